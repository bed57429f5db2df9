"""ImgEdit-Bench: edits of nine types, three grades from 1 to 5 each.

The judge of a type grades how far the instruction was followed, how well the edit fits in, and what else was kept. The
score of an edit is the mean of the three; a type has the mean of its edits, the overall score the mean of the types.

Source: arXiv:2505.20275; PKU-YuanGroup/ImgEdit:Benchmark/Basic (basic_bench.py, step1_get_avgscore.py,
step2_typescore.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._reading import Scores, apart, facts_of, one_image, source_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.core.files import loads
from flowrl.core.strict import read_text
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, require_path, score

LEVEL = "experimental"
FACTS = facts_of("imgedit", LEVEL)
TYPES = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
_SAME = {"alter": "adjust"}
"""Types by the names that the list has for them -> the names of the paper and of the judge's texts."""
_LISTS = ("basic_edit.json", "singleturn.json")
_FORMS = f"the benchmark's list ({' or '.join(_LISTS)}) with its images beside it, or their folder"
_GRADE = re.compile(r"\s*[^:\n]+: *([1-5])\s*")


def _object(path: Path, what: str) -> dict[str, Any]:
    """The object of a .json. Raises ConfigError: it holds none, or a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
        if twice is not None:
            raise ConfigError(f"{what} {path}: {twice!r} occurs twice; keep one of the two")
        return dict(pairs)

    try:
        found = loads(read_text(path, what), object_pairs_hook=once)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{what} {path}: is not JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{what} {path}: must be an object with the benchmark's numbers as its keys")
    return found


def items(path: Path | None) -> list[Item]:
    """The edits in the order of the list, each with its source; an id is the number in the list.

    Raises ConfigError: no list, a record of another form, or an image that is missing.
    """
    given = require_path(path, "imgedit", FACTS, _FORMS)
    if given.is_dir():
        here = [given / name for name in _LISTS if (given / name).is_file()]
        if len(here) != 1:
            raise ConfigError(f"--prompts {given}: holds {len(here)} of {', '.join(_LISTS)}; name the one of them")
        given = here[0]
    result = []
    for number, record in _object(given, "--prompts").items():
        where = f"{given}, {number!r}"
        if not isinstance(record, dict) or not {"id", "prompt", "edit_type"} <= set(record):
            raise ConfigError(f"{where}: needs id, prompt and edit_type, got {str(record)[:80]}")
        kind = str(record["edit_type"])
        kind = _SAME.get(kind, kind)
        if kind not in TYPES:
            raise ConfigError(f"{where}: edit_type={kind!r} is none of {', '.join(TYPES)}")
        own = {"images": [source_of(record["id"], given.parent, where)], "record": record}
        result.append(Item(number, text_of(record["prompt"], where), own, (kind,)))
    return result


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """The mean of each type, of the types, and of all edits."""
    output = chosen_output(rows, "imgedit" if any("imgedit" in row.scores for row in rows) else "vlm_judge")
    bounds = (1.0, 5.0) if output == "imgedit" else None
    groups = by_tag(apart(rows), items, TYPES)
    lines = [line(name, [group], score(output), output=output, bounds=bounds) for name, group in groups.items()]
    overall = "overall" if len(groups) == len(TYPES) else f"overall of {len(groups)} types"
    lines.append(line(overall, list(groups.values()), score(output), output=output, bounds=bounds))
    lines.append(line("all edits", [apart(rows)], score(output), output=output, bounds=bounds))
    return Table(tuple(lines), overall)


def layout(item: Item, k: int) -> str:
    """Raises ConfigError for a second image: the evaluator reads one of each prompt."""
    one_image(k, "imgedit")
    return f"{item.id}.png"


def extras(items: Sequence[Item]) -> dict[str, str]:
    """The list of these edits: the evaluator asks about every edit of its list."""
    return {"basic_edit.json": json.dumps({item.id: item.metadata["record"] for item in items}, indent=4)}


def graded(answer: str) -> float | None:
    """The mean of the three grades of an answer of the official judge; None where it has not three of 1 to 5.

    >>> graded("Brief reasoning: no change.\\nPrompt Compliance: 1\\nVisual Seamlessness: 4\\nPhysical Fidelity: 4")
    3.0
    """
    found = [int(match[1]) for each in answer.splitlines() if (match := _GRADE.fullmatch(each))]
    return sum(found) / 3 if len(found) == 3 else None


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], Scores]:
    """The result.json of basic_bench.py, number -> answer of the judge, or step 1's file, number -> mean grade.

    Raises ConfigError: another file.
    """
    return {(str(number), 0): {"imgedit": _value(said)} for number, said in _object(path, "--results").items()}


def _value(said: str | float | Mapping[str, str]) -> float | None:
    """A mean grade by an answer, or by itself; None: the judge failed, or gave none."""
    if isinstance(said, str):
        return graded(said)
    if isinstance(said, bool) or not isinstance(said, int | float):
        return None
    return float(said) if 1 <= said <= 5 else None
