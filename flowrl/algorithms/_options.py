"""Options that methods share: each a field of the class that reads it. A method's `Config` is made of such classes.

`Options` is what a run asks of any method's options; a class with a field gives its answer.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self

from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.credit.advantages import AdvantageConfig, RuleConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.credit.selection import FilterConfig
from flowrl.diffusion.process import Process, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import SOLVERS, SolverName
from flowrl.diffusion.training_times import TimesConfig, of_process
from flowrl.diffusion.tree_shapes import Branching
from flowrl.samplers.base import KLDivisor, Sampler

ClipRange = float | list[float]
"""The bound on |ratio - 1|, or its largest fall and rise."""


def clip_bounds(clip_range: ClipRange) -> tuple[float, float]:
    """(fall, rise) of a clip range of one number or two.

    Raises ValueError: it is something else, or a number is not above 0.

    >>> clip_bounds(0.2), clip_bounds([0.2, 0.28])
    ((0.2, 0.2), (0.2, 0.28))
    """
    given = clip_range if isinstance(clip_range, list) else [clip_range, clip_range]
    if len(given) != 2 or not all(bound > 0 for bound in given):
        raise ValueError(f"clip_range={clip_range} must be positive, one number or two: the largest fall and rise")
    return given[0], given[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of every method's `Config`: what a run asks of it, and checks.

    Checks raise ValueError that names the key, the value and the remedy; they are called before a model is loaded,
    unless they say otherwise.
    """

    default_sampler: ClassVar[str] = "flow_sde"
    """Sampler where the run names none."""
    least_trees: ClassVar[int] = 1
    """Trees that a prompt needs at least, to have something to compare."""
    default_terms: ClassVar[int] = 1
    """Training times of a finished sample where there is no rule."""
    judged_noisy: ClassVar[bool] = False
    """Whether rewards see latents on their way, and so must be judges of noisy latents."""

    def __post_init__(self) -> None:
        """Refuse bad values; a class that adds fields checks them, and calls this."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Snapshots of the weights that these options need."""
        return ()

    @property
    def wordings(self) -> Sequence[str]:
        """Words in which rewards read the prompts, too: templates over {prompt} and the values of its record."""
        return ()

    @property
    def by_position(self) -> bool:
        """Whether every latent position has its own ratio."""
        return False

    @property
    def notes(self) -> Sequence[str]:
        """Warnings about these options, said before a run."""
        return ()

    def credit_rule(self) -> RuleConfig | None:
        """Rule that makes advantages of rewards; None: the method credits by itself."""
        return None

    def clip(self, sampler: Sampler) -> tuple[float, float]:
        """The ratio's largest fall and rise in use; inf: not bounded."""
        return float("inf"), float("inf")

    def terms(self, num_steps: int) -> int:
        """Training times of a sample on a grid of so many steps.

        Raises ValueError: the grid has fewer nodes than the rule needs.
        """
        return self.default_terms

    def times_on(self, schedule: Schedule) -> TimesConfig:
        """Rule of the training times on finished samples."""
        return of_process(schedule, self.default_terms)

    def on_nodes(self, count: int, given: Container[str] = ()) -> Self:
        """The same for a model that knows `count` noise levels alone: training times on them, a solver of Euler's
        steps, but for the options that were given."""
        return self

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int] | None:
        """Steps of an iteration that are stochastic and trained, where there is no tree; None: all but the last.

        Raises ValueError: they do not fit the grid, naming the key.
        """
        return None

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching | None:
        """The tree of an iteration on a grid of so many steps; None: there is none.

        Raises ValueError: it does not fit the grid, naming the key.
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
        rule = self.credit_rule()
        if rule is not None:
            rule.check_group(group_size)
        if group_size < 2 and vars(self).get("filter") is not None:
            raise OptionError("filter compares the samples of a prompt, and rollout.group_size=1", {"filter": None})

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        """Refuse numbers of samples, denoising steps and optimizer steps of an iteration that do not go together."""

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a number of trained steps, known once the model's grid is, for `samples` samples of an iteration."""

    def check_process(self, process: Process) -> None:
        """Refuse the model's process, known once the model is."""


# ---- of methods on the steps of a rollout


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    coef: float = 0.0
    """Weight of the KL to the reference; 0 computes no reference."""
    divisor: KLDivisor | None = None
    """`variance`: the Gaussian KL, official with CPS, Wan and SAGE; `flow_grpo`: without its factor 1/|dt|, official
    with the Flow-SDE, flows only; `none`: plain square; null: the sampler's official one, else `flow_grpo` on flows and
    `variance` on noise-prediction models."""

    def __post_init__(self) -> None:
        require_not_negative(vars(self), "coef")

    def on(self, process: Process, sampler: Sampler) -> KLDivisor:
        """The divisor in use."""
        return self.divisor or sampler.kl_divisor or ("variance" if isinstance(process, VPProcess) else "flow_grpo")


