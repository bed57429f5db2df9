"""T2I-CompBench: eight categories of compositions, each with its own official tool, and no single number.

300 prompts a category (its _val file), ten images each. Colour, shape and texture: probability of yes to each noun
phrase by BLIP, multiplied; 2D and 3D places and numbers: UniDet; other relations: CLIP; complex: the mean of two or
three of them, by prompt. Those tools read the exported folder, and their results are read back. The judge here is a
vision-language model with the first rule, and is called by another name.

Source: arXiv:2307.06350; Karine-Huang/T2I-CompBench:BLIPvqa_eval/BLIP_vqa.py, 3_in_1_eval/3_in_1.py.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.suites._points import known
from flowrl.apps.suites._reading import facts_of, keep_once, tables_of
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import loads
from flowrl.core.strict import read_text
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, require_path, score

LEVEL = "experimental"
FACTS = facts_of("t2i_compbench", LEVEL)
OUTPUT, OFFICIAL = "vlm_yes_product", "t2i_compbench"
RESULTS: dict[str, str] = tables_of("t2i_compbench")
"""Category -> the file of its official tool, in its folder."""
_PHRASES = ("color", "shape", "texture")
_RANKED = (RESULTS["color"], RESULTS["non_spatial"], RESULTS["complex"])
"""Tools that number the images from 0 in the order of their file names' digits, whatever those are."""
_IMAGES = 10
_FORMS = "the folder with the eight CATEGORY_val.txt, or one of them"
_START = re.compile("an?|the|one|two|three|four|five|six|seven|eight|some|its", re.IGNORECASE)
_BREAK = re.compile(
    "and|or|but|on|in|at|by|with|of|for|to|from|over|under|above|below|near|beside|behind|between|against|into|onto|"
    "through|across|around|inside|outside|next|is|are|was|were|be|has|have|that|which|while|as|his|her",
    re.IGNORECASE,
)


def items(path: Path | None) -> list[Item]:
    """The prompts; an id is CATEGORY-LINE, from line 0. Raises ConfigError: no files, or a file of no category."""
    given = require_path(path, "t2i_compbench", FACTS, _FORMS)
    files = {name: given / f"{name}_val.txt" for name in RESULTS}
    if given.is_file():
        # The longest name: 3d_spatial_val ends with spatial_val too.
        own = [name for name in RESULTS if re.fullmatch(rf"(.*[_-])?{name}(_val)?", given.stem)]
        files = {name: given for name in sorted(own, key=len)[-1:]}
    absent = [file.name for file in files.values() if not file.is_file()]
    if absent or not files:
        raise ConfigError(
            f"--prompts {given}: {f'has no {absent[0]}' if absent else 'is no file of a category'}; give {_FORMS} "
            f"({', '.join(RESULTS)})"
        )
    result: list[Item] = []
    for name, file in files.items():
        lines = [text.split("\t")[0].strip() for text in read_text(file, f"--prompts {file}").split("\n")]
        for number, text in enumerate(filter(None, lines)):
            asked = [f"{phrase}?" for phrase in noun_phrases(text)] if name in _PHRASES else [f"{text.rstrip('.')}?"]
            result.append(Item(f"{name}-{number:03d}", text, {"questions": asked}, (name,)))
    return result


def noun_phrases(text: str) -> list[str]:
    """The noun phrases of a prompt by a plain rule: from its beginning, an article, a number, a comma or "and", up to
    the next of them, a preposition or a form of "be"; the whole prompt where there is none.

    >>> noun_phrases("a green bench and fluffy clouds"), noun_phrases("The cat is sitting on the smooth sill.")
    (['a green bench', 'fluffy clouds'], ['The cat', 'the smooth sill'])
    """
    phrases: list[list[str]] = []
    open_ = True
    for word in re.findall(r"[\w'-]+|,", text):
        if _START.fullmatch(word):
            phrases.append([word])
            open_ = False
        elif word == "," or _BREAK.fullmatch(word):
            open_ = word.lower() in (",", "and")
            phrases.append([])
        elif open_ or (phrases and phrases[-1]):
            if open_:
                phrases.append([])
                open_ = False
            phrases[-1].append(word)
    found = [" ".join(words) for words in phrases if words and [word.lower() for word in words] != ["a"]]
    return found or [text]


def from_answers(answers: Sequence[float], item: Item) -> dict[str, float | None]:
    """The product of the answers of an image; None where a question failed."""
    return {OUTPUT: known(math.prod(answers))}


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """The mean of each category over its images; there is no single number."""
    main = OFFICIAL if any(OFFICIAL in row.scores for row in rows) else chosen_output(rows, OUTPUT)
    groups = by_tag(rows, items, list(RESULTS))
    bounds = (0.0, 1.0) if main in (OUTPUT, OFFICIAL) else None
    return Table(
        tuple(line(name, [group], score(main), output=main, bounds=bounds) for name, group in groups.items()), ""
    )


def layout(item: Item, k: int) -> str:
    """CATEGORY/samples/PROMPT_NUMBER.png; the number has six digits: ten images a prompt.

    Raises ConfigError: an eleventh image, or a prompt that cannot be part of a file name.
    """
    if k >= _IMAGES:
        raise ConfigError(
            f"--export: the tools of t2i_compbench read {_IMAGES} images a prompt", Remedy(flag=f"--samples {_IMAGES}")
        )
    if "/" in item.text or "_" in item.text or "\0" in item.text:
        raise ConfigError(f"--export: {item.text!r} holds / or _, and the tools read the prompt from the file's name")
    name, number = item.id.rsplit("-", 1)
    return f"{name}/samples/{item.text}_{int(number) * _IMAGES + k:06d}.png"


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The vqa_result.json of each category's tool, in the folder that was exported.

    Raises ConfigError: a file is missing or of another form, or a sample is there twice.
    """
    result: dict[tuple[str, int], dict[str, float | None]] = {}
    for name in dict.fromkeys(item.tags[0] for item in items):
        file = path / name / RESULTS[name]
        ids = [item.id for item in items if item.tags[0] == name]
        if not file.is_file():
            raise ConfigError(
                f"--results: there is no {file}: samples of {name} have no result, the first is prompt {ids[0]!r}; run "
                f"the official tool of the category {name} on its folder, and give the exported folder"
            )
        content = read_text(file, f"--results {file}")
        try:
            records: Any = loads(content)
            answers = [(int(record["question_id"]), float(record["answer"])) for record in records]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{file}: must be a list of objects with question_id and answer; run the tool again"
            ) from None
        below = next((number for number, _ in answers if number < 0), None)
        if below is not None:
            raise ConfigError(f"{file}: question_id={below} must be a number from 0; run the tool again")
        times = Counter(number for number, _ in answers)
        twice = next((number for number, count in times.items() if count > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{file}: question_id {twice} is there twice; run the tool again on a folder without doubles"
            )
        own = sorted(int(each.rsplit("-", 1)[1]) for each in ids)
        samples, rest = divmod(len(answers), len(own))
        ranked = RESULTS[name] in _RANKED
        if ranked and rest:
            raise ConfigError(
                f"{file}: {len(answers)} results for {len(own)} prompts; each needs as many as the others"
            )
        for number, answer in answers:
            place, k = divmod(number, samples if ranked and samples else _IMAGES)
            if ranked:
                place = own[place] if place < len(own) else -1
            keep_once(result, (f"{name}-{place:03d}", k), {OFFICIAL: answer}, str(file))
    return result
