"""The result of a suite, of one model or of a base and a tuned one, as table.md and result.json, and on the screen."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from flowrl.apps.suites.running.folder import ResultsFolder, differences
from flowrl.apps.suites.running.options import Options
from flowrl.apps.suites.running.runner import Task, rows_of
from flowrl.core.files import json_ready, write_atomically
from flowrl.data.prompts import distinct_numbers
from flowrl.evaluation import moved
from flowrl.evaluation.suite import Row, Suite, Table, outputs_of
from flowrl.evaluation.suite_intervals import Part, stratified, together
from flowrl.statistics.paired import TIE_SHARE, flip_tests, holm, margin, outcomes
from flowrl.statistics.repeats import noise_floor


@dataclass(frozen=True, slots=True)
class Change:
    """A line of the tuned model against the same line of the base: the same prompts and noise, paired."""

    name: str
    mean: float
    """Mean of tuned - base, weighted as the line is."""
    low: float
    high: float
    win_rate: float
    """Share of values on which the tuned model is better, a tie counting half; likewise weighted. A tie are values at
    most `TIE_SHARE` of the std of the line's values of the base apart; where all are 0 or 1, equal ones."""
    win_low: float
    win_high: float
    p: float
    """Two-sided, of a sign-flip test over prompts."""
    p_holm: float
    """The same, corrected by Holm's rule over all lines."""


def compare(base: Table, tuned: Table, lower_is_better: Collection[str] = ()) -> list[Change]:
    """The changes of the lines that are means of the same parts in both tables, in the tuned table's order. Both are of
    the same suite, prompts and noise; `lower_is_better`: scores of which less is better, for the win rates.
    """
    known = {line.name: line for line in base.lines}
    pairs = [
        (known[line.name], line)
        for line in tuned.lines
        if line.parts
        and line.name in known
        and [part.name for part in known[line.name].parts] == [part.name for part in line.parts]
    ]
    differences = [paired(before.parts, after.parts, lambda a, b: b - a) for before, after in pairs]
    columns = [shares(parts) for parts in differences]
    prompts = list(dict.fromkeys(prompt for column in columns for prompt in column))
    table = np.asarray([[column.get(prompt, np.nan) for prompt in prompts] for column in columns])
    p = flip_tests(table, np.arange(len(prompts))) if len(prompts) else np.ones(len(pairs))
    result = []
    for (before, after), parts, one, adjusted in zip(pairs, differences, p, holm(p.tolist()), strict=True):
        tie_eps = margin(pooled(before.parts), pooled(after.parts), TIE_SHARE)
        more = after.output not in lower_is_better
        wins = paired(before.parts, after.parts, partial(outcomes, higher_is_better=more, tie_eps=tie_eps))
        width = None if after.bounds is None else after.bounds[1] - after.bounds[0]
        over = together if after.shared and len(parts) > 1 else stratified
        gain = over(parts, None if width is None else (-width, width))
        result.append(Change(after.name, *gain, *over(wins, (0.0, 1.0)), float(one), float(adjusted)))
    return result


