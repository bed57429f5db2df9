"""shapes on scenes of its world, with one image of another caption among them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from flowrl.rewards.shapes import Config, build

from flowrl import shapes
from flowrl.contracts.rewards import COUNT, SIDE
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch

CAPTIONS = ("a red circle", "a blue square", "two green triangles")


def samples(reward: Reward, folder: Path) -> Batch:
    rng = np.random.default_rng(0)
    prompts = [CAPTIONS[i % len(CAPTIONS)] for i in range(COUNT)]
    drawn = [shapes.draw(shapes.parse(prompt), rng, SIDE) for prompt in prompts]
    return Batch(torch.from_numpy(np.stack([*drawn[:-1], drawn[0]])), prompts, [{} for _ in prompts])


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config())}
