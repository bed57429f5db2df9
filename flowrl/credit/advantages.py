"""Advantage rules: pure functions on rewards [R, P, G], in float64.

Order everywhere: aggregate, centre, scale, normalise over the batch, clip, select. NaN marks a masked
sample: it enters no statistic, gets advantage 0 and is never selected. A group that is compared with equal
rewards only is dead: its advantages are exactly 0 under every rule.

    rule        advantage                                                                    from
    group       sum of weighted raw rewards, then (r - mean) / (std + eps)                   Flow-GRPO, Dr. GRPO
    per_reward  each reward normalised, then their sum with weights rescaled to 1            MixGRPO
    gdpo        each reward normalised, their weighted sum normalised over the batch         GDPO
    separate    each reward normalised and clipped, one advantage per reward                 DanceGRPO
    median      sum of weighted raw rewards, then (r - median) / (median deviation + eps)    MC-GRPO
    batch       sum of weighted raw rewards, then (r - mean) / (std + eps) over the batch    DDPO
    best_of     what a sample adds to the best of k, by the sum of weighted raw rewards      max@k, PKPO
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import OptionError, Remedy
from flowrl.credit.best_of import BestOfConfig, added_to_best
from flowrl.credit.groups import aggregate, dead_groups, live, masked_mean, over
from flowrl.credit.history import HistoryConfig, normalise_against
from flowrl.credit.selection import SelectConfig, select

Std = Literal["global", "group", "none"]


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """An advantage rule; a method with one loss per reward adds `separate` to the names."""

    name: Literal["group", "per_reward", "gdpo", "median", "batch", "best_of"] = "group"
    """The rule; see `flowrl/credit/advantages.py`."""
    std: Std = "global"
    """Divide by the std of all samples of the iteration, of the prompt's group, or not at all (Dr. GRPO).

    `per_reward`, `gdpo` (`group` only) and `separate` do so reward by reward; `median` has its own scale; `batch` has
    the std of what it compares with, or none; `best_of` the global one, or none.
    """
    eps: float = 1e-4
    """Added to the std or the median deviation."""
    clip: float | None = 5.0
    """Bound on the absolute advantage; null for none."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the std: 0 divides by n (Flow-GRPO), 1 by n - 1 (DanceGRPO, MixGRPO, GDPO)."""
    trimmed_ratio: float = 0.0
    """Share of a group's samples, the lowest, that mean and std leave out."""
    min_deviation: float = 0.1
    """Least deviation of the rule `median`, as a fraction of the group's std."""
    history: HistoryConfig | None = None
    """Mean and std of the rule `batch` from the prompt's own rewards, of this and earlier iterations, once there are
    enough; null: always from the batch."""
    best_of: BestOfConfig | None = None
    """Options of the rule `best_of`; null: k = 4 of it."""

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps} must not be negative")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be positive, or null for none")
        if not 0 <= self.trimmed_ratio < 1:
            raise ValueError(f"trimmed_ratio={self.trimmed_ratio} must be in [0, 1)")
        if self.name == "gdpo" and self.std != "group":
            raise OptionError(
                f"std={self.std!r}: gdpo normalises every reward within its group", remedies=[Remedy({"std": "group"})]
            )
        if not 0 < self.min_deviation <= 1:
            raise ValueError(f"min_deviation={self.min_deviation} must be in (0, 1]: a part of the group's std")
        if self.name == "median" and self.clip is None:
            raise OptionError("clip=null: its deviation can be next to 0", remedies=[Remedy({"clip": 5.0})])
        if self.name in ("median", "batch", "best_of") and self.trimmed_ratio:
            words = f"trimmed_ratio={self.trimmed_ratio}: the rule {self.name!r} leaves no reward out"
            raise OptionError(words, remedies=[Remedy({"trimmed_ratio": 0.0})])
        if self.name == "batch" and self.std == "group":
            raise OptionError("std='group': of a batch there is one std", remedies=[Remedy({"std": "global"})])
        if self.name == "best_of" and self.std == "group":
            words = "std='group': a group's best of k rises with its spread, which this would divide out"
            raise OptionError(words, remedies=[Remedy({"std": "global"}), Remedy({"std": "none"})])
        if self.name != "best_of" and self.best_of is not None:
            words = f"best_of: the rule is {self.name!r}"
            best = Remedy({"name": "best_of"} | ({"std": "global"} if self.std == "group" else {}))
            raise OptionError(words, remedies=[best, Remedy({"best_of": None})])
        if self.name != "batch" and self.history is not None:
            batch = Remedy({"name": "batch"} | ({"std": "global"} if self.std == "group" else {}))
            words = f"history: the rule {self.name!r} compares within a group"
            raise OptionError(words, remedies=[batch, Remedy({"history": None})])

    def rule(self) -> RuleConfig:
        """The rule that samples are compared by."""
        return self

    def selection(self) -> SelectConfig | None:
        """Samples of a prompt that are updated on; None: all."""
        return None

    def check_group(self, group_size: int) -> None:
        """Refuse what a group of this size cannot give; the configuration alone does not know the size."""
        if group_size < 2 and self.name != "batch":
            std = {"advantages.std": "global"} if self.std == "group" else {}
            raise OptionError(
                f"advantages.name={self.name} compares the samples of a prompt, and rollout.group_size={group_size}",
                remedies=[Remedy({"rollout.group_size": 2}), Remedy({"advantages.name": "batch"} | std)],
            )
        best = self.best_of or BestOfConfig()
        k = max(best.k, best.end or 1) if self.name == "best_of" else 1
        if k > group_size:
            raise OptionError(
                f"advantages.best_of: of {group_size} samples there is no best of {k}",
                remedies=[Remedy({"advantages.best_of": {"k": group_size}}), Remedy({"rollout.group_size": k})],
            )
        selection = self.selection()
        if selection is not None:
            selection.check_group(group_size)
        if self.trimmed_ratio and group_size - int(group_size * self.trimmed_ratio) < 2:
            raise ValueError(
                f"advantages.trimmed_ratio={self.trimmed_ratio} leaves fewer than 2 of {group_size} samples for mean "
                f"and std; it must stay below {1 - 1 / group_size:.4g}"
            )


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(RuleConfig):
    """An advantage rule, and the samples that are updated on."""

    select: SelectConfig | None = None
    """Update on some samples of a prompt only; null: on all."""

    def selection(self) -> SelectConfig | None:
        return self.select


