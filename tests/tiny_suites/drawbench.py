"""A table as the hub's: columns Prompts and Category."""

from __future__ import annotations

from pathlib import Path

ROWS = [
    ("A red colored car.", "Colors"),
    ("A black colored car, seen from above.", "Colors"),
    ("One cat and one dog sitting on the grass.", "Counting"),
    ("A storefront with 'Hello World' written on it.", "Text"),
]


def prompts(folder: Path) -> Path:
    file = folder / "drawbench.csv"
    file.write_text("Prompts,Category\n" + "".join(f'"{text}",{kind}\n' for text, kind in ROWS))
    return file
