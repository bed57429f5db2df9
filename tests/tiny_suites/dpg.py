"""The table of questions, and results as the official evaluator writes them."""

from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item
from tests.tiny_suites import table

COLUMNS = (
    *("item_id", "text", "keywords", "proposition_id", "dependency"),
    *("category_broad", "category_detailed", "tuple", "question_natural_language"),
)
ROWS = [
    ("a1", 1, "0", "entity - whole (dog)", "Is there a dog?"),
    ("a1", 2, "1", "attribute - color (dog, red)", "Is the dog red?"),
    ("a1", 3, "2", "attribute - texture (dog, furry)", "Is the red dog furry?"),
    ("a1", 4, "0", "global - (oil painting)", "Is it an oil painting?"),
    ("b2", 1, "0", "entity - whole (cat)", "Is there a cat?"),
    ("b2", 2, "1, 3", "relation - spatial (cat, mat, on)", "Is the cat on the mat?"),
    ("b2", 3, "0", "entity - whole (mat)", "Is there a mat?"),
]


def prompts(folder: Path, rows: Sequence[tuple[str, int, str, str, str]] = ROWS) -> Path:
    file = folder / "dpg_bench.csv"
    full = [(key, f"text of {key}", "", number, above, "", "", kind, ask) for key, number, above, kind, ask in rows]
    file.write_text(table(COLUMNS, full))
    return file


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    """A line for each image with the scores of its crops; a crop that is there twice has a line of its own."""
    scores: dict[str, list[float]] = {}
    lines, seen = [], set[tuple[str, int]]()
    for _, k, place in places:
        if (place, k) in seen:
            lines.append(f"out/{place}, 1.0, 1.0")
        else:
            scores.setdefault(place, []).append(float(k % 2))
            seen.add((place, k))
    for place, values in scores.items():
        numbers = [*values, sum(values) / len(values)]
        lines.append(", ".join((f"out/{place}", *map(str, numbers))))
    file = folder / "dpg-bench_results.txt"
    file.write_text("\n".join([*lines, "Model: tiny", "DPG-Bench score: 50.0"]))
    return file
