"""Keys in which the configurations of runs differ."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from flowrl.apps.gallery.results import DASH
from flowrl.apps.gallery.runs import Run
from flowrl.apps.plain_text import Named, ends

_OWN = ("name", "output", "seed")
"""Keys that runs of one recipe may differ in."""


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(dotted key, its value in each run) of the keys that differ, without name, output and seed; a dash: no such key.

    An entry that only some runs have as a mapping, such as `data.pairs`, is one key in the others. Absolute paths
    are shown by their ends.
    """
    flat = [dict(leaves(_recipe(run))) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key, DASH) for one in flat]) for key in keys]
    rows = [(key, values) for key, values in rows if len(set(values)) > 1]
    paths = sorted({value for _, values in rows for value in values if value.startswith("/")})
    shown = dict(zip(paths, ends(paths), strict=True))
    return [(key, [shown.get(value) or Named({})(value) for value in values]) for key, values in rows]


def recipe_of(run: Run) -> str:
    """The resolved configuration without seed, name and output: equal for the seeds of one recipe."""
    return json.dumps(_recipe(run), sort_keys=True, default=str)


def _recipe(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in _OWN}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of the leaves of nested mappings and lists of mappings; other lists are one leaf.

    >>> list(leaves({"a": {"b": 1}, "c": [{"d": None}], "e": [1, 2]}))
    [('a.b', '1'), ('c.0.d', 'null'), ('e', '1, 2')]
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        pairs = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        pairs = list(enumerate(tree))
    for key, value in pairs:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    if pairs:
        return
    yield prefix, _text(tree)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value) or "[]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
