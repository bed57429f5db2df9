"""A table as PartiPrompts.tsv: columns Prompt, Category, Challenge and Note."""

from __future__ import annotations

from pathlib import Path

ROWS = [
    ("bond", "Abstract", "Basic"),
    ("a shiba inu", "Animals", "Basic"),
    ("a wall with a clock", "Artifacts", "Simple Detail"),
    ("seven owls on a branch", "Animals", "Quantity"),
]


def prompts(folder: Path) -> Path:
    file = folder / "PartiPrompts.tsv"
    file.write_text("Prompt\tCategory\tChallenge\tNote\n" + "".join("\t".join((*row, "none")) + "\n" for row in ROWS))
    return file
