"""Training times of methods that re-noise clean samples: the place on the path of each of a sample's T terms.

Every rule states its axis. Rules on the *grid* draw nodes of the rollout's own schedule, 0 the noisiest, so what the
network is fed there is exact. Rules on *sigma* draw sigma in (0, 1] and shift it there, s > 1 towards noise. (Some code
shifts the fraction walked along the denoising axis instead, where s > 1 goes towards clean; that is another rule.)
Their sigma is a flow's; on VP it stands for the same signal-to-noise ratio, inside what the network was trained on, and
the timestep there need not be whole. On the *steps* of a VP network's training all of them can be drawn.

    rule                axis   times of a sample                                                       from
    discrete            grid   one node from each of T strata of the nodes int(N b) to int(N f)        AWM
    discrete_wo_init    grid   the same without node 0, which is pure noise; b = 0                     AWM
    discrete_with_init  grid   node 0, then one from each of T - 1 strata of the others; b = 0         AWM
    permutation         grid   the first T of an order of all N nodes, T = int(N f) where null; b = 0  DiffusionNFT
    subset              grid   T of the nodes int(N b) to int(N f), without replacement                DGPO
    logit_normal        sigma  sigmoid of a stratified normal                                          AWM, SD3
    uniform             sigma  stratified over [low, 1]                                                AWM
    power               sigma  density proportional to sigma^power                                     RAM
    timesteps           steps  whole timesteps 0 .. N-1 of training, stratified; VP only               Diffusion-DPO

Draws are keyed by identity, one per sample, so they do not depend on batches or processes. (Released code shares one
draw over a micro-batch; the expectation is the same.) Where a loss compares the samples of a prompt they share theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import OptionError, Remedy
from flowrl.core.rng import stream
from flowrl.core.types import SampleId
from flowrl.diffusion.schedules import Schedule, shift_sigmas

GRID = ("discrete", "discrete_wo_init", "discrete_with_init", "permutation", "subset")
WITHIN = ("discrete", "subset")
"""Rules that draw between two places of the grid."""


@dataclass(frozen=True, kw_only=True)
class TimesConfig:
    name: Literal[
        "discrete",
        "discrete_wo_init",
        "discrete_with_init",
        "permutation",
        "subset",
        "logit_normal",
        "uniform",
        "power",
        "timesteps",
    ]
    """The rule of drawing. It has no default: methods differ, and a mapping replaces theirs as a whole."""
    count: int | None = 6
    """Terms per sample (T); null: as many as the rule has nodes, for `permutation`."""
    fraction: float = 0.9
    """Share of the nodes that can be drawn, from the noisy end (f); only on the grid."""
    begin: float = 0.0
    """Share of the nodes at the noisy end that are left out (b), as for the second of two experts; only for `discrete`
    and `subset`."""
    shift: float = 3.0
    """Resolution shift applied to sigma; only on sigma."""
    low: float = 0.2
    """Least u of `uniform`, before the shift."""
    power: float = 1.0
    """Exponent of `power`, above -1."""

    def __post_init__(self) -> None:
        if self.count is None and self.name != "permutation":
            raise ValueError(f"count=null: the rule {self.name!r} needs a number of terms per sample")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count={self.count} must be at least 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction} must be in (0, 1]")
        if not 0 <= self.begin < self.fraction:
            raise ValueError(f"begin={self.begin} must be in [0, fraction), fraction={self.fraction}")
        if self.begin and self.name not in WITHIN:
            raise ValueError(f"begin={self.begin}: only the rules {' and '.join(WITHIN)} leave out noisy nodes")
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift} must be positive")
        if not 0 <= self.low < 1:
            raise ValueError(f"low={self.low} must be in [0, 1)")
        if not -1 < self.power <= 100:
            raise ValueError(f"power={self.power} must be above -1, or the density has no mass, and at most 100")

    def terms(self, num_steps: int) -> int:
        """Terms per sample on a grid of so many steps. Raises ValueError: it has fewer nodes than the rule needs."""
        if self.name not in GRID:
            assert self.count is not None
            return self.count
        nodes = len(self.nodes(num_steps))
        need = nodes if self.count is None else self.count
        have = nodes - (self.name == "discrete_wo_init")
        if not 1 <= need <= have:
            share = f"{self.fraction:g}" + (f" from {self.begin:g} on" if self.begin else "")
            raise ValueError(
                f"times: the rule {self.name!r} with fraction {share} of {num_steps} steps has {have} nodes, too few "
                f"for {need} terms; lower times.count, raise times.fraction, or take more inference steps"
            )
        return need

    def nodes(self, num_steps: int) -> range:
        """Nodes that can be drawn on a grid of so many steps; `permutation` draws its number of them from all."""
        return range(int(num_steps * self.begin), int(num_steps * self.fraction))


@dataclass(frozen=True, slots=True)
class Times:
    """Training times of B samples, [B, T] float32 each."""

    sigma: Tensor
    timestep: Tensor
    """The network's input there."""


