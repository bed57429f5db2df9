"""What the intervals of a report are made of, and a warning where hardly a prompt tells base and tuned apart."""

from collections.abc import Iterable

import numpy as np

from flowrl.statistics.intervals import Clusters, clusters
from flowrl.statistics.paired import TIE, prompt_means

LEAST = 6
"""Prompts that must differ before a test can find anything: all of 5 gaining has p = 2 / 2^5 > 0.05."""


def told_apart(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> tuple[int, int]:
    """(distinct prompts on which two models differ, all of them) of scores [P, K]; NaN counts as no image."""
    sample = clusters(prompt_means(after - before), groups)
    return int((np.abs(sample.total / sample.count) > TIE).sum()), len(sample)


def warning(label: str, differ: int, prompts: int) -> str:
    """A sentence where too few prompts differ for an interval to say much; "": enough do, or there are none."""
    if not prompts or differ >= LEAST:
        return ""
    prefix = f"By {label} base and tuned differ on {differ or 'none'} of {prompts} prompts"
    return f"{prefix}: fewer than {LEAST} cannot show a difference, and the interval may be too narrow."


def method(samples: Iterable[Clusters]) -> str:
    """How the 95 % intervals of the means of `samples` are made, for a sentence."""
    few = {sample.few for sample in samples if len(sample)}
    if True not in few:
        return "95 % intervals from a bootstrap over prompts"
    if few == {True}:
        return "95 % intervals made for few prompts (t, bootstrap-t or score intervals)"
    return (
        "95 % intervals over prompts, from a bootstrap or, where few prompts differ, made for few (t, bootstrap-t or "
        "score intervals)"
    )
