"""Checks of the rewards: one that decides alone, saturation, noise, power, scorers that disagree."""

import math

import numpy as np

from flowrl.apps.diagnosis.evidence import Evidence, Lacking, Seen
from flowrl.statistics.intervals import NORMAL
from flowrl.statistics.paired import group_means, prompt_means
from flowrl.statistics.scales import FAINT, scale_up

ALONE = 0.95
"""Share of the variance inside groups that one of several rewards makes: the others then move the order of two samples
in one case of seven or less (a correlation of 0.97 with the total)."""
SATURATED = 0.95
"""Share of the base's images with one and the same score: a group of 8 then has equal scores in two cases of three."""
LEAST_IMAGES = 20
"""Images in which a share of 1 - 0.95 is one image: of fewer ones all may have one score by chance."""
RELIABLE = 0.3
"""Cohen's medium correlation. A reliability below it means that over two thirds of the variance are noise."""
POWER = 2.8
"""Standard errors of the smallest effect that a two-sided test at 5 % finds in 80 % of the cases: 1.96 + 0.84."""
MEDIUM = 0.5
"""Cohen's medium effect, in standard deviations of one image's score. Lab recipes gain 0.1 to 0.4."""
SMALL = 0.2
"""Cohen's small effect: a fall below it is not called a disagreement, however sure it is."""
WHOLE = ("group", "median", "batch")
"""Advantage rules that add raw rewards before they are compared; the others put each on one scale first."""


def one_reward_dominates(seen: Evidence) -> Seen | None:
    """Several rewards whose sum is one of them, within a group."""
    entries = [entry for entry in seen.option("rewards") or [] if entry.get("weight", 1.0)]
    if len(entries) < 2 or seen.option("algorithm.advantages.name") not in WHOLE:
        return None
    names = sorted(n for n in seen.columns if n.startswith("advantage/") and n.endswith("_share"))
    names = [n for n in names if n != "advantage/dead_group_share"]
    if not names:
        raise Lacking("metrics.jsonl has no advantage/<output>_share (written since this check is there)")
    shares = {name: float(np.median(seen.column(name))) for name in names}
    name = max(shares, key=lambda n: shares[n])
    if shares[name] <= ALONE:
        return None
    output = name.removeprefix("advantage/").removesuffix("_share")
    return Seen(shares[name], shares[name], ALONE, count=len(names), output=output)


def reward_saturated(seen: Evidence) -> Seen | None:
    """A trained reward with one score for nearly all images of the untrained model."""
    table = seen.base.scores.get(seen.metric)
    if table is None or not np.isfinite(table).any():
        raise Lacking(f"eval/base.json has no scores of {seen.metric}")
    values, counts = np.unique(table[np.isfinite(table)], return_counts=True)
    total, most = int(counts.sum()), int(counts.argmax())
    share = float(counts[most]) / total
    if total < LEAST_IMAGES:
        raise Lacking(f"it needs {LEAST_IMAGES} scored samples of the base, and there are {total}")
    if share <= SATURATED:
        return None
    return Seen(share, share, SATURATED, metric=seen.metric, score=float(values[most]), total=total)


def reward_scale(seen: Evidence) -> Seen | None:
    """Rewards whose differences are so small that the credit is next to nothing, whatever the learning rate."""
    seen.column("advantage/largest", 1)
    if not seen.faint:
        return None
    stds = seen.column("reward/group_std", 1)
    std = float(np.median(stds[stds > 0])) if (stds > 0).any() else 0.0
    live = [(i, entry) for i, entry in enumerate(seen.option("rewards") or []) if entry.get("weight", 1.0)]
    if len(live) == 1 and std:
        place, entry = live[0]
        scale = (entry.get("scale") or 1.0) * scale_up(std)
        return Seen(1.0, seen.faint, FAINT, "one reward", std=std, place=place, scale=scale)
    larger = f"{scale_up(std):g} times as large" if std else "larger by powers of ten"
    return Seen(1.0, seen.faint, FAINT, std=std, larger=larger)


