"""Flow-GRPO: online clipped policy gradient on flow models.

    1. roll out G samples per prompt with the Flow-SDE on the trained steps, the ODE elsewhere
    2. A = (r - mean of the prompt's group) / (std + 1e-4), clipped to +-5
    3. per trained step: ratio = exp(log p(x'|x) - log p_old(x'|x)), log p the mean over latent dims
       loss = max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef * KL(policy | reference)

Defaults are those of the official code; the last step is never trained, its Gaussian is too sharp.

Other methods of the family take their options, their loss or a part of it from here.

Source: arXiv 2505.05470; yifan123/flow_grpo:scripts/train_sd3.py, config/grpo.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms._options import (
    ClipRange,
    KLConfig,
    Options,
    RatioOptions,
    SpatialOptions,
    StepOptions,
    clip_bounds,
)
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_positive
from flowrl.credit.step_values import StepValues
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import Surrogate, SurrogateName, surrogate_loss
from flowrl.samplers.base import Ratio, Sampler, StepDistribution

LEVEL = "tested"


# ---- options


@dataclass(frozen=True, kw_only=True)
class ClipOptions(Options):
    """The loss of a ratio, and its bound."""

    clip_range: ClipRange | None = None
    """Bound on |ratio - 1|, in the units of the sampler's log-prob form (means over 4096 dims and more; small latents
    need more); two numbers: its largest fall and rise; null: the published value for sampler and ratio."""
    surrogate: SurrogateName = "clip"
    """Loss of a ratio: `clip`, PPO's; `none`, and CISPO, SAPO and PSPO are the same here; `preserve`, with CE-GPPO's
    gradient outside the band; `quadratic`, with a pull to ratio 1 on every term (docs/concepts/clip_and_kl.md)."""
    preserved: list[float] | None = None
    """Share of the gradient that `preserve` leaves beyond the largest fall, and beyond the largest rise; null: 0.5 and
    1, as published."""
    eta: float | None = None
    """Log ratio at which the pull of `quadratic` cancels an advantage of 1; null: the clip range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range is not None:
            clip_bounds(self.clip_range)
        require_positive(vars(self), "eta")
        shares = self.preserved
        if shares is not None and (len(shares) != 2 or not all(share >= 0 for share in shares)):
            raise ValueError(f"preserved={shares} must be two numbers from 0 on: below the band, above it")
        for key, value, name in (("eta", self.eta, "quadratic"), ("preserved", shares, "preserve")):
            if value is not None and self.surrogate != name:
                raise OptionError(
                    f"{key}={value} belongs to surrogate={name}, not {self.surrogate}",
                    [{"surrogate": name}, {key: None}],
                )

    @property
    def ratio(self) -> Ratio:
        """Kind of ratio, for its published clip range."""
        return "plain"

    def clip(self, sampler: Sampler) -> tuple[float, float]:
        if self.surrogate == "none":
            return float("inf"), float("inf")
        if self.clip_range is not None:
            return clip_bounds(self.clip_range)
        if self.by_position:
            raise OptionError(
                "clip_range=null: there is no published value for spatial.ratio=position, and those for means over all "
                "dims are far too small (docs/algorithms/vipo.md has what to look at)",
                {"spatial.ratio": "sample"},
            )
        return clip_bounds(sampler.clip_range(self.ratio))

    def check(self, sampler: Sampler, num_steps: int) -> None:
        if self.by_position and sampler.log_prob_form != "mean":
            # CPS scores without 1 / (2 std^2). A Gaussian by position would be another method, with the steps
            # weighed by their noise, and nobody has published the unscaled square by position.
            raise OptionError(
                f"spatial.ratio=position takes Gaussian log-probs apart, the sampler's form is "
                f"{sampler.log_prob_form!r}",
                {"spatial.ratio": "sample"},
            )
        self.clip(sampler)
        self.tree(num_steps, 1, 0)
        super().check(sampler, num_steps)

    def rule(self, sampler: Sampler) -> Surrogate:
        """The loss of a ratio in use."""
        low, high = self.preserved or (0.5, 1.0)
        return Surrogate(name=self.surrogate, bounds=self.clip(sampler), kept=(low, high), eta=self.eta)


