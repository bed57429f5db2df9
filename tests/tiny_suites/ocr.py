"""Lines with a text in double quotes."""

from __future__ import annotations

from pathlib import Path


def prompts(folder: Path) -> Path:
    file = folder / "test.txt"
    file.write_text('a sign that says "Open Now"\na cake with "Happy Day" on it\na book called "Seas"\n')
    return file
