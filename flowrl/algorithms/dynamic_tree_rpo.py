"""Dynamic-TreeRPO: a tree over a sliding window of stochastic steps, noisier from layer to layer.

    1. one ODE path to the window; in it every node has `children` children; ODE paths from there
    2. the noise level of layer k of d is eta (1 + growth k / d), in draw and density alike
    3. A(leaf) = (r - mean of the prompt) / (std + eps); A(edge) = mean of A after it
    4. loss = max(-A ratio, -A clamp(ratio, 1 - low, 1 + high)), low = c (1 - s A), high = c (1 + s A), at least c / 10:
       s = `clip_sensitivity` gives good paths more room upwards and bad ones downwards
    5. LayerTuning (`tuning`): + coef w (v(x_t) - V_t)^2 at the window's nodes, V_t the velocity at step t on the path
       to the tree's best leaf, when it was drawn; w = A(best leaf) / the bound on A where its reward is above the
       mean of earlier iterations, else 0

No code was released, and the paper is known through reviews: the forms of 2 (k from 0), 4 and 5, every default but the
tree's size, and that 3 has no comparison by depth, are reconstructions. 4 and 5 are off.

Source: arXiv 2509.23352.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.algorithms._credit import leaf_advantages
from flowrl.algorithms._options import PathOptions, RatioOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_terms, single_advantage, with_reference
from flowrl.core.errors import OptionError
from flowrl.core.types import Edges
from flowrl.credit.advantages import Advantages, RuleConfig
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.tree_shapes import Branching, splits
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import Bounds
from flowrl.rollout.policy import by_edge
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler

LEVEL = "tested"
_LEAST = 0.1
"""Share of the clip range that is always left."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Regression to the velocities of the best path (LayerTuning)."""

    coef: float = 0.1
    """Weight of the mean square over latent dims."""
    decay: float = 0.9
    """Decay of the running mean of rewards, which the best leaf must exceed; in [0, 1)."""

    def __post_init__(self) -> None:
        if not (self.coef > 0 and 0 <= self.decay < 1):
            raise ValueError(f"tuning: coef={self.coef} must be positive, decay={self.decay} in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Config(PathOptions, ClipOptions, RatioOptions):
    children: int = 2
    """Children of each node in the window; a tree has children^size leaves."""
    window: MixWindow = field(default_factory=MixWindow)
    """Window of the tree; its `size` is the depth d, at most all steps but the last two
    (`flowrl/diffusion/windows.py`)."""
    growth: float = 0.5
    """Rise of the noise level from the first layer to the last, times d / (d - 1); 0: none. The last layer must be
    within the sampler's bound."""
    clip_sensitivity: float = 0.0
    """s: how the clip range depends on the advantage; 0: not at all."""
    tuning: TuningConfig | None = None
    """Regression to the velocities of the best path (LayerTuning); null: none."""
    advantages: RuleConfig = field(default_factory=lambda: RuleConfig(std="group"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.children < 2 or self.growth < 0 or self.clip_sensitivity < 0:
            raise ValueError(
                f"children={self.children} must be at least 2, growth={self.growth} and "
                f"clip_sensitivity={self.clip_sensitivity} not negative"
            )
        if self.tuning is not None and self.advantages.clip is None:
            raise OptionError(
                "advantages.clip=null: the weight of tuning is the advantage over its bound", {"advantages.clip": 5.0}
            )

    def check(self, sampler: Sampler, num_steps: int) -> None:
        super().check(sampler, num_steps)
        depth, level, bound = self.depth(num_steps), sampler.default_noise_level(), sampler.largest
        share = (depth - 1) / depth
        if level * (1 + self.growth * share) > bound:
            fits = (bound / level - 1) / share, bound / (1 + self.growth * share)
            growth, least = (math.floor(1e4 * value) / 1e4 for value in fits)  # rounded down, or they would not fit
            raise OptionError(
                f"growth={self.growth}: the last of {depth} layers has noise level "
                f"{level * (1 + self.growth * share):.4g}, above the sampler's largest, {bound:g}",
                [{"growth": growth}, {f"rollout.sampler.{sampler.noise_key}": least}],
            )

    def depth(self, num_steps: int) -> int:
        """d: layers of a tree, fewer on a short grid."""
        return min(self.window.size, num_steps - 2)

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        size, steps = self.depth(num_steps), mix_window(self.window, num_steps, seed, iteration)
        # At the end of the grid the window is shorter; the tree keeps its size and stays at its last whole place.
        start = min(steps[0], num_steps - 2 - size)
        steps = tuple(range(start, start + size))
        return splits(num_steps, dict.fromkeys(steps, self.children), steps)


class DynamicTreeRpo(EdgeMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.tuning is not None:
            self.columns, self.remembers = ("velocity_old",), ("mean",)
        self.mean: float | None = None
        """Running mean of rewards, before this iteration."""
        self.worth: Tensor | None = None
        """[P, G] weight of the tuning for each sample's tree."""

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        plan = super().plan(schedule, sampler, iteration, seed)
        start, depth = plan.train[0], len(plan.train)
        layer = [1 + self.config.growth * (k - start) / depth for k in range(len(plan))]
        return replace(plan, noise_level=tuple(a * b for a, b in zip(plan.noise_level, layer, strict=True)))

    def on_tree(self, credit: Advantages, leaves: LeafRewards, iteration: int) -> Advantages:
        if self.config.tuning is not None:
            self._weigh(credit, leaves.totals(credit.valid), leaves.tree.leaves)
        return super().on_tree(credit, leaves, iteration)

    def _weigh(self, credit: Advantages, total: Tensor, leaves: int) -> None:
        """Set the weight of each tree's best leaf, and the running mean after this iteration."""
        tuning, clip = self.config.tuning, self.config.advantages.clip
        assert tuning is not None
        assert clip is not None
        if self.mean is None:
            self.worth = torch.zeros_like(total)
        else:
            best = torch.where(total > self.mean, leaf_advantages(credit), 0.0).nan_to_num()
            trees = best.unflatten(1, (-1, leaves)).amax(dim=2).clamp(min=0) / clip
            self.worth = trees.repeat_interleave(leaves, dim=1)
        now = float(total.nanmean())
        if now == now:  # NaN where no sample was scored
            self.mean = now if self.mean is None else tuning.decay * self.mean + (1 - tuning.decay) * now

    def annotated(self, rollout: Rollout, credit: Advantages) -> Edges:
        """Edges with the target of their tuning, `target` [E, ...], and its weight, `worth` [E]."""
        edges, tree = rollout.edges, rollout.plan.tree
        if self.config.tuning is None:
            return edges
        assert tree is not None
        assert self.worth is not None
        number, leaves = rollout.identity, tree.leaves
        leaf = leaf_advantages(credit).flatten()[number].nan_to_num(nan=-torch.inf).unflatten(0, (-1, leaves))
        best = leaf.argmax(dim=1)  # of each of this rank's trees
        row = torch.full((len(number), len(rollout.plan)), -1)
        row[edges.sample, edges.step] = torch.arange(len(edges))
        every = torch.stack([tree.child(k) for k in range(len(rollout.plan))])  # [K, L]
        place = edges.sample // leaves
        taken = row[place * leaves + every[edges.step, best[place]], edges.step]
        extra = {"target": edges.columns["velocity_old"][taken], "worth": self.worth.flatten()[number][edges.sample]}
        return replace(edges, columns={**edges.columns, **extra})

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        config, policy = self.config, networks.policy
        prediction = policy.predict(batch.latents, batch.start, batch.cond)
        transition = by_edge(policy.distribution(prediction, batch.latents, batch.start), batch)
        rule, advantage = config.rule(policy.sampler), single_advantage(batch)
        low, high = rule.bounds
        lean = config.clip_sensitivity * advantage
        bounds = Bounds(low * (1 - lean).clamp(min=_LEAST), high * (1 + lean).clamp(min=_LEAST))
        log_ratio = self.log_ratio(transition, batch, policy.sampler)
        terms = clipped_terms(log_ratio, [advantage], replace(rule, bounds=bounds))
        if config.tuning is not None:
            error = (batch.by_edge(prediction.velocity) - batch.columns["target"]).square().flatten(1).mean(dim=1)
            tuned = config.tuning.coef * batch.columns["worth"].to(error) * error
            metrics = {**terms.metrics, "policy/tuning": tuned.detach().sum()}
            terms = replace(terms, loss=terms.loss + tuned, metrics=metrics)
        return with_reference(terms, transition, batch, networks, config.kl)


build = DynamicTreeRpo
