"""GenEval's 553 benchmark prompts with their records, drawn anew by the benchmark's own rule.

The benchmark draws its prompts from COCO's classes with NumPy's generator at seed 43: the same draws in the same order
give its file byte for byte. Tasks and numbers of prompts, equal ones taken once:

    single_object 80    two_object 99    counting 80    colors 94    position 100    color_attr 100

The plurals are the benchmark's ("four benchs").

Source: arXiv:2310.11513; the rule of djghosh13/geneval:prompts/create_prompts.py (MIT), written anew.
"""

import json
from collections.abc import Iterator

import numpy as np

from flowrl.apps.suites._reading import tables_of

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