def paired(
    base: Sequence[Part], tuned: Sequence[Part], value: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[Part, ...]:
    """Parts of `value(base's, tuned's)` of the values [K] of each prompt that both have; NaN where one of them is."""

    def of(before: tuple[float, ...], after: tuple[float, ...]) -> tuple[float, ...]:
        count = min(len(before), len(after))
        return tuple(value(np.asarray(before[:count]), np.asarray(after[:count])).tolist())

    return tuple(
        Part(
            {p: of(before.values[p], values) for p, values in after.values.items() if p in before.values}, after.weight
        )
        for before, after in zip(base, tuned, strict=True)
    )


def pooled(parts: Sequence[Part]) -> np.ndarray:
    """All values of the parts, [N]; NaN where there is none."""
    return np.asarray([value for part in parts for values in part.values.values() for value in values])


def shares(parts: Sequence[Part]) -> dict[str, float]:
    """Prompt -> its share of the weighted mean of the parts' means, which is the sum of all shares.

    {} where a part has no value: the mean of the others is another number.
    """
    total = math.fsum(part.weight for part in parts)
    result: dict[str, float] = {}
    for part in parts:
        count = sum(n for _, _, n in part.totals())
        if not count:
            return {}
        for prompt, value, _ in part.totals():
            result[prompt] = result.get(prompt, 0.0) + part.weight / total * value / count
    return result


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _interval(low: float, high: float) -> str:
    return "-" if math.isnan(low) or math.isnan(high) else f"{low:.4f} to {high:.4f}"


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]

    def text(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([text(titles), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(text, rows)])


def markdown(
    suite: Suite,
    tables: dict[str, Table],
    changes: Sequence[Change],
    note: str = "",
    moved: str = "",
    noise: Mapping[str, Mapping[str, float]] | None = None,
    pairs: str = "",
) -> str:
    """The page of a result: a table for each model (by its words), the changes, what differs from the protocol, `noise`
    of the judge by output, and a section about `pairs`; `moved` says how much the images of the two models differ.
    """
    rows = [
        (
            *(change.name, _number(change.mean), _interval(change.low, change.high)),
            *(_number(change.win_rate), _interval(change.win_low, change.win_high), _number(change.p_holm)),
        )
        for change in changes
    ]
    titles = ("line", "model - base", "95 % interval", "win rate", "95 % interval", "p (Holm)")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(Path(__file__).with_name("table.md.j2").read_text(encoding="utf-8")).render(
        facts=suite.facts,
        tables={name: table_text(table) for name, table in tables.items()},
        changes=_grid(titles, rows) if rows else "",
        share=f"{TIE_SHARE:g}",
        **{"note": note, "moved": moved, "noise": noise, "pairs": pairs, "number": _number},
    )


def unlike(headers: dict[str, dict[str, Any]]) -> str:
    """A sentence about settings in which the model and the base differ, which then are a part of every difference."""
    keys = ("pipeline", "steps", "guidance", "arguments", "dtype", "scheduler")
    if "base" not in headers:
        return ""
    before, after = ({key: headers[name]["made_with"].get(key) for key in keys} for name in ("base", "model"))
    found = differences(before, after)
    words = [one.replace(" was ", " (base ", 1).replace(", now ", ", model ", 1) + ")" for one in found]
    return f" Base and model differ in settings too: {'; '.join(words[:6])}." if words else ""


def table_text(table: Table) -> str:
    """The Markdown table of one model; the headline is marked."""
    rows = [
        (
            f"**{line.name}**" if line.name == table.headline else line.name,
            *(_number(line.mean), _interval(line.low, line.high)),
            *(str(line.n_prompts), f"{line.n_scored}/{line.n_images}"),
        )
        for line in table.lines
    ]
    return _grid(("line", "mean", "95 % interval", "prompts", "scored"), rows)


def plain(table: Table) -> dict[str, Any]:
    """A table for result.json."""
    names = ("name", "mean", "low", "high", "n_prompts", "n_images", "n_scored")
    lines = [(one.name, one.mean, one.low, one.high, one.n_prompts, one.n_images, one.n_scored) for one in table.lines]
    return {"headline": table.headline, "lines": [dict(zip(names, values, strict=True)) for values in lines]}


TABLE, RESULT = "table.md", "result.json"


def report(
    options: Options,
    task: Task,
    listed: int,
    folders: Mapping[str, ResultsFolder],
    pairs: tuple[dict[str, Any] | None, str],
) -> None:
    """Write table.md and result.json, and print the table; `listed` is the number of prompts before --limit.

    Exits with code 1 if no sample of a model is scored, with the judge's own reason.
    """
    suite = task.suite
    aggregate = suite.compat if options.judging.compat and suite.compat is not None else suite.aggregate
    tables: dict[str, Table] = {name: aggregate(rows_of(task, folder), task.items) for name, folder in folders.items()}
    headers = {name: folder.header for name, folder in folders.items()}
    lower = {name for judge in headers["model"]["judged_by"].values() for name in judge.get("less_is_better", ())}
    changes = compare(tables["base"], tables["model"], lower) if "base" in tables else []
    note = _note(options, task, listed, headers["model"]) + unlike(headers)
    named = {f"{name}: {options.models()[name]}": table for name, table in tables.items()}
    noise = _judge_noise(task, folders["base" if "base" in folders else "model"])
    change = _image_change(task, folders)
    text = markdown(suite, named, changes, note, change, noise, pairs[1].rstrip())
    result = {
        "suite": options.name,
        "settings": note,
        "differs": suite.facts.differs,
        "models": {name: {"target": options.models()[name], **plain(table)} for name, table in tables.items()},
        "changes": [dataclasses.asdict(one) for one in changes],
        "images": change,
        "judge_noise": noise,
        "pairs": pairs[0],
        "headers": headers,
    }
    write_atomically(options.folder / TABLE, text)
    write_atomically(options.folder / RESULT, json.dumps(json_ready(result), indent=1) + "\n")
    print(text)
    print(f"{options.folder / TABLE}, {options.folder / RESULT}")
    empty = [name for name, table in tables.items() if not any(line.n_scored for line in table.lines)]
    for name in empty:
        rows = rows_of(task, folders[name])
        reason = next((row.error for row in rows if row.error), "the judge gave NaN, which means: not scored")
        print(f"{name}: none of {len(rows)} samples is scored: {reason}", file=sys.stderr)
    if empty:
        raise SystemExit(1)


def _note(options: Options, task: Task, listed: int, header: dict[str, Any]) -> str:
    made, official = header["made_with"], task.suite.facts.num_prompts
    whole = f"the {official} official prompts" if listed == official else f"{listed} prompts (officially {official})"
    own = {str(entry["name"]) for entry in task.suite.entries(task.items) or ()} | {"official evaluator"}
    foreign = "" if own & set(header["judged_by"]) else ", which is not the suite's own: compare with nothing published"
    lora = "" if not options.loras else f", LoRA {', '.join(options.loras)}"
    return (
        f"{len(task.items)} of {whole}, {task.samples} {task.suite.facts.noun}{'s' if task.samples > 1 else ''} each; "
        f"{made['pipeline']}, {made['steps']} steps, guidance {made['guidance']}, {made['dtype']}, seed "
        f"{options.making.seed}{lora}. Judge: {', '.join(header['judged_by']) or 'none'}{foreign}."
    )


def _judge_noise(task: Task, folder: ResultsFolder) -> dict[str, dict[str, float]]:
    """Output -> what `noise_floor` says of it, of the same images judged twice (`--rejudge`); {}: they were once."""
    before, now = folder.judged_before(), rows_of(task, folder)
    if not before:
        return {}
    shape, groups = (len(task.items), task.samples), np.array(distinct_numbers([item.text for item in task.items]))

    def table(rows: Sequence[Row | None], name: str) -> np.ndarray:
        values = [math.nan if row is None or row.scores.get(name) is None else row.scores[name] for row in rows]
        return np.array(values, dtype=np.float64).reshape(shape)

    earlier = [before.get((item.id, k)) for item, k in task.all()]
    return {name: noise_floor(table(earlier, name), table(now, name), groups) for name in outputs_of(now)}


def _image_change(task: Task, folders: Mapping[str, ResultsFolder]) -> str:
    """How far the model's first images of the prompts are from the base's, in a sentence; "" without a base."""
    if "base" not in folders:
        return ""
    files = ((folders["base"].image(item, 0), folders["model"].image(item, 0)) for item in task.items)
    return moved.sentence(moved.measure(pair for pair in files if all(file.is_file() for file in pair)))
