"""UniGenBench: test points of a prompt, each judged 0 or 1 with a reason.

600 prompts of 1 to 10 test points, four images each. A dimension's score is the mean over its test points; the overall
score is the mean of the ten dimensions. 27 sub-dimensions are shown too.

Source: arXiv:2510.18701; CodeGoat24/UniGenBench:eval/qwenvl_72b_en_eval.py.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._points import PERCENT, POINT, answers_of, by_kind, has_points, known, mean_of_parts
from flowrl.apps.suites._reading import facts_of, keep_once, records_of, text_of
from flowrl.core.assets import table
from flowrl.core.errors import ConfigError
from flowrl.core.files import is_mapping, loads
from flowrl.core.questions import arithmetic_mean
from flowrl.evaluation.suite import Item, Line, Row, Table, chosen_output, line, require_path, score

LEVEL = "experimental"
FACTS = facts_of("unigenbench", LEVEL)
OUTPUT = "unigenbench"
ABOUT: dict[str, str] = table(Path(__file__).with_name("unigenbench.yaml"))
"""What the dimensions look at, in our words; other names (the Chinese files') stand for themselves."""
_POINTS = ("Testpoints", "\u8003\u70b9")
_DESCRIPTIONS = ("Testpoint Description", "\u8003\u70b9\u5bf9\u5e94\u63cf\u8ff0")
_FORMS = "test_prompts_*.csv as it is: index, prompt_en, sub_dims_en (or prompt_zh, sub_dims_zh)"
_PLACE = re.compile(r"(?:^|/)(\d+)_(\d+)\.png$")


def items(path: Path | None) -> list[Item]:
    """The prompts; an id is the file's own index. Raises ConfigError: no file, or a row of another form."""
    result: list[Item] = []
    for where, record in records_of(require_path(path, "unigenbench", FACTS, _FORMS), ("index",)):
        text, dims = (_column(record, name, where) for name in ("prompt", "sub_dims"))
        number = str(record["index"]).strip()
        if not number.isdecimal():
            raise ConfigError(f"{where}: index={number!r} must be a whole number")
        points, descriptions = _points(dims, f"{where}, index {number}")
        named = [f"{point} ({ABOUT[point]})" if point in ABOUT else point for point in points]
        questions = [f"{point}: {what}" for point, what in zip(named, descriptions, strict=True)]
        tags = tuple(dict.fromkeys(dimension(point) for point in points))
        result.append(Item(number, text_of(text, where), {"questions": questions, "points": points}, tags))
    twice = next((item.id for item in result if sum(item.id == other.id for other in result) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: the index {twice} occurs twice; give the official file")
    return result


def _column(record: dict[str, Any], name: str, where: str) -> str:
    found = [key for key in record if key == name or key in (f"{name}_en", f"{name}_zh")]
    if len(found) != 1:
        raise ConfigError(f"{where}: needs one column {name}, {name}_en or {name}_zh; there are: {', '.join(record)}")
    return str(record[found[0]])


def _points(text: str, where: str) -> tuple[list[str], list[str]]:
    """Names and descriptions of the test points of a prompt."""
    try:
        record = loads(text)
    except ValueError as error:
        place = error.pos if isinstance(error, json.JSONDecodeError) else 0
        raise ConfigError(
            f"{where}: the JSON of sub_dims breaks at character {place + 1}, in "
            f"{text[max(0, place - 30) : place + 30]!r} ({error}); mend it in a copy of the file, or leave "
            "this row out there, for a table of the other prompts"
        ) from None
    names = descriptions = None
    if is_mapping(record):
        names, descriptions = (
            next((record[k] for k in keys if k in record), None) for keys in (_POINTS, _DESCRIPTIONS)
        )
    if not isinstance(names, list) or not isinstance(descriptions, list):
        raise ConfigError(
            f"{where}: sub_dims must be a JSON object with {_POINTS[0]!r} and {_DESCRIPTIONS[0]!r}, got {text[:80]!r}"
        )
    if not names or len(names) != len(descriptions):
        raise ConfigError(f"{where}: {len(names)} test points have {len(descriptions)} descriptions")
    return [str(each) for each in names], [str(each) for each in descriptions]


def dimension(point: str) -> str:
    """The primary dimension of a test point.

    >>> dimension("Action - Hand (Character/Anthropomorphic)"), dimension("Style")
    ('Action', 'Style')
    """
    return point.split("-", 1)[0].strip()


def from_answers(answers: Sequence[float], item: Item) -> dict[str, float | None]:
    """The share of test points that an image meets."""
    return {OUTPUT: known(arithmetic_mean(answers))}


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Sub-dimensions and dimensions over their test points, and the mean of the dimensions; all times 100."""
    main = chosen_output(rows, OUTPUT)
    lines: list[Line] = []
    bounds = PERCENT if main == OUTPUT else None
    headline = "mean of images"
    if has_points(rows):
        small = by_kind(rows, items, lambda item: item.metadata["points"], answers_of)
        large = by_kind(rows, items, lambda item: [dimension(each) for each in item.metadata["points"]], answers_of)
        lines += [line(name, [group], _answers, scale=100.0, bounds=PERCENT) for name, group in sorted(small.items())]
        wide = {
            name: line(f"{name} (dimension)", [group], _answers, scale=100.0, bounds=PERCENT)
            for name, group in large.items()
        }
        lines += [wide[name] for name in sorted(wide)]
        scored = sum(row.scores.get(main) is not None for row in rows)
        headline = "overall" if len(wide) == 10 else f"overall of {len(wide)} dimensions"
        parts = [each.parts[0] for each in wide.values()]
        lines.append(mean_of_parts(headline, parts, len(rows), scored, bounds=PERCENT))
    lines.append(line("mean of images", [rows], score(main), scale=100.0, output=main, bounds=bounds))
    return Table(tuple(lines), headline)


def _answers(row: Row) -> list[Any]:
    return row.answers


def layout(item: Item, k: int) -> str:
    return f"{item.id}_{k}.png"


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The .csv that the official evaluators write: `img_path` and `result_json` of each image.

    An image whose result is null, since the judge gave up, has no score: the official table leaves it out.

    Raises ConfigError: another file, scores that are not those of the prompt's test points, or a sample twice.
    """
    counts = {item.id: len(item.metadata["points"]) for item in items}
    result: dict[tuple[str, int], dict[str, float | None]] = {}
    for where, record in records_of(path, ("img_path", "result_json")):
        place = _PLACE.search(str(record["img_path"]).replace("\\", "/"))
        try:
            # pandas writes an empty cell for null, and a float where a parquet has one.
            text = record["result_json"]
            answer = loads(text) if isinstance(text, str) and text.strip() else None
            given = None if answer is None else answer["score"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{where}: result_json must be a JSON object with 'score', or null") from None
        key = (place[1], int(place[2])) if place else (str(record["img_path"]), 0)
        if given is None:
            keep_once(result, key, {OUTPUT: None}, where)
            continue
        wanted = counts.get(key[0], len(given) if isinstance(given, list) else 0)
        if not isinstance(given, list) or len(given) != wanted or any(value not in (0, 1) for value in given):
            raise ConfigError(f"{where}: score={given} must be {wanted} numbers, each 0 or 1, one a test point")
        own: dict[str, float | None] = {OUTPUT: arithmetic_mean(given)}
        own |= {POINT.format(number): float(value) for number, value in enumerate(given, start=1)}
        keep_once(result, key, own, where)
    return result
