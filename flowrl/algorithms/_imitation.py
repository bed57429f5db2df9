"""What the methods that imitate their better samples share: who draws the samples, and the weighted regression.

A network that imitates its own samples copies their discretisation error, and the next samples err twice: contrast and
reward fall within tens of iterations, whatever is rewarded. So the samples come from a network that follows later
(`refresh`), as in yifan123/flow_grpo (`ref_update_step`).
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.algorithms._matching import AnchorConfig, pull
from flowrl.algorithms._options import Options
from flowrl.losses.batches import LossOutput, summed
from flowrl.rollout.outputs import Outputs


@dataclass(frozen=True, kw_only=True)
class ImitationOptions(Options):
    refresh: int | None = 40
    """Optimizer steps after which the samples are drawn by the policy as it then is; until then by the one before.
    0: always by the policy; null: always by the untouched one (offline)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh is not None and self.refresh < 0:
            raise ValueError(f"refresh={self.refresh} must not be negative; null never refreshes")

    @property
    def drawing(self) -> tuple[str, tuple[str, int] | None]:
        """The role that draws the samples, and `SampleMethod.refresh`."""
        return "sampling" if self.refresh != 0 else "policy", ("sampling", self.refresh) if self.refresh else None


def weighted_loss(kl: AnchorConfig, outputs: Outputs) -> LossOutput:
    """w mean (v - v*)^2 + kl mean (v - v_ref)^2, summed over the terms; w are the advantages."""
    weight = outputs.batch.advantage.double()
    policy = weight * outputs.error()
    metrics = {"policy/loss": policy, "policy/weight": weight, "policy/weight_square": weight.square()}
    return summed(policy + pull(kl, outputs, "reference"), metrics | outputs.metrics())