@dataclass(frozen=True, slots=True)
class Advantages:
    """Credit of every sample of an iteration."""

    values: Tensor
    """[P, G, R'] float32, 0 where masked or dead. R' is 1; the rule `separate` has one column per reward whose
    weight is not 0, in their order, with the weight inside: the loss is the plain sum over columns."""
    valid: Tensor
    """[P, G] bool, False where a reward that counts has failed."""
    dead: Tensor
    """[P] bool: the group is compared with equal rewards only, in each reward that counts."""
    kept: Tensor
    """[P, G] bool, samples that take part in the update: all valid ones of live groups, less those that a rule or a
    selection leaves out, whose `values` stay."""
    bound: Tensor | None = None
    """[R'] float32, the bound of each column, where the clip is still to follow (`unclipped`); else None."""
    steps: Tensor | None = None
    """[P, G, K] float32, credit of every step of a sample's path in a tree, instead of `values`; NaN: none."""
    pruned: Tensor | None = None
    """[P, G, K] bool with `steps`: steps that are not trained, instead of `kept`."""
    margin: Tensor | None = None
    """[P] float, rewards of the better less those of the worse sample of a pair, where the loss is on pairs."""


def advantages(
    rewards: Tensor, weights: Tensor, config: RuleConfig, *, past: Sequence[Tensor | None] | None = None
) -> Advantages:
    """Advantages of all samples of an iteration by the configured rule.

    Args:
        rewards: training values [R, P, G]; NaN marks a failure.
        weights: [R]; a reward of weight 0 is only logged.
        config: the rule.
        past: of the rule `batch`: the rewards [n] that each prompt is compared with; None: those of the iteration.

    Raises ValueError: rewards that do not fit the configuration, naming the key.
    """
    return _clipped(_compared(rewards, weights, config, past), config)


def unclipped(
    rewards: Tensor, weights: Tensor, config: RuleConfig, *, past: Sequence[Tensor | None] | None = None
) -> Advantages:
    """The same credit for a method that multiplies before it clips: values without the clip, and `bound`.

    The samples that take part are chosen by the clipped values, as without the multiplication.
    """
    result = _compared(rewards, weights, config, past)
    bound = None
    if config.clip is not None:
        bound = torch.full(result.values.shape[2:], config.clip)
        bound = bound if result.weights is None else bound * result.weights.abs()
    return replace(_clipped(result, config), values=result.within(None), bound=bound)


def _compared(rewards: Tensor, weights: Tensor, config: RuleConfig, past: Sequence[Tensor | None] | None) -> Compared:
    """Rewards compared by the rule, before the clip; see `advantages`."""
    if rewards.ndim != 3:
        raise ValueError(f"rewards must be [R, P, G], got {tuple(rewards.shape)}")
    config.check_group(rewards.shape[2])
    # Only `batch` has a past, and without one it compares like the others.
    return RULES[config.name](rewards, weights, config) if past is None else batch(rewards, weights, config, past)


