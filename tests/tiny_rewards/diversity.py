"""diversity on colour waves, and on a tiny random CLIP or DINOv2."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flowrl.rewards.diversity import Config, build

from flowrl.reward import Reward
from tests import toy_clip


def save_clip(folder: Path) -> str:
    """A CLIP with its preprocessing."""
    from transformers import CLIPImageProcessor

    size = toy_clip.IMAGE_SIZE
    CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(folder)
    return toy_clip.save(folder)


def save_dinov2(folder: Path) -> str:
    """A DINOv2 with its preprocessing."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    size: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    toy_clip.drawn(lambda: Dinov2Model(Dinov2Config(**size, image_size=28, patch_size=14)), 0).save_pretrained(folder)
    return str(folder)


def save_dino(folder: Path) -> str:
    """A DINO with its preprocessing, which makes squares."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    shape = ViTConfig(**size, image_size=16, patch_size=8, initializer_range=0.5)
    toy_clip.drawn(lambda: ViTModel(shape, add_pooling_layer=False), 0).save_pretrained(folder)
    return str(folder)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    backbones = {"fixed": "fixed", "clip": save_clip(folder / "clip"), "dinov2": save_dinov2(folder / "dinov2")}
    return {name: build(Config(backbone=place, device="cpu")) for name, place in backbones.items()}
