"""HPS v2: both releases' files, with different random weights, laid out as the published ones."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from flowrl.rewards.hpsv2 import Config, build

from flowrl.reward import Reward
from flowrl.rewards import hpsv2
from tests import toy_clip

IMAGE_SIZE, CONTEXT = 32, 24
ARCHITECTURE = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": IMAGE_SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": CONTEXT, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


def save(folder: Path) -> str:
    """Write both files."""
    import open_clip

    for seed, name in enumerate(("HPS_v2.1_compressed.pt", "HPS_v2_compressed.pt")):
        network = toy_clip.drawn(lambda: open_clip.CLIP(**ARCHITECTURE), seed)
        torch.save({"state_dict": network.state_dict()}, folder / name)
    return str(folder)


def tiny_network(patch: pytest.MonkeyPatch) -> None:
    """The network that the reward builds is this one."""
    import open_clip

    patch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-hps", ARCHITECTURE)
    patch.setattr(hpsv2, "ARCHITECTURE", "tiny-hps")


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    save(folder)
    with pytest.MonkeyPatch.context() as patch:
        tiny_network(patch)
        options = {"exact": {}, "fast": {"preprocess": "fast"}, "no antialias": {"antialias": False}}
        return {name: build(Config(weights=str(folder), device="cpu", **own)) for name, own in options.items()}
