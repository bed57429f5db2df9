"""HPDv2: 800 prompts in each of four styles, judged by HPSv2.1.

The score of a style is 100 times its mean, and the official code's deviation is the standard deviation of the means of
10 chunks of 80 prompts in the order of the file. The overall score is the mean of the styles.

Source: arXiv:2306.09341; tgxs002/HPSv2:hpsv2/evaluation.py.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.apps.suites._reading import facts_of, text_of
from flowrl.core.errors import ConfigError
from flowrl.data.prompt_files import read_records
from flowrl.evaluation.suite import Item, Line, Row, Table, by_tag, line, outputs_of, require_path, score

LEVEL = "tested"
FACTS = facts_of("hpdv2", LEVEL)
STYLES = ("anime", "concept-art", "paintings", "photo")
_CHUNK, _CHUNKS = 80, 10
_FORMS = "a folder with STYLE.json (a list of prompts; also .txt or .jsonl), or benchmark_STYLE.json, of each style"


def items(path: Path | None) -> list[Item]:
    """The prompts of the four files of a folder; an id is STYLE-NUMBER, by the order of the file."""
    folder = require_path(path, "hpdv2", FACTS, _FORMS)
    result: list[Item] = []
    for style in STYLES:
        names = [f"{before}{style}{suffix}" for before in ("", "benchmark_") for suffix in (".json", ".jsonl", ".txt")]
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if file is None:
            raise ConfigError(
                f"--prompts {path}: there is no {style}.json in it; give {_FORMS}. They are here: {FACTS.where}"
            )
        # Not `prompts_of`, which takes equal prompts once: the chunks are of lines.
        where = f"--prompts {file}"
        given = [(place, record.get("prompt")) for place, record in read_records(file, where, "prompt")]
        if not given or not all(isinstance(text, str) for _, text in given):
            raise ConfigError(f"{where}: needs a list of prompts, or of records with 'prompt'")
        texts = [text_of(text, f"{where}, {place}") for place, text in given]
        result += [Item(f"{style}-{number:05d}", text, {"style": style}, (style,)) for number, text in enumerate(texts)]
    return result


def aggregate(rows: Sequence[Row], items: Sequence[Item]) -> Table:
    """100 times each score by style and over the styles, and the deviation over chunks of complete styles."""
    lines: list[Line] = []
    names = outputs_of(rows)
    headline = ""
    for name in names:
        styles = by_tag(rows, items, STYLES)
        overall = name if len(styles) == len(STYLES) else f"{name}, {len(styles)} of 4 styles"
        headline = headline or overall
        lines.append(line(overall, list(styles.values()), score(name), scale=100.0, output=name))
        for style, group in styles.items():
            lines.append(line(f"{name}: {style}", [group], score(name), scale=100.0, output=name))
            deviation = _deviation(group, name)
            if deviation is not None:
                counted = lines[-1]
                own = (counted.n_prompts, counted.n_images, counted.n_scored)
                lines.append(Line(f"{name}: {style}, std of 10 chunks", deviation, math.nan, math.nan, *own))
    return Table(tuple(lines), headline)


def _deviation(rows: Sequence[Row], name: str) -> float | None:
    """Standard deviation (divided by n) of 100 times the mean of each chunk; None unless all 800 prompts are scored."""
    chunks: dict[int, list[float]] = {}
    for row in rows:
        value = row.scores.get(name)
        if row.k == 0 and value is not None:
            chunks.setdefault(int(row.id.rpartition("-")[2]) // _CHUNK, []).append(100 * value)
    if len(chunks) != _CHUNKS or any(len(values) != _CHUNK for values in chunks.values()):
        return None
    return float(np.std([np.mean(values) for values in chunks.values()]))


def layout(item: Item, k: int) -> str:
    """As `hpsv2.evaluate` reads it, which takes one image a prompt; the others lie in folders of their own.

    The name ends in .jpg, as the official code wants it, and the content is a PNG, which it opens too.
    """
    style, _, number = item.id.rpartition("-")
    return f"{style}/{number}.jpg" if k == 0 else f"more-{k:03d}/{style}/{number}.jpg"
