"""Options of the rollout."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flowrl.core.paths import ComponentOf
from flowrl.core.strict import Options, require_not_negative, require_positive

PreviewKind = Literal["policy", "merged", "bfloat16", "int8", "float8", "compiled"]
SelectRule = Literal["best_worst", "variance", "random"]
"""Rule that chooses candidates by their scores."""


@dataclass(frozen=True, kw_only=True)
class ExplorationConfig:
    pool: int
    """Candidates per prompt (N); rollout.group_size of them are trained on."""
    num_inference_steps: int | None = None
    """Denoising steps of the preview; null takes rollout's."""
    network: PreviewKind = "policy"
    """Network of the preview; see `flowrl/rollout/preview.py`."""
    batch_size: int | None = None
    """Samples per forward of the preview; null takes rollout's."""
    select: SelectRule = "best_worst"
    """Rule that chooses the group from the pool by the scores of the preview."""
    least_hit_rate: float = 0.8
    """Share of the truly best and worst that the preview must choose in the check, in [0, 1]; with less, the run goes
    on without exploration and warns."""
    check_prompts: int = 4
    """Prompts of the first iteration whose whole pool is drawn in full for that check; 0: no check."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "pool", "num_inference_steps", "batch_size")
        if not 0 <= self.least_hit_rate <= 1:
            raise ValueError(f"least_hit_rate={self.least_hit_rate} must lie in [0, 1]")
        require_not_negative(vars(self), "check_prompts")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    sampler: Annotated[Options | None, ComponentOf("samplers")] = None
    """Sampler of the stochastic steps: name and its own options; null: the method's own (flow_sde; dance_sde for
    branch_grpo, dance_grpo and euphonium, sage for sage_grpo, cps for rocm, wan_sde for flash_grpo, ode for opd, ddim
    for adjoint_matching, ddpo and dpok)."""
    num_inference_steps: int = 10
    """Denoising steps of a training sample."""
    guidance_scale: float = 1.0
    """Guidance scale in the pipeline's units; 1: none."""
    prompts_per_iteration: int = 48
    """Prompts drawn per iteration, over all processes."""
    group_size: int = 24
    """Samples per prompt."""
    batch_size: int = 8
    """Samples per network forward and process."""
    shared_noise: bool = False
    """All samples of a prompt start from the same noise."""
    exploration: ExplorationConfig | None = None
    """A cheap preview of more samples, of which some are drawn in full (flowrl/rollout/exploration.py); null: none."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "num_inference_steps", "prompts_per_iteration", "group_size", "batch_size")