@dataclass(frozen=True, kw_only=True)
class StepCreditOptions(Options):
    """Credit of each step."""

    step_values: StepValues | None = None
    """Credit of each trained step by a judge of latents, beside that of the sample: {output, weight, of}; null:
    none."""

    def require_one(self, spatial: object) -> None:
        """Refuse a map of the image beside values of steps."""
        if spatial is not None and self.step_values is not None:
            raise OptionError("spatial and step_values both change the credit of a step", {"step_values": None})


@dataclass(frozen=True, kw_only=True)
class Config(StepCreditOptions, SpatialOptions, StepOptions, ClipOptions, RatioOptions):
    """Rule of credit and KL, bound of the ratio, trained steps, and map of the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one(self.spatial)


# ---- the method


class FlowGrpo(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        return window(schedule, sampler.default_noise_level(), self.config.sde_steps)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


def clipped_loss(
    method: EdgeMethod[Any], batch: Microbatch, networks: Networks, weight: Tensor | None = None
) -> LossOutput:
    """The loss of step 3, summed over the E edges of a microbatch. `batch` has one advantage for all rewards,
    [E, 1, *pos]; the options of `method` are `ClipOptions` and `RatioOptions`. `weight`: of each edge before the KL is
    added, [E]; None: 1.
    """
    policy, sampler = networks.transition(batch), networks.policy.sampler
    log_ratio = method.log_ratio(policy, batch, sampler)  # log p - log p_old, [E, *pos]
    terms = clipped_terms(log_ratio, [single_advantage(batch)], method.config.rule(sampler), weight)
    return with_reference(terms, policy, batch, networks, method.config.kl)


@dataclass(frozen=True, slots=True)
class Terms:
    """The policy loss of each edge [E], and the metrics: summed, and by edge."""

    loss: Tensor
    metrics: dict[str, Tensor]
    per_step: dict[str, Tensor] = field(default_factory=dict)


def clipped_terms(
    log_ratio: Tensor, advantages: Sequence[Tensor], rule: Surrogate, weight: Tensor | None = None
) -> Terms:
    """weight * mean over positions of the sum over advantages of the surrogate's loss, per edge.

    log_ratio and each of the advantages are [E, *pos]; `weight` [E], None is 1.
    """
    parts = [surrogate_loss(log_ratio, each, rule) for each in advantages]
    loss = per_edge(torch.stack([part for part, _ in parts]).sum(dim=0))
    if weight is not None:
        loss = weight * loss
    clipped = per_edge(torch.stack([part for _, part in parts]).float().mean(dim=0))
    metrics = {"policy/clip_fraction": clipped.sum()} | ratio_metrics(log_ratio, loss)
    ratio = per_edge(log_ratio.detach().exp())
    return Terms(loss, metrics, {"policy/ratio": ratio, "policy/clip_fraction": clipped})


def ratio_metrics(log_ratio: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Metrics of every ratio loss, from log_ratio [E, *pos] and loss [E], summed over the edges."""
    return {
        "policy/loss": loss.detach().sum(),
        "policy/approx_kl": per_edge(0.5 * log_ratio.detach().square()).sum(),
        "policy/ratio_mean": per_edge(log_ratio.detach().exp()).sum(),
    }


def with_reference(
    terms: Terms, policy: StepDistribution, batch: Microbatch, networks: Networks, config: KLConfig
) -> LossOutput:
    """The summed loss of an update: the terms plus coef * KL(policy | reference), if coef is above 0."""
    loss, metrics = terms.loss, dict(terms.metrics)
    if config.coef > 0:
        reference = networks.frozen("reference", batch)
        dt = batch.step.sigma_next - batch.step.sigma
        divisor = config.on(networks.policy.adapter.process, networks.policy.sampler)
        kl = policy.kl(reference, divisor=divisor, dt=dt)
        # Per edge, so after the mean over positions: no map weighs it. (Official ViPO refuses a KL.)
        loss = loss + config.coef * kl
        metrics["policy/kl_reference"] = kl.detach().sum()
    return LossOutput(loss=loss.sum(), metrics=metrics, per_step=terms.per_step)


def single_advantage(batch: Microbatch) -> Tensor:
    """The one advantage for all rewards, [E, 1, *pos] -> [E, *pos]."""
    return batch.advantage.squeeze(1)


def per_edge(values: Tensor) -> Tensor:
    """Mean over positions, [E, *pos] -> [E]; without positions unchanged."""
    return values if values.ndim == 1 else values.flatten(1).mean(dim=1)


build = FlowGrpo