def reward_noise(seen: Evidence) -> Seen | None:
    """Scores that neither repeat over the seeds of a prompt nor over two evaluations of the same noise."""
    metric, first = seen.metric, (*seen.run.during, seen.after)[0]
    before, after, groups = seen.tables(metric, first)
    if before.shape[1] < 2:
        raise Lacking("eval.samples_per_prompt is 1: a split-half reliability needs 2 seeds")
    if seen.moved:
        return None  # noise has the same mean whatever the model draws
    order = np.unique(groups, return_index=True)[1]  # a duplicate would be counted twice
    before, after = before[order], after[order]
    halves = [np.nanmean(before[:, start::2], axis=1) for start in (0, 1)]
    by_seed, prompts = _correlation(*halves)
    by_time, images = _correlation(before.ravel(), after.ravel())
    # Upper ends of the 95 % intervals of the two correlations (Fisher's z).
    ends = [
        1.0 if n < 4 or r >= 1 else math.tanh(math.atanh(max(r, -0.999)) + NORMAL / math.sqrt(n - 3))
        for r, n in ((by_seed, prompts), (by_time, images))
    ]
    if math.isnan(by_seed) or math.isnan(by_time) or max(ends) >= RELIABLE:
        return None
    reliability = max(2 * by_seed / (1 + by_seed), 0.0)  # Spearman-Brown: of all seeds together
    words = {"metric": metric, "prompts": prompts, "iterations": first.iteration, "by_time": by_time}
    return Seen(1 - max(reliability, by_time, 0.0), reliability, RELIABLE, **words)


def _correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, int]:
    """(Pearson's r, pairs) of the finite pairs; NaN where one of them is constant."""
    known = np.isfinite(one) & np.isfinite(other)
    one, other = one[known], other[known]
    if len(one) < 4 or not np.ptp(one) or not np.ptp(other):
        return math.nan, len(one)
    return float(np.corrcoef(one, other)[0, 1]), len(one)


def too_few_samples(seen: Evidence) -> Seen | None:
    """A comparison that would overlook an effect of medium size."""
    metric = seen.metric
    before, after, groups = seen.tables(metric)
    change, prompts = seen.changes[metric], len(np.unique(groups))
    if change["low"] > 0 or change["high"] < 0:
        return None
    spread = float(np.nanstd(before))
    if not spread:
        return None  # reward_saturated speaks of that
    each = group_means(prompt_means(after - before), groups)
    each = each[np.isfinite(each)]
    scatter = float(each.std(ddof=1)) if len(each) > 1 else math.inf
    least = POWER * scatter / math.sqrt(max(len(each), 1))
    if least <= MEDIUM * spread:
        return None
    if not math.isfinite(least):
        return Seen(1.0, least, MEDIUM * spread, "one prompt", spread=spread, wanted=32)
    wanted = math.ceil((POWER * scatter / (MEDIUM * spread)) ** 2)
    words = {"prompts": prompts, "subject": seen.run.subject.name, "seeds": before.shape[1], "metric": metric}
    severity = min(least / (4 * MEDIUM * spread), 1.0)
    return Seen(severity, least, MEDIUM * spread, spread=spread, wanted=wanted, **words)


def scorers_disagree(seen: Evidence) -> Seen | None:
    """One scorer that rises while another falls, each by more than its interval."""
    if len(seen.changes) < 2:
        raise Lacking("one output alone is evaluated; add another to eval.rewards")
    effects = {}
    for metric, change in seen.changes.items():
        spread = float(np.nanstd(seen.base.scores[metric]))
        effects[metric] = change["mean"] / spread if spread else 0.0
    up = [m for m, change in seen.changes.items() if change["low"] > 0]
    down = [m for m, change in seen.changes.items() if change["high"] < 0 and effects[m] < -SMALL]
    if not up or not down:
        return None
    best, worst = max(up, key=lambda m: effects[m]), min(down, key=lambda m: effects[m])
    rise, fall = effects[best], -effects[worst]
    limit = -SMALL * float(np.nanstd(seen.base.scores[worst]))
    mean = seen.changes[worst]["mean"]
    return Seen(min(fall, 1.0), mean, limit, best=best, rise=rise, worst=worst, fall=fall)
