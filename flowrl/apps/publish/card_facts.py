"""What a model card says about a run: its data, settings, rewards, numbers and limits, as escaped text."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.apps.gallery import guard, results
from flowrl.apps.gallery.facts import seconds
from flowrl.apps.gallery.results import Estimate, Metric
from flowrl.apps.gallery.runs import Run, value_at
from flowrl.apps.plain_text import Named, escaped
from flowrl.core import registry
from flowrl.core.errors import Fault
from flowrl.display.units import duration

_FEW = 50
"""Prompts below which the card calls the data small; `flowrl.statistics` takes wider intervals there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A run, the names of its paths, and its metrics."""

    run: Run
    named: Named
    metrics: list[Metric]
    estimates: dict[str, dict[str, Estimate]]

    @classmethod
    def of(cls, run: Run) -> "Facts":
        metrics = results.metrics_of(run)
        return cls(run, Named(run.config), metrics, {m.name: results.estimates_of(run, m) for m in metrics})

    def say(self, text: object) -> str:
        """Text for Markdown, without the folders of its paths."""
        return escaped(self.named(str(text)))

    def at(self, *path: str) -> Any:
        """A value of the configuration; None if there is none."""
        return value_at(self.run.config, *path)

    @property
    def learned_noise(self) -> bool:
        return self.at("algorithm", "name") == "find"

    @property
    def known(self) -> list[Metric]:
        """Metrics of both the base and the tuned model."""
        return [
            m for m in self.metrics if self.estimates[m.name]["tuned"].known and self.estimates[m.name]["base"].known
        ]


def method(facts: Facts) -> tuple[str, list[str]]:
    """(the method in words with its source, arXiv ids of its papers)."""
    name, path = facts.at("algorithm", "name"), facts.at("algorithm", "path")
    if path or not name:
        return f"a method of the user's own file, {facts.say(Path(str(path)).name)}", []
    try:
        text = registry.load("algorithms", str(name)).__doc__ or ""
    except Fault:  # a method of another program
        return facts.say(name), []
    first, _, rest = " ".join(text.split()).partition(". ")
    source = rest.rpartition("Source: ")[2] if "Source: " in rest else ""
    words = facts.say(first.partition(" 1. ")[0].rstrip(".: "))
    return f"{words} ({facts.say(source.rstrip('.'))})" if source else words, re.findall(r"\b\d{4}\.\d{5}\b", source)


def training(facts: Facts) -> list[tuple[str, str]]:
    """(label, text) of the rows about data, settings, hardware and time."""
    run, say = facts.run, facts.say
    steps, guidance = facts.at("rollout", "num_inference_steps"), facts.at("rollout", "guidance_scale")
    sampler = [facts.at("rollout", "sampler", "name"), f"{steps} steps" if steps else ""]
    sampler += [f"guidance {guidance:g}" if isinstance(guidance, int | float) else ""]
    prompts, size = facts.at("rollout", "prompts_per_iteration"), facts.at("rollout", "group_size")
    rank, alpha = facts.at("model", "lora", "rank"), facts.at("model", "lora", "alpha")
    trained = f"a LoRA of rank {rank}, alpha {alpha:g}" if rank else "all weights of the denoiser"
    if facts.learned_noise:
        trained = "the initial noise of the run's own prompts; the network is the base's"
    updates = facts.at("optim", "updates_per_iteration") or 1
    optimum = f"learning rate {facts.at('optim', 'learning_rate')}, {updates} updates an iteration"
    known = {
        "Method": method(facts)[0],
        "Trained": trained,
        "Data": _data(facts),
        "Iterations": f"{run.iterations} of {facts.at('iterations')}",
        "Samples": ", ".join(say(part) for part in sampler if part),
        "Group": f"{prompts} prompts an iteration, {size} samples of each" if prompts and size else "",
        "Optimizer": say(optimum) + (f", EMA {say(decay)}" if (decay := facts.at("optim", "ema", "decay")) else ""),
        "Evaluation": say(results.settings(run.after)) if run.after else "",
        "Seed": say(facts.at("seed")),
        "Hardware": say(run.provenance.get("hardware") or ""),
        "Time": duration(seconds(run)) if run.rows else "",
    }
    return [(label, text) for label, text in known.items() if text]


def _data(facts: Facts) -> str:
    """Prompts and pairs, and what is held out."""
    run, say = facts.run, facts.say
    parts: list[str] = []
    pairs = value_at(run.provenance, "data", "pairs")
    if isinstance(pairs, dict) or facts.at("data", "pairs"):
        source = facts.at("data", "pairs", "path")
        usable = pairs.get("usable") if isinstance(pairs, dict) else None
        parts.append((f"{usable} " if usable is not None else "") + f"preference records of {say(source)}")
    if facts.at("data", "prompts"):
        count = run.summary.get("trained_prompts")
        parts.append((f"{count} " if count else "") + f"prompts of {say(facts.at('data', 'prompts'))}")
    held_out = run.summary.get("held_out")
    if isinstance(held_out, dict):
        parts.append(f"{held_out.get('prompts')} prompts held out ({say(held_out.get('source'))})")
    elif run.summary.get("evaluated_on") == "training prompts":
        parts.append("no prompts held out")
    return "; ".join(parts)


def rewards(facts: Facts) -> list[dict[str, str]]:
    """Rows of the rewards: those that were trained on, then those that were only watched."""
    roles = {"trained on": facts.at("rewards") or [], "watched": facts.at("eval", "rewards") or []}
    return [_reward(facts, entry, role) for role, entries in roles.items() for entry in entries]


def _reward(facts: Facts, entry: dict[str, Any], role: str) -> dict[str, str]:
    name, path = entry.get("name"), entry.get("path")
    licence, source = "not declared", "a file of the user's own"
    if path is None and name in registry.names("rewards"):
        card = registry.load("rewards", str(name)).CARD
        licence, source = card.licence, card.source
    weight = entry.get("weight", 1.0)
    return {
        "name": facts.say(name if path is None else Path(str(path)).name),
        "weight": f"{weight:g}" if role == "trained on" and isinstance(weight, int | float) else "",
        "role": role,
        "licence": facts.say(licence),
        "source": facts.say(source),
    }


def table(facts: Facts) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, rows) of the numbers; the best guidance has a column where it was sought."""
    shown = facts.known
    blocks = [b for b in results.BLOCKS if "best" not in b or any(facts.estimates[m.name][b].known for m in shown)]
    rows: list[dict[str, Any]] = []
    for metric in shown:
        estimates = facts.estimates[metric.name]
        row = results.table_row(facts.run, metric, estimates)
        cells = [
            cell["text"] + (f" ({cell['interval']})" if cell["interval"] else "")
            for cell in (row["cells"][block] for block in blocks)
        ]
        better = "lower is better" if metric.sign < 0 else "higher is better"
        rows.append({"label": f"{facts.say(metric.label)}, {better}", "cells": cells, "prompts": row["prompts"]})
    return blocks, rows


