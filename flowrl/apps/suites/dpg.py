"""DPG-Bench: long prompts as lists of yes-or-no questions, of which some mean nothing where another is a no.

1065 prompts, four images each, in one 2 x 2 grid for the official evaluator. An answer is 1 for yes, else 0; it becomes
0 where a parent's is 0 by then, in the order of the file, so zeros pass on. An image's score is the mean over its
questions, a prompt's the mean over its images, the total their mean times 100.

`compat` (`--compat`) is the table of the official code with what it does besides: the first row of the file is skipped
(and an image whose child asks for that question is dropped), a prompt with a failed image is dropped, and the
categories are of the answers before parents, of the last image of each prompt alone.

Source: arXiv:2403.05135; TencentQQGYLab/ELLA:dpg_bench/compute_dpg_bench.py.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._points import PERCENT, answers_of, by_kind, has_points, known, prompt_line
from flowrl.apps.suites._reading import facts_of, keep_once, last_of, records_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.core.questions import after_parents, arithmetic_mean, listed_questions
from flowrl.core.strict import read_text
from flowrl.evaluation.suite import Item, Line, Row, Table, chosen_output, line, require_path

LEVEL = "experimental"
FACTS = facts_of("dpg", LEVEL)
OUTPUT, OFFICIAL = "dpg", "dpg_official"
"""Scores of an image: by the judge here, by the official evaluator."""
_COLUMNS = ("item_id", "text", "proposition_id", "dependency", "question_natural_language")
_FORMS = "dpg_bench.csv as it is, or the folder that holds it"
_SAFE = re.compile(r"[\w-]+")


def items(path: Path | None) -> list[Item]:
    """The prompts, each with its questions in the order of the file; an id is the file's item_id.

    Raises ConfigError: no file, a row of another form, or a question whose parent is none of its prompt.
    """
    file = require_path(path, "dpg", FACTS, _FORMS)
    file = file / "dpg_bench.csv" if file.is_dir() else file
    texts: dict[str, str] = {}
    # As the official code has it: of two rows of one number the later one counts.
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    first = ""
    for where, record in records_of(file, _COLUMNS):
        key = str(record["item_id"]).strip()
        if not _SAFE.fullmatch(key):
            raise ConfigError(f"{where}: item_id={key!r} must be letters, digits, - and _: images are named after it")
        question = _question(record, where)
        texts.setdefault(key, text_of(record["text"], where))
        rows.setdefault(key, {})[question["id"]] = question
        first = first or f"{key} {question['id']}"
    return [_item(key, texts[key], list(own.values()), first, file) for key, own in rows.items()]


def _item(key: str, text: str, rows: list[dict[str, Any]], first: str, file: Path) -> Item:
    questions = [{name: row[name] for name in ("text", "id", "parents")} for row in rows]
    try:
        listed_questions({"questions": questions})
    except ValueError as error:
        raise ConfigError(f"{file}: item {key!r}: {error}; mend the column dependency") from None
    kinds = [row["kind"] for row in rows]
    metadata = {"questions": questions, "kinds": kinds, "skipped": [f"{key} {row['id']}" == first for row in rows]}
    return Item(key, text, metadata, tuple(dict.fromkeys(map(broad, kinds))))


def _question(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Text, id, parents and category of a row."""
    try:
        number = int(record["proposition_id"])
        parents = [int(each) for each in str(record["dependency"]).split(",")]
    except ValueError:
        raise ConfigError(
            f"{where}: proposition_id={record['proposition_id']!r} and dependency={record['dependency']!r} must be "
            "whole numbers, those of dependency with commas between them, 0 for none"
        ) from None
    text = str(record["question_natural_language"]).strip()
    if not text:
        raise ConfigError(f"{where}: question_natural_language is empty")
    kind = (
        str(record.get("tuple") or "").split("(")[0].strip(" -") or str(record.get("category_broad") or "other").strip()
    )
    # A question that is its own parent is 0 already where that would make it 0.
    return {"text": text, "id": number, "parents": [each for each in parents if each not in (0, number)], "kind": kind}


def broad(kind: str) -> str:
    """The broad category.

    >>> broad("attribute - color")
    'attribute'
    """
    return kind.split("-")[0].strip()


