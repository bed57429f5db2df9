"""clip_score on tiny random CLIPs of both libraries."""

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.clip_score import Config, build

from flowrl.reward import Reward
from tests import toy_clip

TOWER = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64, "patch_size": None}
"""A residual network, whose normalisation by the batch would show."""


def save_residual(folder: Path) -> str:
    return toy_clip.save_open_clip(folder, embed_dim=64, vision_cfg=TOWER)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    folders = {
        "transformers": toy_clip.save(folder / "transformers"),
        "open_clip": toy_clip.save_open_clip(folder / "open_clip"),
        "residual": save_residual(folder / "residual"),
    }
    return {
        f"{kind} {way}": build(Config(model=place, device="cpu", preprocess=way))
        for kind, place in folders.items()
        for way in ("exact", "fast")
    }
