"""Before and after training: the base evaluation, the final one, `summary.json`, an iteration's line."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.display.board import HEADLINES
from flowrl.display.console import log, verdict
from flowrl.evaluation import best_of, copying, diversity, moved, sharpness
from flowrl.evaluation.held_out import RunPrompts
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import accuracy, difference, format_interval, summary, win_rate
from flowrl.run.best_guidance import Chosen, GuidanceSearch, heaviest, level, saved
from flowrl.run.folder import RunFolder
from flowrl.run.guarding import Guarding
from flowrl.run.session import Session
from flowrl.run.state import Clock
from flowrl.run.status import GUARDED

Levels = tuple[Evaluation, Chosen | None]
"""A model at the evaluation's guidance, and at its best guidance; None: not sought."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What happened in a run that has come to its end."""

    folder: Path
    """Of the run; the trained weights are in its `adapter/`."""
    summary: dict[str, Any]
    """Contents of its `summary.json`."""


After = Callable[[Finished], object]
"""Something that comes after a run, such as its report; its folder is complete and stays locked."""


class Report:
    """Compares a run's result with the untrained model, in the evaluations and the summary of its folder."""

    def __init__(self, session: Session, folder: RunFolder, clock: Clock, guard: Guarding) -> None:
        self.session, self.folder, self.clock, self.guard = session, folder, clock, guard
        self.prompts, self.watched = session.parts.data.prompts, session.parts.scorers.watched
        self.search = GuidanceSearch(session) if session.config.eval.best_guidance else None

    @property
    def metric(self) -> str | None:
        """The output with the largest weight: the first share of the heaviest reward; None without a reward."""
        entry = heaviest(self.session.parts.scorers)
        return None if entry is None else next(iter(entry.shares()))

    def _saved(self, tag: str) -> Evaluation | None:
        """An evaluation in the run folder, if it was made as it would be now."""
        session, file = self.session, self.folder.path / "eval" / f"{tag}.json"
        return saved(session, session.parts.evaluator, file, session.eval_guidance)

    def _at_best(self, own: Evaluation) -> Levels:
        return own, None if self.search is None else self.search(own, self.folder.path)

    def before(self) -> Levels:
        """Evaluate the untrained model, unless the run folder has that; called before a checkpoint is restored."""
        base = self._saved("base")
        if base is not None:  # with other preview prompts than today's, perhaps
            self.session.preview_base()
            return self._at_best(base)
        # The base is its own reference, so it has no preference.
        base = self.session.evaluate("base", iteration=0, pairs=False)
        if self.metric is not None and base.prompts:
            on = self.prompts.counted(len(base.prompts))
            log.info("base: %s %s on %s", self.metric, format_estimate(summary(base)[self.metric]), on)
        return self._at_best(base)

    def announce(self, before: Levels) -> None:
        """Write the summary of a run under way."""
        self._write("running", before, None)

    def finish(self, before: Levels) -> Finished:
        """Evaluate the result, write the summary, log the verdict, and return what happened."""
        self.session.world.together(self.folder.require_own)
        session, tuned = self.session, self._saved("tuned")
        if tuned is None or tuned.iteration != session.iteration:
            tuned = session.evaluate("tuned")
        result = self._write(GUARDED if self.guard.ended else "finished", before, self._at_best(tuned))
        if session.world.main:
            self.guard.say_end()
            _log_verdict(self.metric, result, self.prompts, session)
        return Finished(self.folder.path, result)

    def _write(self, status: str, before: Levels, after: Levels | None) -> dict[str, Any]:
        rows, tie = self.guard.judged, self.session.config.eval.tie
        whole, best = before[0], before[1]
        base = whole if rows is None else whole.of(rows)
        watched = () if self.watched is None else self.watched.distinct
        lower = [name for e in watched for name in e.reward.card.lower]
        result: dict[str, Any] = {
            "status": status,
            "iterations": self.guard.ended or self.session.iteration,
            "seconds": round(self.clock.seconds, 1),
            **self.prompts.facts(),
            "primary": self.metric,
            "lower_is_better": lower,
            "tie": tie,
            "base": summary(base),
            "base_best_guidance": level(base),
        }
        tuned = None if after is None else after[0] if rows is None else after[0].of(rows)
        if after is not None and tuned is not None:
            result |= {"tuned": summary(tuned), "difference": difference(base, tuned)}
            result["win_rate"] = {
                name: win_rate(whole, after[0], name, higher_is_better=name not in lower, tie=tie, rows=rows)
                for name in result["difference"]
            }
            result["best_of"] = best_of.facts(base, tuned, self.session.parts.scorers.trained)
            result["diversity"] = diversity.facts(base, tuned)
            if tuned.agreement is not None:
                result["implicit_accuracy"] = accuracy(tuned.agreement)
        if self.search is not None and best is not None:
            result |= self.search.entries(best, after and after[1], rows)
        result |= {"sharpness": sharpness.facts(base, tuned), "copy_index": copying.facts(base, tuned)}
        result |= self.guard.summary()
        if self.session.world.main:
            if tuned is not None:
                place = self.folder.path / "eval"
                found = moved.measure(moved.saved_pairs(place / base.tag, place / tuned.tag, range(len(base.prompts))))
                result["moved"] = None if found is None else asdict(found)
            self.folder.write_json("summary.json", result)
        return result


