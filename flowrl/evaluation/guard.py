"""The guard: what an evaluation during training says against going on, in one sentence with its numbers.

It sees the prompts of its half alone (`held_out.guards_half`), so that final numbers of the others are not flattered by
its choice. It has no random numbers and no model: the same evaluations give the same verdicts. P prompts, S seeds.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from flowrl.config.schema import GuardConfig
from flowrl.evaluation.copying import copied
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.signs import RISING, SHARES, WORDS, Signs
from flowrl.evaluation.statistics import format_interval
from flowrl.statistics import paired
from flowrl.statistics.intervals import NORMAL, interval

Name = Literal["below base", "below best", "diversity", "degeneracy", "copying", "kl budget", "norm ratio"]
Found = tuple[Name, str, dict[str, float]]
"""An alarm without its iteration: name, what is said of the run, numbers."""
KL, NORM_RATIO = "policy/kl_reference", "matching/norm_ratio"
"""Keys of the metrics row."""


@dataclass(frozen=True, slots=True)
class Look:
    """An evaluation on the guard's prompts."""

    scores: Evaluation
    signs: Signs | None = None
    """Of its kept images; None: there are none."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that speaks against going on."""

    name: Name
    iteration: int
    sentence: str
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a look."""

    iteration: int
    alarms: tuple[Alarm, ...]
    """The gravest first."""
    best: int
    """Iteration of the best evaluation so far, this one among them."""


@dataclass(slots=True)
class State:
    """What a guard remembers: plain data."""

    metric: str
    looked: int = 0
    """Iteration of the last look; 0: none."""
    looks: int = 0
    best: int = 0
    """Iteration of the best evaluation; 0: none."""
    table: list[list[float | None]] = field(default_factory=list)
    """Scores of the best evaluation, [P, S]."""
    losses: int = 0
    """Looks in a row that lost against the best evaluation."""
    base_losses: int = 0
    """Looks in a row that lost against the base."""
    gain: dict[str, float | None] = field(default_factory=dict)
    """Paired difference of the best evaluation from the base."""
    beat: bool = False
    """Whether the interval of some evaluation lay wholly above the base, in the metric's direction."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Every alarm so far."""
    over: bool = False
    """Whether an alarm has ended the run."""


