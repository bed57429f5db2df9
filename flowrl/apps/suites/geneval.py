"""GenEval: objects, numbers, colours and places that a prompt names, found by a detector.

553 prompts of six tasks, four images each. A task's accuracy is the mean over its images; the overall score is the
unweighted mean of the six, not the mean over images.

Source: arXiv:2310.11513; djghosh13/geneval:evaluation/evaluate_images.py, summary_scores.py.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._reading import facts_of, keep_once, records_of
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, refuse_path, score

LEVEL = "tested"
FACTS = facts_of("geneval", LEVEL)
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
_OUTPUTS = ("correct", "geneval_official")
"""Scores by the official rule: of the official evaluator, of the reward."""
_PLACE = re.compile(r"(\d{5})/samples/(\d+)\.png$")


def items(path: Path | None) -> list[Item]:
    """The prompts, in the order of the benchmark's file; an id is the number of the line, 00000 to 00552.

    Raises ConfigError: a path that is not that of the benchmark's own file.
    """
    from flowrl.apps.suites._geneval_prompts import lines

    own = lines()
    if path is None or not path.is_file() or path.read_bytes().split() != "\n".join(own).encode().split():
        refuse_path(path, "geneval")
    records = [json.loads(text) for text in own]
    return [Item(f"{number:05d}", record["prompt"], record, (record["tag"],)) for number, record in enumerate(records)]


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Accuracy of each task, their mean, and the share of prompts of which any image is correct."""
    found = [name for name in _OUTPUTS if any(name in row.scores for row in rows)]
    output = found[0] if found else chosen_output(rows, _OUTPUTS[1])
    value = score(output)
    official = output in _OUTPUTS
    bounds = (0.0, 1.0) if official else None
    tasks = by_tag(rows, items, TASKS)
    lines = [line(task, [group], value, output=output, bounds=bounds) for task, group in tasks.items()]
    overall = "overall" if len(tasks) == len(TASKS) else f"overall of {len(tasks)} tasks"
    lines.append(line(overall, list(tasks.values()), value, output=output, bounds=bounds))
    name = "correct images" if official else "all images"
    lines.append(line(name, [rows], value, output=output, bounds=bounds))
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(row.id, []).append(row)
    best = [_best(own, output, official=official) for own in of.values()]
    name = "prompts with a correct image" if official else "best image of each prompt"
    lines.append(line(name, [best], value, output=output, bounds=bounds))
    return Table(tuple(lines), overall)


def _best(rows: Sequence[Row], output: str, *, official: bool) -> Row:
    """The best image of a prompt; one without a score where an image without may be the correct one."""

    def rank(row: Row) -> float:
        own = row.scores.get(output)
        # Below a score of any judge, and between wrong and correct.
        return (0.5 if official else -math.inf) if own is None else own

    return max(rows, key=rank)


def layout(item: Item, k: int) -> str:
    return f"{item.id}/samples/{k:05d}.png"


def extras(items: Sequence[Item]) -> dict[str, str]:
    return {f"{item.id}/metadata.jsonl": json.dumps(item.metadata) + "\n" for item in items}


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The lines that `evaluate_images.py --outfile FILE` writes: `filename` and `correct` of each image.

    Raises ConfigError: another file, a sample twice, or one that is neither correct nor not.
    """
    result: dict[tuple[str, int], dict[str, float | None]] = {}
    for where, record in records_of(path, ("filename", "correct")):
        place = _PLACE.search(str(record["filename"]).replace("\\", "/"))
        if record["correct"] not in (0, 1):  # the text "False" is not nothing
            raise ConfigError(
                f"{where}: correct={record['correct']!r} must be true or false; give the evaluator's file"
            )
        key = (place[1], int(place[2])) if place else (str(record["filename"]), 0)
        keep_once(result, key, {"correct": float(bool(record["correct"]))}, where)
    return result
