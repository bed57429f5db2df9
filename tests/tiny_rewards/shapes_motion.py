"""shapes_motion on videos of its world, with one of another caption among them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from flowrl.rewards.shapes_motion import Config, build

from flowrl import moving_shapes
from flowrl.contracts.rewards import COUNT, FRAMES, SIDE
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch

CAPTIONS = ("a red circle moves left", "a blue square stays", "a cross turns from green to red")


def samples(reward: Reward, folder: Path) -> Batch:
    rng = np.random.default_rng(0)
    prompts = [CAPTIONS[i % len(CAPTIONS)] for i in range(COUNT)]
    drawn = [moving_shapes.draw(moving_shapes.parse(prompt), rng, FRAMES, SIDE) for prompt in prompts]
    return Batch(torch.from_numpy(np.stack([*drawn[:-1], drawn[0]])), prompts, [{} for _ in prompts])


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config())}
