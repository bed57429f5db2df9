"""Flow-GRPO: online clipped policy gradient on flow models.

    1. roll out G samples per prompt with the Flow-SDE on the trained steps, the ODE elsewhere
    2. A = (r - mean of the prompt's group) / (std + 1e-4), clipped to +-5
    3. per trained step: ratio = exp(log p(x'|x) - log p_old(x'|x)), log p the mean over latent dims
       loss = max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef * KL(policy | reference)

Defaults are those of the official code; the last step is never trained, its Gaussian is too sharp.

Other methods of the family take their options, their loss or a part of it from here.

Source: arXiv 2505.05470; yifan123/flow_grpo:scripts/train_sd3.py, config/grpo.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import Options
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.core.errors import OptionError, Remedy
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.process import Process, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import Bounds, clipped_ratio_loss
from flowrl.samplers.base import KLDivisor, LogProbForm, Sampler, StepDistribution

LEVEL = "tested"
Ratio = Literal["plain", "ratio_norm"]

CLIP_PRESETS: dict[tuple[str, LogProbForm, Ratio], float] = {
    ("flow_sde", "mean", "plain"): 1e-4,
    ("dance_sde", "mean", "plain"): 1e-4,
    ("sage", "mean", "plain"): 1e-4,
    ("ddim", "mean", "plain"): 1e-4,
    ("wan_sde", "mean", "plain"): 1e-3,
    ("cps", "unscaled", "plain"): 1e-5,
    ("flow_sde", "mean", "ratio_norm"): 2e-6,
    ("dance_sde", "mean", "ratio_norm"): 2e-6,
}
"""(sampler, log-prob form, ratio) -> published clip range; without an entry there is none."""


# ---- options


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    coef: float = 0.0
    """Weight of the KL to the reference; 0 computes no reference."""
    divisor: KLDivisor | None = None
    """`variance`: the Gaussian KL, official with CPS, Wan and SAGE; `flow_grpo`: without its factor 1/|dt|, official
    with the Flow-SDE, flows only; `none`: plain square; null: the sampler's official one, else `flow_grpo` on flows and
    `variance` on noise-prediction models."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"coef={self.coef} must not be negative")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",) if self.coef > 0 else ()

    def on(self, process: Process, sampler: Sampler) -> KLDivisor:
        """The divisor in use."""
        return self.divisor or sampler.kl_divisor or ("variance" if isinstance(process, VPProcess) else "flow_grpo")

    def check_process(self, process: Process) -> None:
        """Refuse a divisor that is not for the model's process."""
        if self.divisor == "flow_grpo" and isinstance(process, VPProcess):
            raise OptionError(
                "kl.divisor=flow_grpo multiplies the KL of a step by |dt|, which belongs to a flow's SDE; "
                "on this noise-prediction model (VP) it would weigh the steps a hundredfold unevenly",
                remedies=[Remedy({"kl.divisor": "variance"}), Remedy({"kl.divisor": "none"})],
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedOptions(Options):
    """Options of every method that clips the ratio."""

    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference: the network without LoRA, or a frozen copy of full weights."""
    guidance_scale: float | None = None
    """Guidance scale of the training forward; methods with log-probs take rollout's, so only that value or null is
    accepted."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """`recompute` evaluates it once more at training geometry, where the two differ by more than the parity gate."""
    clip_range: float | None = None
    """Bound on |ratio - 1|, in the units of the sampler's log-prob form (means over 4096 dims and more; small latents
    need more); null: the published value for sampler and ratio."""

    def __post_init__(self) -> None:
        check_steps(self.sde_steps)
        if self.clip_range is not None and self.clip_range <= 0:
            raise ValueError(f"clip_range={self.clip_range} must be positive")

    @property
    def ratio(self) -> Ratio:
        """Kind of ratio, for its published clip range."""
        return "plain"

    @property
    def roles(self) -> tuple[str, ...]:
        return self.kl.roles

    def clip(self, sampler: Sampler) -> float:
        if self.clip_range is not None:
            return self.clip_range
        if self.by_position:
            raise OptionError(
                "clip_range=null: there is no published value for spatial.ratio=position, and those for means over all "
                "dims are far too small (docs/algorithms/vipo.md has what to look at)",
                remedies=[Remedy({"spatial.ratio": "sample"})],
            )
        return clip_preset(sampler, self.ratio)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        if self.by_position and sampler.log_prob_form != "mean":
            # CPS scores without 1 / (2 std^2). A Gaussian by position would be another method, with the steps
            # weighed by their noise, and nobody has published the unscaled square by position.
            raise OptionError(
                f"spatial.ratio=position takes Gaussian log-probs apart, the sampler's form is "
                f"{sampler.log_prob_form!r}",
                remedies=[Remedy({"spatial.ratio": "sample"})],
            )
        self.clip(sampler)
        self.tree(num_steps, 1, 0)

    def check_process(self, process: Process) -> None:
        self.kl.check_process(process)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ClippedOptions):
    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all but the last."""
    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where an image has something to see (docs/algorithms/vipo.md); null: everywhere."""


# ---- the method


class FlowGrpo(EdgeMethod[Config]):
    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        return window(schedule, sampler.default_noise_level(), self.config.sde_steps)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


def clipped_loss(
    self: EdgeMethod[Any], batch: Microbatch, networks: Networks, weight: Tensor | None = None
) -> LossOutput:
    """The loss of step 3, summed over the E edges of a microbatch.

    Args:
        self: has `ClippedOptions`.
        batch: with one advantage for all rewards, [E, 1, *pos].
        networks: policy and reference.
        weight: of each edge before the KL is added, [E]; None: 1.
    """
    policy, sampler = networks.transition(batch), networks.policy.sampler
    log_ratio = self.log_ratio(policy, batch, sampler)  # log p - log p_old, [E, *pos]
    terms = clipped_terms(log_ratio, [single_advantage(batch)], self.config.clip(sampler), weight)
    return with_reference(terms, policy, batch, networks, self.config.kl)


@dataclass(frozen=True, slots=True)
class Terms:
    """The policy loss of each edge [E], and the metrics: summed, and by edge."""

    loss: Tensor
    metrics: dict[str, Tensor]
    per_step: dict[str, Tensor]


def clipped_terms(
    log_ratio: Tensor, advantages: Sequence[Tensor], clip_range: float | Bounds, weight: Tensor | None = None
) -> Terms:
    """weight * mean over positions of the sum over advantages of max(-A r, -A clamp(r, 1 - c, 1 + c)), per edge.

    log_ratio and each of the advantages are [E, *pos]; `weight` [E], None is 1.
    """
    bounds = clip_range if isinstance(clip_range, Bounds) else (clip_range, clip_range)
    parts = [clipped_ratio_loss(log_ratio, each, bounds) for each in advantages]
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


# ---- checks


def clip_preset(sampler: Sampler, ratio: Ratio) -> float:
    """The published clip range of a sampler, its log-prob form and a kind of ratio.

    Raises:
        ValueError: nobody published one.
    """
    key = sampler.name, sampler.log_prob_form, ratio
    if key not in CLIP_PRESETS:
        known = ", ".join(sorted({name for name, _, kind in CLIP_PRESETS if kind == ratio}))
        raise ValueError(
            f"clip_range=null: there is no published value for sampler {sampler.name!r} (log-prob form "
            f"{sampler.log_prob_form!r}) with the {ratio!r} ratio; give algorithm.clip_range, or use one of {known}"
        )
    return CLIP_PRESETS[key]


def check_steps(steps: list[int] | None) -> None:
    """Refuse a bad `sde_steps`; its upper end is known once there is a grid."""
    if steps is None:
        return
    if not steps or min(steps) < 0:
        raise ValueError(f"sde_steps={steps} needs at least one step, counted from 0")
    if len(set(steps)) < len(steps):
        raise OptionError(f"sde_steps={steps} names a step twice", remedies=[Remedy({"sde_steps": sorted(set(steps))})])


build = FlowGrpo
