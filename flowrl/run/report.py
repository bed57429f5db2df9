"""Before and after training: the base evaluation, the final one, `summary.json`, an iteration's line."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.display.board import HEADLINES
from flowrl.display.console import log, verdict
from flowrl.evaluation import moved
from flowrl.evaluation.held_out import RunPrompts
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import accuracy, difference, summary, win_rate
from flowrl.run.folder import RunFolder
from flowrl.run.guarding import Guarding
from flowrl.run.session import Session
from flowrl.run.state import Clock
from flowrl.run.status import GUARDED
from flowrl.scoring.weighted import WeightedReward

_GUIDANCE_PROMPTS = 128
"""Prompts on which candidates for the base's best CFG are compared; the best one is then evaluated in full."""

Before = tuple[Evaluation, Evaluation | None]
"""The untrained model at the evaluation's guidance, and at its best guidance; None: the same, or not sought."""


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

    def _heaviest(self) -> WeightedReward | None:
        """The evaluated reward with the largest weight: a trained one, else of `eval.rewards`; None without any."""
        trained, watched = self.session.rewards, self.watched
        entries = (trained and trained.evaluated) or (watched.entries if watched is not None else ())
        return max(entries, key=lambda e: abs(e.weight), default=None)

    @property
    def metric(self) -> str | None:
        """The output with the largest weight: the first share of the heaviest reward; None without a reward."""
        entry = self._heaviest()
        return None if entry is None else next(iter(entry.shares()))

    def _saved(self, tag: str, guidance_scale: float) -> Evaluation | None:
        """An evaluation in the run folder, if it was made as it would be now."""
        session, evaluator = self.session, self.session.parts.evaluator
        file = self.folder.path / "eval" / f"{tag}.json"
        if not file.is_file():
            return None
        result, prompts = Evaluation.load(file), tuple(prompt.text for prompt in evaluator.prompts)
        now = replace(
            result,
            guidance_scale=guidance_scale,
            num_inference_steps=session.eval_steps,
            prompts=prompts,
            seeds=evaluator.options.samples_per_prompt,
            made_with=dict(evaluator.made_with),
        )
        unlike = now.unlike(result)
        if unlike:
            log.warning("%s was made with other values of: %s; it is made again", file, ", ".join(unlike))
        return None if unlike else result

    def before(self, *, resumed: bool) -> Before:
        """Evaluate the untrained model, unless the run folder has that; called before a checkpoint is restored."""
        base = self._saved("base", self.session.eval_guidance)
        kept = base is not None
        if base is None:
            base = self._of_base("base", self.session.eval_guidance)
            if self.metric is not None and base.prompts:
                on = self.prompts.counted(len(base.prompts))
                log.info("base: %s %s on %s", self.metric, format_estimate(summary(base)[self.metric]), on)
        if kept:  # with other preview prompts than today's, perhaps
            self.session.preview_base()
        wanted = self.session.config.eval.best_guidance
        return base, (self._best_guidance(base, wanted, sought=resumed and kept) if wanted else None)

    def _of_base(self, tag: str, guidance_scale: float, **options: Any) -> Evaluation:
        # The base is its own reference, so it has no preference.
        return self.session.evaluate(tag, iteration=0, guidance_scale=guidance_scale, pairs=False, **options)

    def _best_guidance(self, base: Evaluation, wanted: Sequence[float], *, sought: bool) -> Evaluation | None:
        """The base at the best of the `wanted` scales; `sought`: an earlier call of the program has searched."""
        entry, folder, world = self._heaviest(), self.folder.path / "eval", self.session.world
        assert entry is not None  # flowrl/config/checks.py
        metric = next(iter(entry.shares()))
        stale = sorted(folder.glob("base-guidance-*.json"))
        for file in stale:
            result = self._saved(file.stem, Evaluation.load(file).guidance_scale)
            if result is not None:
                return result
        if sought and not stale:  # the base's own scale is its best
            return None
        world.barrier()  # all processes have read them
        for file in stale if world.main else ():
            file.unlink()
        means = {base.guidance_scale: float(base.scores[metric][:_GUIDANCE_PROMPTS].mean())}
        trials: dict[float, Evaluation] = {}
        for wish in wanted:
            if wish not in means:
                # Its images are in their place, where it turns out to be the best.
                options = {"limit": _GUIDANCE_PROMPTS, "save": "images", "tree": False}
                trials[wish] = self._of_base(f"base-guidance-{wish:g}", wish, **options)
                means[wish] = float(trials[wish].scores[metric].mean())
        better = entry.reward.card.prefers_more(metric)
        scale = (max if better else min)(means, key=lambda s: means[s])
        log.info("base by CFG%s: %s", self.prompts.on, ", ".join(f"{s:g}: {m:.3f}" for s, m in sorted(means.items())))
        for other in trials.keys() - {scale} if world.main else ():
            shutil.rmtree(folder / trials[other].tag, ignore_errors=True)
        if scale == base.guidance_scale:
            return None
        # Trees have the guidance of training: the tree of the base is there already.
        return self._of_base(trials[scale].tag, scale, tree=False, known=trials[scale])

    def announce(self, before: Before) -> None:
        """Write the summary of a run under way."""
        self._write("running", *before, None)

    def finish(self, before: Before) -> Finished:
        """Evaluate the result, write the summary, log the verdict, and return what happened."""
        self.session.world.together(self.folder.require_own)
        session, tuned = self.session, self._saved("tuned", self.session.eval_guidance)
        if tuned is None or tuned.iteration != session.iteration:
            tuned = session.evaluate("tuned")
        result = self._write(GUARDED if self.guard.ended else "finished", *before, tuned)
        if session.world.main:
            self.guard.say_end()
            _log_verdict(self.metric, result, before[1], self.prompts, moved.trained(session.resolved.tree()))
        return Finished(self.folder.path, result)

    def _write(
        self, status: str, base: Evaluation, best: Evaluation | None, tuned: Evaluation | None
    ) -> dict[str, Any]:
        whole, rows, tie = (base, tuned), self.guard.judged, self.session.config.eval.tie
        if rows is not None:
            base, best, tuned = base.of(rows), best and best.of(rows), tuned and tuned.of(rows)
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
        }
        rival = best or base
        result["base_best_guidance"] = summary(rival) | {"guidance_scale": rival.guidance_scale}
        if tuned is not None and whole[1] is not None:
            result |= {"tuned": summary(tuned), "difference": difference(base, tuned)}
            result["win_rate"] = {
                name: win_rate(whole[0], whole[1], name, higher_is_better=name not in lower, tie=tie, rows=rows)
                for name in result["difference"]
            }
            if tuned.agreement is not None:
                result["implicit_accuracy"] = accuracy(tuned.agreement)
        result |= self.guard.summary()
        if self.session.world.main:
            if tuned is not None:
                place = self.folder.path / "eval"
                found = moved.measure(moved.saved_pairs(place / base.tag, place / tuned.tag, range(len(base.prompts))))
                result["moved"] = None if found is None else found.plain()
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


