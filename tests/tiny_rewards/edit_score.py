"""EditScore on a server, every sample an edit of one source."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from flowrl.rewards.edit_score import Config, build
from PIL import Image

from flowrl.contracts.rewards import trial_batch
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests.tiny_rewards import judges, records

GRADES = '{"reasoning": "so", "score": [{0}, 2.5]}'


def save_source(folder: Path, value: int = 77, name: str = "source.png", size: tuple[int, int] = (6, 8)) -> dict:
    """Write a grey source; the record of a sample that is an edit of it."""
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(folder / name)
    return {"images": [str(folder / name)]}


def samples(reward: Reward, folder: Path) -> Batch:
    return records(trial_batch(reward.card), save_source(folder))


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config(backend="http", http=judges.server(stack, GRADES)))}
