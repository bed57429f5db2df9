"""SePPO: the policy against a random earlier self, with preferred images of the data and no losers.

    1. every `every` optimizer steps the policy is kept as a checkpoint, the newest `keep` of them; a round is the
       time between two of them
    2. a round has one of the kept checkpoints, drawn uniformly, as its reference (the newest is the policy itself until
       the round's first update); it also draws x_r for each prompt
    3. slot (c, x_w of the data, x_r); one sigma and one eps for both
    4. s = sign(l_ref(x_w) - l(x_w)), over all times of the slot, 0 counting as +1: +1, the policy fits the image of
       the data better than its earlier self, and x_r loses; -1, it does not, and x_r wins too
    5. loss = -log sigmoid(-beta / 2 [(l - l_ref)(x_w) - s (l - l_ref)(x_r)])

No training code is released; the paper's -beta T omega is in beta, with Diffusion-DPO's 1/2. Whether its two images
share their noise is not published; here they do.

Source: arXiv 2410.05255 (v2: Self-Sampling Preference Optimization).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.algorithms._matching import PullOptions, pulling
from flowrl.algorithms._options import TimesOptions
from flowrl.algorithms._pairs import PairOptions, agreement, pair_loss
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.errors import OptionError
from flowrl.core.rng import stream
from flowrl.core.strict import require_positive
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solvers import SOLVERS, SolverName
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.losses.matching import group_mean
from flowrl.losses.preference import Anchor, anchor_sign
from flowrl.models.weights.roles import Weights
from flowrl.rollout.outputs import Outputs
from flowrl.samplers.base import Sampler

LEVEL = "experimental"
EARLIER = "earlier"


@dataclass(frozen=True, kw_only=True)
class Config(PairOptions, PullOptions, TimesOptions):
    default_terms: ClassVar[int] = 4  # the criterion averages over them: one draw has a noisy sign

    anchor: Anchor = "sign"
    """Fate of x_r where the earlier self fits the data better: `sign`: it wins too, `indicator`: it is left out,
    `loser`: it loses all the same, without any criterion."""
    every: int = 30
    """Optimizer steps between checkpoints: a round."""
    keep: int = 7
    """Newest checkpoints kept, the initial network being the first."""
    solver: SolverName = "dpm2_midpoint"
    """Solver of x_r."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "every", "keep")
        if SOLVERS[self.solver].stochastic:
            raise OptionError(f"solver={self.solver} adds noise, and the earlier self draws without", {"solver": "ode"})


class Seppo(SampleMethod[Config]):
    members = ("chosen", "drawn")
    prefers = True
    unit = "prompt"
    shared_times = "group"
    eps = "group"
    remembers = ("made", "last", "behaviour")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.made, self.last = 1, 0
        """Checkpoints made so far, the initial network among them, and the optimizer step of the newest."""
        self.behaviour = _name(0)

    @property
    def compared(self) -> tuple[str, ...]:
        """The round's reference, which changes, and the untouched network where the loss pulls to it."""
        return (*pulling(reference=self.config.kl), self.behaviour)

    @property
    def roles(self) -> tuple[str, ...]:
        """The checkpoints, and the untouched network for held-out pairs: an earlier self may be the policy as it is."""
        return ("reference", *(_name(place) for place in range(self.config.keep)))

    def plan(self, schedule: Schedule, sampler: Sampler, iteration: int, seed: int) -> StepPlan:
        self.behaviour = _name(drawn_checkpoint(self.made, self.config.keep, seed) % self.config.keep)
        return super().plan(schedule, sampler, iteration, seed)

    def outputs(self, batch: NoisedBatch, networks: Networks, roles: Sequence[str] | None = None) -> Outputs:
        """The round's reference has one name, whichever checkpoint it is."""
        outputs = super().outputs(batch, networks, roles)
        if roles is None:
            outputs.by_role[EARLIER] = outputs.by_role.pop(self.behaviour)
        return outputs

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs = self.outputs(batch, networks)
        own = self.own_sign(outputs)
        sign = torch.where(batch.advantage > 0, 1.0, -own)
        return pair_loss(self.config, self.config.kl, outputs, EARLIER, sign, {"policy/anchor_sign": own})

    def own_sign(self, outputs: Outputs) -> Tensor:
        """s of each row's slot, [M] float64."""
        batch, space = outputs.batch, self.config.space
        better = outputs.error(EARLIER, space) - outputs.error("policy", space).detach()
        slot = batch.sample // len(self.members)
        # Both samples count in the mean's denominator, which does not change its sign.
        return anchor_sign(group_mean((batch.advantage > 0) * better, slot), self.config.anchor)

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return agreement(self, batch, networks)

    def after_iteration(self, updates: int, weights: Weights) -> None:
        if updates - self.last >= self.config.every:
            weights.follow(_name(self.made % self.config.keep), 0.0)
            self.made, self.last = self.made + 1, updates


def _name(place: int) -> str:
    return f"checkpoint_{place}"


def drawn_checkpoint(made: int, keep: int, seed: int) -> int:
    """Number of the checkpoint that is the reference of the round, of `made`: uniform over the newest `keep`.

    >>> drawn_checkpoint(1, 7, 0)
    0
    """
    first = max(0, made - keep)
    return first + int(stream(seed, "earlier_self", made).integers(made - first))


build = Seppo