def _clipped(compared: Compared, config: RuleConfig) -> Advantages:
    """The credit within the configured clip, of the samples that are selected."""
    values, kept = compared.within(config.clip), compared.valid & ~compared.dead[:, None]
    if compared.left_out is not None:
        kept = kept & ~compared.left_out
    selection = config.selection()
    if selection is not None:
        # Columns hold their reward's weight, so their sum ranks a sample as its loss does.
        kept = select(values.sum(dim=2), kept, selection)
    return Advantages(values=values, valid=compared.valid, dead=compared.dead, kept=kept)


# ---- scale


def _normalised(total: Tensor, config: RuleConfig) -> tuple[Tensor, Tensor]:
    """(total - mean of its group) / (std + eps), [P, G] float64, 0 where `total` is not finite; and dead groups.

    The statistics leave out the int(n * trimmed_ratio) lowest rewards of a group of n; where the others are all equal,
    only `eps` and the clip bound the lowest.
    """
    total = total.double()
    valid = total.isfinite()
    filled = torch.where(valid, total, 0.0)
    counted = valid
    if config.trimmed_ratio:
        order = torch.where(valid, filled, torch.inf).argsort(dim=1, stable=True)
        dropped = (valid.sum(dim=1, keepdim=True).double() * config.trimmed_ratio).floor()
        counted = valid & (order.argsort(dim=1) >= dropped)
    centred = torch.where(valid, filled - masked_mean(filled, counted), 0.0)
    if config.std == "group":
        scale = masked_mean(centred.square(), counted, config.ddof).sqrt() + config.eps
    else:
        scale = _pooled(filled, counted, config)
    dead = dead_groups(filled, valid)
    # Exactly 0, not the rounding error of the mean, which a small std would magnify.
    return torch.where(dead[:, None], 0.0, over(centred, scale)), dead


def _pooled(filled: Tensor, counted: Tensor, config: RuleConfig) -> Tensor:
    """The std of all samples of the iteration, or 1, [1, 1]."""
    if config.std == "none":
        return torch.ones(1, 1, dtype=torch.float64)
    if config.std != "global":
        raise ValueError(f"std={config.std!r}; use 'global', 'group' or 'none'")
    pooled, mask = filled.reshape(1, -1), counted.reshape(1, -1)
    squares = (pooled - masked_mean(pooled, mask)).square()
    return masked_mean(squares, mask, config.ddof).sqrt() + config.eps


