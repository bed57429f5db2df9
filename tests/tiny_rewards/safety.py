"""The safety classifier on a tiny random ViT of three classes."""

from contextlib import ExitStack
from pathlib import Path

import torch
from flowrl.rewards.safety import Config, build

from flowrl.reward import Reward

SIZE, NAMES = 32, {0: "normal", 1: "NSFW", 2: "drawing"}


def save(folder: Path) -> str:
    """Write classifier and preprocessing."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE,
        patch_size=8, id2label=NAMES, label2id={name: number for number, name in NAMES.items()},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return str(folder)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config(model=save(folder), device="cpu"))}