@dataclass(frozen=True, kw_only=True)
class RatioOptions(Options):
    """Options of a method that compares log-probs of the policy with those of the rollout."""

    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rule that makes advantages of rewards."""
    filter: FilterConfig | None = None
    """Groups that are trained (Edit-R1); null: all that are not dead."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference: the network without LoRA, or a frozen copy of full weights."""
    guidance_scale: float | None = None
    """Guidance scale of the training forward; methods with log-probs take rollout's, so only that value or null is
    accepted."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """`recompute` evaluates it once more at training geometry, where the two differ by more than the parity gate."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",) if self.kl.coef > 0 else ()

    def credit_rule(self) -> RuleConfig:
        return self.advantages.rule()

    def check_process(self, process: Process) -> None:
        if self.kl.divisor == "flow_grpo" and isinstance(process, VPProcess):
            raise OptionError(
                "kl.divisor=flow_grpo multiplies the KL of a step by |dt|, which belongs to a flow's SDE; "
                "on this noise-prediction model (VP) it would weigh the steps a hundredfold unevenly",
                [{"kl.divisor": "variance"}, {"kl.divisor": "none"}],
            )


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """The steps that are trained, by number."""

    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all but the last."""

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.sde_steps
        if steps is None:
            return
        if not steps or min(steps) < 0:
            raise ValueError(f"sde_steps={steps} needs at least one step, counted from 0")
        if len(set(steps)) < len(steps):
            once = sorted(set(steps))
            raise OptionError(f"sde_steps={steps} names a step twice", {"sde_steps": once})

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int] | None:
        return self.sde_steps

    def most_trained(self, num_steps: int) -> int:
        """Number of trained steps of a grid of which only the number of steps is known."""
        return num_steps - 1 if self.sde_steps is None else len(self.sde_steps)


@dataclass(frozen=True, kw_only=True)
class SpatialOptions(Options):
    """A map of every image, by which its advantage counts."""

    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where an image has something to see (docs/algorithms/vipo.md); null: everywhere."""

    @property
    def by_position(self) -> bool:
        return self.spatial is not None and self.spatial.ratio == "position"


@dataclass(frozen=True, kw_only=True)
class PathOptions(Options):
    """The weight of the paths of a tree."""

    path_weight: float = 0.0
    """beta: leaves after an edge count by exp(beta z), z how likely the path to them was among them (standardised
    log-prob); 0: all alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(vars(self), "path_weight")


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(StepOptions, RatioOptions):
    """The options of an `EdgeMethod` whose file has none; its loss adds `kl` (`flow_grpo.with_reference`)."""


# ---- of methods on finished samples


class Lag(Protocol):
    """The pace at which a role follows the policy."""

    def decay(self, updates: int) -> float:
        """d after so many optimizer steps of the run, in [0, 1]: 0 copies the policy, 1 leaves the role as it is."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimesOptions(Options):
    """Options of every method that noises finished samples again."""

    times: TimesConfig | None = None
    """Rule of the times that the samples are noised to; see `flowrl/diffusion/training_times.py`. null, where samples
    may be given: `timesteps` on noise-prediction models, `logit_normal` on flows."""
    guidance_scale: float | None = None
    """Guidance scale of the forwards in training; null: none where guidance is CFG, the rollout's where the network
    takes it."""
    passes: int = 1
    """Times that an iteration goes through its samples; noise and times of a sample stay the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "passes")

    def terms(self, num_steps: int) -> int:
        return self.default_terms if self.times is None else self.times.terms(num_steps)

    def times_on(self, schedule: Schedule) -> TimesConfig:
        return self.times or super().times_on(schedule)

    def on_nodes(self, count: int, given: Container[str] = ()) -> Self:
        terms = self.default_terms if self.times is None else self.times.count or count
        moved: dict[str, Any] = {
            "times": TimesConfig(name="subset", count=min(terms, count), fraction=1.0),
            "solver": "ode",
        }
        return replace(self, **{name: new for name, new in moved.items() if name in vars(self) and name not in given})

    def check(self, sampler: Sampler, num_steps: int) -> None:
        self.terms(num_steps)
        super().check(sampler, num_steps)


@dataclass(frozen=True, kw_only=True)
class SolverOptions(Options):
    """The solver by which samples are drawn."""

    solver: SolverName = "dpm2_midpoint"
    """Solver of the rollout; `sa` adds noise."""
    solver_noise: float = 0.0
    """tau of `sa`, between sigma 0.3 and 0.9."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(vars(self), "solver_noise")
        if self.solver_noise > 0 and not SOLVERS[self.solver].stochastic:
            raise OptionError(
                f"solver_noise={self.solver_noise}: only the solver 'sa' adds noise, not {self.solver!r}",
                [{"solver": "sa"}, {"solver_noise": 0.0}],
            )

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        least = SOLVERS[self.solver].least_steps
        if num_steps < least:
            raise OptionError(
                f"solver={self.solver} needs at least {least} steps, rollout.num_inference_steps is {num_steps}",
                {"rollout.num_inference_steps": least},
            )


@dataclass(frozen=True, kw_only=True)
class CreditOptions(Options):
    """The rule by which finished samples are credited."""

    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rule that makes advantages of rewards."""
    filter: FilterConfig | None = None
    """Groups that are trained (Edit-R1); null: all that are not dead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantages.virtual_best:
            raise OptionError(
                f"advantages.virtual_best={self.advantages.virtual_best} makes the mean advantage negative, by which a "
                "signed loss on finished samples runs away; it is for methods on the steps of a rollout",
                {"advantages.virtual_best": 0},
            )

    def credit_rule(self) -> RuleConfig:
        return self.advantages.rule()


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Options):
    """The guidance of the untouched network."""

    reference_guidance: float | None = None
    """CFG of the untouched network, in the pipeline's units; null: as the policy, by default none. Where guidance is an
    input of the network, it gets the policy's value."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CreditOptions, SolverOptions, TimesOptions):
    """The options of a `SampleMethod` whose file has none of its own."""

    solver: SolverName = "ode"


# ---- of methods on the initial noise


@dataclass(frozen=True, kw_only=True)
class NoiseOptions(Options):
    """The options of a `NoiseMethod` whose file has none of its own."""

    passes: int = 1
    """Times that an iteration goes through its samples."""
    solver: SolverName = "ode"
    """Solver of the rollout; `sa` is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if SOLVERS[self.solver].stochastic:
            raise OptionError(f"solver={self.solver} adds noise, so z would not decide the image", {"solver": "ode"})
        require_positive(vars(self), "passes")
