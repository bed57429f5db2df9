"""GenEval's 553 benchmark prompts with their records, by the rule of flowrl/apps/suites/geneval.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.apps.suites.geneval import lines

FILE = Path(__file__).resolve().parents[2] / "assets" / "prompts" / "geneval.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=FILE)


def write(options: argparse.Namespace) -> None:
    options.out.write_text("\n".join(lines()) + "\n", encoding="ascii", newline="\n")
    print(f"{options.out}: {len(lines())} prompts")
