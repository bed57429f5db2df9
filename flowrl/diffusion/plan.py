"""The step plan: which steps are stochastic, how noisy, which are trained. The loop obeys it.

The plan alone decides the edge cases: the bound at sigma = 1 and the deterministic final step. Windows that
move are pure functions of the iteration, the same on every rank, so a resumed run needs no state of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.core.rng import permutation, stream
from flowrl.core.types import SampleId, Step
from flowrl.diffusion.process import Process
from flowrl.diffusion.sa_solver import noise_levels, sa_schedule
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import Solver
from flowrl.diffusion.tree_shapes import Branching


@dataclass(frozen=True, slots=True)
class StepPlan:
    """K denoising steps. `noise_level[k]` 0 means a deterministic step; `train` lists the trained steps."""

    schedule: Schedule
    noise_level: tuple[float, ...]
    train: tuple[int, ...]
    solver: tuple[Solver, ...] = ()
    """How each step without a law is taken; empty: `ode` everywhere. `sa` takes its noise level as tau."""
    tree: Branching | None = None
    """Where rollouts of a prompt part after a common start; None: each goes its own way from its own noise."""
    spread: float | None = None
    """Of a tree: siblings share a noise, each adds s times its own; None is without end: they share nothing."""
    inflation: float = 1.0
    """Of a tree: factor on the std where it splits, in draw and density alike; other than 1, another law."""

    def __post_init__(self) -> None:
        num_steps = len(self.schedule)
        if not self.solver:
            object.__setattr__(self, "solver", ("ode",) * num_steps)
        for name, values in (("noise levels", self.noise_level), ("solvers", self.solver)):
            if len(values) != num_steps:
                raise ValueError(f"the plan has {len(values)} {name} for {num_steps} steps")
        if self.tree is not None:
            self._check_tree(self.tree)
        self._check_trained(num_steps)
        for k, solver in enumerate(self.solver):
            if solver not in get_args(Solver):
                raise ValueError(f"the plan solves step {k} by {solver!r}; there are {', '.join(get_args(Solver))}")
            if solver not in ("ode", "sa") and self.noise_level[k] > 0:
                raise ValueError(
                    f"the plan gives step {k} a noise level ({self.noise_level[k]:g}) and the solver {solver!r}: "
                    "a stochastic step takes its law from the sampler"
                )

    def _check_tree(self, tree: Branching) -> None:
        if tree.num_steps != len(self.schedule):
            raise ValueError(f"the tree has {tree.num_steps} steps, the plan {len(self.schedule)}")
        if set(self.solver) != {"ode"}:
            raise ValueError(f"a tree takes its steps without a law by `ode`, not by {sorted(set(self.solver))}")
        for k, (planned, taken) in enumerate(zip(self.stochastic, tree.stochastic, strict=True)):
            if planned != taken:
                raise ValueError(
                    f"the tree takes step {k} {'by the law' if taken else 'without a law'}, and its noise level is "
                    f"{self.noise_level[k]:g}"
                )
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"spread={self.spread} must be a number of at least 0")
        if not self.inflation > 0:
            raise ValueError(f"inflation={self.inflation} must be positive")

    def _check_trained(self, num_steps: int) -> None:
        outside = [k for k in self.train if not 0 <= k < num_steps]
        if outside:
            raise ValueError(f"the plan trains step {outside[0]}, but there are only steps 0..{num_steps - 1}")
        for k in self.train:
            if not self.stochastic[k]:
                raise ValueError(
                    f"the plan trains step {k}, which is deterministic (noise level {self.noise_level[k]:g}): "
                    "it has no log-prob"
                )
            if self.end(k) == num_steps and float(self.schedule.sigmas[-1]) == 0:
                raise ValueError(
                    f"the plan trains the last step ({k}), which ends at clean data (sigma 0): a law has std 0 there "
                    f"or leaves noise in the picture; train steps 0..{k - 1} or, of a noise-prediction model, "
                    "keep noise in the last one: model.final_alpha=first, or a scheduler with set_alpha_to_one=false"
                )

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def stochastic(self) -> tuple[bool, ...]:
        """Steps that draw from the sampler's law, which has a density."""
        return tuple(level > 0 and how != "sa" for level, how in zip(self.noise_level, self.solver, strict=True))

    @property
    def leaves(self) -> int:
        """Samples that one start leads to: a tree's leaves, or 1."""
        return 1 if self.tree is None else self.tree.leaves

    def drawn_together(self, batch_size: int) -> int:
        """Samples of a batch: as many whole trees as it holds, at least one."""
        return self.leaves * max(1, batch_size // self.leaves)

    def end(self, k: int) -> int:
        """Where the stochastic step from place k of the grid ends."""
        return k + 1 if self.tree is None else self.tree.end(k)

    def steps(
        self, index: Tensor, process: Process, device: torch.device | str = "cpu", ends: Tensor | None = None
    ) -> Step:
        """The steps of `index` [B] as [B] tensors; `ends` [B] are their ends, where not those of stochastic steps."""
        index = index.cpu()
        if ends is None:
            ends = torch.tensor([self.end(k) for k in range(len(self))])[index]
        sigmas = self.schedule.sigmas
        alphas = process.alpha(sigmas) if self.schedule.alphas is None else self.schedule.alphas
        # Some laws diverge at the noisiest sigma; official code bounds it by the grid's second value.
        ceiling = sigmas[1 if len(sigmas) > 2 else 0].expand(len(index))
        columns = {
            "alpha": alphas[index],
            "sigma": sigmas[index],
            "alpha_next": alphas[ends],
            "sigma_next": sigmas[ends],
            "timestep": self.schedule.timesteps[index],
            "noise_level": torch.tensor(self.noise_level)[index],
            "sigma_ceiling": ceiling.clone(),
        }
        if self.tree is not None and self.inflation != 1:
            columns["std_scale"] = torch.where(torch.tensor(self.tree.splits)[index], self.inflation, 1.0)
        return Step(index=index.to(device), **{name: value.to(device) for name, value in columns.items()})


def deterministic(schedule: Schedule, solver: Solver = "ode") -> StepPlan:
    """No step has a law: evaluation, sampling, and rollouts of methods without log-probs."""
    num_steps = len(schedule)
    return StepPlan(schedule=schedule, noise_level=(0.0,) * num_steps, train=(), solver=(solver,) * num_steps)


def stochastic_solver(schedule: Schedule, noise_level: float) -> StepPlan:
    """Every step by the SA-Solver on its own grid, with noise in the middle of the path."""
    grid = sa_schedule(schedule)
    return replace(deterministic(grid, "sa"), noise_level=noise_levels(grid, noise_level))


def window(schedule: Schedule, noise_level: float, steps: Sequence[int] | None = None) -> StepPlan:
    """Stochastic and trained at `steps`, deterministic elsewhere; None: every step but the last.

    Raises:
        ValueError: the window is empty, leaves the grid, or holds the last step; noise_level is 0.
    """
    chosen = tuple(range(len(schedule) - 1)) if steps is None else tuple(steps)
    if not chosen:
        raise ValueError(
            f"the window of stochastic steps is empty ({len(schedule)} steps in all): give at least one, "
            "and at least 2 denoising steps"
        )
    levels = tuple(noise_level if k in chosen else 0.0 for k in range(len(schedule)))
    return StepPlan(schedule=schedule, noise_level=levels, train=chosen)


def noisy_steps(schedule: Schedule) -> tuple[int, ...]:
    """Steps that do not end at clean data, where a law may leave noise: all of a noise-prediction model whose last step
    ends at its least noise level, all but the last of a flow.

    >>> noisy_steps(Schedule(torch.tensor([0.9, 0.4, 0.03]), torch.tensor([900.0, 400.0])))
    (0, 1)
    """
    return tuple(range(len(schedule) - int(float(schedule.sigmas[-1]) == 0)))


# ---- windows that move from iteration to iteration; iterations count from 1


def random_window(num_steps: int, size: int, low: int, high: int, seed: int, iteration: int) -> tuple[int, ...]:
    """`size` neighbouring steps inside [low, high), the start uniform: Flow-GRPO-Fast.

    Raises:
        ValueError: the window is empty, does not fit, or could hold the last step.

    >>> random_window(10, 3, 0, 3, seed=0, iteration=1)
    (0, 1, 2)
    """
    if size < 1:
        raise ValueError(f"a window of size {size} is empty: give at least 1, or no window for all steps but the last")
    if not 0 <= low <= high - size:
        raise ValueError(f"a window of {size} steps does not fit between steps {low} and {high} (exclusive)")
    if high > num_steps - 1:
        raise ValueError(
            f"windows up to step {high} (exclusive) could hold the last of {num_steps} steps, whose Gaussian is too "
            f"sharp to be scored: the range must end at {num_steps - 1} or before"
        )
    start = int(stream(seed, "random_window", iteration).integers(low, high - size, endpoint=True))
    return tuple(range(start, start + size))


def subset(
    num_steps: int, count: int, seed: int, iteration: int, steps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """`count` steps drawn from `steps` (None: all but the last), not necessarily neighbours, in rising order.

    Raises:
        ValueError: nothing is drawn, or more than there is; `steps` leaves the grid or holds the last step.
    """
    pool = tuple(range(num_steps - 1)) if steps is None else tuple(sorted(set(steps)))
    wrong = [k for k in pool if not 0 <= k < num_steps - 1]
    if wrong:
        raise ValueError(f"step {wrong[0]} cannot be drawn: of {num_steps} steps, 0..{num_steps - 2} can be trained")
    if not 1 <= count <= len(pool):
        raise ValueError(f"cannot draw {count} of {len(pool)} steps: give a number in 1..{len(pool)}")
    chosen = permutation(len(pool), seed, "step_subset", iteration)[:count].tolist()
    return tuple(sorted(pool[j] for j in chosen))


def step_subsets(ids: Sequence[SampleId], trained: Sequence[int], fraction: float, seed: int, iteration: int) -> Tensor:
    """Which of K trained steps each of B samples keeps: bool [B, K], int(K * fraction) per sample (DanceGRPO).

    Keyed by identity, so a sample keeps the same steps whichever rank trains it. Flattened, the mask is in
    the order of a rollout's edges.

    Raises:
        ValueError: `fraction` leaves a sample without a step, or is above 1.
    """
    kept = int(len(trained) * fraction) if 0 < fraction <= 1 else 0
    if kept < 1:
        raise ValueError(
            f"a fraction of {fraction:g} of {len(trained)} trained steps is no subset: it must keep at least one step "
            "and be at most 1"
        )
    mask = torch.zeros(len(ids), len(trained), dtype=torch.bool)
    for row, i in zip(mask, ids, strict=True):
        row[permutation(len(trained), seed, "sample_steps", iteration, i.slot, i.sample)[:kept]] = True
    return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class MixWindow:
    """MixGRPO's window, sliding from noisy to clean; defaults of the released FLUX script."""

    strategy: Literal["progressive", "random", "decay", "exp_decay", "frozen"] = "progressive"
    """`progressive`: every `interval` iterations; `decay`, `exp_decay`: sooner the cleaner; `random`: another
    start in every iteration; `frozen`: the first steps for ever."""
    size: int = 4
    """Steps in the window (w)."""
    shift: int = 1
    """Steps by which it moves (s), where windows overlap."""
    interval: int = 25
    """Iterations at one place (tau)."""
    overlap: bool = True
    """False moves it by `size`."""
    roll_back: bool = False
    """Past the last trained step: back to the first, instead of staying there."""
    longest: int = 10
    """`decay`: iterations at the noisiest place."""
    shortest: int = 1
    """`decay`: iterations at the cleanest place."""
    rate: float = 0.1
    """`exp_decay`: iterations shrink by exp(-rate) per step ..."""
    threshold: int = 13
    """... from this step on."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("shift", 0), ("interval", 1), ("shortest", 1), ("rate", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.longest < self.shortest:
            raise ValueError(f"longest={self.longest} must not be below shortest={self.shortest}")

    def stay(self, start: int, limit: int) -> int:
        """Iterations at `start`; `limit` is the first step that is never trained."""
        if self.strategy == "decay":
            place = start / limit
            return max(self.shortest, int(self.longest * (1 - place) + self.shortest * place))
        if self.strategy == "exp_decay":
            return math.ceil(self.interval * math.exp(-self.rate * max(0, start - self.threshold)))
        return self.interval

    def last(self, num_steps: int) -> int:
        """The cleanest step that it ever holds.

        >>> [MixWindow(strategy=name).last(20) for name in ("progressive", "random", "frozen")]
        [17, 17, 3]
        """
        limit, shift = num_steps - 2, self.shift if self.overlap else self.size
        if self.strategy == "random":
            return limit - 1
        start = limit - 1
        if self.strategy == "frozen" or shift == 0:
            start = 0
        elif self.roll_back:
            start -= start % shift
        return min(start + self.size, limit) - 1


def mix_window(config: MixWindow, num_steps: int, seed: int, iteration: int) -> tuple[int, ...]:
    """Steps of MixGRPO's window; as released, the last two steps are never trained and the window ends before them.

    Two differences from the released code, which lets the start reach X = num_steps - 2, where the window is
    empty and the loss 0 for as long as it stays: here X - 1 is the last start, from which it turns back (the
    sequence is then the released one without its empty windows) or where it stays. And `random` draws from the
    run's seed, from the first iteration on, instead of from each rank's own entropy.

    >>> [mix_window(MixWindow(size=2, interval=2), 8, seed=0, iteration=k) for k in (1, 2, 3)]
    [(0, 1), (0, 1), (1, 2)]
    """
    limit = num_steps - 2
    if limit < 1:
        raise ValueError(f"MixGRPO never trains the last two steps: {num_steps} steps leave none, give at least 3")
    if iteration < 1:
        raise ValueError(f"iterations count from 1, got {iteration}")
    if config.strategy == "random":
        last = max(limit - config.size, 0)
        start = int(stream(seed, "mix_window", iteration).integers(0, last, endpoint=True))
    else:
        start = 0 if config.strategy == "frozen" else _mix_start(config, limit, iteration)
    return tuple(range(start, min(start + config.size, limit)))


def _mix_start(config: MixWindow, limit: int, iteration: int) -> int:
    """Start of the sliding window: all its places from the first iteration on are walked through."""
    start, done = 0, iteration - 1
    while done >= (stay := config.stay(start, limit)):
        done -= stay
        start += config.shift if config.overlap else config.size
        if start >= limit:
            start = 0 if config.roll_back else limit - 1
    return start
