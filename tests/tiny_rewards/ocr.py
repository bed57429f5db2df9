"""ocr with a reader that reads a text of the image's brightness; the real one is tried on rendered words."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from flowrl.rewards.ocr import Config, build

from flowrl.contracts.rewards import trial_batch
from flowrl.reward import Reward
from flowrl.rewards import ocr
from flowrl.scoring.surroundings import Batch
from tests.tiny_rewards import captions

TEXTS = ("Hello", "Hello W", "Hello Wrld", "Hello World", "Yellow World")


def read(images: Sequence[np.ndarray]) -> list[str]:
    return [TEXTS[int(image.astype(float).mean()) % len(TEXTS)] for image in images]


def samples(reward: Reward, folder: Path) -> Batch:
    return captions(trial_batch(reward.card), ['a sign "Hello World"', 'a sign "Hello"'])


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocr, "load_reader", lambda config: read)
        return {"extra text": build(Config()), "exact": build(Config(allow_extra_text=False))}
