"""Gains of the lab that other pages quote, brought up to date when the lab's page is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

QUOTE = re.compile(r"(`configs/(?:lab/)?([\w-]+)\.yaml`[^`+]{0,80}?)[+-]\d+\.\d to [+-]\d+\.\d")
"""The file of a recipe, a few words, and the smallest and largest gain of its seeds in points."""


def brought_up_to_date(text: str, gains: Mapping[str, Sequence[float]]) -> str:
    """A page with the gains of today, in points by recipe; a recipe without any keeps its numbers.

    >>> brought_up_to_date("`configs/lab/awm.yaml`: +1.0 to +2.0 points", {"awm": [3.0, 5.25, 4.0]})
    '`configs/lab/awm.yaml`: +3.0 to +5.2 points'
    """

    def quote(match: re.Match[str]) -> str:
        values = gains.get(match[2])
        return f"{match[1]}{min(values):+.1f} to {max(values):+.1f}" if values else match[0]

    return QUOTE.sub(quote, text)


def bring_up_to_date(docs: Path, gains: Mapping[str, Sequence[float]]) -> None:
    """Rewrite the quotes in the pages on algorithms."""
    for file in sorted((docs / "algorithms").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        new = brought_up_to_date(text, gains)
        if new != text:
            file.write_text(new, encoding="utf-8")
            print(file)
