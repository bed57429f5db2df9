"""What the methods of the GRPO family share: options, clip presets, the clipped loss, the KL to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Networks, Options
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import StepPlan, noisy_steps, window
from flowrl.diffusion.process import Process, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.windows import step_subsets
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import Bounds, clipped_ratio_loss
from flowrl.samplers.base import KLDivisor, LogProbForm, Sampler, StepDistribution

Ratio = Literal["plain", "ratio_norm"]

# (law, log-prob form, ratio) -> published clip range; without an entry there is none. grpo_family sheet 8.1.
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


def clip_preset(sampler: Sampler, ratio: Ratio) -> float:
    """The published clip range of a sampler's law and log-prob form and of a kind of ratio.

    Raises:
        ValueError: nobody published one.
    """
    law, form = type(sampler).__module__.rpartition(".")[2], sampler.log_prob_form  # a component is named by its file
    if (law, form, ratio) not in CLIP_PRESETS:
        known = ", ".join(sorted({name for name, _, kind in CLIP_PRESETS if kind == ratio}))
        raise ValueError(
            f"clip_range=null: there is no published value for sampler {law!r} (log-prob form {form!r}) with the "
            f"{ratio!r} ratio; give algorithm.clip_range, or use one of {known}"
        )
    return CLIP_PRESETS[law, form, ratio]


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    coef: float = 0.0
    """Weight of the KL to the reference; 0 computes no reference."""
    divisor: KLDivisor | None = None
    """`variance`: the Gaussian KL, official with CPS and Wan; `flow_grpo`: without its factor 1/|dt|, official with the
    Flow-SDE, flows only; `none`: plain square; null: `flow_grpo` on flows, `variance` on noise-prediction models."""

    def on(self, process: Process) -> KLDivisor:
        """The divisor in use."""
        return self.divisor or ("variance" if isinstance(process, VPProcess) else "flow_grpo")

    def check_process(self, process: Process) -> None:
        """Refuse a divisor that is not for the model's process."""
        if self.divisor == "flow_grpo" and isinstance(process, VPProcess):
            raise ValueError(
                "kl.divisor=flow_grpo multiplies the KL of a step by |dt|, which belongs to the law of a flow's SDE; "
                "on this noise-prediction model (VP) it would weigh the steps a hundredfold unevenly: leave it out, "
                "which is variance here, or set variance or none"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig(Options):
    """Options of every method here."""

    SEPARATE: ClassVar[bool] = False  # whether the loss takes one advantage per reward
    SPATIAL: ClassVar[bool] = False  # whether the loss takes one ratio and one advantage per position
    WINDOWED: ClassVar[bool] = False  # whether the method chooses the steps itself
    LAST: ClassVar[bool] = False  # whether the last step is trained too, where it leaves noise

    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all but the last (of ddpo and dpok: with
    the last where it leaves noise)."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    guidance_scale: float | None = None
    """Of the training forward; methods with log-probs take rollout's, so only that value or null is accepted."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """`recompute` evaluates it once more at training geometry, where the two differ by more than the parity gate."""
    spatial: SpatialConfig | None = None
    """ViPO: advantages that count where a picture has something to see (`flowrl/credit/saliency.py`);
    null: everywhere."""

    def __post_init__(self) -> None:
        if self.advantages.name == "separate" and not self.SEPARATE:
            raise ValueError(
                "advantages.name=separate: this method has one loss for all rewards; use per_reward or gdpo here, "
                "or the method dance_grpo"
            )
        if self.spatial is not None and not self.SPATIAL:
            raise ValueError(
                "spatial: this method's loss takes no advantages by position; set it to null, or use "
                "flow_grpo, flow_grpo_fast, mix_grpo, mix_grpo_flash or dance_grpo"
            )
        if self.kl.coef < 0:
            raise ValueError(f"kl.coef={self.kl.coef} must not be negative")
        if self.sde_steps is not None:
            self._check_sde_steps(self.sde_steps)

    def _check_sde_steps(self, steps: list[int]) -> None:
        """Their upper end is known once there is a grid."""
        if self.WINDOWED:
            raise ValueError(f"sde_steps={steps}: this method draws its steps by its own window; leave it null")
        if not steps or min(steps) < 0:
            raise ValueError(f"sde_steps={steps} needs at least one step, counted from 0")
        if len(set(steps)) < len(steps):
            raise ValueError(f"sde_steps={steps} names a step twice; use {sorted(set(steps))}")

    def check_process(self, process: Process) -> None:
        self.kl.check_process(process)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedConfig(GrpoConfig):
    """Options of the methods that clip the ratio."""

    clip_range: float | None = None
    """Bound on |ratio - 1|, in the units of the sampler's log-prob form (means over 4096 dims and more; small latents
    need more); null: the published value for sampler and ratio."""

    def __post_init__(self) -> None:
        GrpoConfig.__post_init__(self)
        if self.clip_range is not None and self.clip_range <= 0:
            raise ValueError(f"clip_range={self.clip_range} must be positive")

    @property
    def ratio(self) -> Ratio:
        return "plain"

    def clip(self, sampler: Sampler) -> float:
        """The clip range in use."""
        if self.clip_range is not None:
            return self.clip_range
        if self.by_position:
            raise ValueError(
                "clip_range=null: there is no published value for spatial.ratio=position, and those for means over all "
                "dims are far too small; give algorithm.clip_range (see docs/algorithms/vipo.md), or set "
                "spatial.ratio=sample"
            )
        return clip_preset(sampler, self.ratio)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        if self.by_position and sampler.log_prob_form != "mean":
            # CPS scores without 1 / (2 std^2). A Gaussian by position would be another method, with the steps
            # weighed by their noise, and nobody has published the unscaled square by position.
            raise ValueError(
                f"spatial.ratio=position takes Gaussian log-probs apart, the sampler's form is "
                f"{sampler.log_prob_form!r}: set spatial.ratio=sample, or use flow_sde or dance_sde"
            )
        self.clip(sampler)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetConfig(ClippedConfig):
    """Options of the methods that train some of a sample's steps, drawn for each sample."""

    timestep_fraction: float = 1.0
    """Share of the trained steps that each sample keeps, rounded down."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction={self.timestep_fraction} must lie in (0, 1]")

    def check(self, sampler: Sampler, num_steps: int) -> None:
        ClippedConfig.check(self, sampler, num_steps)
        # The most there can be: whether the last step is among them is known once there is a grid.
        self.check_trained(1, num_steps - (not self.LAST) if self.sde_steps is None else len(set(self.sde_steps)))

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a share that leaves a sample of `trained` steps none."""
        if int(trained * self.timestep_fraction) < 1:
            raise ValueError(
                f"timestep_fraction={self.timestep_fraction} of {trained} trained steps keeps none; "
                f"it must be at least {1 / max(trained, 1):.3g}"
            )


