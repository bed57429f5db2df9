"""GenEval: objects, numbers, colours and places that a prompt names, found by a detector.

553 prompts of six tasks, four images each, drawn anew by the benchmark's own rule: from COCO's classes with NumPy's
generator at seed 43, which gives its file byte for byte. Equal prompts are taken once:

    single_object 80    two_object 99    counting 80    colors 94    position 100    color_attr 100

The plurals are the benchmark's ("four benchs"). A task's accuracy is the mean over its images; the overall score is the
unweighted mean of the six, not the mean over images.

Source: arXiv:2310.11513; djghosh13/geneval:evaluation/evaluate_images.py, summary_scores.py and the rule of
prompts/create_prompts.py (MIT), written anew.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flowrl.apps.suites._reading import facts_of, keep_once, records_of, tables_of
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, refuse_path, score

SEED, DRAWS = 43, 100

CLASSES: list[str] = tables_of("geneval")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _record(tag: str, text: str, include: list[dict], exclude: list[dict] | None = None) -> dict:
    excluded = {} if exclude is None else {"exclude": exclude}
    return {"tag": tag, "include": include, **excluded, "prompt": f"a photo of {text}"}


def _object(name: str, count: int = 1, **more: object) -> dict:
    return {"class": name, "count": count, **more}


def draws(rng: np.random.Generator) -> Iterator[dict]:
    """All records in the benchmark's order, repeated ones included."""
    for index in rng.choice(len(CLASSES), size=len(CLASSES), replace=False):
        yield _record("single_object", _a(CLASSES[index]), [_object(CLASSES[index])])
    for _ in range(DRAWS):
        first, second = (CLASSES[i] for i in rng.choice(len(CLASSES), size=2, replace=False))
        yield _record("two_object", f"{_a(first)} and {_a(second)}", [_object(first), _object(second)])
    for _ in range(DRAWS):
        name, count = CLASSES[rng.choice(len(CLASSES))], int(rng.integers(2, 5))
        counted = [_object(name, count)], [_object(name, count + 1)]
        yield _record("counting", f"{NUMBERS[count]} {name}{'es' if name.endswith('s') else 's'}", *counted)
    # A coloured person is never asked for: of the classes, the first is left out.
    coloured = CLASSES[1:]
    for _ in range(DRAWS):
        name = coloured[rng.choice(len(coloured))]
        color = COLORS[rng.choice(len(COLORS))]
        yield _record("colors", f"{_a(color)} {name}", [_object(name, color=color)])
    for _ in range(DRAWS):
        first, second = (CLASSES[i] for i in rng.choice(len(CLASSES), size=2, replace=False))
        relation = RELATIONS[rng.choice(len(RELATIONS))]
        placed = [_object(second), _object(first, position=[relation, 0])]
        yield _record("position", f"{_a(first)} {relation} {_a(second)}", placed)
    for _ in range(DRAWS):
        first, second = (coloured[i] for i in rng.choice(len(coloured), size=2, replace=False))
        one, two = (COLORS[i] for i in rng.choice(len(COLORS), size=2, replace=False))
        both = [_object(first, color=one), _object(second, color=two)]
        yield _record("color_attr", f"{_a(one)} {first} and {_a(two)} {second}", both)


def lines() -> list[str]:
    """Lines of the benchmark's file, evaluation_metadata.jsonl: each distinct record once."""
    return list(dict.fromkeys(json.dumps(record) for record in draws(np.random.default_rng(SEED))))


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
