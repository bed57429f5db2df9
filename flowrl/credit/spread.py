"""Credit by how unlike the others of its group a sample is, which a reward of weight 0 measures.

    distance   A_i <- A_i d_i / mean(d) where A_i > 0; d_i to the nearest other sample                  GARDO
    share      r_i <- r_i s_i where r_i > 0; s_i = 1 / samples that are alike, itself among them        DiverseGRPO

The features, the clusters of `share` and that rewards below 0 stay are ours (rewards/diversity.py with `near`); the
papers have DINOv3, and spectral clustering.

Source: arXiv 2512.24138, tinnerhrhe/GARDO; arXiv 2512.21514.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.strict import require_not_negative
from flowrl.credit.groups import masked_mean, over


@dataclass(frozen=True, kw_only=True)
class SpreadConfig:
    """How unlike the others of its group a sample is, in its credit."""

    by: Literal["distance", "share"]
    """`distance`: positive advantages in proportion to the distance from the nearest other (GARDO, with `std: none`);
    `share`: rewards above 0 divided by the number of samples that are alike (DiverseGRPO)."""
    reward: int
    """Number of the entry of `rewards`, from 0, that measures it: `diversity` with `near`, of weight 0, with
    `outputs: {diversity_distance: 1}` or `{diversity_share: 1}`."""

    def __post_init__(self) -> None:
        require_not_negative(vars(self), "reward")

    def shared(self, rewards: Tensor) -> Tensor:
        """Rewards [R, P, G] in shares, for `share`; one that could not be measured stays whole."""
        if self.by != "share":
            return rewards
        share = rewards[self.reward].nan_to_num(1.0)
        scaled = torch.where(rewards > 0, rewards * share, rewards)
        return torch.where(torch.arange(len(rewards)).view(-1, 1, 1) == self.reward, rewards, scaled)

    def scaled(self, values: Tensor, rewards: Tensor) -> Tensor:
        """Advantages [P, G, R'] by their distances, for `distance`; groups of equal ones, and unknown ones, stay."""
        if self.by != "distance" or self.reward >= len(rewards):  # gains of single steps, which have no image
            return values
        distance = rewards[self.reward].to(values)
        known = distance.isfinite()
        mean = masked_mean(distance, known)
        factor = torch.where(known & (mean > 0), over(distance, mean), 1.0)
        return torch.where(values > 0, values * factor[:, :, None], values)
