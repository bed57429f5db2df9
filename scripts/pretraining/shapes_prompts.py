"""The captions of the shapes world, still and in motion: `assets/prompts/shapes*.txt`.

A test compares the files with `prompts` of `flowrl.shapes` and `flowrl.moving_shapes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl import moving_shapes, shapes

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=FOLDER)


def write(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        for name, captions in (("shapes", shapes.prompts(part)), ("shapes-motion", moving_shapes.prompts(part))):
            file = options.out / f"{name}-{part}.txt"
            file.write_text("\n".join(captions) + "\n", encoding="ascii", newline="\n")
            print(f"{file}: {len(captions)} captions")
