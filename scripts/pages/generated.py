"""The pages, pictures and lists that the code alone gives, and which of them the repository has otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.pages.svg import unlike

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("listed", "reference", "option-tables", "rewards", "models", "migration", "concept-pictures", "hours")
"""Words, each the name of its module with dashes, which has `pages()`: file -> its text."""


def module(word: str) -> Any:
    return import_module(f"scripts.pages.{word.replace('-', '_')}")


def different(word: str) -> Iterator[tuple[Path, str, str]]:
    """(file, text that the code gives, in what the file is not so) of each file of a word that differs.

    A picture may differ by rounding, which is the processor's.
    """
    for file, text in module(word).pages().items():
        if not file.is_file():
            yield file, text, "it is not there"
            continue
        shipped = file.read_text(encoding="utf-8")
        what = unlike(text, shipped) if file.suffix == ".svg" else "" if text == shipped else "other words"
        if what:
            yield file, text, what


def make(words: Sequence[str] = GENERATED) -> None:
    """Write what differs; say its names."""
    for word in words:
        for file, text, _ in different(word):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
            print(file.relative_to(ROOT))