@dataclass(frozen=True, slots=True)
class Terms:
    """The policy loss of each edge [E], and what is reported of it."""

    loss: Tensor
    metrics: dict[str, Tensor]
    per_step: dict[str, Tensor]


def merged(batch: Microbatch) -> list[Tensor]:
    """The one advantage of methods that merge all rewards, [E, 1, *pos] -> one [E, *pos]."""
    return [batch.advantage.squeeze(1)]


def per_edge(values: Tensor) -> Tensor:
    """Mean over positions, [E, *pos] -> [E]; what has none comes back as it is."""
    return values if values.ndim == 1 else values.flatten(1).mean(dim=1)


def clipped_terms(
    log_ratio: Tensor, advantages: Sequence[Tensor], clip_range: float | Bounds, weight: Tensor | None = None
) -> Terms:
    """weight * mean over positions of the sum over advantages of max(-A r, -A clamp(r, 1 - c, 1 + c)), per edge.

    log_ratio and each of the advantages are [E, *pos]; `weight` [E], None is 1; two clip ranges are (down, up).
    """
    bounds = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    parts = [clipped_ratio_loss(log_ratio, each, bounds) for each in advantages]
    loss = per_edge(torch.stack([part for part, _ in parts]).sum(dim=0))
    if weight is not None:
        loss = weight * loss
    clipped = per_edge(torch.stack([part for _, part in parts]).float().mean(dim=0))
    metrics = {"policy/clip_fraction": clipped.sum()} | ratio_metrics(log_ratio, loss)
    ratio = per_edge(log_ratio.detach().exp())
    return Terms(loss, metrics, {"policy/ratio": ratio, "policy/clip_fraction": clipped})


def ratio_metrics(log_ratio: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """What every ratio loss reports of log_ratio [E, *pos] and loss [E], summed over the edges."""
    return {
        "policy/loss": loss.detach().sum(),
        "policy/approx_kl": per_edge(0.5 * log_ratio.detach().square()).sum(),
        "policy/ratio_mean": per_edge(log_ratio.detach().exp()).sum(),
    }


def with_reference(
    terms: Terms, policy: StepDistribution, batch: Microbatch, networks: Networks, config: KLConfig
) -> LossOutput:
    """The summed loss of an update: the terms plus coef * KL(policy | reference), where there is one."""
    loss, metrics = terms.loss, dict(terms.metrics)
    if config.coef > 0:
        reference = networks.frozen("reference", batch)
        dt = batch.step.sigma_next - batch.step.sigma
        kl = policy.kl(reference, divisor=config.on(networks.policy.adapter.process), dt=dt)
        # Per edge, so behind the mean over positions: no map weighs it. (Official ViPO refuses a KL.)
        loss = loss + config.coef * kl
        metrics["policy/kl_reference"] = kl.detach().sum()
    return LossOutput(loss=loss.sum(), metrics=metrics, per_step=terms.per_step)


C = TypeVar("C", bound=GrpoConfig)


class GrpoBase(EdgeMethod[C]):
    """What a method has unless its file says otherwise. Each file adds its plan and its loss."""

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.roles = ("reference",) if config.kl.coef > 0 else ()

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        steps = self.config.sde_steps
        if steps is None and self.config.LAST:
            steps = noisy_steps(schedule)
        return window(schedule, sampler.default_noise_level(), steps)


P = TypeVar("P", bound=ClippedConfig)


class ClippedGrpo(GrpoBase[P]):
    """The plain loss: the clipped ratio of the log-probs, and the KL to the reference."""

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        terms = clipped_terms(log_ratio, merged(batch), self.config.clip(sampler))
        return with_reference(terms, policy, batch, networks, self.config.kl)


S = TypeVar("S", bound=SubsetConfig)


class SubsetGrpo(GrpoBase[S]):
    """A method whose samples keep a random part of the trained steps each."""

    def kept_edges(self, ids: Sequence[SampleId], plan: StepPlan, iteration: int, seed: int) -> Tensor | None:
        return step_subsets(ids, plan.train, self.config.timestep_fraction, seed, iteration).flatten()
