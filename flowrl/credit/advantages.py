"""Advantage rules: pure functions on rewards [R, P, G], in float64.

Order everywhere: aggregate, centre, scale, normalise over the batch, clip, select. NaN marks a masked
sample: it enters no statistic, gets advantage 0 and is never selected. A group that is compared with equal
rewards only is dead: its advantages are exactly 0 under every rule. Most rules compare a group with itself, so one of
equal rewards is dead; `smooth` and `batch` also with earlier ones, and `virtual_best` with the best reward there can
be: there a group of equal rewards is dead if all the others are equal to it as well, as in a group that is all right.

    rule           advantage                                                                    from
    group          sum of weighted raw rewards, then (r - mean) / (std + eps)                   Flow-GRPO, Dr. GRPO
    leave_one_out  the same with the mean of the other samples                                  RLOO
    smooth         the same, blended with that over all groups of the prompt so far             DCPO
    per_reward     each reward normalised, then their sum with weights rescaled to 1            MixGRPO
    gdpo           each reward normalised, their weighted sum normalised over the batch         GDPO
    separate       each reward normalised and clipped, one advantage per reward                 DanceGRPO
    median         sum of weighted raw rewards, then (r - median) / (median deviation + eps)    MC-GRPO
    batch          sum of weighted raw rewards, then (r - mean) / (std + eps) over the batch    DDPO, SPO
    best_of        what a sample adds to the best of k, by the sum of weighted raw rewards      max@k, PKPO
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.credit.best_of import BestOfConfig, added_to_best
from flowrl.credit.groups import aggregate, dead_groups, live, masked_mean, over
from flowrl.credit.history import normalise_against, unexpected
from flowrl.credit.rule_options import RuleConfig
from flowrl.credit.selection import SelectConfig, select
from flowrl.credit.spread import SpreadConfig


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(RuleConfig):
    """An advantage rule, and the samples that are updated on."""

    select: SelectConfig | None = None
    """Update on some samples of a prompt only; null: on all."""
    spread: SpreadConfig | None = None
    """Count in how unlike the others of its group a sample is: {by: distance, reward: NUMBER}; null: not."""

    def spreading(self) -> SpreadConfig | None:
        return self.spread

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
    rewards: Tensor, weights: Tensor, config: RuleConfig, *, known: Sequence[Tensor | None] | None = None
) -> Advantages:
    """Advantages of all samples of an iteration by the configured rule.

    Rewards are training values [R, P, G], NaN marks a failure; one of weight 0 ([R]) is only logged. `known`: of a rule
    that remembers, what it knows of each prompt (`credit/history.py`); with `virtual_best` the highest value of each
    reward; None: this iteration alone.

    Raises ValueError: rewards that do not fit the configuration, naming the key.
    """
    return _clipped(_spread(_compared(rewards, weights, config, known), rewards, config), config)


def unclipped(
    rewards: Tensor, weights: Tensor, config: RuleConfig, *, known: Sequence[Tensor | None] | None = None
) -> Advantages:
    """The same credit for a method that multiplies before it clips: values without the clip, and `bound`.

    The samples that take part are chosen by the clipped values, as without the multiplication.
    """
    result = _spread(_compared(rewards, weights, config, known), rewards, config)
    bound = None
    if config.clip is not None:
        bound = torch.full(result.values.shape[2:], config.clip)
        bound = bound if result.weights is None else bound * result.weights.abs()
    return replace(_clipped(result, config), values=result.within(None), bound=bound)


def _compared(
    rewards: Tensor, weights: Tensor, config: RuleConfig, known: Sequence[Tensor | None] | None
) -> "Compared":
    """Rewards compared by the rule, before the clip; see `advantages`."""
    if rewards.ndim != 3:
        raise ValueError(f"rewards must be [R, P, G], got {tuple(rewards.shape)}")
    size = rewards.shape[2]
    config.check_group(size)
    if config.virtual_best:
        tops = [own.nan_to_num(-torch.inf).max() for own in rewards] if known is None else [*known]
        virtual = torch.tensor(tops).to(rewards)[:, None, None].expand(-1, rewards.shape[1], config.virtual_best)
        rewards, known = torch.cat([rewards, virtual], dim=2), None
    if known is not None:
        return {"batch": batch, "smooth": smooth}[config.name](rewards, weights, config, known)
    result = RULES[config.name](rewards, weights, config)
    return replace(result, values=result.values[:, :size], valid=result.valid[:, :size])


def _spread(compared: "Compared", rewards: Tensor, config: RuleConfig) -> "Compared":
    """The same with the advantages by the spread of each group, where the configuration says so."""
    spread = config.spreading()
    return compared if spread is None else replace(compared, values=spread.scaled(compared.values, rewards))


def _clipped(compared: "Compared", config: RuleConfig) -> Advantages:
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
    """The std of all samples of the iteration, of their distances from the mean of their group, or 1, [1, 1]."""
    if config.std == "none":
        return torch.ones(1, 1, dtype=torch.float64)
    if config.std == "within":
        filled = filled - masked_mean(filled, counted)
    elif config.std != "global":
        raise ValueError(f"std={config.std!r}; use 'global', 'within', 'group' or 'none'")
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


def leave_one_out(rewards: Tensor, weights: Tensor, config: RuleConfig) -> Compared:
    """(sum of weighted rewards - mean of the others of its group) / (std + eps): n / (n - 1) times the rule `group`.

    Source: arXiv 2402.14740; huggingface/trl:trl/trainer/rloo_trainer.py.
    """
    own = group(rewards, weights, config)
    count = own.valid.sum(dim=1)
    return replace(own, values=own.values * (count / (count - 1).clamp(min=1))[:, None, None])


def smooth(
    rewards: Tensor, weights: Tensor, config: RuleConfig, known: Sequence[Tensor | None] | None = None
) -> Compared:
    """The smaller, in size, of b / i + (1 - 1 / i) a and a / i + (1 - 1 / i) b: a by the rule `group`, b the same over
    all i groups of the prompt so far.

    Source: arXiv 2509.02333; lime-RL/DCPO.
    """
    own, total = group(rewards, weights, config), aggregate(rewards, weights)
    if known is None:
        return own
    visits, mean, variance = torch.stack([own for own in known if own is not None]).T[:, :, None]
    a = own.values.squeeze(2)
    b = torch.where(own.valid, over(total - mean, variance.sqrt() + config.eps), 0.0)
    one, other = (torch.lerp(x, y, 1 / visits) for x, y in ((a, b), (b, a)))
    values = torch.where(own.valid, torch.where(one.abs() < other.abs(), one, other), 0.0)
    return replace(own, values=values[:, :, None], dead=(variance.squeeze(1) == 0) | ~own.valid.any(dim=1))


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
    if config.nonzero_factor:
        values = values * (valid.sum(dim=1, keepdim=True) / (values != 0).sum(dim=1, keepdim=True).clamp(min=1))
    left_out = torch.zeros_like(valid).scatter(1, sample, True)
    return Compared(values[:, :, None], valid, dead, left_out)


def batch(
    rewards: Tensor, weights: Tensor, config: RuleConfig, known: Sequence[Tensor | None] | None = None
) -> Compared:
    """(reward - mean) / (std + eps) over the iteration, or over the prompt's rewards that `history` remembers.

    Source: arXiv 2305.13301; kvablack/ddpo-pytorch:ddpo_pytorch/stat_tracking.py; arXiv 2509.13232 for `decay`.
    """
    total = aggregate(rewards, weights)
    if known is not None and config.history is not None and config.history.decay is not None:
        total, known = unexpected(total, known), None
    values, dead = normalise_against(total, known, eps=config.eps, ddof=config.ddof, scaled=config.std == "global")
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
    "leave_one_out": leave_one_out,
    "smooth": smooth,
    "per_reward": per_reward,
    "gdpo": gdpo,
    "separate": separate,
    "median": median,
    "batch": batch,
    "best_of": best_of,
}
