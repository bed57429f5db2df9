"""GenEval's rules on a tiny random Mask2Former and a tiny random CLIP."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flowrl.rewards._detection import detectors
from flowrl.rewards._detection.detectors import ClipColors, Mask2Former
from flowrl.rewards._vision import clips
from flowrl.rewards.geneval import Config, scorer

from flowrl.contracts.rewards import trial_batch
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests import toy_clip
from tests.tiny_rewards import records

RECORD = {"tag": "colors", "include": [{"class": "dog", "count": 12, "color": "red"}]}


def detector(folder: Path) -> Mask2Former:
    """A Mask2Former of three classes, saved and loaded like a real one, that keeps all that it sees."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    stages: dict[str, Any] = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    backbone = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, **stages
    )
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=12,
        id2label={0: "dog", 1: "mouse", 2: "remote"}, label2id={"dog": 0, "mouse": 1, "remote": 2},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 128}
    Mask2FormerImageProcessor(size=size, size_divisor=32).save_pretrained(folder)
    loaded = detectors.load_detector(str(folder), device="cpu", reward="geneval")
    return Mask2Former(loaded.model, loaded.processor, floor=0.0)


def colors(folder: Path) -> ClipColors:
    place = toy_clip.save(folder)
    return ClipColors(clips.load(place, place, device="cpu", preprocess="exact", reward="geneval"))


def samples(reward: Reward, folder: Path) -> Batch:
    return records(trial_batch(reward.card), RECORD)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    sees = detector(folder / "mask2former")
    return {"": scorer(Config(confidence=0.0), sees, colors(folder / "clip"), sees.labels)}
