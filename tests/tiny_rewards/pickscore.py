"""PickScore on a tiny random CLIP."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.pickscore import Config, build

from flowrl.reward import Reward
from tests import toy_clip


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    clip = toy_clip.save(folder)
    ways = ("exact", "fast")
    return {way: build(Config(model=clip, tokenizer=clip, device="cpu", preprocess=way)) for way in ways}
