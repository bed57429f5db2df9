"""The step plan: the steps that are stochastic, their noise levels, the steps that are trained. The loop follows it.

The plan alone decides the edge cases: the bound at sigma = 1 and the deterministic final step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.tensors import sent
from flowrl.core.types import Step
from flowrl.diffusion.process import Process
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import SOLVERS, SolverName
from flowrl.diffusion.tree_shapes import Branching


@dataclass(frozen=True, slots=True)
class StepPlan:
    """K denoising steps. `noise_level[k]` 0 means a deterministic step; `train` lists the trained steps."""

    schedule: Schedule
    noise_level: tuple[float, ...]
    train: tuple[int, ...]
    solver: tuple[SolverName, ...] = ()
    """Solver of each step that is not a transition; empty: `ode` everywhere. A stochastic one uses the noise level."""
    tree: Branching | None = None
    """Tree of the rollouts of a prompt; None: each is a chain from its own noise."""
    sibling_noise: float | None = None
    """s of a tree: siblings share a noise, and each adds s times its own; None: they share nothing."""
    inflation: float = 1.0
    """Factor on the std where a tree splits, in draw and density alike; other than 1 it changes the marginals."""
    keep: tuple[int, ...] = ()
    """Further steps, with noise or without, whose latents and predictions are kept of every sample."""
    own: tuple[int, ...] = ()
    """Of chains with one stochastic step each, one of `train`: that of slot p is own[p % len(own)]; empty: every chain
    takes all of them."""
    tilt: tuple[float, ...] = ()
    """For each step: a transition is drawn from tilt std^2 times a judge's slope beside its mean; empty: none is."""
    _tables: "dict[int, _Table]" = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `steps` takes from, by the identity of the process."""

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
            if solver not in SOLVERS:
                raise ValueError(f"the plan solves step {k} by {solver!r}; there are {', '.join(SOLVERS)}")
            if solver != "ode" and not SOLVERS[solver].stochastic and self.noise_level[k] > 0:
                raise ValueError(
                    f"the plan gives step {k} a noise level ({self.noise_level[k]:g}) and the solver {solver!r}: "
                    "a stochastic step is a transition of the sampler"
                )

    def _check_tree(self, tree: Branching) -> None:
        if tree.num_steps != len(self.schedule):
            raise ValueError(f"the tree has {tree.num_steps} steps, the plan {len(self.schedule)}")
        if set(self.solver) != {"ode"}:
            raise ValueError(f"a tree takes its deterministic steps by `ode`, not by {sorted(set(self.solver))}")
        for k, (planned, taken) in enumerate(zip(self.stochastic, tree.stochastic, strict=True)):
            if planned != taken:
                raise ValueError(
                    f"the tree takes step {k} {'with noise' if taken else 'without noise'}, and its noise level is "
                    f"{self.noise_level[k]:g}"
                )
        if self.sibling_noise is not None and not (math.isfinite(self.sibling_noise) and self.sibling_noise >= 0):
            raise ValueError(f"sibling_noise={self.sibling_noise} must be a number of at least 0")
        if not self.inflation > 0:
            raise ValueError(f"inflation={self.inflation} must be positive")

    def _check_trained(self, num_steps: int) -> None:
        for word, steps in (("trains", self.train), ("keeps", self.keep)):
            outside = [k for k in steps if not 0 <= k < num_steps]
            if outside:
                raise ValueError(f"the plan {word} step {outside[0]}, but there are only steps 0..{num_steps - 1}")
        if self.keep and self.tree is not None:
            raise ValueError("a tree keeps the nodes of its trained steps alone")
        if self.own and (self.tree is not None or set(self.solver) != {"ode"} or {*self.own} != {*self.train}):
            raise ValueError(
                f"the plan has steps of its own for each slot, {self.own}: they are those of a chain that it trains, "
                f"{self.train}, and all others are taken by `ode`"
            )
        for k in self.train:
            if not self.stochastic[k]:
                raise ValueError(
                    f"the plan trains step {k}, which is deterministic (noise level {self.noise_level[k]:g}): "
                    "it has no log-prob"
                )
            if self.end(k) == num_steps and float(self.schedule.sigmas[-1]) == 0:
                raise ValueError(
                    f"the plan trains the last step ({k}), which ends at clean data (sigma 0): a transition has std 0 "
                    f"there or leaves noise in the image; train steps 0..{k - 1} or, of a noise-prediction model, "
                    "keep noise in the last one: model.final_alpha=first, or a scheduler with set_alpha_to_one=false"
                )

    def __len__(self) -> int:
        return len(self.schedule)

    @property
    def stochastic(self) -> tuple[bool, ...]:
        """Steps that are transitions of the sampler, which have a density."""
        pairs = zip(self.noise_level, self.solver, strict=True)
        return tuple(level > 0 and not SOLVERS[how].stochastic for level, how in pairs)

    @property
    def trained(self) -> int:
        """Trained steps of a chain."""
        return 1 if self.own else len(self.train)

    def firsts(self) -> tuple[int, ...]:
        """First stochastic step of each kind of chain, all equally many; empty: there is none."""
        return self.own or tuple(k for k, noisy in enumerate(self.stochastic) if noisy)[:1]

    @property
    def leaves(self) -> int:
        """Samples that one start leads to: a tree's leaves, or 1."""
        return 1 if self.tree is None else self.tree.leaves

    def drawn_together(self, batch_size: int) -> int:
        """Samples of a batch: as many whole trees as it holds, at least one."""
        return self.leaves * max(1, batch_size // self.leaves)

    def end(self, k: int) -> int:
        """The place of the grid at which the stochastic step from place k ends."""
        return k + 1 if self.tree is None else self.tree.end(k)

    def steps(
        self, index: Tensor, process: Process, device: torch.device | str = "cpu", ends: Tensor | None = None
    ) -> Step:
        """The steps of `index` [B] as [B] tensors; `ends` [B] are their ends, where not those of stochastic steps.

        Both are best on the CPU: a GPU's are waited for. Steps on a GPU keep themselves on the CPU too, as `host`.
        """
        index, table = index.cpu(), self._table(process)
        columns = {name: values[index] for name, values in table.columns.items()}
        if ends is not None:
            ends = ends.cpu()
            columns |= {"alpha_next": table.alphas[ends], "sigma_next": table.sigmas[ends]}
        here = Step(index=index, **columns)
        if torch.device(device).type == "cpu":
            return here
        # Two copies instead of one for each column.
        there = sent(torch.stack(list(columns.values())), device).unbind()
        return Step(index=sent(index, device), **dict(zip(columns, there, strict=True))).knowing(here)

    def _table(self, process: Process) -> "_Table":
        """The values of every step, made once."""
        known = self._tables.get(id(process))
        if known is None:
            known = self._tables[id(process)] = self._made_table(process)
        return known

    def _made_table(self, process: Process) -> "_Table":
        sigmas, steps = self.schedule.sigmas, torch.arange(len(self))
        alphas = process.alpha(sigmas) if self.schedule.alphas is None else self.schedule.alphas
        ends = torch.tensor([self.end(k) for k in range(len(self))])
        columns = {
            "alpha": alphas[steps],
            "sigma": sigmas[steps],
            "alpha_next": alphas[ends],
            "sigma_next": sigmas[ends],
            "timestep": self.schedule.timesteps[steps],
            "noise_level": torch.tensor(self.noise_level),
            # Some samplers diverge at the noisiest sigma; official code bounds it by the grid's second value.
            "sigma_ceiling": sigmas[1 if len(sigmas) > 2 else 0].repeat(len(self)),
        }
        if self.tree is not None and self.inflation != 1:
            columns["std_scale"] = torch.where(torch.tensor(self.tree.splits), self.inflation, 1.0)
        return _Table(process, alphas, sigmas, columns)


@dataclass(frozen=True, slots=True)
class _Table:
    """Values of the steps of a plan on the CPU."""

    process: Process
    alphas: Tensor
    """At the places of the grid, [K + 1]."""
    sigmas: Tensor
    """[K + 1]."""
    columns: dict[str, Tensor]
    """Fields of `Step`, [K] each."""


def solver_plan(schedule: Schedule, solver: SolverName = "ode", noise_level: float = 0.0) -> StepPlan:
    """A plan without transitions: evaluation, sampling, and rollouts of methods without log-probs. The schedule is the
    model's; some solvers walk another grid. `noise_level` is for a stochastic solver. Raises ValueError: the solver
    cannot walk this grid.
    """
    how = SOLVERS[solver]
    grid = how.grid(schedule)
    return StepPlan(grid, how.noise_levels(grid, noise_level), train=(), solver=(solver,) * len(grid))


def window(schedule: Schedule, noise_level: float, steps: Sequence[int] | None = None) -> StepPlan:
    """Stochastic and trained at `steps`, deterministic elsewhere; None: every step but the last.

    Raises ValueError: the window is empty, leaves the grid, or holds the last step; noise_level is 0.
    """
    chosen = tuple(range(len(schedule) - 1)) if steps is None else tuple(steps)
    if not chosen:
        raise ValueError(
            f"the window of stochastic steps is empty ({len(schedule)} steps in all): give at least one, "
            "and at least 2 denoising steps"
        )
    levels = tuple(noise_level if k in chosen else 0.0 for k in range(len(schedule)))
    return StepPlan(schedule=schedule, noise_level=levels, train=chosen)


def kept_plan(schedule: Schedule, noise_level: float) -> StepPlan:
    """Steps of the sampler that are kept and not scored: all but a last one that ends at clean data, and is the ODE's.
    At noise level 0 all steps are the ODE's, and kept.
    """
    noisy = noisy_steps(schedule) if noise_level > 0 else ()
    levels = tuple(noise_level if k in noisy else 0.0 for k in range(len(schedule)))
    return StepPlan(schedule, levels, train=(), keep=noisy or tuple(range(len(schedule))))


def noisy_steps(schedule: Schedule) -> tuple[int, ...]:
    """Steps that do not end at clean data: all of a noise-prediction model whose last step ends at its least noise
    level, all but the last of a flow.

    >>> noisy_steps(Schedule(torch.tensor([0.9, 0.4, 0.03]), torch.tensor([900.0, 400.0])))
    (0, 1)
    """
    return tuple(range(len(schedule) - int(float(schedule.sigmas[-1]) == 0)))
