"""motion by pixels alone, and with the embeddings of a tiny random CLIP."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.motion import Config, build

from flowrl.reward import Reward
from tests.tiny_rewards.diversity import save_clip


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"pixels": build(Config()), "clip": build(Config(backbone=save_clip(folder), device="cpu"))}
