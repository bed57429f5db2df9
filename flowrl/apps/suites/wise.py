"""WISE: prompts that take knowledge of the world, in six categories, judged by a vision-language model.

Two protocols that cannot be compared, told apart by the categories of their numbers, and by the name of the file or
folder of prompts ("verified" in it) where those fit both.
WISE_Verified: one judgement of 0 or 1, overall = 0.40 culture + 0.12 (time + space + biology + physics + chemistry).
The first one: consistency C, realism R and aesthetic quality A of 0 to 2, WiScore = (0.7 C + 0.2 R + 0.1 A) / 2,
overall = 0.4 culture + 0.167 time + 0.133 space + 0.1 (biology + physics + chemistry).

Source: arXiv:2503.07265; PKU-YuanGroup/WISE:README.md, WISE_legacy/README.md.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._reading import facts_of, keep_once, one_image, records_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, outputs_of, require_path

LEVEL = "experimental"
FACTS = facts_of("wise", LEVEL)
LEGACY, VERIFIED = "legacy", "verified"
WEIGHTS: dict[str, dict[str, float]] = {
    LEGACY: {"culture": 0.4, "time": 0.167, "space": 0.133, "biology": 0.1, "physics": 0.1, "chemistry": 0.1},
    VERIFIED: {"culture": 0.4, "time": 0.12, "space": 0.12, "biology": 0.12, "physics": 0.12, "chemistry": 0.12},
}
_LAST: dict[str, tuple[int, ...]] = {LEGACY: (400, 567, 700, 800, 900, 1000), VERIFIED: (400, 520, 640, 760, 880, 1000)}
"""Last prompt_id of each category, in the order of WEIGHTS."""
_RATINGS = {"consistency": 0.7, "realism": 0.2, "aesthetic_quality": 0.1}
_NAMES = ("cultural_common_sense", "spatio-temporal_reasoning", "natural_science")
_FORMS = "the three .json of the protocol in their folder, or one of them"


def items(path: Path | None) -> list[Item]:
    """The prompts, by prompt_id; which protocol they are for is in their record.

    Raises ConfigError: no files, a record of another form, or a number twice.
    """
    given = require_path(path, "wise", FACTS, _FORMS)
    named = (given.name, *([] if given.is_dir() else [given.resolve().parent.name]))
    whole = given.is_dir() and bool(list(given.glob("*_verified.json")))
    protocol = VERIFIED if whole or any("verified" in name.lower() for name in named) else LEGACY
    files = [given]
    if given.is_dir():
        ending = "_verified.json" if protocol == VERIFIED else ".json"
        files = [given / f"{name}{ending}" for name in _NAMES]
    records = [each for file in files for each in records_of(file, ("Prompt", "Explanation", "prompt_id"))]
    fitting = [each for each in WEIGHTS if all(_fits(record, each) for _, record in records)]
    protocol = fitting[0] if len(fitting) == 1 else protocol
    found: dict[int, Item] = {}
    for where, record in records:
        item = _item(record, protocol, where)
        if int(item.id) in found:
            raise ConfigError(f"{where}: prompt_id={item.id} occurs twice; give each prompt once")
        found[int(item.id)] = item
    return [found[number] for number in sorted(found)]


def _fits(record: Mapping[str, Any], protocol: str) -> bool:
    """Whether the category of a record, such as "Physical Knowledge", is that of its number."""
    number, own = record["prompt_id"], str(record.get("Category", "")).casefold()
    named = next((name for name in WEIGHTS[protocol] if own.startswith(name[:5])), None)
    known = isinstance(number, int) and 1 <= number <= _LAST[protocol][-1]
    return named is None or not known or category(number, protocol) == named


def _item(record: Mapping[str, Any], protocol: str, where: str) -> Item:
    number = record["prompt_id"]
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _LAST[protocol][-1]:
        raise ConfigError(f"{where}: prompt_id={number!r} must be a whole number from 1 to {_LAST[protocol][-1]}")
    metadata = {
        "explanation": str(record["Explanation"]),
        "subcategory": str(record.get("Subcategory", "")),
        "protocol": protocol,
    }
    return Item(str(number), text_of(record["Prompt"], where), metadata, (category(number, protocol),))


def category(number: int, protocol: str) -> str:
    """The category of a prompt_id.

    >>> category(550, "legacy"), category(550, "verified")
    ('time', 'space')
    """
    return next(name for name, last in zip(WEIGHTS[protocol], _LAST[protocol], strict=True) if number <= last)


def protocol_of(items: Sequence[Item]) -> str:
    """The protocol that the prompts are for."""
    return items[0].metadata["protocol"]


def rewards(items: Sequence[Item]) -> tuple[dict[str, Any], ...]:
    """The reward entries that judge these prompts."""
    return ({"name": "vlm_judge", "rubric": f"wise_{protocol_of(items)}"},)


def wiscore(scores: Mapping[str, float | None]) -> float | None:
    """The WiScore of an image by its three ratings; None where one is missing or none of 0 to 2 (a failed 999).

    >>> round(wiscore({"consistency": 2.0, "realism": 1.0, "aesthetic_quality": 0.0}), 3)
    0.8
    """
    prefix = next((each for each in ("", "vlm_judge_") if f"{each}consistency" in scores), "")
    ratings = [scores.get(f"{prefix}{name}") for name in _RATINGS]
    if any(value is None or not 0 <= value <= 2 for value in ratings):
        return None
    return sum(weight * (value or 0.0) for weight, value in zip(_RATINGS.values(), ratings, strict=True)) / 2


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """The mean of each category, and their weighted mean with the protocol's weights."""
    protocol = protocol_of(items)
    found = outputs_of(rows)
    rated = any(name in found for name in ("consistency", "vlm_judge_consistency"))
    output = next((name for name in ("score", "vlm_judge_score") if name in found), chosen_output(rows, "vlm_judge"))

    def value(row: Row) -> float | None:
        return wiscore(row.scores) if rated else row.scores.get(output)

    weights = WEIGHTS[protocol]
    bounds = (0.0, 1.0) if rated or output in ("score", "vlm_judge_score") else None
    groups = by_tag(rows, items, list(weights))
    named = "" if rated else output
    lines = [line(name, [group], value, output=named, bounds=bounds) for name, group in groups.items()]
    title = "WiScore" if protocol == LEGACY else "WISE_Verified"
    overall = title if len(groups) == len(weights) else f"{title} of {len(groups)} categories"
    own = [weights[name] for name in groups]
    lines.append(line(overall, list(groups.values()), value, weights=own, output=named, bounds=bounds))
    return Table(tuple(lines), overall)


def layout(item: Item, k: int) -> str:
    """Raises ConfigError for a second image: the evaluator reads one of each prompt."""
    one_image(k, "wise")
    return f"{item.id}.png"


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The *results.jsonl that the official evaluators write, one file or their folder: ratings, or a score.

    Raises ConfigError: no such files, a line of another protocol, or a sample twice.
    """
    protocol = protocol_of(items)
    keys = tuple(_RATINGS) if protocol == LEGACY else ("score",)
    files = sorted(path.rglob("*results.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--results {path}: holds no *results.jsonl; give the folder that the evaluator wrote")
    result: dict[tuple[str, int], dict[str, float | None]] = {}
    for file in files:
        for where, record in records_of(file, ("prompt_id",)):
            if not all(isinstance(record.get(key), int | float) for key in keys):
                raise ConfigError(
                    f"{where}: needs the numbers {', '.join(keys)} of the {protocol} protocol, got "
                    f"{json.dumps(record)[:120]}; give results of the same protocol as the prompts"
                )
            top = 2 if protocol == LEGACY else 1
            own = {key: float(record[key]) if 0 <= record[key] <= top else None for key in keys}
            keep_once(result, (str(record["prompt_id"]), 0), own, where)
    return result