def strata(name: str, nodes: range, count: int) -> list[range]:
    """AWM's strata of nodes: `count` ranges, one node is drawn from each.

    Source: scxue/advantage_weighted_matching:scripts/train_sd3_awm.py, `time_type`.

    >>> rules = "discrete", "discrete_wo_init"
    >>> [[list(part) for part in strata(name, range(12), 6)][:2] for name in rules]
    [[[0, 1], [2, 3]], [[1], [2, 3]]]
    """
    if name == "discrete_with_init":
        return [range(0, 1), *(strata("discrete_wo_init", nodes, count - 1) if count > 1 else [])]
    first = nodes.start if name == "discrete" else 1
    bounds = np.floor(np.linspace(first, nodes.stop, count + 1)).astype(int).tolist()
    return [range(low, high) for low, high in pairwise(bounds)]


def draw(
    config: TimesConfig,
    schedule: Schedule,
    ids: Sequence[SampleId],
    key: tuple[int, ...],
    *,
    shared: Literal["sample", "group", "all"] = "sample",
) -> Times:
    """The training times of B samples. The schedule is the rollout's, `key` (seed, iteration, pass). `shared`: who has
    the same times: nobody, the samples of a prompt, or all.
    """
    seed, *rest = key
    count = config.terms(len(schedule))
    drawn: dict[tuple[int, ...], np.ndarray] = {}
    parts = {"sample": 2, "group": 1, "all": 0}[shared]
    keys = [(i.slot, i.sample)[:parts] for i in ids]
    for one in dict.fromkeys(keys):
        generator = stream(seed, "times", *rest, *one)
        drawn[one] = _grid(config, schedule, count, generator) if config.name in GRID else _sigmas(config, generator)
    rows = np.stack([drawn[one] for one in keys])
    if config.name == "timesteps":
        return _trained(schedule, rows)
    if config.name in GRID:
        nodes = torch.as_tensor(rows)
        return Times(schedule.sigmas[nodes], schedule.timesteps[nodes])
    sigma = schedule.at_flow(torch.as_tensor(rows))
    try:
        return Times(sigma, schedule.timestep_at(sigma))
    except ValueError as error:
        raise OptionError(
            f"times.name={config.name}: {error}", remedies=[Remedy({"times.name": name}) for name in GRID]
        ) from None


def of_process(schedule: Schedule, count: int) -> TimesConfig:
    """The rule of methods on given images where none is named: nearly that of the network's own training."""
    return TimesConfig(name="logit_normal" if schedule.table is None else "timesteps", count=count)


def _trained(schedule: Schedule, u: np.ndarray) -> Times:
    """Timesteps of training at u in (0, 1], [B, T]."""
    if schedule.table is None:
        raise OptionError(
            "times.name=timesteps: a flow is not trained at numbered timesteps", {"times.name": "logit_normal"}
        )
    count = len(schedule.table)
    step = torch.as_tensor(np.minimum(((1 - u) * count).astype(np.int64), count - 1))
    return Times((1 - schedule.table[step]).sqrt().float(), step.float())


def _grid(config: TimesConfig, schedule: Schedule, count: int, generator: np.random.Generator) -> np.ndarray:
    """Nodes of one sample, [T] int64."""
    nodes = config.nodes(len(schedule))
    if config.name == "permutation":
        # Of all nodes: a rule that is to see every time but a few leaves out others each time.
        return generator.permutation(len(schedule))[:count]
    if config.name == "subset":
        return generator.permutation(nodes)[:count]  # as an order of so many numbers, from the first node on
    return np.array([generator.integers(s.start, s.stop) for s in strata(config.name, nodes, count)])


def _sigmas(config: TimesConfig, generator: np.random.Generator) -> np.ndarray:
    """Sigmas of one sample, or with `timesteps` what stands for them, [T] float64 in (0, 1], in random order."""
    count = config.count or 1
    # Stratified, in (0, 1]: at sigma 0 there is nothing to predict.
    u = 1 - (generator.permutation(count) + generator.random(count)) / count
    if config.name == "timesteps":
        return u
    if config.name == "power":
        return u ** (1 / (1 + config.power))
    if config.name == "uniform":
        base = config.low + (1 - config.low) * u
    else:
        from scipy.special import expit, ndtri

        base = expit(ndtri(u))
    shifted = shift_sigmas(torch.as_tensor(base), config.shift)
    return shifted.clamp(min=0.01 if config.name == "logit_normal" else 0.0).numpy()
