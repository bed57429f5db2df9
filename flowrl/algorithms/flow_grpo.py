"""Flow-GRPO: online clipped policy gradient on flow models.

    1. roll out G samples per prompt with the Flow-SDE on the trained steps, the ODE elsewhere
    2. A = (r - mean of the prompt's group) / (std + 1e-4), clipped to +-5
    3. per trained step: ratio = exp(log p(x'|x) - log p_old(x'|x)), log p the mean over latent dims
       loss = max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef * KL(policy | reference)

Defaults are those of the official code; the last step is never trained, its Gaussian is too sharp.

Source: arXiv 2505.05470; yifan123/flow_grpo:scripts/train_sd3.py, config/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.algorithms._grpo import ClippedConfig, ClippedGrpo

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedConfig):
    SPATIAL: ClassVar[bool] = True


class FlowGrpo(ClippedGrpo[Config]):
    level = LEVEL


def build(config: Config) -> FlowGrpo:
    return FlowGrpo(config)
