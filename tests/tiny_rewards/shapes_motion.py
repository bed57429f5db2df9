"""shapes_motion on videos of its world, with one of another caption among them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.shapes_motion import Config, build

from flowrl import moving_shapes
from flowrl.contracts.rewards import FRAMES
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests.tiny_rewards import drawn_samples

CAPTIONS = ("a red circle moves left", "a blue square stays", "a cross turns from green to red")


def samples(reward: Reward, folder: Path) -> Batch:
    return drawn_samples(moving_shapes, CAPTIONS, FRAMES)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config())}
