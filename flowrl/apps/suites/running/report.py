"""The result of a suite as table.md and result.json, and on the screen."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.apps.suites.running.comparison import compare, markdown, plain, unlike
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.options import Options
from flowrl.apps.suites.running.runner import Task, rows_of
from flowrl.core.files import json_ready, write_atomically
from flowrl.data.prompts import distinct_numbers
from flowrl.evaluation import moved
from flowrl.evaluation.suite import Row, Table, outputs_of
from flowrl.statistics.repeats import noise_floor

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
