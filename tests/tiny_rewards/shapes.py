"""shapes on scenes of its world, with one image of another caption among them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.shapes import Config, build

from flowrl import shapes
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests.tiny_rewards import drawn_samples

CAPTIONS = ("a red circle", "a blue square", "two green triangles")


def samples(reward: Reward, folder: Path) -> Batch:
    return drawn_samples(shapes, CAPTIONS)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config())}
