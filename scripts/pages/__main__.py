"""Make every page that the code gives: `python -m scripts.pages`, from the repository root.

    python -m scripts.pages                  every generated page; those that are as they should be stay untouched
    python -m scripts.pages reference ...    these alone
    python -m scripts.pages --check          write nothing; say which differ, and end with 1 if one does
    python -m scripts.pages --list           all words, also those of pictures that need a run or a browser
    python -m scripts.pages comparison-pictures RUN RUN ...

Tests compare the generated pages. Those of measurements are written by what measures them: `python -m scripts.lab`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.pages.svg import unlike

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("reference", "option-tables", "rewards", "models", "migration", "concept-pictures")
"""Words of what the code alone gives; the module of each has `pages()`: file -> its text."""
WITH_WORDS = (
    "comparison-pictures",
    "readme-picture",
    "vote-picture",
    "watch-pictures",
    "video-report",
    "tutorials",
)
"""What needs a run, a browser or time; the module of each has `main(words)`."""


def module(word: str) -> Any:
    return import_module(f"scripts.pages.{word.replace('-', '_')}")


def different(word: str) -> Iterator[tuple[Path, str, str]]:
    """(file, text that the code gives, in what it is not so) of the files of a word that differ.

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


def listed() -> str:
    """A line for each word: what it makes."""
    about = {word: (module(word).__doc__ or "").partition("\n")[0] for word in (*GENERATED, *WITH_WORDS)}
    width = max(map(len, about))
    return "\n".join(f"{word:{width}}  {text}" for word, text in about.items())


def main(words: list[str]) -> int:
    if words and words[0] in WITH_WORDS:
        module(words[0]).main(words[1:])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="what to make; default: every generated page")
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    parser.add_argument("--list", action="store_true", help="what there is")
    options = parser.parse_args(words)
    if unknown := [word for word in options.words if word not in GENERATED]:
        parser.error(f"no such word: {', '.join(unknown)}; there are {', '.join((*GENERATED, *WITH_WORDS))}")
    if options.list:
        print(listed())
        return 0
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = [each for word in options.words or GENERATED for each in different(word)]
    for file, text, what in found:
        print(f"{file.relative_to(ROOT)}: {what}" if options.check else file.relative_to(ROOT))
        if not options.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    return int(options.check and bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