def from_answers(answers: Sequence[float], item: Item) -> dict[str, float | None]:
    """The mean over the questions of an image, after parents; None where a question failed."""
    failed = any(math.isnan(answer) for answer in answers)
    return {OUTPUT: None if failed else known(arithmetic_mean(after_parents(answers, listed_questions(item.metadata))))}


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Broad and detailed categories over the questions of all images, and the total; all times 100."""

    def after(row: Row, item: Item) -> list[float]:
        return after_parents(answers_of(row, item), listed_questions(item.metadata))

    main = OFFICIAL if any(OFFICIAL in row.scores for row in rows) else chosen_output(rows, OUTPUT)
    lines = _categories(rows, items, after) if has_points(rows) else []
    bounds = PERCENT if main in (OUTPUT, OFFICIAL) else None
    lines.append(prompt_line("dpg", rows, lambda row: row.scores.get(main), 100.0, bounds, main))
    return Table(tuple(lines), "dpg")


def compat(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """The official code's table of a judge's answers (see the module). Raises ConfigError: the rows have no answers."""
    if not has_points(rows):
        raise ConfigError("--compat: the official code's table is made of the answers to the questions; judge by them")
    known = {item.id: item for item in items}
    values = {(row.id, row.k): _compat_score(answers_of(row, known[row.id]), known[row.id]) for row in rows}
    dropped = {key for (key, _), value in values.items() if value is None}
    kept = [row for row in rows if row.id not in dropped]
    last = {row.id: row for row in sorted(kept, key=lambda row: row.k)}
    # The skipped question is in no category either.

    def without_skipped(row: Row, item: Item) -> list[float]:
        pairs = zip(answers_of(row, item), item.metadata["skipped"], strict=True)
        return [math.nan if skipped else each for each, skipped in pairs]

    lines = _categories(list(last.values()), items, without_skipped)
    lines.append(prompt_line("dpg (compat)", kept, lambda row: values[row.id, row.k], 100.0, PERCENT))
    return Table(tuple(lines), "dpg (compat)")


def _compat_score(answers: Sequence[float], item: Item) -> float | None:
    """The score of an image by the official code; None where it fails."""
    result: dict[int, float] = {}
    listed = listed_questions(item.metadata)
    for place, (answer, skipped) in enumerate(zip(answers, item.metadata["skipped"], strict=True)):
        if math.isnan(answer) and not skipped:
            return None
        if not skipped:
            result[place] = float(answer)
    for place in result:
        for parent in listed[place].parents:
            if parent not in result:  # a KeyError there
                return None
            if result[parent] == 0:
                result[place] = 0.0
                break
    return math.fsum(result.values()) / len(result) if result else None


def _categories(
    rows: Sequence[Row], items: Sequence[Item], values: Callable[[Row, Item], Sequence[float]]
) -> list[Line]:
    result: list[Line] = []
    wide = by_kind(rows, items, lambda item: [broad(kind) for kind in item.metadata["kinds"]], values)
    fine = by_kind(rows, items, lambda item: item.metadata["kinds"], values)
    for groups in (wide, fine):
        result += [
            line(name, [group], lambda row: row.answers, scale=100.0, bounds=PERCENT)
            for name, group in sorted(groups.items())
            if groups is wide or name not in wide
        ]
    return result


def layout(item: Item, k: int) -> str:
    """One file for all images of a prompt: a grid, row by row."""
    return f"{item.id}.png"


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The results .txt of the official evaluator: lines of an image's path, the score of each crop, and their mean.

    Raises ConfigError: another file, or an image twice.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; give the dpg-bench_..._results.txt of the evaluator")
    result: dict[tuple[str, int], dict[str, float | None]] = {}
    for number, text in enumerate(read_text(path, f"--results {path}").split("\n"), 1):
        name, _, rest = text.rpartition(".png, ")
        if not name:
            continue  # the summary at the end
        try:
            values = [float(each) for each in rest.split(", ")]
        except ValueError:
            raise ConfigError(
                f"{path}, line {number}: has no scores after its image; give the file of scores, not the _detail one"
            ) from None
        if len(values) < 2:
            raise ConfigError(f"{path}, line {number}: needs the score of each image, and their mean")
        strange = next((value for value in values if not math.isnan(value) and not 0 <= value <= 1), None)
        if strange is not None:
            raise ConfigError(
                f"{path}, line {number}: the score {strange} must be from 0 to 1; run the evaluator again"
            )
        key = last_of(name)
        for k, value in enumerate(values[:-1]):
            keep_once(result, (key, k), {OFFICIAL: value}, f"{path}, line {number}")
    if not result:
        raise ConfigError(f"{path}: holds no line of an image; give the dpg-bench_..._results.txt of the evaluator")
    return result
