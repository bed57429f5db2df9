"""Online DPO: best against worst of the samples that are drawn for a prompt.

    1. sample x0 with the policy, the untouched network, or one that follows the policy at intervals
    2. of each prompt the best and the worst sample, by the advantage rule without its clip; a prompt whose two differ
       too little is left out
    3. loss = -log sigmoid(-beta / 2 Delta), as Diffusion-DPO; one sigma and one eps for both

The margin is taken against the untouched network, with `lagged` against the network that drew the samples.

(yifan123/flow_grpo takes samples 0 and 1 as a pair where all rewards are equal, Flow-Factory one sample twice: neither
teaches anything.)

Source: arXiv 2311.12908; yifan123/flow_grpo:scripts/train_sd3_dpo.py (`lagged`);
X-GenGroup/Flow-Factory:trainers/dpo.py (`policy`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._matching import PullOptions, pulling
from flowrl.algorithms._options import CreditOptions, SolverOptions, TimesOptions
from flowrl.algorithms._pairs import SIZE, PairOptions, PreferenceOptions, pair_loss, require_anchor
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages, RuleConfig, aggregate
from flowrl.credit.selection import best_and_worst
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.models.weights.roles import Weights

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class RankConfig(RuleConfig):
    """An advantage rule that ranks the samples of a prompt, of which `best_of` ties the lowest; nothing is clipped."""

    name: Literal["group", "per_reward", "gdpo", "median", "batch"] = "group"
    best_of: ClassVar[None] = None
    clip: ClassVar[float | None] = 5.0  # no option: a class variable


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, PreferenceOptions, PullOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="logit_normal", count=4))
    advantages: RankConfig = field(default_factory=RankConfig)
    """Rule that ranks the samples of a prompt."""
    beta: float = 100.0
    """Inverse temperature of the margin, in units of a mean over dims."""
    least_gap: float = 0.0
    """Least difference of a pair's weighted rewards, exclusive; a pair below it is left out."""
    behaviour: Literal["policy", "reference", "lagged"] = "policy"
    """Role that draws the samples. `lagged` is the policy at the last refresh, and the margin's reference too."""
    ref_update: int = 40
    """Optimizer steps between refreshes of `lagged`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "ref_update")
        require_not_negative(vars(self), "least_gap")
        require_anchor(self.loss, self.kl, self.beta)


class OnlineDpo(SampleMethod[Config]):
    unit = "group"
    shared_times = "group"
    eps = "group"
    remembers = ("refreshes",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.behaviour = config.behaviour
        self.against = "lagged" if config.behaviour == "lagged" else "reference"
        self.compared = tuple(dict.fromkeys((*pulling(reference=config.kl), self.against)))
        self.refresh = ("lagged", config.ref_update) if self.against == "lagged" else None
        self.size = 0.0
        """Running mean of |Delta|."""
        if config.auto_beta is not None:
            self.remembers, self.feedback = ("refreshes", "size"), (SIZE,)

    def taken(self, group_size: int) -> int:
        return 2

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        # A clip ties outliers: the best two of a prompt may both be beyond it.
        credit = replace(self.rule(rewards, weights, prompts, clipped=False), bound=None)
        return best_against_worst(credit, aggregate(rewards, weights), self.config.least_gap)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs = self.config, self.outputs(batch, networks)
        return pair_loss(config, config.kl, outputs, self.against, preference=config, size=self.size)

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        self.size = self.config.size_after(self.size, means)


def best_against_worst(credit: Advantages, total: Tensor, least_gap: float) -> Advantages:
    """+1 for the best and -1 for the worst sample of each prompt by its credit, others not kept.

    Values of `credit` are [P, G, 1], not clipped; `total` are weighted rewards [P, G], NaN where masked. Pairs whose
    `total` differs by no more than `least_gap` are left out.
    """
    values = credit.values.squeeze(2)
    kept = best_and_worst(values, credit.kept, 2)
    # Among equals the rule takes different samples for best and worst; the one of the higher credit wins.
    best = values.masked_fill(~kept, -torch.inf).argmax(dim=1, keepdim=True)
    signs = torch.full_like(values, -1.0).scatter(1, best, 1.0)
    gap = torch.where(kept, signs * total, 0.0).sum(dim=1)
    kept = kept & ((kept.sum(dim=1) == 2) & (gap > least_gap))[:, None]
    return replace(credit, values=torch.where(kept, signs, 0.0)[:, :, None], kept=kept, margin=gap)


build = OnlineDpo
