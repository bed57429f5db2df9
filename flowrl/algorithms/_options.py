"""The base of the methods' options; `base.py` exports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.credit.advantages import RuleConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.process import Process
from flowrl.diffusion.solvers import SolverName
from flowrl.diffusion.training_times import TimesConfig
from flowrl.diffusion.tree_shapes import Branching
from flowrl.samplers.base import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The base of every method's `Config`: checks, and the values of options that a method does not have.

    A class variable here becomes an option where a method declares a field of its name. Checks raise ValueError that
    names the key, the value and the remedy; they are called before a model is loaded, unless they say otherwise.
    """

    default_sampler: ClassVar[str] = "flow_sde"
    """Sampler where the run names none."""
    least_trees: ClassVar[int] = 1
    """Trees that a prompt needs at least, to have something to compare."""
    advantages: ClassVar[RuleConfig | None] = None  # that of `group` with its defaults, or the method credits by itself
    """Rule that makes advantages of rewards."""
    guidance_scale: ClassVar[float | None] = None
    """Guidance scale of the training forward; None: the rollout's."""
    old_log_prob: ClassVar[Literal["rollout", "recompute"]] = "rollout"
    """Source of the old log-probs."""
    sde_steps: ClassVar[list[int] | None] = None
    """Steps that are stochastic and trained; None: those of the method's plan."""
    spatial: ClassVar[SpatialConfig | None] = None
    """Map by which advantages count over an image; None: a sample has one advantage."""
    path_weight: ClassVar[float] = 0.0
    """Weight of a leaf's log-prob where a tree's leaves are averaged; 0: all alike."""
    shift: ClassVar[float] = 1.0
    """Resolution shift of the grid that the plan presumes."""
    passes: ClassVar[int] = 1
    """Times that an iteration goes through its data."""
    solver: ClassVar[SolverName] = "ode"
    """Solver of the steps without noise."""
    solver_noise: ClassVar[float] = 0.0
    """tau of the solver `sa`."""
    times: ClassVar[TimesConfig | None] = None
    """Rule of the training times on finished samples; None: `timesteps` on noise-prediction models, `logit_normal` on
    flows."""
    default_terms: ClassVar[int] = 1
    """Training times of a sample where there is no rule."""
    reference_guidance: ClassVar[float | None] = None
    """Guidance scale of the role "reference" where guidance is CFG; None: that of the policy."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Snapshots of the weights that these options need."""
        return ()

    @property
    def by_position(self) -> bool:
        """Whether every latent position has its own ratio."""
        return self.spatial is not None and self.spatial.ratio == "position"

    def clip(self, sampler: Sampler) -> float:
        """The bound on |ratio - 1| in use; inf: none."""
        return float("inf")

    def terms(self, num_steps: int) -> int:
        """Training times of a sample on a grid of so many steps.

        Raises:
            ValueError: the grid has fewer nodes than the rule needs.
        """
        return self.default_terms if self.times is None else self.times.terms(num_steps)

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching | None:
        """The tree of an iteration on a grid of so many steps; None: there is none.

        Raises:
            ValueError: it does not fit the grid, naming the key.
        """
        return None

    def leaves(self, num_steps: int) -> int:
        """Samples of a tree on a grid of so many steps; 1: there is none."""
        tree = self.tree(num_steps, 1, 0)
        return 1 if tree is None else tree.leaves

    def check(self, sampler: Sampler, num_steps: int) -> None:
        """Refuse what the run's sampler and number of denoising steps do not allow."""

    def check_group(self, group_size: int) -> None:
        """Refuse what a group of this size cannot give."""
        if self.advantages is not None:
            self.advantages.rule().check_group(group_size)

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        """Refuse numbers of samples, denoising steps and optimizer steps of an iteration that do not go together."""

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a number of trained steps, known once the model's grid is, for `samples` samples of an iteration."""

    def check_process(self, process: Process) -> None:
        """Refuse the model's process, known once the model is."""
