"""TempFlow-GRPO: children leave one ODE path at each of its steps, so a reward credits a single stochastic step.

    1. one ODE path for a tree; at every step i but the last, k children leave it by the SDE and go on by the ODE
    2. A(i, j) = (r(i, j) - mean) / (std + 1e-4) over the children of step i, of all trees of the prompt
    3. loss = w_i max(-A ratio, -A clamp(ratio, 1 - c, 1 + c)) + kl.coef KL, w_i = std_i over its mean (`noise_weight`)
       over all steps that may branch, drawn in this iteration or not: noisy steps move the image more

The weight is of a Gaussian log-prob, whose gradient falls as 1 / std_i. CPS leaves 1 / (2 std_i^2) out, so that its
gradient grows as std_i: there w_i = (1 / std_i) over its mean, which weighs the steps alike.

A tree has k leaves for each step that branches, and costs (T - 1) + k T (T - 1) / 2 evaluations where all do.

Source: arXiv 2508.04324; Shredded-Pork/TempFlow-GRPO.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import KLConfig, RatioOptions
from flowrl.algorithms._tree import NodeOptions, OffshootOptions, by_nodes
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_terms, single_advantage, with_reference
from flowrl.core.errors import OptionError
from flowrl.core.tensors import sent
from flowrl.credit.advantages import Advantages
from flowrl.credit.tree_credit import LeafRewards, Scale, depthwise, fuse
from flowrl.diffusion.tree_shapes import Branching
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.samplers.base import Sampler, step_std

LEVEL = "tested"
_RELEASED = 2.25
"""Factor on the std of a step in the released code for SD3."""


@dataclass(frozen=True, kw_only=True)
class Config(OffshootOptions, NodeOptions, ClipOptions, RatioOptions):
    noise_weight: Literal["normalised", "released", "none"] = "normalised"
    """w_i: std_i over its mean over all steps that may branch (CPS: 1 / std_i over its own); 2.25 std_i; or 1."""
    scale: Scale = field(default_factory=lambda: Scale(pool="prompt", eps=1e-4, ddof=0))
    """Comparison of the nodes of a step (`flowrl/credit/tree_credit.py`)."""
    kl: KLConfig = field(default_factory=lambda: KLConfig(divisor="variance"))

    def check(self, sampler: Sampler, num_steps: int) -> None:
        if self.noise_weight == "released" and sampler.log_prob_form == "unscaled":
            raise OptionError(
                "noise_weight=released is for Gaussian log-probs, and the sampler's form is 'unscaled'",
                {"noise_weight": "normalised"},
            )
        super().check(sampler, num_steps)


class TempFlowGrpo(EdgeMethod[Config]):
    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        return by_nodes(credit, leaves, self.config.advantages, self.compare)

    def compare(self, total: Tensor, tree: Branching) -> Tensor:
        """Advantages of the edges [P, G, K] from the rewards of the leaves [P, G]."""
        return depthwise(fuse(total, tree), total, tree, self.config.scale)

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        policy, sampler = networks.transition(batch), networks.policy.sampler
        weight = self.weight(policy.std, batch, networks)
        log_ratio = self.log_ratio(policy, batch, sampler)
        terms = clipped_terms(log_ratio, [single_advantage(batch)], self.config.rule(sampler), weight)
        return with_reference(terms, policy, batch, networks, self.config.kl)

    def weight(self, std: Tensor, batch: Microbatch, networks: Networks) -> Tensor | None:
        """w of each edge [E], from the std [E] of its step."""
        if self.config.noise_weight == "none":
            return None
        if self.config.noise_weight == "released":
            return _RELEASED * std
        plan, process = batch.plan, networks.policy.adapter.process
        every = torch.tensor(sorted(set(self.config.every_step(len(plan)))))
        step = plan.steps(every, process, ends=every + self.config.merge)
        step = replace(step, noise_level=torch.full_like(step.noise_level, plan.noise_level[plan.train[0]]))
        of_all = step_std(networks.policy.sampler, process, step)
        if networks.policy.sampler.log_prob_form == "unscaled":
            std, of_all = 1 / std, 1 / of_all
        return std / sent(of_all.mean(), std.device)


build = TempFlowGrpo
