"""Options of the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowrl.core.paths import ComponentOf
from flowrl.core.strict import Options, require_positive
from flowrl.rollout.exploration import ExplorationConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    sampler: Annotated[Options | None, ComponentOf("samplers")] = None
    """Sampler of the stochastic steps: name and its own options; null: the method's own (flow_sde; dance_sde for
    branch_grpo and dance_grpo, sage for sage_grpo, ddim for ddpo and dpok)."""
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
        require_positive(
            num_inference_steps=self.num_inference_steps,
            prompts_per_iteration=self.prompts_per_iteration,
            group_size=self.group_size,
            batch_size=self.batch_size,
        )
