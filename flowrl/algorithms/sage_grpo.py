"""SAGE-GRPO: steps weighed to equal gradient norms, and a trust region around a moving anchor and the old policy.

    1. roll out and credit as Flow-GRPO with the sampler `sage`; keep mean_old of every trained step
    2. N_i = |d mean / d velocity| / std of trained step i (with cps, whose log p lacks 1 / (2 std^2), times std);
       S_i = median(N) / N_i (the lower median)
    3. per edge KL_anchor = mean((mean - mean_anchor)^2) / (2 std^2), the anchor a copy of the policy that is
       renewed every n optimizer updates; KL_old = mean((mean - mean_old)^2) / (2 std^2)
       loss = S_i * max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + lambda * (KL_anchor + 0.1 KL_old)
    4. after each update lambda is multiplied by f where the trust term exceeds its target, else divided by f,
       within its bounds

S does not depend on the data. Do not combine it with GRPO-Guard's weights: both divide by the noise.

Source: arXiv 2603.21872; Tencent-Hunyuan/SAGE-GRPO. The rule of step 4 is ours, the official one is not published.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import RatioOptions, StepOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, Terms, clipped_terms, single_advantage, with_reference
from flowrl.core.errors import OptionError
from flowrl.core.tensors import sent
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import Process
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.models.weights.roles import Weights
from flowrl.samplers.base import Sampler, StepDistribution, step_std

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    anchor: Literal["moving", "fixed", "none"] = "moving"
    """`moving`: a copy of the policy, renewed; `fixed`: the untrained model; `none`: no such term."""
    every: int = 10
    """Optimizer updates between renewals of the moving anchor."""
    old: Literal["gaussian", "sampled", "none"] = "gaussian"
    """Term to the old policy: the Gaussian KL; `sampled`: mean(log p_old - log p) as in the official code, whose
    gradient on policy is 0 on average; `none`: no such term."""
    old_weight: float = 0.1
    """Weight of that term next to the anchor's."""
    coef: float = 1e-7
    """lambda at the start; 0 switches the trust region off."""
    adaptive: bool = True
    """Let lambda follow the target."""
    target: float = 1e-5
    """Target of KL_anchor + old_weight * KL_old."""
    factor: float = 1.5
    """Factor by which lambda moves after an update."""
    min_coef: float = 1e-7
    """Least lambda."""
    max_coef: float = 1e-5
    """Largest lambda."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1")
        if self.coef < 0 or self.old_weight < 0 or self.target < 0:
            raise ValueError("coef, old_weight and target must not be negative")
        if self.adaptive and self.coef > 0:
            if not self.factor > 1:
                raise ValueError(f"factor={self.factor} must be above 1")
            if not 0 < self.min_coef <= self.coef <= self.max_coef:
                raise OptionError(
                    f"coef={self.coef} must be between min_coef={self.min_coef} and max_coef={self.max_coef}, and "
                    "these above 0",
                    {"adaptive": False},
                )


@dataclass(frozen=True, kw_only=True)
class Config(StepOptions, ClipOptions, RatioOptions):
    default_sampler: ClassVar[str] = "sage"

    equalise: bool = True
    """Weigh steps by S_i; false weighs all alike."""
    trust: TrustConfig = field(default_factory=TrustConfig)
    """The trust region."""
    advantages: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(std="group"))


def gradient_norms(plan: StepPlan, sampler: Sampler, process: Process) -> Tensor:
    """N of the plan's trained steps, [K]: size of the gradient of log p by the velocity, but for one constant.

    Of a Gaussian by how much a unit change of the velocity moves the mean, in stds; the unscaled form lacks 1 / std^2.
    """
    step = plan.steps(torch.tensor(plan.train), process)
    gain, std = sampler.velocity_gain(step).abs(), step_std(sampler, process, step)
    return gain * std if sampler.log_prob_form == "unscaled" else gain / std


def equaliser(plan: StepPlan, sampler: Sampler, process: Process) -> Tensor:
    """S of every step of the plan, [len(plan)]; 1 where a step is not trained."""
    norms, scale = gradient_norms(plan, sampler, process), torch.ones(len(plan))
    scale[list(plan.train)] = norms.median() / norms
    return scale


class SageGrpo(EdgeMethod[Config]):
    remembers = ("trust_coef",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        trust = config.trust
        self.trust_coef = trust.coef
        self.anchor = {"moving": "anchor", "fixed": "reference", "none": ""}[trust.anchor] if trust.coef > 0 else ""
        self.old = trust.old if trust.coef > 0 and trust.old_weight > 0 else "none"
        self.roles = tuple(dict.fromkeys([*self.roles, *filter(None, [self.anchor])]))
        self.columns = ("mean_old",) if self.old == "gaussian" else ()
        self.feedback = ("policy/trust_kl",) if self.anchor or self.old != "none" else ()

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        log_ratio = self.log_ratio(policy, batch, sampler)
        weight = None
        if self.config.equalise:
            scale = equaliser(batch.plan, sampler, networks.policy.adapter.process)
            weight = sent(scale, log_ratio.device)[batch.step.index]
        terms = clipped_terms(log_ratio, [single_advantage(batch)], self.config.rule(sampler), weight)
        if self.feedback:
            terms = self._trusted(terms, policy, log_ratio, batch, networks)
        return with_reference(terms, policy, batch, networks, self.config.kl)

    def _trusted(
        self, terms: Terms, policy: StepDistribution, log_ratio: Tensor, batch: Microbatch, networks: Networks
    ) -> Terms:
        """The terms with the trust region added."""
        kl, metrics = torch.zeros_like(terms.loss), {}
        if self.anchor:
            to_anchor = policy.kl(networks.frozen(self.anchor, batch))
            kl, metrics["policy/kl_anchor"] = kl + to_anchor, to_anchor.detach().sum()
        if self.old != "none":
            to_old = -log_ratio
            if self.old == "gaussian":
                to_old = policy.kl(StepDistribution(batch.columns["mean_old"], policy.std))
            kl, metrics["policy/kl_old"] = kl + self.config.trust.old_weight * to_old, to_old.detach().sum()
        coef = self.trust_coef
        metrics |= {"policy/trust_kl": kl.detach().sum(), "policy/trust_coef": kl.new_full((), coef * len(batch))}
        return Terms(terms.loss + coef * kl, terms.metrics | metrics, terms.per_step)

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        trust = self.config.trust
        if self.feedback and trust.adaptive:
            moved = (
                self.trust_coef * trust.factor
                if means["policy/trust_kl"] > trust.target
                else self.trust_coef / trust.factor
            )
            self.trust_coef = min(max(moved, trust.min_coef), trust.max_coef)
        if self.anchor == "anchor" and updates % trust.every == 0:
            weights.snapshot("anchor")


build = SageGrpo
