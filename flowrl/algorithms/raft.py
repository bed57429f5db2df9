"""RAFT: fine-tuning on the best samples of each prompt.

    1. sample x0 with the network that was the policy at the last refresh (see rwr.py)
    2. keep the k best of a prompt; `ties` keeps all that equal the k-th
    3. loss = mean (v - v*)^2 over those kept + kl mean (v - v_ref)^2

The mean is over kept samples. (Released code averages zeros in, which scales the learning rate by k / G.)

Source: arXiv 2304.06767; yifan123/flow_grpo:scripts/train_sd3_sft.py (`ties`, k = 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.algorithms._credit import imitation
from flowrl.algorithms._matching import PullOptions, pulling
from flowrl.algorithms._options import SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.algorithms.rwr import ImitationOptions, weighted_loss
from flowrl.core.errors import OptionError
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(ImitationOptions, PullOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete"))
    best: int = 1
    """k."""
    ties: bool = False
    """Keep every sample as good as the k-th; else the first of them."""
    skip_equal: bool = True
    """Leave out prompts whose samples are all equal: none of them is best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best < 1:
            raise ValueError(f"best={self.best} must be at least 1")

    def check_group(self, group_size: int) -> None:
        """Refuse a group that has no more samples than are kept."""
        if self.best >= group_size:
            raise OptionError(
                f"best={self.best} keeps every sample of a group of {group_size}",
                {"best": max(group_size - 1, 1)} | ({"rollout.group_size": 2} if group_size < 2 else {}),
            )


class Raft(SampleMethod[Config]):
    remembers = ("refreshes",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(reference=config.kl)
        self.behaviour, self.refresh = config.drawing

    def taken(self, group_size: int) -> int:
        return group_size if self.config.ties else self.config.best

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        return weighted_loss(self.config.kl, self.outputs(batch, networks))

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        total, config = aggregate(rewards, weights), self.config
        credit = imitation(best_of(total, config.best, ties=config.ties), total)
        if not config.skip_equal:
            return credit
        low, high = total.nan_to_num(torch.inf).amin(dim=1), total.nan_to_num(-torch.inf).amax(dim=1)
        return Advantages(credit.values, credit.valid, ~(high > low), credit.kept & (high > low)[:, None])


def best_of(total: Tensor, count: int, *, ties: bool) -> Tensor:
    """1 for the `count` best of each row of total [P, G], else 0; NaN is never among them. [P, G] float64."""
    filled = total.nan_to_num(-torch.inf)
    order = filled.argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(filled).scatter(1, order[:, :count], 1.0)
    if ties:
        worst = filled.gather(1, order[:, count - 1 : count])
        chosen = (filled >= worst).to(filled)
    return torch.where(total.isfinite(), chosen, 0.0)


build = Raft
