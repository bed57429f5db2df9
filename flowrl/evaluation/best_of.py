"""Best of n of base and tuned from the scores of an evaluation: chosen by the training rewards, judged by a metric.

Nothing is sampled: from S seeds a prompt the best of 1 to S has an unbiased estimate (`flowrl.statistics.best_of`).
The base's best of n is the fair rival of training: it costs n times the network evaluations of one image, and no
training. Where the judge is one of what chose, the curve is that of the choice and not of what people see.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import format_interval
from flowrl.scoring.scorer import Scorer
from flowrl.statistics.best_of import curves
from flowrl.statistics.intervals import intervals


def facts(base: Evaluation, tuned: Evaluation, trained: Scorer | None) -> dict[str, Any] | None:
    """`by`, the names of the rewards that choose; and by judge, for each k from 1, means with intervals over prompts.

    Judges are the scores that are not trained on; without any those that are, and `chose` says so. `base`, `tuned`: of
    the best of k; `rival`: the tuned model's one image - the base's best of k. None: one seed a prompt, or no reward
    that gives an image a score of its own.
    """
    entries = [] if trained is None else [entry for entry in trained.entries if entry.weight]
    cards = [entry.reward.card for entry in entries]
    if base.seeds < 2 or not entries or any(card.needs_groups or card.by_people for card in cards):
        return None

    def values(of: Evaluation) -> np.ndarray:
        raw = {name: torch.from_numpy(table) for name, table in of.scores.items()}
        return torch.stack([entry.weight * entry.training_value(raw) for entry in entries]).sum(dim=0).numpy()

    own = dict.fromkeys(name for entry in entries for name in entry.shares())
    both = {"base": base, "tuned": tuned}
    names = [name for name in base.scores if name in tuned.scores]
    found = dict[str, Any]()
    for name in [name for name in names if name not in own] or [name for name in names if name in own]:
        tables = {key: curves(values(each), each.scores[name]).T for key, each in both.items()}
        tables["rival"] = tables["tuned"][:1] - tables["base"]
        told = {key: intervals(table, base.groups) for key, table in tables.items()}
        found[name] = {"chose": name in own} | told
    return {"by": " + ".join(entry.name for entry in entries), "judges": found} if found else None


def sentence(by: str, metric: str, value: Mapping[str, Any]) -> str:
    """The base's best of n beside the tuned model's one image and its best of n, of one judge of `facts`."""
    most = len(value["base"])
    same = ", which is part of what chose" if value["chose"] else ""
    levels = [f"{key} {value[key][0]['mean']:.4g} to {value[key][-1]['mean']:.4g}" for key in ("base", "tuned")]
    rival = value["rival"][-1]
    change = f"{rival['mean']:+.4g} ({format_interval(rival, '+.4g')})"
    return (
        f"From one image to the best of {most}, chosen by {by} and judged by {metric}{same}: {', '.join(levels)}. "
        f"The tuned model's one image less the base's best of {most}, {most} times the network evaluations: {change}. "
        "The chosen images were selected: no other number is of them."
    )
