"""The lab's one command: its cells, or with a word in front another experiment (scripts/lab/README.md)."""

from __future__ import annotations

import importlib
import sys

from scripts.lab import cells

WORDS = (
    *("frozen-video", "guard", "guard-ratio", "proxy", "judge", "rules"),
    *("find-best-of-n", "motion-tasks", "motion-accuracy"),
)
"""Each is the name of its module, with dashes."""


def main() -> int | None:
    words = sys.argv[1:]
    other = words and words[0] in WORDS
    module = importlib.import_module(f"scripts.lab.{words[0].replace('-', '_')}") if other else cells
    # The name in front of the usage.
    sys.argv = [f"python -m scripts.lab {words[0]}", *words[1:]] if other else ["python -m scripts.lab", *words]
    return module.main()


if __name__ == "__main__":
    raise SystemExit(main())