def row_line(row: dict[str, Any], iterations: int, prompts: RunPrompts) -> str:
    """The metrics row of an iteration, of a run with `iterations`, in one line for the terminal."""
    parts = [f"iteration {row['iteration']}/{iterations}"]
    # Without rewards or pairs there is still a loss, but for an iteration without a readable image.
    parts += [f"{word} {row[name]:.3f}" for name, word in HEADLINES.items() if name in row][:1]
    parts += [format_mean(prompts, name, row[name]) for name in row if name.startswith("eval/")][:1]
    if "policy/clip_fraction" in row:
        parts.append(f"clip {row['policy/clip_fraction']:.2f}")
    if "advantage/dead_group_share" in row:
        parts.append(f"dead groups {row['advantage/dead_group_share']:.2f}")
    parts.append(f"{row['time/iteration_s']:.2f} s")
    for name, text in (("reward/masked", "samples masked"), ("pairs/unreadable", "pairs unreadable")):
        if row.get(name):
            parts.append(f"{row[name]} {text}")
    return "  ".join(parts)


def _log_verdict(metric: str | None, result: dict[str, Any], prompts: RunPrompts, session: Session) -> None:
    """The lines of the end."""
    trained, first = moved.trained(session.resolved.tree()), session.config.eval.verdict
    found = None if result["moved"] is None else moved.Moved(**result["moved"])
    lines: list[str] = []
    if metric is not None and metric in result["difference"]:
        on, best = prompts.on, best_lines(metric, result, prompts.on)
        lines = [
            *(best if first == "best" else ()),
            f"base{on}  {metric} {format_estimate(result['base'][metric])}",
            f"tuned{on} {metric} {format_estimate(result['tuned'][metric])}",
            f"paired difference{on} {format_estimate(result['difference'][metric], signed=True)}",
            format_win_rate(metric, result["win_rate"][metric], on, session.noun),
            *(best if first == "same" else ()),
            moved.sentence(found, trained),
        ]
    shown = (("sharpness", sharpness), ("copy_index", copying))
    lines += [part.sentence(result[name]) for name, part in shown if result[name] is not None]
    if lines and prompts.name == "training prompts":
        lines.append(prompts.remark)
    if "implicit_accuracy" in result:
        lines.append(format_accuracy(result["implicit_accuracy"]))
    for line in lines:
        verdict.info("%s", line)


def best_lines(metric: str, result: Mapping[str, Any], on: str) -> list[str]:
    """Base, tuned and their paired difference, each at its best guidance; [] where none was sought."""
    if "tuned_best_guidance" not in result:
        return []
    base, tuned = result["base_best_guidance"], result["tuned_best_guidance"]
    change = format_estimate(result["difference_best_guidance"][metric], signed=True)
    return [
        f"base with its best CFG {base['guidance_scale']:g}{on}  {metric} {format_estimate(base[metric])}",
        f"tuned with its best CFG {tuned['guidance_scale']:g}{on} {metric} {format_estimate(tuned[metric])}",
        f"paired difference{on}, each with its best CFG {change}; {result['guidance_search']['how']}",
    ]


def format_accuracy(value: dict[str, float]) -> str:
    """The network's accuracy on held-out pairs, in words."""
    return f"implicit accuracy on held-out pairs {format_estimate(value)}"


def format_mean(prompts: RunPrompts, key: str, value: float) -> str:
    """An evaluation's mean in a row's line: on held-out pairs, or on the evaluated prompts."""
    what = "" if key == "eval/implicit_accuracy" else prompts.on
    return f"{key.removeprefix('eval/')}{what} {value:.3f}" if what else f"held-out {key[5:]} {value:.3f}"


def format_win_rate(metric: str, value: Mapping[str, Any], on: str = "", noun: str = "image") -> str:
    """A win rate of images or videos and its rule in words; `on` names its prompts unless they are held out."""
    rule = moved.rule(value, noun)
    if not value["n"] + value["ties"]:
        return f"win rate{on} by {metric}: none, no {noun} has a score in both evaluations"
    if not value["n"]:
        return f"win rate{on} by {metric}: none, since all {value['ties']} {noun}s are tied ({rule})"
    return (
        f"win rate{on} by {metric}: {value['rate']:.1%} of {value['n']} {noun}s that are not tied "
        f"({format_interval(value, '.1%')}); {value['ties']} ties, {value['tie_rate']:.1%} ({rule})"
    )


def format_estimate(value: dict[str, float], *, signed: bool = False) -> str:
    """A mean with its interval and its number of prompts, in words."""
    sign = "+" if signed else ""
    return f"{value['mean']:{sign}.4f} ({format_interval(value, f'{sign}.4f')}, n = {value['n']})"
