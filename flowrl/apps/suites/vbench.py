"""VBench: sixteen dimensions of videos from text, each with its own official tool, and their weighted scores.

946 prompts, five videos each; a prompt belongs to one dimension or several. Every dimension is the mean over its
videos. With its published bounds and weights (Min, Max and w below)

    normalised = (mean - Min) / (Max - Min)
    quality    = sum w normalised / sum w    over the first seven dimensions
    semantic   = the same over the other nine
    total      = (4 quality + semantic) / 5

The tools read the exported folder, videos/PROMPT-K.mp4, and their *_eval_results.json are read back.

Source: arXiv:2311.17982; Vchitect/VBench:scripts/constant.py, scripts/cal_final_score.py, vbench/__init__.py,
prompts/README.md.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.apps.suites._points import mean_of_parts
from flowrl.apps.suites._reading import facts_of, id_of, keep_once, last_of, tables_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.core.files import loads
from flowrl.core.strict import read_text
from flowrl.display.console import log
from flowrl.evaluation.suite import Item, Row, Table, by_tag, chosen_output, line, part, require_path, score
from flowrl.evaluation.suite_intervals import Part

LEVEL = "experimental"
FACTS = facts_of("vbench", LEVEL)
QUALITY, SEMANTIC = (tables_of("vbench")[part] for part in ("quality", "semantic"))
DIMENSIONS: dict[str, tuple[float, float, float]] = QUALITY | SEMANTIC
"""Dimension -> Min, Max, w."""
QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4.0, 1.0
OFFICIAL = "vbench_"
"""Before a dimension's name in the scores of a video: rewards have outputs of the same names (motion_smoothness)."""
MAY_LACK = ("color", "temporal_flickering")
"""Dimensions whose tools leave videos out by rule: without the object in them, and, after the filter, that move."""
_NOT_SHARES = ("aesthetic_quality", "appearance_style", "temporal_style", "overall_consistency")
"""Dimensions that are no means of values in [0, 1]."""
_OUT_OF_100 = "imaging_quality"
"""The dimension whose videos have scores from 0 to 100, where its own mean is a hundredth of theirs."""
_FORMS = "VBench_full_info.json, or the folder that holds it"
_RESULTS = "*_eval_results.json"
_FILE = re.compile(r"(?s)(.*)-(\d+)\.\w+")
_NAME_BYTES = 255
_NEAR = 1e-3
_ROUNDING = 0.01
"""How far a score may lie outside its range: the tools work in half precision."""


def items(path: Path | None) -> list[Item]:
    """The prompts of the official list; one that stands there twice belongs to the dimensions of both."""
    given = require_path(path, "vbench", FACTS, _FORMS)
    name = "VBench_full_info.json"
    files = (given / name, given / "vbench" / name) if given.is_dir() else (given,)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(f"--prompts {given}: there is no {name} in it; give {_FORMS}")
    content = read_text(file, f"--prompts {file}")
    try:
        records: Any = loads(content)
        prompts = [(one["prompt_en"], list(one["dimension"]), dict(one.get("auxiliary_info") or {})) for one in records]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"--prompts {file}: must be a list of objects with prompt_en and dimension; give {_FORMS}"
        ) from None
    result: dict[str, Item] = {}
    for given_text, dimensions, extra in prompts:
        text = text_of(given_text, f"--prompts {file}")
        unknown = [one for one in dimensions if one not in DIMENSIONS]
        if unknown or not dimensions:
            what = f"the dimension {unknown[0]!r}" if unknown else "no dimension"
            raise ConfigError(
                f"--prompts {file}: {text[:60]!r} has {what}; those of VBench 1 are {', '.join(DIMENSIONS)}"
            )
        known = result.get(text, Item(id_of(text), text, {"auxiliary_info": {}}))
        tags = tuple(one for one in DIMENSIONS if one in (*known.tags, *dimensions))
        result[text] = Item(known.id, text, {"auxiliary_info": known.metadata["auxiliary_info"] | extra}, tags)
    return list(result.values())


# ---- the table


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """Each dimension, then the weighted scores of those that were judged; of another judge its mean by dimension."""
    if not any(name.startswith(OFFICIAL) for row in rows for name in row.scores):
        main, groups = chosen_output(rows, "vbench"), by_tag(rows, items, list(DIMENSIONS))
        lines = [line(f"{main}: {name}", [own], score(main), output=main) for name, own in groups.items()]
        return Table((line(main, [rows], score(main), output=main), *lines), main)
    groups = _judged(rows, items)
    parts = {name: _normalised(name, own) for name, own in groups.items()}
    return _table(
        groups, parts, lambda name, count, of: name if count == of else f"{name} of {count} of {of} dimensions"
    )


