"""GenEval 2: each atom of a prompt (an object, its number, an attribute, a relation) is a question to a judge.

800 prompts of 3 to 10 atoms. Soft-TIFA is the probability of the right answer to each question; AM is the mean over the
questions of an image, GM their geometric mean, both averaged over the images.

Source: arXiv:2512.16853; facebookresearch/GenEval2:README.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._points import PERCENT, answers_of, by_kind, has_points, known
from flowrl.apps.suites._reading import facts_of, records_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.core.questions import arithmetic_mean, geometric_mean
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, require_path, score, tags_of

LEVEL = "experimental"
FACTS = facts_of("geneval2", LEVEL)
GM, AM = "soft_tifa_gm", "soft_tifa_am"
_KEYS = ("prompt", "atom_count", "vqa_list", "skills")
_FORMS = "geneval2_data.jsonl as it is: prompt, atom_count, vqa_list, skills in each line"


def items(path: Path | None) -> list[Item]:
    """The prompts; an id is the line, 00000 to 00799. Raises ConfigError: no file, or a line whose lists do not fit."""
    result: list[Item] = []
    for number, (where, record) in enumerate(records_of(require_path(path, "geneval2", FACTS, _FORMS), _KEYS)):
        pairs, skills = record["vqa_list"], record["skills"]
        if not isinstance(pairs, list) or not pairs or not all(_is_pair(each) for each in pairs):
            raise ConfigError(f"{where}: vqa_list={str(pairs)[:80]} must be a list of [question, answer]")
        if not isinstance(skills, list) or len(skills) != len(pairs):
            raise ConfigError(f"{where}: {len(pairs)} questions have the skills {skills}; there must be one for each")
        questions = [{"text": text, "answer": answer} for text, answer in pairs]
        metadata = {"questions": questions, "skills": skills, "atom_count": record["atom_count"]}
        result.append(
            Item(f"{number:05d}", text_of(record["prompt"], where), metadata, (f"{record['atom_count']} atoms",))
        )
    return result


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def from_answers(answers: Sequence[float], item: Item) -> dict[str, float | None]:
    """Both means of the probabilities of one image; None where a question failed."""
    return {GM: known(geometric_mean(answers)), AM: known(arithmetic_mean(answers))}


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Per skill over its atoms, per number of atoms by GM, and both means over all images; all times 100."""
    main = chosen_output(rows, GM)
    bounds = PERCENT if main == GM else None
    lines = []
    if has_points(rows):
        kinds = by_kind(rows, items, lambda item: item.metadata["skills"], answers_of)
        lines += [
            line(skill, [group], lambda row: row.answers, scale=100.0, bounds=PERCENT)
            for skill, group in sorted(kinds.items())
        ]
    atoms = sorted(tags_of(items), key=lambda tag: (len(tag), tag))
    lines += [
        line(tag, [group], score(main), scale=100.0, output=main, bounds=bounds)
        for tag, group in by_tag(rows, items, atoms).items()
    ]
    for output in dict.fromkeys((AM, main) if any(AM in row.scores for row in rows) else (main,)):
        lines.append(line(output, [rows], score(output), scale=100.0, output=output, bounds=bounds))
    return Table(tuple(lines), main)
