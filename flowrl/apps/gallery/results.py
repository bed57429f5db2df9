"""Results of a run: metrics, intervals, verdict, table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.apps.gallery import certainty, charts, guard, movement
from flowrl.apps.gallery.runs import Evaluation, Run, nan_mean, number, value_at
from flowrl.evaluation import copying, diversity, moved
from flowrl.statistics.intervals import clusters
from flowrl.statistics.paired import prompt_means

LABELS = {"shapes_strict": "strict accuracy", "shapes_partial": "partial score"}
"""Names of metrics in sentences; others are shown with spaces for underscores."""

LEVELS = ("base", "base_best_guidance", "tuned", "tuned_best_guidance")
BLOCKS = (*LEVELS, "difference", "difference_best_guidance")
DASH = "\u2013"
MINUS = "\u2212"
NO_VERDICT = "nothing has been evaluated yet"
NONE_HELD_OUT = "no verdict: no prompts were held out, and every number below is of training prompts"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its form as text; a share of passes (all scores 0 or 1) is in per cent."""

    name: str
    percent: bool
    decimals: int
    sign: int = 1
    """1: higher is better, -1: lower is."""

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name.replace("_", " "))

    def value(self, x: float, unit: str = " %", digits: int | None = None) -> str:
        """`x` as text with `digits` decimals (None: those of a mean); a dash for NaN.

        >>> Metric("shapes_strict", percent=True, decimals=3).value(0.4609)
        '46.1 %'
        """
        if not math.isfinite(x):
            return DASH
        text = f"{100 * x:.1f}{unit}" if self.percent else f"{x:.{self.decimals if digits is None else digits}f}"
        return text.replace("-", MINUS)

    def change(self, x: float, digits: int | None = None) -> str:
        """A difference with its sign, in percentage points for shares."""
        text = self.value(x, unit="", digits=digits)
        is_zero = not any(digit in text for digit in "123456789")
        return text.lstrip(MINUS) if is_zero else f"+{text}" if x > 0 else text

    def single(self, x: float) -> str:
        """The score of one image: pass or fail, or a number with one digit less than a mean."""
        if self.percent and math.isfinite(x):
            return "pass" if bool(x) == (self.sign > 0) else "fail"
        return self.value(x, digits=max(self.decimals - 1, 0))

    def single_change(self, x: float) -> str:
        """The change of one image; from 0 to 1 is 1, not 100 percentage points."""
        if self.percent and math.isfinite(x):
            return {1: "+1", 0: "0", -1: f"{MINUS}1"}[round(x)]
        return self.change(x, digits=max(self.decimals - 1, 0))

    def interval(self, e: "Estimate") -> str:
        """Bounds as text; "": there are none."""
        return f"{self.value(e.low, unit='')} to {self.value(e.high, unit='')}" if e.bounded else ""

    def level(self, e: "Estimate") -> dict[str, str]:
        """A cell of a table."""
        return {"text": self.value(e.mean), "interval": self.interval(e)}

    def tone(self, low: float, high: float | None = None) -> str:
        """ "better" or "worse" if a change, or a whole interval of changes, is; else "same"."""
        ends = sorted((self.sign * low, self.sign * (low if high is None else high)))
        return "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "same"

    def sure_tone(self, change: "Estimate", judged: bool = True) -> str:
        """The tone of a change with its interval; "same" without one, or where nothing is judged."""
        return self.tone(change.low, change.high) if change.bounded and judged else "same"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; NaN: not computed yet."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Estimate":
        """That of a block of summary.json, or of `flowrl.statistics`."""
        return cls(*(number(entry.get(key)) for key in ("mean", "low", "high")))

    @property
    def known(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


Estimates = dict[str, Estimate]
"""Block of summary.json (one of `BLOCKS`) -> estimate, for one metric."""


def shared(run: Run) -> np.ndarray:
    """[P, K] bool: whether base and tuned have the same prompt and seed; [0, 0] while either is missing."""
    if not run.both:
        return np.zeros((0, 0), dtype=bool)
    base, after = run.both
    prompts = [a == b for a, b in zip(base.prompts, after.prompts, strict=False)]
    seeds = [a == b for a, b in zip(base.seeds, after.seeds, strict=False)]
    return np.array(prompts, dtype=bool)[:, None] & np.array(seeds, dtype=bool)[None, :]


def paired(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(scores before, after), [P, K] each; NaN in both if either is missing or the pair is not shared."""
    same = shared(run)
    rows, columns = same.shape
    nothing = np.full(same.shape, np.nan)
    before, after = (
        e.scores[metric][:rows, :columns] if e is not None and metric in e.scores else nothing
        for e in (run.base, run.after)
    )
    if run.both:  # with the same model, prompts and reward
        one, other = (e.made_with for e in run.both)
        same = same & all(one.get(k) == other.get(k) for k in ("model", "prompts", f"score {metric}"))
    valid = same & np.isfinite(before) & np.isfinite(after)
    return np.where(valid, before, np.nan), np.where(valid, after, np.nan)


def metrics_of(run: Run) -> list[Metric]:
    """The run's metrics, the primary one first."""
    result = [e for e in (run.base, run.after) if e is not None]
    names = [str(run.summary["primary"])] if run.summary.get("primary") else []
    for block in BLOCKS:
        names += [name for name, entry in run.block(block).items() if isinstance(entry, dict)]
    names += [name for evaluation in result for name in evaluation.scores]
    lower_is_better = run.summary.get("lower_is_better") or ()
    metrics = []
    for name in dict.fromkeys(names):
        tables = [e.scores[name] for e in result if name in e.scores]
        scores = np.concatenate([t[np.isfinite(t)] for t in tables]) if tables else np.zeros(0)
        percent = bool(np.isin(scores, (0, 1)).all()) if scores.size else name == "shapes_strict"
        # Two digits below the std over images: further ones are noise at a usual number of prompts.
        std = float(scores.std()) if scores.size else 0.0
        decimals = min(max(2 - math.floor(math.log10(std)), 0), 5) if std > 0 else 3
        metrics.append(Metric(name, percent, decimals, -1 if name in lower_is_better else 1))
    return metrics


def estimates_of(run: Run, metric: Metric) -> Estimates:
    """Estimates of summary.json; while it has none, means of the evaluations without an interval.

    An evaluation during training may have the first prompts alone. Where it stands for the tuned model, the base and
    its best guidance are those of the same prompts, and without an interval too.
    """
    result = {block: Estimate() for block in BLOCKS}
    if run.base:
        result["base"] = Estimate(run.base.mean(metric.name))
    if run.after:
        result["tuned"] = Estimate(run.after.mean(metric.name))
    before, after = paired(run, metric.name)
    if before.size:
        result["difference"] = Estimate(nan_mean(nan_mean(after - before)))
    for block in BLOCKS:
        entry = run.block(block).get(metric.name)
        if isinstance(entry, dict):
            result[block] = Estimate.of(entry)
    if run.both and not isinstance(run.block("tuned").get(metric.name), dict):
        base, latest = run.both
        fewer = len(latest.prompts) < len(base.prompts) or len(latest.seeds) < len(base.seeds)
        if fewer and latest.tag != "tuned":
            for block, evaluation in (("base", base), ("base_best_guidance", best_evaluation(run, "base"))):
                result[block] = Estimate(level_while_training(run, evaluation, metric))
    if _is_own_guidance(run) and not (run.config.get("eval") or {}).get("best_guidance"):
        # No other scale was tried, so the base model's own need not be its best.
        result["base_best_guidance"] = Estimate()
    return result


def method(run: Run, metrics: Sequence[Metric]) -> str:
    """How the intervals of base, tuned and difference are made, for a sentence."""
    tables = [pair for metric in metrics if (pair := paired(run, metric.name))[0].size]
    groups = np.zeros(0, dtype=np.int64) if run.base is None else run.base.groups
    means = [prompt_means(part) for before, after in tables for part in (before, after, after - before)]
    return certainty.method(clusters(row, groups[: len(row)]) for row in means)


def level_while_training(run: Run, evaluation: Evaluation | None, metric: Metric) -> float:
    """Mean of `evaluation` on the prompts and seeds of evaluations during training, which may be fewer; NaN: none."""
    if evaluation is None or metric.name not in evaluation.scores:
        return math.nan
    rows, columns = (len(run.during[-1].prompts), len(run.during[-1].seeds)) if run.during else (None, None)
    return nan_mean(nan_mean(evaluation.scores[metric.name][:rows, :columns]))


def evaluated_curve(run: Run, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """(iterations [N], means [N]) of the evaluations during training, then of the tuned model."""
    x, y = run.curve(f"eval/{metric.name}")
    tuned = run.evaluations.get("tuned")
    known = {*x.tolist(), *(() if tuned is None else (tuned.iteration,))}
    # Evaluations that were asked for have no place in the rows, which are those of a run that was not asked.
    asked = [e for e in run.during if e.iteration not in known and metric.name in e.scores]
    if asked:
        x = np.append(x, [e.iteration for e in asked])
        y = np.append(y, [level_while_training(run, e, metric) for e in asked])[np.argsort(x)]
        x = np.sort(x)
    if tuned is not None and tuned.iteration > max(x, default=0):
        x, y = np.append(x, tuned.iteration), np.append(y, level_while_training(run, tuned, metric))
    return x, y


def verdict(run: Run, metric: Metric, estimates: Estimates) -> tuple[str, str]:
    """(sentence about `metric`, tone), at the guidance of `eval.verdict`.

    The tone is "better" or "worse" if the whole interval is, else "same".
    """
    best = at_best(run, metric, estimates) if _title_is_best(run) and run.subject.judged else None
    return at_same(run, metric, estimates) if best is None else best


def at_same(run: Run, metric: Metric, estimates: Estimates) -> tuple[str, str]:
    """That of base and tuned at the same guidance."""
    base, tuned, change = estimates["base"], estimates["tuned"], estimates["difference"]
    label = f"{metric.label}{run.subject.on}"
    if not run.subject.judged:
        return (NONE_HELD_OUT if base.known else NO_VERDICT), "same"
    if not (base.known and tuned.known and change.known):
        return (f"{label} of the base model: {metric.value(base.mean)}" if base.known else NO_VERDICT), "same"
    at = run.after.label if run.after else ""
    when = "no interval" if at == "tuned" else f"so far, at {at}, no interval yet"
    words, tone = _changed(metric, base, tuned, change, when)
    found = movement.of_run(run)
    return f"{label} {words}", "same" if found is not None and found.hardly else tone


def at_best(run: Run, metric: Metric, estimates: Estimates) -> tuple[str, str] | None:
    """That of base and tuned, each at its best guidance; None: not sought, or not yet."""
    base, tuned, change = (estimates[f"{name}_best_guidance"] for name in ("base", "tuned", "difference"))
    if not (base.known and tuned.known and change.known):
        return None
    scales = [number(run.block(f"{name}_best_guidance").get("guidance_scale")) for name in ("base", "tuned")]
    words, tone = _changed(metric, base, tuned, change, "no interval")
    each = f"with each model at its best guidance (base {scales[0]:g}, tuned {scales[1]:g})"
    return f"{metric.label}{run.subject.on} {each} {words}", tone


def _changed(metric: Metric, base: Estimate, tuned: Estimate, change: Estimate, when: str) -> tuple[str, str]:
    """(the change in words, tone); `when`: why there is no interval."""
    levels = f"from {metric.value(base.mean)} to {metric.value(tuned.mean)}"
    if not change.bounded:
        return f"went {levels} ({metric.change(change.mean)}; {when})", "same"
    verb = "rose" if change.low > 0 else "fell" if change.high < 0 else "did not change measurably:"
    tone = metric.tone(change.low, change.high)
    # What nobody can see is no success.
    if verb in ("rose", "fell") and metric.value(base.mean) == metric.value(tuned.mean):
        verb, tone = "did not change visibly:", "same"
    return f"{verb} {levels} ({metric.change(change.mean)}, 95 % CI {metric.interval(change)})", tone


def _title_is_best(run: Run) -> bool:
    return value_at(run.config, "eval", "verdict") == "best"


def _other_guidance(run: Run, metric: Metric, estimates: Estimates) -> tuple[str, str] | None:
    """(tone, sentence) of the comparison that is not the title: each at its best guidance, or at the same one."""
    best, search = at_best(run, metric, estimates), run.block("guidance_search")
    if best is not None and search:
        shown = at_same(run, metric, estimates) if _title_is_best(run) and run.subject.judged else best
        how = "At the same guidance " if shown is not best else ""
        text = f"{how}{shown[0]}. Each guidance was {search.get('how')}."
        return shown[1], text[:1].upper() + text[1:]
    if not (rival := estimates["base_best_guidance"]).known:
        return None
    scale = number(run.block("base_best_guidance").get("guidance_scale"))
    at = f" (scale {scale:g}{', its own' if _is_own_guidance(run) else ''})" if math.isfinite(scale) else ""
    ends = f" (95 % CI {metric.interval(rival)})" if rival.bounded else ""
    text = f"The fair rival, the base model with its best guidance{at}, reaches {metric.value(rival.mean)}{ends}"
    return "same", f"{text}{run.subject.on}."


def remarks(run: Run, metrics: Sequence[Metric], estimates: dict[str, Estimates]) -> list[tuple[str, str]]:
    """(tone, sentence) of the best guidance, win rate, sharpness, held-out pairs, and metrics that got worse."""
    result, on = guard.remarks(run), run.subject.on
    if metrics and (other := _other_guidance(run, metrics[0], estimates[metrics[0].name])):
        result.append(other)
    if metrics and (sentence := win_rate(run, metrics[0])):
        result.append(sentence)
    if sharp := movement.sharpness_of(run):
        result.append(sharp)
    if spread := run.block("diversity"):
        result.append(("worse" if number(spread["difference"]["high"]) < 0 else "same", diversity.sentence(spread)))
    if "tuned" in (copies := run.block("copy_index")):
        result.append(("worse" if copying.risen(copies) else "same", copying.sentence(copies)))
    accuracy = run.block("implicit_accuracy")
    if math.isfinite(number(accuracy.get("mean"))):
        share, low, high = (100 * number(accuracy.get(key)) for key in ("mean", "low", "high"))
        text = f"Of {accuracy.get('n')} held-out pairs the tuned model prefers {share:.1f} % as the data do"
        tone = "better" if low > 50 else "worse" if high < 50 else "same"
        result.append((tone, f"{text} ({_ends(low, high)})."))
    for metric in metrics:
        before, after = paired(run, metric.name)
        if run.base and estimates[metric.name]["difference"].bounded and before.size:
            told = certainty.told_apart(before, after, run.base.groups[: len(before)])
            result += [("same", text) for text in [certainty.warning(f"{metric.label}{on}", *told)] if text]
    for metric in metrics[1:]:
        change = estimates[metric.name]["difference"]
        if metric.sure_tone(change) == "worse":
            text = f"{metric.label} got worse{on}: {metric.change(change.mean)}, 95 % CI {metric.interval(change)}."
            result.append(("worse", text[:1].upper() + text[1:]))
    return result if run.subject.judged else [("same", text) for _, text in result]


def win_rate(run: Run, metric: Metric) -> tuple[str, str] | None:
    """(tone, sentence) about the share of prompts and seeds whose tuned image beats the base's; None: not known."""
    result = run.block("win_rate").get(metric.name)
    if not isinstance(result, dict) or not (result.get("n") or result.get("ties")):
        return None
    found = movement.of_run(run)
    rule, change = moved.rule(result, run.noun), moved.sentence(found, moved.trained(run.config))
    if not result.get("n"):
        text = f"By {metric.label} there is no win rate: all {result.get('ties')} {run.noun}s are tied"
        return "same", f"{text}{run.subject.on} ({rule}). {change}"
    rate, low, high, ties = (100 * number(result.get(key)) for key in ("rate", "low", "high", "tie_rate"))
    # What nobody can see is no success.
    tone = "same" if found is not None and found.hardly else "better" if low > 50 else "worse" if high < 50 else "same"
    return tone, (
        f"By {metric.label} the tuned model wins {rate:.1f} % of {result['n']} {run.noun}s that are not tied"
        f"{run.subject.on} ({_ends(low, high)}); {ties:.1f} % of all are ties ({rule}). {change}"
    )


def _ends(low: float, high: float) -> str:
    """An interval of a share in per cent; one prompt alone has none."""
    return f"95 % CI {low:.1f} to {high:.1f}" if math.isfinite(low) else "one prompt has no interval"


def table_row(run: Run, metric: Metric, estimates: Estimates) -> dict[str, Any]:
    """A row of the table of results: texts, tone and interval plot."""
    cells, judged = {block: metric.level(e) for block, e in estimates.items()}, run.subject.judged
    for block in BLOCKS[len(LEVELS) :]:
        cells[block]["text"] = metric.change(estimates[block].mean)
    scored: np.ndarray = np.isfinite(paired(run, metric.name)[0])
    entry = run.block("difference").get(metric.name)
    declared = number(entry.get("n")) if isinstance(entry, dict) else math.nan
    paired_prompts = run.base.num_distinct(np.asarray(scored.any(-1))) if run.base and scored.size else declared
    num_prompts = declared if guard.chose(run) else paired_prompts
    total = f" of {scored.size}" if scored.sum() < scored.size else ""
    return {
        "metric": metric,
        "cells": cells,
        "tone": metric.sure_tone(estimates["difference"], judged),
        "best_tone": metric.sure_tone(estimates["difference_best_guidance"], judged),
        "plot": charts.interval_plot([(name, e.mean, e.low, e.high) for name in LEVELS for e in [estimates[name]]]),
        "prompts": f"{num_prompts:.0f}" if math.isfinite(num_prompts) else DASH,
        "images": f"{scored.sum()}{total}" if scored.size else DASH,
    }


def guidance_search(run: Run, metrics: Sequence[Metric]) -> dict[str, Any] | None:
    """What the search for the best guidance saw, and a row of each scale: its text, mean of the base, of the tuned."""
    found = run.block("guidance_search")
    metric = next((m for m in metrics if m.name == found.get("metric")), None)
    if metric is None:
        return None
    both = [found.get(name) or {} for name in ("base", "tuned")]
    rows = [(scale, [metric.value(number(means.get(scale))) for means in both]) for scale in sorted(both[0], key=float)]
    return {"label": metric.label, "how": found.get("how"), "rows": rows}


def settings(evaluation: Evaluation) -> str:
    """Sampling settings of an evaluation in words."""
    seeds = ", ".join(map(str, evaluation.seeds))
    return f"{evaluation.num_inference_steps} steps, guidance {evaluation.guidance_scale:g}, seeds {seeds}"


def best_evaluation(run: Run, name: str) -> Evaluation | None:
    """The evaluation of "base" or "tuned" at the best guidance that the summary names."""
    own, scale = run.evaluations.get(name), number(run.block(f"{name}_best_guidance").get("guidance_scale"))
    same = own is not None and own.guidance_scale == scale
    return own if same else run.evaluations.get(f"{name}-guidance-{scale:g}")


def _is_own_guidance(run: Run) -> bool:
    """Whether the base model's best guidance in the summary is that of its own evaluation."""
    scale = run.block("base_best_guidance").get("guidance_scale")
    return run.base is not None and scale is not None and scale == run.base.guidance_scale
