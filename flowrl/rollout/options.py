"""Options of the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowrl.core.paths import ComponentOf
from flowrl.core.strict import Options, require_positive
from flowrl.rollout.exploration import ExplorationConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    sampler: Annotated[Options | None, ComponentOf("samplers")] = None
    """Transition law of the stochastic steps: name and its own options. Null: the method's own, where it needs one:
    flow_sde, of ddpo and dpok ddim."""
    num_inference_steps: int = 10
    """Denoising steps of a training sample."""
    guidance_scale: float = 1.0
    """CFG in the pipeline's units; 1 is none."""
    prompts_per_iteration: int = 48
    """Prompts drawn per iteration, over all processes."""
    group_size: int = 24
    """Samples per prompt."""
    batch_size: int = 8
    """Samples per network forward and process."""
    shared_noise: bool = False
    """All samples of a prompt start from the same noise."""
    exploration: ExplorationConfig | None = None
    """Look at more samples cheaply and draw the most telling ones in full (flowrl/rollout/exploration.py); null: no."""

    def __post_init__(self) -> None:
        require_positive(
            num_inference_steps=self.num_inference_steps,
            prompts_per_iteration=self.prompts_per_iteration,
            group_size=self.group_size,
            batch_size=self.batch_size,
        )