class Guard:
    """Looks at the evaluations of a run, one after the other. `metric` is the watched one. `state`: of an earlier
    guard, to go on from; None: nothing was seen yet. `noun`: "image" or "video", for its sentences.
    """

    def __init__(
        self,
        options: GuardConfig,
        metric: str,
        *,
        higher_is_better: bool = True,
        state: State | None = None,
        noun: str = "image",
    ) -> None:
        self._noun = noun
        self.options, self.metric, self.sign = options, metric, 1 if higher_is_better else -1
        self.state = State(metric) if state is None else state

    def look(self, base: Look, now: Look, row: Mapping[str, Any]) -> Verdict:
        """Judge an evaluation `now`, whose iteration has the metrics `row`, beside the base's, and remember it.

        Raises ValueError: other prompts or seeds than the base's, or an iteration that was judged already.
        """
        state, iteration = self.state, now.scores.iteration
        if iteration <= state.looked:
            raise ValueError(f"iteration {iteration} was judged already: the last one was {state.looked}")
        if base.scores.prompts != now.scores.prompts:
            raise ValueError("a guard needs the same prompts in both evaluations")
        table, groups = now.scores.scores[self.metric], now.scores.groups
        change = paired.difference(base.scores.scores[self.metric], table, groups)
        state.looked, state.looks = iteration, state.looks + 1
        found = (
            self._below_base(change),
            self._below_best(table, groups),
            self._diversity(base, now),
            self._degeneracy(base, now),
            self._copying(base, now),
            self._limit("kl budget", KL, self.options.kl_budget, "the KL to the reference", row),
            self._limit("norm ratio", NORM_RATIO, self.options.norm_ratio, "the norm of the output over base's", row),
        )
        alarms = [
            Alarm(name, iteration, f"After iteration {iteration} {text}.", numbers)
            for name, text, numbers in filter(None, found)
        ]
        self._remember_best(table, change, iteration)
        state.beat = state.beat or self._ends(change)[0] > 0
        state.alarms += [asdict(alarm) for alarm in alarms]
        return Verdict(iteration, tuple(alarms), state.best)

    # ---- the watched metric

    def _ends(self, change: Mapping[str, float]) -> tuple[float, float]:
        """(low, high) of a difference in the metric's direction; NaN where one prompt has no interval."""
        low, high = sorted((self.sign * change["low"], self.sign * change["high"]))
        return low, high

    def _below_base(self, change: dict[str, float]) -> Found | None:
        """The loss against the base. One look in forty loses by chance alone, so it takes `patience` of them."""
        state = self.state
        state.base_losses = state.base_losses + 1 if self._ends(change)[1] < 0 else 0
        if state.base_losses < self.options.patience:
            return None
        text = f"{self._label} is {_times(state.base_losses)}worse than the base's, now by {_worded(change)}"
        return "below base", text, change

    def _below_best(self, table: np.ndarray, groups: np.ndarray) -> Found | None:
        """The loss against the best evaluation so far, whose luck is allowed for: it was picked among `looks` - 1."""
        state = self.state
        if not state.best:
            return None
        change = widened(paired.difference(np.asarray(state.table, dtype=np.float64), table, groups), state.looks - 1)
        state.losses = state.losses + 1 if self._ends(change)[1] < 0 else 0
        if state.losses < self.options.patience:
            return None
        text = f"{self._label} is {_times(state.losses)}worse than at iteration {state.best}, its best"
        text += f", now by {_worded(change)}"
        return "below best", text, change | {"best": state.best}

    def _remember_best(self, table: np.ndarray, change: dict[str, float], iteration: int) -> None:
        state = self.state
        gain, before = self.sign * change["mean"], state.gain.get("mean")
        if math.isnan(gain) or (before is not None and gain <= self.sign * before):
            return
        state.best, state.losses = iteration, 0
        state.table = [[None if math.isnan(x) else float(x) for x in row] for row in table]
        state.gain = {name: None if math.isnan(value) else float(value) for name, value in change.items()}

    # ---- the images

    def _diversity(self, base: Look, now: Look) -> Found | None:
        share = self.options.diversity
        if share is None or base.signs is None or now.signs is None:
            return None
        before, after = base.signs.image_std, now.signs.image_std
        both = ~np.isnan(before) & ~np.isnan(after)
        if not both.any() or not before[both].sum() > 0:
            return None
        # The share is below the limit where after - limit * before is below 0, an ordinary mean over prompts.
        groups = now.scores.groups[both]
        rest = interval(after[both] - share * before[both], groups)
        kept = float(after[both].sum() / before[both].sum())
        if not rest["high"] < 0:
            return None
        text = f"the {self._noun}s of a prompt differ from each other by {kept:.0%} of what the base's do"
        text += f", less than {share:.0%}"
        return "diversity", text, {"retention": kept, "least": share, "n": rest["n"]}

    def _degeneracy(self, base: Look, now: Look) -> Found | None:
        limit = self.options.degeneracy
        if limit is None or base.signs is None or now.signs is None:
            return None
        found: list[tuple[float, str, dict[str, float]]] = []
        for name, words in WORDS.items():
            before, after = (values[~np.isnan(values)] for values in (base.signs.values[name], now.signs.values[name]))
            if not len(before) or not len(after):
                continue
            level, spread = float(before.mean()), float(before.std())
            if name in SHARES:  # std of a share of so many images; none in few is not none ever
                safe = (before.sum() + 1) / (len(before) + 2)
                spread = math.sqrt(safe * (1 - safe) / len(after))
            moved = float(after.mean()) - level
            if spread > 0 and (moved if name in RISING else abs(moved)) > limit * spread:
                numbers = {"base": level, "now": float(after.mean()), "std": spread, "distance": abs(moved) / spread}
                found.append((abs(moved) / spread, f"{words} from {level:.3g} to {numbers['now']:.3g}", numbers))
        if not found:
            return None
        found.sort(key=lambda one: -one[0])
        text = f"the {self._noun}s have changed their kind: {', '.join(words for _, words, _ in found)}"
        text += f", more than {limit:g} standard deviations of the base's {self._noun}s"
        return "degeneracy", text, found[0][2]

    def _copying(self, base: Look, now: Look) -> Found | None:
        limit, before, after = self.options.copying, copied(base.scores), copied(now.scores)
        if limit is None or before is None or after is None:
            return None
        change = paired.difference(before, after, now.scores.groups)
        if not change["low"] > limit:
            return None
        text = f"the share of {self._noun}s that leave the place of their edit as it was has moved from the base's by "
        return "copying", f"{text}{_worded(change)}, surely more than {limit:g}", change

    # ---- the row

    def _limit(self, name: Name, key: str, limit: float | None, words: str, row: Mapping[str, Any]) -> Found | None:
        value = row.get(key)
        if limit is None or not isinstance(value, int | float) or not value > limit:
            return None
        return name, f"{words} ({key}) is {value:.4g}, above {limit:g}", {"value": float(value), "limit": limit}

    # ---- words

    @property
    def _label(self) -> str:
        return f"{self.metric} of the guard's prompts"


def widened(change: dict[str, float], picked_from: int) -> dict[str, float]:
    """A 95 % interval as wide as if it were one of `picked_from` together (Bonferroni), ends moved in proportion.

    >>> widened({"mean": 0.0, "low": -1.0, "high": 1.0, "n": 9}, 1)["low"]
    -1.0
    """
    factor = NormalDist().inv_cdf(1 - 0.025 / picked_from) / NORMAL if picked_from > 1 else 1.0
    mean = change["mean"]
    ends = {name: mean + factor * (change[name] - mean) for name in ("low", "high")}
    return change | ends


def _times(looks: int) -> str:
    return f"in {looks} evaluations in a row " if looks > 1 else ""


def _worded(change: Mapping[str, float]) -> str:
    return f"{change['mean']:+.4g} ({format_interval(change, '+.4g')}, {change['n']:.0f} prompts)"