def on(facts: Facts) -> str:
    """The prompts and seeds of the numbers, in a sentence."""
    evaluation = facts.run.after
    if evaluation is None:
        return ""
    what = facts.run.subject.name.removeprefix("no ")
    seeds = len(evaluation.seeds)
    count = facts.run.block("guard")["judged_prompts"] if guard.chose(facts.run) else evaluation.num_distinct()
    return f"On {count} {what}, {seeds} fixed {'seed' if seeds == 1 else 'seeds'} each."


def verdicts(facts: Facts) -> list[str]:
    """The verdict on the primary metric, then the remarks of the report."""
    if not facts.metrics:
        return ["no reward was evaluated."]
    first = facts.metrics[0]
    sentence, _ = results.verdict(facts.run, first, facts.estimates[first.name])
    remarks = [text for _, text in results.remarks(facts.run, facts.metrics, facts.estimates)]
    return [facts.say(text) for text in (sentence[:1].upper() + sentence[1:] + ".", *remarks)]


def limits(facts: Facts) -> dict[str, Any]:
    """What the template says the numbers do not show, and what nobody checked."""
    run, watched = facts.run, facts.at("eval", "rewards") or []
    unwatched, trained = bool(facts.at("rewards")) and not watched, run.summary.get("trained_prompts")
    changes = {metric: facts.estimates[metric.name]["difference"] for metric in facts.known}
    shares = {metric: _unscored(facts, metric) for metric in facts.known}
    return {
        "few": _FEW,
        "evaluated": run.after.num_distinct() if run.after and run.after.prompts else 0,
        "trained_prompts": trained if isinstance(trained, int) else 0,
        "unwatched": unwatched,
        "worse": {m: e for m, e in changes.items() if not unwatched and m.sure_tone(e) == "worse"},
        "unscored": {metric: 100 * share for metric, share in shares.items() if share > 0},
        "unsafe": not any(entry.get("name") == "safety" for entry in watched),
    }


def _unscored(facts: Facts, metric: Metric) -> float:
    """Share of (prompt, seed) pairs without a score before or after; NaN: no pairs."""
    before, _ = results.paired(facts.run, metric.name)
    return 1 - float((before == before).mean()) if before.size else math.nan