def _log_verdict(
    metric: str | None, result: dict[str, Any], best: Evaluation | None, prompts: RunPrompts, trained: str
) -> None:
    """The lines of the end; `trained`: what was trained, as of `moved.trained`."""
    found = None if result["moved"] is None else moved.Moved(**result["moved"])
    if metric is not None and metric in result["difference"]:
        on = prompts.on
        verdict.info("base%s  %s %s", on, metric, format_estimate(result["base"][metric]))
        if best is not None:
            rival = format_estimate(result["base_best_guidance"][metric])
            verdict.info("base with its best CFG %g%s  %s %s", best.guidance_scale, on, metric, rival)
        verdict.info("tuned%s %s %s", on, metric, format_estimate(result["tuned"][metric]))
        verdict.info("paired difference%s %s", on, format_estimate(result["difference"][metric], signed=True))
        verdict.info("%s", format_win_rate(metric, result["win_rate"][metric], on, found.noun if found else "image"))
        verdict.info("%s", moved.sentence(found, trained))
        if prompts.name == "training prompts":
            verdict.info("%s", prompts.remark)
    if "implicit_accuracy" in result:
        verdict.info("%s", format_accuracy(result["implicit_accuracy"]))


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


def format_interval(value: Mapping[str, Any], form: str) -> str:
    """The interval of an estimate in words; one prompt alone has none."""
    low, high = value["low"], value["high"]
    return "no interval" if math.isnan(low) else f"95 % interval {low:{form}} to {high:{form}}"
