"""What repeats say: several training seeds of one recipe, and a judge that scored the same images twice.

R training seeds, P prompts, S seeds of the evaluation's noise.
"""

import math

import numpy as np

from flowrl.statistics.intervals import NORMAL, Bounds, clusters, intervals, student


def over_seeds(columns: np.ndarray, groups: np.ndarray, bounds: Bounds | None = None) -> dict[str, float]:
    """Mean of one recipe over R training seeds, with its interval over seeds and prompts.

    A claim about a method is about other seeds and other prompts than these, so both are sources of error. With 2 or 3
    seeds a bootstrap over seeds is far too narrow (two seeds have three different resamples), so the interval is a t
    interval of the two-way layout: the variance of the mean is that of the seed means / R plus that of the prompt
    means / N minus their common rest, with Satterthwaite's degrees of freedom. It is never narrower than the t interval
    over seeds alone; with 2 seeds that is 12.7 standard errors wide to each side. Where all values are equal, neither
    seeds nor prompts say anything of their spread, and it is the interval over prompts.

    Args:
        columns: a value for each training seed and prompt, [R, P]; NaN in one seed leaves the prompt out in all.
        groups: [P] int64, equal for prompts that are the same.
        bounds: least and largest possible mean, at which the intervals end; None: not known.

    Returns:
        `mean`, `low`, `high`; `sd` of the seed means (NaN for one seed); `seeds`, `n` groups; `low_seeds`,
        `high_seeds`: the t interval over seeds alone, for these prompts; `low_prompts`, `high_prompts`: the interval
        over prompts alone, for these seeds. With one seed `low` and `high` are those over prompts.
    """
    columns = np.where(np.isnan(columns).any(axis=0), np.nan, np.asarray(columns, dtype=np.float64))
    prompts = intervals(columns.mean(axis=0)[None], groups, bounds=bounds)[0]
    seeds, mean = len(columns), prompts["mean"]
    samples = [clusters(column, groups) for column in columns]
    n = len(samples[0])
    found = {"mean": mean, "sd": math.nan, "seeds": seeds, "n": n}
    over_prompts = {"low_prompts": prompts["low"], "high_prompts": prompts["high"]}
    if seeds < 2 or n < 2:
        ends = {"low": prompts["low"], "high": prompts["high"]} if seeds == 1 else {"low": math.nan, "high": math.nan}
        return found | ends | {"low_seeds": math.nan, "high_seeds": math.nan} | over_prompts
    # Linear in the groups: the share of each group in the mean, [R, N].
    count = samples[0].count
    table = np.stack([sample.total - mean * count for sample in samples]) * (n / count.sum())
    own = table.mean(axis=1)
    sd = float(own.std(ddof=1))
    by_seed = sd**2 / seeds
    by_prompt = float(table.mean(axis=0).var(ddof=1)) / n
    rest = table - own[:, None] - table.mean(axis=0) + table.mean()
    common = float((rest**2).sum()) / ((seeds - 1) * (n - 1)) / (seeds * n)
    variance = max(by_seed + by_prompt - common, by_seed, by_prompt)
    parts = ((by_seed, seeds - 1), (by_prompt, n - 1), (common, (seeds - 1) * (n - 1)))
    below = sum(part**2 / freedom for part, freedom in parts)
    freedom = max(variance**2 / below, float(min(seeds, n) - 1)) if below else 1.0
    alone = student(seeds - 1) * math.sqrt(by_seed)
    # Few seeds know little of their own spread: never narrower than they are alone.
    half = max(student(freedom) * math.sqrt(variance), alone)
    least, largest = bounds or (-math.inf, math.inf)
    ends = {"low": max(mean - half, least), "high": min(mean + half, largest)}
    if np.nanmax(columns) == np.nanmin(columns):
        ends = {"low": prompts["low"], "high": prompts["high"]}
    ends |= {"low_seeds": max(mean - alone, least), "high_seeds": min(mean + alone, largest)}
    return found | {"sd": sd} | ends | over_prompts


def noise_floor(first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """What a judge's own noise does to a comparison: the same images scored twice, tables [P, S].

    Returns:
        `sd` of one score; `sd_of_mean`: of a mean over these prompts; `floor`: a difference of two means below it is
        within the judge's noise (1.96 standard deviations of such a difference); `shift`: mean of second - first; `n`
        images scored twice. NaN below two of them.
    """
    change = (second - first).ravel()
    sample = clusters(change, np.repeat(groups, first.shape[1]))
    n = int(np.isfinite(change).sum())
    if len(sample) < 2:
        return {"sd": math.nan, "sd_of_mean": math.nan, "floor": math.nan, "shift": sample.mean, "n": n}
    # Each of the two scores has half the variance of their difference.
    of_mean = sample.error / math.sqrt(2)
    sd = float(np.nanstd(change, ddof=1)) / math.sqrt(2)
    return {"sd": sd, "sd_of_mean": of_mean, "floor": NORMAL * sample.error, "shift": sample.mean, "n": n}
