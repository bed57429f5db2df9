"""GEdit-Bench: edits of eleven groups that people asked for, in English and Chinese, by VIEScore.

SC is the smaller of two grades of 0 to 10, for the edit and for what was kept, PQ the smaller of two for the look,
O = sqrt(SC PQ) of each edit. A group has the mean of its edits, a language the mean of its groups, for the full set and
for the edits that every model of the paper answered (the intersection).

Source: arXiv:2504.17761; stepfun-ai/Step1X-Edit:GEdit-Bench (generate_image_example.py, test_gedit_score.py,
calculate_statistics.py).
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from flowrl.apps.suites._reading import Scores, apart, facts_of, keep_once, one_image, records_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.data.prompt_sources import Columns, load_prompts
from flowrl.evaluation.suite import Item, Row, Table, Value, by_tag, chosen_output, line, require_path, score

LEVEL = "experimental"
FACTS = facts_of("gedit", LEVEL)
GROUPS = (
    *("background_change", "color_alter", "material_alter", "motion_change", "ps_human", "style_change"),
    *("subject-add", "subject-remove", "subject-replace", "text_change", "tone_transfer"),
)
LANGUAGES = ("en", "cn")
_COLUMNS = ("key", "task_type", "instruction_language", "Intersection_exist")
_FORMS = (
    "the data set's folder (parquet, or of save_to_disk), or a .parquet or .jsonl with its columns: instruction, "
    f"input_image_raw, {', '.join(_COLUMNS)}"
)
_PLACE = re.compile(r"([^/]+)/(\w+)/([^/]+)\.png$")
_CSV = ("edited_image", "sementics_score", "quality_score")  # the evaluator's own spelling


def items(path: Path | None) -> list[Item]:
    """The edits in the order of the set, each with its source; an id is its key and its language.

    Raises ConfigError: no set, a record of another form, or an image that is missing.
    """
    given = require_path(path, "gedit", FACTS, _FORMS)
    columns = Columns(prompt="instruction", image="input_image_raw")
    found: dict[str, Item] = {}
    for prompt in load_prompts(f"hf:{given}" if given.is_dir() else str(given), "--prompts", columns):
        where, record = f"--prompts {given}, {prompt.text[:40]!r}", prompt.metadata
        lacking = [name for name in _COLUMNS if name not in record]
        if lacking:
            raise ConfigError(f"{where}: has no {lacking[0]!r}; accepted: {_FORMS}")
        key, group, language, both = (record[name] for name in _COLUMNS)
        for name, value, known in (("task_type", group, GROUPS), ("instruction_language", language, LANGUAGES)):
            if value not in known:
                raise ConfigError(f"{where}: {name}={value!r} is none of {', '.join(known)}")
        own = f"{key}-{language}"
        if own in found:
            raise ConfigError(f"{where}: key={key!r} occurs twice in {language}; give each edit once")
        metadata = {"key": key, "images": list(prompt.images)}
        tags = (language, group, *(["intersection"] if both else []))
        found[own] = Item(own, text_of(prompt.text, where), metadata, tags)
    return list(found.values())


def _values(rows: Sequence[Row]) -> tuple[str, dict[str, tuple[str, Value]]]:
    """(overall output, name of a part -> its output and value): of the official evaluator, of edit_score or another."""
    for prefix, overall in (("gedit_", "gedit"), ("edit_score_", "edit_score")):
        parts = {"semantics": f"{prefix}sc", "quality": f"{prefix}pq"}
        if all(any(name in row.scores for row in rows) for name in parts.values()):
            return overall, {name: (output, score(output)) for name, output in parts.items()}
    return chosen_output(rows, "edit_score"), {}


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """O of each group, then semantics, quality and O of the language, for the full set and the intersection."""
    output, parts = _values(rows)
    bounds = (0.0, 10.0) if parts else None
    values = parts | {"overall": (output, score(output))}
    lines, headline = [], ""
    for language, own in by_tag(apart(rows), items, LANGUAGES).items():
        groups = by_tag(own, items, GROUPS)
        few = "" if len(groups) == len(GROUPS) else f" of {len(groups)} groups"
        value = values["overall"][1]
        lines += [line(f"{language} {name}", [g], value, output=output, bounds=bounds) for name, g in groups.items()]
        common = by_tag(own, items, ("intersection",)).get("intersection", [])
        for title, kept in (("", groups), (", intersection", by_tag(common, items, GROUPS))):
            for name, (each, of) in values.items():
                if kept:
                    strata = list(kept.values())
                    lines.append(line(f"{language} {name}{few}{title}", strata, of, output=each, bounds=bounds))
        headline = headline or f"{language} overall{few}"
    return Table(tuple(lines), headline)


def layout(item: Item, k: int) -> str:
    """Raises ConfigError for a second image: the evaluator reads one of each prompt."""
    one_image(k, "gedit")
    return f"fullset/{item.tags[1]}/{item.tags[0]}/{item.metadata['key']}.png"


def extras(items: Sequence[Item]) -> dict[str, Path]:
    """The sources, which the evaluator reads from beside the results."""
    return {f"{layout(item, 0)[:-4]}_SRCIMG.png": Path(item.metadata["images"][0]) for item in items}


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], Scores]:
    """The *_gpt_score.csv that test_gedit_score.py writes: the combined one, or the folder of those of the groups.

    Raises ConfigError: no such files, a line that is of no edit, or an edit twice.
    """
    files = sorted(path.glob("*_gpt_score.csv")) if path.is_dir() else [path]
    files = [file for file in files if file.name.endswith("_combined_gpt_score.csv")] or files
    if not files:
        raise ConfigError(f"--results {path}: holds no *_gpt_score.csv; give the folder that the evaluator wrote")
    result: dict[tuple[str, int], Scores] = {}
    for file in files:
        for where, record in records_of(file, _CSV):
            place = _PLACE.search(str(record["edited_image"]).replace("\\", "/"))
            own = f"{place[3]}-{place[2]}" if place else str(record["edited_image"])
            sc, pq = (_grade(record[name]) for name in _CSV[1:])
            both = None if sc is None or pq is None else math.sqrt(sc * pq)
            keep_once(result, (own, 0), {"gedit": both, "gedit_sc": sc, "gedit_pq": pq}, where)
    return result


def _grade(value: object) -> float | None:
    """A grade of 0 to 10; None: it is none."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 <= number <= 10 else None
