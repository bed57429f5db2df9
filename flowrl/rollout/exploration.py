"""Two-stage exploration: a cheap preview of many candidates, the chosen ones drawn again in full and trained on.

    1. N candidates per prompt, with fewer steps and / or a cheaper copy of the network; score them
    2. choose G of them by those scores: the best and the worst, the most varied, or at random
    3. draw the chosen ones again, from the same initial noise, with all steps and the network itself; score again
    4. advantages from the second scores of the G alone

Samples and scores of the preview are never trained on: the chosen extremes fall back when drawn again. A preview pays
only if it ranks candidates as the full draw does, which `fidelity` measures.

Source: arXiv 2604.06916; NVlabs/Sana:train_scripts/sol_rl.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.core.rng import permutation
from flowrl.credit.selection import SelectConfig, select
from flowrl.rollout.options import ExplorationConfig, SelectRule


def require_pool(config: ExplorationConfig, group_size: int) -> None:
    """Raise ValueError for a pool smaller than a group, or a rule that cannot choose one."""
    if config.pool < group_size:
        raise ValueError(f"pool={config.pool} is less than rollout.group_size={group_size}")
    if config.select == "best_worst":
        SelectConfig(keep=group_size)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How well a preview ranks candidates; means over prompts."""

    kendall: float
    spearman: float
    hit_rate: float
    """Share of the true top and bottom halves of a group that are among the chosen top and bottom."""
    top_rank: float
    """Mean true rank, from 1, of the k candidates chosen as best; (k + 1) / 2 is perfect."""
    bottom_rank: float
    """The same from the worst, counted from the bottom."""
    prompts: int
    """Prompts with different scores in both draws; the others do not count."""

    def __str__(self) -> str:
        if not self.prompts:
            return "no prompt of the check had two different scores, so it has no result"
        return (
            f"the first look finds {self.hit_rate:.0%} of the best and worst (Kendall {self.kendall:.2f}, Spearman "
            f"{self.spearman:.2f}; mean true rank of its best {self.top_rank:.1f}, of its worst {self.bottom_rank:.1f} "
            f"from below; {self.prompts} prompts)"
        )


def choose(scores: Tensor, keep: int, rule: SelectRule, key: tuple[int, ...]) -> Tensor:
    """The candidates of every prompt that are drawn in full, in rising order. G numbers each, [P, G] int64. `scores`
    are those of the preview, [P, N], NaN for a failure, chosen only if too few others are left; `keep` is G, `rule`
    that of `ExplorationConfig.select`; the random one has the key (seed, iteration).
    """
    seed, *rest = key
    rows = []
    for slot, row in enumerate(scores):
        valid = row.isfinite()
        if rule == "random":
            chosen = permutation(len(row), seed, "exploration", *rest, slot)[:keep]
        else:
            kept = select(row.nan_to_num(0.0)[None], valid[None], SelectConfig(name=rule, keep=keep))[0]
            chosen = kept.nonzero().squeeze(1)[:keep]
            if len(chosen) < keep:
                chosen = torch.cat([chosen, (~valid).nonzero().squeeze(1)[: keep - len(chosen)]])
        rows.append(chosen.sort().values)
    return torch.stack(rows)


def fidelity(first: Tensor, second: Tensor, keep: int) -> Fidelity:
    """Compare the scores of a preview with those of the same candidates drawn in full, both [P, N].

    Ties of the full draw count as hits: among equal candidates none is the better choice.
    """
    from scipy.stats import kendalltau, spearmanr

    half, rows = max(keep // 2, 1), []
    for look, truth in zip(first.double(), second.double(), strict=True):
        both = look.isfinite() & truth.isfinite()
        look, truth = look[both], truth[both]
        if len(look) < 2 * half or look.unique().numel() < 2 or truth.unique().numel() < 2:
            continue
        order = look.argsort(stable=True)
        low, high = order[:half], order[-half:]
        ranked = truth.sort().values
        hits = (truth[high] >= ranked[-half]).double().mean() + (truth[low] <= ranked[half - 1]).double().mean()
        # Mean rank among equals.
        above = (truth[None] > truth[high][:, None]).sum(1) + ((truth[None] == truth[high][:, None]).sum(1) + 1) / 2
        below = (truth[None] < truth[low][:, None]).sum(1) + ((truth[None] == truth[low][:, None]).sum(1) + 1) / 2
        rows.append(
            (
                float(np.asarray(kendalltau(look, truth))[0]),
                float(np.asarray(spearmanr(look, truth))[0]),
                float(hits) / 2,
                float(above.mean()),
                float(below.mean()),
            )
        )
    if not rows:
        nan = float("nan")
        return Fidelity(nan, nan, nan, nan, nan, 0)
    means = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    return Fidelity(*means, prompts=len(rows))
