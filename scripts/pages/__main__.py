"""Make every page that the code gives: `python -m scripts.pages`, from the repository root.

    python -m scripts.pages                  every generated page; what is as the code gives it stays untouched
    python -m scripts.pages reference ...    these alone
    python -m scripts.pages --check          write nothing; say which differ, and end with 1 if one does
    python -m scripts.pages --list           all words, also those of pictures that need a run or a browser
    python -m scripts.pages comparison-pictures RUN RUN ...

Pages of measurements are written by what measures: `python -m scripts.lab --write`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

from scripts.pages.generated import GENERATED, ROOT, different, make, module

WITH_WORDS = ("comparison-pictures", "readme-picture", "vote-picture", "watch-pictures", "video-report", "tutorials")
"""What needs a run, a browser or time; the module of each has `main(words)`."""


def listed() -> str:
    """A line for each word: what it makes."""
    about = {word: (module(word).__doc__ or "").partition("\n")[0] for word in (*GENERATED, *WITH_WORDS)}
    width = max(map(len, about))
    return "\n".join(f"{word:{width}}  {text}" for word, text in about.items())


def check(words: list[str]) -> int:
    """Say which files differ; 1 if one does."""
    found = [(file, what) for word in words for file, _, what in different(word)]
    for file, what in found:
        print(f"{file.relative_to(ROOT)}: {what}")
    return 1 if found else 0


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
    asked = options.words or list(GENERATED)
    if options.check:
        return check(asked)
    make(asked)
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    raise SystemExit(main(sys.argv[1:]))
