"""The verifier of edits, on results of one source; the last sample shows the first instruction's result."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from flowrl.rewards.shapes_edit import Config, build
from PIL import Image

from flowrl.contracts.rewards import COUNT, SIDE
from flowrl.edited_shapes import apply, parse
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from flowrl.shapes import Placed, render

SCALE = SIDE / 32
SOURCE = (
    Placed("circle", "red", 9 * SCALE, 9 * SCALE, 5 * SCALE),
    Placed("cross", "green", 22 * SCALE, 20 * SCALE, 5 * SCALE),
)
INSTRUCTIONS = ("make the red circle blue", "remove the green cross", "turn the red circle into a square")


def samples(reward: Reward, folder: Path) -> Batch:
    """COUNT results under the instructions in turn, with their source."""
    file = folder / "source.png"
    Image.fromarray(np.round(255 * render(SOURCE, SIDE).transpose(1, 2, 0)).astype(np.uint8)).save(file)
    prompts = [INSTRUCTIONS[i % len(INSTRUCTIONS)] for i in range(COUNT)]
    results = [render(apply(parse(prompt), SOURCE, SCALE) or (), SIDE) for prompt in prompts]
    images = torch.from_numpy(np.stack([*results[:-1], results[0]]))
    return Batch(images, prompts, [{"images": [str(file)]} for _ in prompts])


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config())}