def compat(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """As the official script counts: a dimension without a result has the mean 0, before it is normalised.

    Raises ConfigError: no dimension has a result.
    """
    groups = _judged(rows, items)
    if not groups:
        raise ConfigError(
            "--compat: the official script's table is made of the official tools' results; give --results"
        )
    prompts = dict.fromkeys(row.prompt for own in groups.values() for row in own)

    def zero(name: str) -> Part:
        """Of every judged prompt, so that it adds none; without a name: it is compared with no result of another."""
        return Part(dict.fromkeys(prompts, (_scaled(name, 0.0),)), DIMENSIONS[name][2])

    parts = {name: _normalised(name, groups[name]) if name in groups else zero(name) for name in DIMENSIONS}
    return _table(groups, parts, lambda name, count, of: f"{name} (compat)")


def _judged(rows: Sequence[Row], items: Sequence[Item]) -> dict[str, list[Row]]:
    """Dimension -> the rows of its prompts, of the dimensions that have a result."""
    groups = by_tag(rows, items, list(DIMENSIONS))
    return {name: own for name, own in groups.items() if any(_known(row, name) for row in own)}


def _table(groups: dict[str, list[Row]], parts: dict[str, Part], named: Callable[[str, int, int], str]) -> Table:
    """The lines; `named` gives the name of a weighted score of so many of so many dimensions."""
    lines = []
    for name, own in groups.items():
        bounds = None if name in _NOT_SHARES else (0.0, 1.0)
        lines.append(line(name, [own], score(OFFICIAL + name), output=OFFICIAL + name, bounds=bounds))
    for name, both in (("quality", (QUALITY,)), ("semantic", (SEMANTIC,)), ("total", (QUALITY, SEMANTIC))):
        weighted: list[Part] = []
        for half in both:
            own = {each: parts[each] for each in half if each in parts}
            weight = 1.0 if len(both) == 1 else QUALITY_WEIGHT if half is QUALITY else SEMANTIC_WEIGHT
            sum_ = math.fsum(each.weight for each in own.values())
            weighted += [Part(each.values, weight * each.weight / sum_, each.name) for each in own.values()]
        # A total needs dimensions of both halves: of one alone it would be that half.
        if not weighted or (len(both) > 1 and not all(any(each in parts for each in half) for half in both)):
            continue
        every = [each for half in both for each in half]
        videos = {(row.id, row.k): row for each in every for row in groups.get(each, ())}
        scored = sum(any(_known(row, each) for each in every) for row in videos.values())
        title = named(name, len(weighted), len(every))
        lines.append(mean_of_parts(title, weighted, len(videos), scored))
    return Table(tuple(lines), lines[-1].name if lines else "")


def _known(row: Row, name: str) -> bool:
    return row.scores.get(OFFICIAL + name) is not None


def _scaled(name: str, value: float) -> float:
    low, high, _ = DIMENSIONS[name]
    return (value - low) / (high - low)


def _normalised(name: str, rows: Sequence[Row]) -> Part:
    """The normalised scores of a dimension by prompt, with its weight and name."""

    def value(row: Row) -> float:
        own = row.scores.get(OFFICIAL + name)
        return math.nan if own is None else _scaled(name, own)

    return replace(part(rows, value, DIMENSIONS[name][2]), name=name)


# ---- the official tools


def layout(item: Item, k: int) -> str:
    """videos/PROMPT-K.mp4: the tools find a video by its prompt. Raises ConfigError: it cannot be a file's name."""
    name = f"{item.text}-{k}.mp4"
    if "/" in name or "\0" in name or len(name.encode()) > _NAME_BYTES:
        raise ConfigError(
            f"--export: {item.text[:60]!r} cannot be the name of a file (a slash, or more than {_NAME_BYTES} bytes), "
            "and the tools find videos by their prompts; leave the prompt out"
        )
    return f"videos/{name}"


def extras(items: Sequence[Item]) -> dict[str, str]:
    """The list of these prompts for the tools (`--full_json_dir`), beside the videos."""
    records = [
        {"prompt_en": item.text, "dimension": list(item.tags)}
        | ({"auxiliary_info": own} if (own := item.metadata["auxiliary_info"]) else {})
        for item in items
    ]
    return {"VBench_full_info.json": json.dumps(records, indent=1) + "\n"}


def read_results(path: Path, items: Sequence[Item]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The *_eval_results.json of the tools: one file, or a folder of several for different dimensions.

    Raises ConfigError: a file of another form, a dimension or a video that is there twice, or one that is missing, or a
    score that is out of its range.
    """
    known = {item.text: item for item in items}
    found: dict[str, dict[tuple[str, int], dict[str, float | None]]] = {}
    for file, dimension, mean, videos in _dimensions(path):
        if dimension in found:
            raise ConfigError(f"{file}: {dimension} has results already, in another file; keep one of the two")
        own = found.setdefault(dimension, {})
        if not videos:
            raise ConfigError(
                f"{file}: {dimension} has no result of any video; run its tool again, or leave the file out"
            )
        for place, value in videos:
            match = _FILE.fullmatch(last_of(place))
            item = known.get(match[1]) if match else None
            if match is None or item is None or dimension not in item.tags:
                raise ConfigError(
                    f"{file}: {dimension} has a result of {last_of(place)!r}, which is no video of this run in that "
                    "dimension; give the results of the folder that --export wrote, unchanged"
                )
            # A score that no tool writes is refused before it moves the means. Similarities can be negative.
            low, unit = -1.0 if dimension in _NOT_SHARES else 0.0, 100.0 if dimension == _OUT_OF_100 else 1.0
            if not low - _ROUNDING <= value / unit <= 1.0 + _ROUNDING:
                raise ConfigError(
                    f"{file}: {dimension} of {Path(place).name!r} is {value:g}, and must be a number from "
                    f"{low * unit:g} to {unit:g}; run the tool of {dimension} again"
                )
            value = value / unit
            keep_once(own, (item.id, int(match[2])), {OFFICIAL + dimension: value}, f"{file}, {dimension}")
        values = [float(one[OFFICIAL + dimension] or 0.0) for one in own.values()]
        ours = math.fsum(values) / len(values)
        if not abs(ours - mean) <= _NEAR * max(1.0, abs(mean)):  # as of videos of different lengths
            told = "%s: %s says %.4f, and its videos have a mean of %.4f, which is used here"
            log.warning(told, file, dimension, mean, ours)
    return _joined(path, items, found)


def _joined(
    path: Path, items: Sequence[Item], found: dict[str, dict[tuple[str, int], dict[str, float | None]]]
) -> dict[tuple[str, int], dict[str, float | None]]:
    """The scores of every video in all judged dimensions; None where a tool leaves it out by rule.

    A video of a prompt that belongs to no judged dimension has no scores.
    """
    samples = 1 + max((k for own in found.values() for _, k in own), default=-1)
    unjudged = [item for item in items if not any(tag in found for tag in item.tags)]
    result: dict[tuple[str, int], dict[str, float | None]] = {
        (item.id, k): {} for item in unjudged for k in range(samples)
    }
    for dimension, own in found.items():
        wanted = [(item, k) for item in items if dimension in item.tags for k in range(samples)]
        missing = [(item, k) for item, k in wanted if (item.id, k) not in own]
        if missing and dimension not in MAY_LACK:
            item, k = missing[0]
            raise ConfigError(
                f"{path}: {len(missing)} of {len(wanted)} videos of {dimension} have no result, the first is prompt "
                f"{item.id!r} ({item.text[:60]!r}), sample {k}; run the tool of {dimension} on the whole folder again"
            )
        for item, k in wanted:
            score_of = OFFICIAL + dimension
            result.setdefault((item.id, k), {})[score_of] = own.get((item.id, k), {}).get(score_of)
    return result


def _dimensions(path: Path) -> Iterator[tuple[Path, str, float, list[tuple[str, float]]]]:
    """(file, dimension, its mean, [(place of a video, its score)]) of every dimension of the tools' files."""
    files = sorted(path.rglob(_RESULTS)) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"--results {path}: there is no {_RESULTS}; give such a file, or the folder of them")
    for file in files:
        content = read_text(file, f"--results {file}")
        try:
            record: Any = loads(content)
            own = [
                (name, float(mean), [(str(one["video_path"]), float(one["video_results"])) for one in videos])
                for name, (mean, videos) in record.items()
            ]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(
                f"{file}: must be an object of dimensions, each a list of its mean and of objects with video_path and "
                "video_results; run the tool again"
            ) from None
        for name, mean, videos in own:
            if name not in DIMENSIONS:
                raise ConfigError(f"{file}: {name!r} is no dimension of VBench 1; there are {', '.join(DIMENSIONS)}")
            yield file, name, mean, videos
