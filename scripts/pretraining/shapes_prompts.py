"""The captions of the shapes world, still and in motion: `assets/prompts/shapes*.txt`; with near misses, as .jsonl.

A test compares the files with `prompts` of `flowrl.shapes` and `flowrl.moving_shapes`, another one near misses.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from flowrl import moving_shapes, shapes
from scripts.pretraining.clip import near_misses

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"


NEAR = 3
"""Near misses of a caption."""


def with_near_misses(caption: str) -> dict[str, str]:
    """A record: the caption, and others that differ by a colour, shape, number or relation, as near_1, near_2, ..."""
    near = sorted({scene.caption for scene in near_misses(shapes.parse(caption))})
    random.Random(caption).shuffle(near)
    return {"prompt": caption} | {f"near_{k + 1}": near[k % len(near)] for k in range(NEAR)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=FOLDER)


def write(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        for name, captions in (("shapes", shapes.prompts(part)), ("shapes-motion", moving_shapes.prompts(part))):
            file = options.out / f"{name}-{part}.txt"
            file.write_text("\n".join(captions) + "\n", encoding="ascii", newline="\n")
            print(f"{file}: {len(captions)} captions")
    file = options.out / "shapes-train-near.jsonl"
    lines = [json.dumps(with_near_misses(caption)) + "\n" for caption in shapes.prompts("train")]
    file.write_text("".join(lines), encoding="ascii", newline="\n")
    print(f"{file}: {len(lines)} captions")
