"""Every reward as a tiny one: random weights of the same classes, written offline; plain.py has those of a line or two.

Each of the others has a module with `cases(folder, stack)`, {name of the case: reward}: `folder` takes the weights,
`stack` ends what must not outlive the trials (patches, servers). Where the contract's own captions or records do not
do, it has `samples(reward, folder)` too. A reward without weights or required options needs nothing.
"""

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.contracts.rewards import COUNT, SIDE, trial_batch
from flowrl.core import registry
from flowrl.reward import Images, Reward
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch
from flowrl.scoring.weighted import WeightedReward

FOLDER = Path(__file__).parent
PROMPTS = ["a cat", "two dogs on a bench far away at the edge of the old town", "a cat", "x", "sea"]


@dataclass(frozen=True)
class Case:
    """A tiny reward with the samples on which its contract is tried."""

    name: str
    reward: Reward
    samples: Batch


def cases(name: str, folder: Path, stack: ExitStack) -> list[Case]:
    """The tiny rewards of a file in rewards/.

    Raises:
        AssertionError: its weights cannot be random ones, as there is no module here.
    """
    plain = importlib.import_module(f"{__name__}.plain")
    if name in plain.CASES:
        make, samples = plain.CASES[name], plain.SAMPLES.get(name)
    elif (FOLDER / f"{name}.py").exists():
        tiny = importlib.import_module(f"{__name__}.{name}")
        make, samples = tiny.cases, getattr(tiny, "samples", None)
    else:
        module = registry.load("rewards", name)
        assert not module.CARD.memory_gib, f"reward {name!r} has weights: write {FOLDER / name}.py, see {__doc__}"
        make, samples = lambda *_: {"": module.build(module.Config())}, None
    samples = samples or (lambda reward, folder: trial_batch(reward.card))
    return [
        Case(f"{name} {case}".strip(), reward, samples(reward, folder)) for case, reward in make(folder, stack).items()
    ]


def scored(reward: Reward, images: Images, prompts: Sequence[str] = (), metadata: Sequence[dict] | None = None) -> Any:
    """Scores [B], or by output for a reward of several; of PROMPTS and without records unless others are given."""
    prompts = prompts or PROMPTS[: len(images)]
    return reward.score(images, prompts, metadata or [{}] * len(prompts))


def raw_scores(reward: Reward, images: Images) -> dict[str, Tensor]:
    """Scores by output, as the scorer logs them, where every sample may fail and prompts do not matter."""
    scorer = Scorer([WeightedReward("tiny", reward)], max_failed_share=1.0)
    return scorer.score(images, [""] * len(images), [{}] * len(images)).raw


def smooth_images(count: int = 5, height: int = 40, width: int = 52, seed: int = 0) -> Tensor:
    """Smooth and strongly coloured images, [count, 3, height, width]: resizing matters little and scores differ."""
    coarse = torch.rand(count, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")


def uint8(image: Tensor) -> Tensor:
    """[H, W, 3] uint8 of an image [3, H, W]."""
    return (image * 255).round().to(torch.uint8).permute(1, 2, 0)


def drawn_samples(world: Any, captions: Sequence[str], *frames: int) -> Batch:
    """COUNT images or videos of a shapes world under captions in turn; the last one shows the first caption."""
    rng = np.random.default_rng(0)
    prompts = [captions[i % len(captions)] for i in range(COUNT)]
    drawn = [world.draw(world.parse(prompt), rng, *frames, SIDE) for prompt in prompts]
    return Batch(torch.from_numpy(np.stack([*drawn[:-1], drawn[0]])), prompts, [{} for _ in prompts])


def records(given: Batch, record: dict) -> Batch:
    """The same samples, each with a copy of a record."""
    return Batch(given.images, given.prompts, [dict(record) for _ in given.metadata])


def captions(given: Batch, prompts: Sequence[str]) -> Batch:
    """The same samples under other captions, taken in turn."""
    return Batch(given.images, [prompts[i % len(prompts)] for i in range(len(given.prompts))], given.metadata)
