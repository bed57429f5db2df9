"""What a run folder shows: options, columns of the metrics, paired changes, saved images. No model is loaded."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flowrl.apps.gallery.movement import shared_pairs
from flowrl.apps.gallery.runs import Evaluation, Run, value_at
from flowrl.evaluation.moved import bright_pairs
from flowrl.statistics import paired
from flowrl.statistics.scales import FAINT

TREND_ROWS = 8
"""Fewest iterations for a trend: quarters of two."""
PAGE = "docs/troubleshooting.md"


class Lacking(Exception):
    """The folder lacks what a check needs; the text says what."""


@dataclass(frozen=True, slots=True)
class Number:
    """The number that shows a finding."""

    name: str
    value: float
    limit: float
    """The value from which on it is a finding."""


@dataclass(frozen=True, slots=True)
class Change:
    """The option to change."""

    option: str
    """Dotted key of the configuration."""
    value: str
    """A value to try, in words where it is not one number."""


class Seen:
    """What a check found: the number that shows it, and the words of its texts in checks.yaml. `severity`, in (0, 1],
    is how much of the run it touches; `limit` is the value from which on it is a finding; `cases` are those of the
    table that this is.
    """

    def __init__(self, severity: float, value: float, limit: float, *cases: str, **words: Any) -> None:
        self.severity, self.value, self.limit, self.cases, self.words = severity, value, limit, cases, words


class Evidence:
    """A run as the checks read it; every access raises `Lacking` where the folder does not have the thing."""

    def __init__(self, run: Run) -> None:
        self.run = run

    # ---- options

    def option(self, key: str) -> Any:
        """The value at a dotted key of config.yaml; null is a value. Raises Lacking: a component without the option."""
        tree: Any = self.run.config
        for part in key.split("."):
            if not isinstance(tree, dict) or part not in tree:
                raise Lacking(f"config.yaml has no {key}")
            tree = tree[part]
        return tree

    def given(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, or `default` where there is none or null."""
        found = value_at(self.run.config, *key.split("."))
        return default if found is None else found

    @cached_property
    def updates(self) -> int:
        """Optimizer steps that an iteration's samples go through."""
        return int(self.option("optim.updates_per_iteration")) * int(self.given("algorithm.passes", 1))

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.updates * len(self.run.rows)

    def require_steps(self, least: int) -> None:
        """Raise Lacking for a run of fewer optimizer steps, about whose learning rate nothing can be said."""
        if self.steps < least:
            raise Lacking(f"it needs {least} updates of the weights, and there are {self.steps}")

    # ---- metrics

    def column(self, key: str, least: int = 2) -> np.ndarray:
        """The finite values [N] of a column of metrics.jsonl. Raises Lacking: no row has it, or fewer than `least`."""
        values = self.run.curve(key)[1]
        known = values[np.isfinite(values)]
        if not len(self.run.rows):
            raise Lacking("metrics.jsonl has no row")
        if not len(known):
            raise Lacking(f"metrics.jsonl has no {key} (another method)")
        if len(known) < least:
            raise Lacking(f"{key} needs {least} iterations, and there are {len(known)}")
        return known

    @cached_property
    def columns(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(name for row in self.run.rows for name in row)

    @property
    def trains_noise(self) -> bool:
        """The method trains the distribution of the initial noise (FIND), not the network."""
        return "noise/std" in self.columns

    @cached_property
    def skipped(self) -> float:
        """Share of the updates that were skipped; 0 where no row says."""
        return float(self.column("optim/skipped").mean()) if "optim/skipped" in self.columns else 0.0

    def log_ratio(self) -> float:
        """Typical RMS log ratio within an iteration."""
        return math.sqrt(2 * float(np.median(self.column("policy/approx_kl"))))

    @property
    def live(self) -> bool:
        """Whether some group of some iteration had something to teach; True where groups are not compared."""
        dead = self.run.curve("advantage/dead_group_share")[1]
        return not len(dead) or bool((dead < 1).any())

    @cached_property
    def faint(self) -> float:
        """Largest credit of a typical live iteration if the rewards' scale is too small for it to teach; else 0."""
        known = self.run.curve("advantage/largest")[1]
        known = known[np.isfinite(known) & (known > 0)]
        typical = float(np.median(known)) if len(known) else 0.0
        return typical if typical < FAINT else 0.0

    def quarters(self, key: str) -> tuple[float, float]:
        """Medians of a column over the first and the last quarter of the run."""
        values = self.column(key, TREND_ROWS)
        share = len(values) // 4
        return float(np.median(values[:share])), float(np.median(values[-share:]))

    # ---- evaluations

    @property
    def base(self) -> Evaluation:
        """The evaluation of the untrained model. Raises Lacking: there is none, or it has no scores."""
        base = self.run.base
        if base is None:
            raise Lacking("there is no eval/base.json")
        if not base.scores or not base.prompts:
            raise Lacking("eval/base.json has no scores")
        return base

    @property
    def after(self) -> Evaluation:
        """The latest evaluation of the trained model."""
        if self.run.after is None:
            raise Lacking("there is no evaluation after the base's")
        return self.run.after

    def tables(self, metric: str, after: Evaluation | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(base [P, S], after [P, S], groups [P]) of the prompts and seeds that both evaluations have.

        Raises Lacking: one of them has no such score, or their prompts differ.
        """
        base, after = self.base, after or self.after
        if metric not in base.scores or metric not in after.scores:
            raise Lacking(f"{metric} is not in both evaluations")
        count = min(len(base.prompts), len(after.prompts))
        if base.prompts[:count] != after.prompts[:count] or base.seeds != after.seeds:
            raise Lacking(f"eval/{base.tag}.json and eval/{after.tag}.json have other prompts or seeds")
        return base.scores[metric][:count], after.scores[metric][:count], base.groups[:count]

    @cached_property
    def changes(self) -> dict[str, dict[str, float]]:
        """Metric -> paired difference after - base with its interval, in the direction in which more is better."""
        result = {}
        for metric in self.base.scores:
            sign = self.sign(metric)
            before, after, groups = self.tables(metric)
            result[metric] = paired.difference(sign * before, sign * after, groups)
        return result

    def sign(self, metric: str) -> int:
        """1: more is better; -1: less is."""
        return -1 if metric in (self.run.summary.get("lower_is_better") or ()) else 1

    @property
    def metric(self) -> str:
        """The output that the run is judged by. Raises Lacking: nothing was evaluated."""
        found = self.run.summary.get("primary") or next(iter(self.base.scores), None)
        if found is None:
            raise Lacking("no output is evaluated")
        return str(found)

    @property
    def rose(self) -> bool:
        """Whether the held-out metric is above the base's: its whole paired interval is."""
        change = self.changes.get(self.metric)
        if change is None:
            raise Lacking(f"{self.metric} is not evaluated")
        return change["low"] > 0

    @property
    def moved(self) -> bool:
        """Whether any evaluated output changed by more than its interval, up or down: then something was learned."""
        try:
            return any(change["low"] > 0 or change["high"] < 0 for change in self.changes.values())
        except Lacking:
            return False

    # ---- images

    @cached_property
    def images(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Brightness [H, W] float64, 0 to 255, of base and trained model on the same prompt and noise.

        Raises Lacking: no such pair of images was saved (videos are not opened).
        """
        base, after = self.base, self.after
        files = (pair for pair in shared_pairs(base, after) if pair[0].suffix == ".png")
        found = [(before[0], trained[0]) for before, trained in bright_pairs(files)]
        if not found:
            raise Lacking("no image of the same prompt and seed is saved for both evaluations")
        return found