def _each(rewards: Tensor, config: RuleConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Every reward normalised by itself: [P, G, R] float64; samples valid in all of them; groups dead in all."""
    valid = rewards.isfinite().all(dim=0)
    # A sample that one reward could not score has no advantage, so the others' statistics go without it too.
    parts = [_normalised(torch.where(valid, r, torch.nan), config) for r in rewards]
    values, dead = (torch.stack(part, dim=-1) for part in zip(*parts, strict=True))
    return values, valid, dead.all(dim=-1)


# ---- the rules: rewards [R, P, G] and weights [R] to what samples are credited with, before the clip


@dataclass(frozen=True, slots=True)
class Compared:
    """Rewards compared by a rule."""

    values: Tensor
    """[P, G, R'] float64, not clipped."""
    valid: Tensor
    """[P, G] bool."""
    dead: Tensor
    """[P] bool."""
    left_out: Tensor | None = None
    """[P, G] bool: samples that the rule does not train; None: it trains all."""
    weights: Tensor | None = None
    """[R'] float32: factors of the columns, which follow the clip; None: 1."""

    def within(self, clip: float | None) -> Tensor:
        """The values within +-clip (None: as they are), rounded to float32, times the weights."""
        values = self.values if clip is None else self.values.clamp(-clip, clip)
        return values.float() if self.weights is None else values.float() * self.weights


def group(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """(sum of weighted rewards - mean of its group) / (std + eps).

    Source: arXiv 2505.05470; yifan123/flow_grpo:flow_grpo/stat_tracking.py. arXiv 2503.20783 for no std.

    >>> table = torch.tensor([[[0.0, 1.0], [1.0, 1.0]]])
    >>> group(table, torch.ones(1), RuleConfig(std="group", eps=0.0)).values.squeeze(2).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    total = aggregate(rewards, weights)
    values, dead = _normalised(total, config)
    return Compared(values[:, :, None], total.isfinite(), dead)


def per_reward(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """Each reward normalised by itself, then their sum with weights rescaled to an absolute sum of 1.

    Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO, `advantage_aggr`.
    """
    rewards, weights = live(rewards, weights)
    values, valid, dead = _each(rewards, config)
    return Compared((values * (weights / weights.abs().sum())).sum(dim=2, keepdim=True), valid, dead)


def gdpo(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """Each reward normalised within its group; the weighted sum of these, normalised over the whole batch.

    Weights act on normalised advantages, so a reward's scale is irrelevant. One reward alone is plain GRPO.

    Source: arXiv 2601.05242; NVlabs/GDPO (there ddof 1).
    """
    rewards, weights = live(rewards, weights)
    if len(rewards) == 1:
        return group(rewards, weights, config)
    values, valid, dead = _each(rewards, config)
    pooled, mask = (values * weights).sum(dim=2).reshape(1, -1), valid.reshape(1, -1)
    centred = pooled - masked_mean(pooled, mask)
    scale = masked_mean(centred.square(), mask, config.ddof).sqrt() + config.eps
    whitened = over(centred, scale).reshape(valid.shape)
    whitened = torch.where(valid & ~dead[:, None], whitened, 0.0)
    return Compared(whitened[:, :, None], valid, dead)


def separate(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """Each reward normalised by itself and kept apart, its weight after the clip.

    For one clipped loss per reward: weight * max(-A ratio, -A bounded) is max of the same with weight * A.

    Source: arXiv 2505.07818; XueZeyue/DanceGRPO, HunyuanVideo scripts.
    """
    rewards, weights = live(rewards, weights)
    return Compared(*_each(rewards, config), weights=weights.float())


def median(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """(reward - median of its group) / (median absolute deviation + eps); the median sample is not trained.

    The deviation is 0 where half of the rewards are equal; the official code then divides by eps alone. Here it
    is at least `min_deviation` of the group's std. Of an even number of samples the lower median is taken.

    Source: arXiv 2601.22582; lotusroot-kim/MC-GRPO (eps 1e-3).
    """
    total = aggregate(rewards, weights)
    valid = total.isfinite()
    filled = torch.where(valid, total, 0.0)
    last = torch.where(valid, total, torch.inf)
    middle = (valid.sum(dim=1, keepdim=True) - 1).clamp(min=0) // 2
    sample = last.argsort(dim=1, stable=True).gather(1, middle)
    centred = torch.where(valid, filled - filled.gather(1, sample), 0.0)
    deviation = torch.where(valid, centred.abs(), torch.inf).sort(dim=1).values.gather(1, middle)
    mean = masked_mean(filled, valid)
    std = masked_mean((filled - mean).square(), valid, config.ddof).sqrt()
    dead = dead_groups(filled, valid)
    scale = torch.maximum(deviation, config.min_deviation * std) + config.eps
    values = torch.where(dead[:, None], 0.0, over(centred, scale))
    left_out = torch.zeros_like(valid).scatter(1, sample, True)
    return Compared(values[:, :, None], valid, dead, left_out)


def batch(
    rewards: Tensor, weights: Tensor, config: RuleConfig, past: Sequence[Tensor | None] | None = None
) -> Compared:
    """(reward - mean) / (std + eps) over the iteration, or over the rewards `past` of a prompt; see `advantages`.

    Source: arXiv 2305.13301; kvablack/ddpo-pytorch:ddpo_pytorch/stat_tracking.py.
    """
    total = aggregate(rewards, weights)
    values, dead = normalise_against(total, past, eps=config.eps, ddof=config.ddof, scaled=config.std == "global")
    return Compared(values[:, :, None], total.isfinite(), dead)


def best_of(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """n times the unbiased gradient weight of E[max of k draws], from n samples, over (std + eps).

    Source: arXiv 2510.23393 and 2505.15201.
    """
    total = aggregate(rewards, weights)
    valid = total.isfinite()
    filled = torch.where(valid, total, 0.0)
    dead = dead_groups(filled, valid)
    added = over(added_to_best(filled, valid, (config.best_of or BestOfConfig()).k), _pooled(filled, valid, config))
    return Compared(torch.where(valid & ~dead[:, None], added, 0.0)[:, :, None], valid, dead)


Rule = Callable[[Tensor, Tensor, RuleConfig], Compared]
RULES: dict[str, Rule] = {
    "group": group,
    "per_reward": per_reward,
    "gdpo": gdpo,
    "separate": separate,
    "median": median,
    "batch": batch,
    "best_of": best_of,
}
