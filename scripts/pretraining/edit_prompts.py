"""Edits of scenes with their sources: `assets/prompts/shapes-edit-*.jsonl` and the images beside them.

The operations come in turn, so that every list has as many of each, give or take one; no list has the same content
twice, and none is in both. A record has `prompt`, `image` and `operation`. Tests compare the files with these draws.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl import edited_shapes, shapes
from flowrl.edited_shapes import OPERATIONS, Pair

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"
SIZE = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--train", type=int, default=1000, help="pairs of the training list")
    parser.add_argument("--heldout", type=int, default=500, help="pairs of the held-out list")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the set; what it holds is replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--count", type=int, default=2000)


def draw(part: str, count: int, operations: tuple[str, ...] = OPERATIONS, seed: int = 0) -> list[Pair]:
    """So many pairs of a part, the operations in turn."""
    rng, pairs = np.random.default_rng((seed, len(part))), dict[str, Pair]()
    while len(pairs) < count:
        pair = edited_shapes.draw(operations[len(pairs) % len(operations)], rng, SIZE, part)
        pairs.setdefault(pair.content, pair)
    return list(pairs.values())


def as_image(values: np.ndarray) -> Image.Image:
    """Values [3, H, W] in [0, 1] in 8 bits."""
    return Image.fromarray(np.round(255 * values.transpose(1, 2, 0)).astype(np.uint8))


def write(options: argparse.Namespace) -> None:
    (options.out / "shapes-edit").mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        lines = []
        for number, pair in enumerate(draw(part, getattr(options, part), tuple(options.operations), options.seed)):
            name = f"shapes-edit/{part}-{number:03}.png"
            as_image(shapes.render(pair.source, SIZE)).save(options.out / name)
            record = {"prompt": pair.edit.instruction, "image": name, "operation": pair.edit.operation}
            lines.append(json.dumps(record) + "\n")
        file = options.out / f"shapes-edit-{part}.jsonl"
        file.write_text("".join(lines), encoding="ascii", newline="\n")
        print(f"{file}: {len(lines)} edits")


def write_pairs(options: argparse.Namespace) -> None:
    """A preference set that needs no sampling: the right result against the source, unchanged.

    Edits are fresh draws of the training part; a record has `prompt`, `image`, `chosen` and `rejected`.
    """
    rng, lines = np.random.default_rng((options.seed, options.count)), []
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    for number in range(options.count):
        pair = edited_shapes.draw(options.operations[number % len(options.operations)], rng, SIZE, "train")
        names = [f"images/{number:05}-{side}.png" for side in ("source", "result")]
        for name, placed in zip(names, (pair.source, pair.result), strict=True):
            as_image(shapes.render(placed, SIZE)).save(options.out / name)
        record = {"prompt": pair.edit.instruction, "image": names[0], "chosen": names[1], "rejected": names[0]}
        lines.append(json.dumps(record | {"operation": pair.edit.operation}) + "\n")
    (options.out / "pairs.jsonl").write_text("".join(lines), encoding="ascii", newline="\n")
    print(f"{options.out}: {len(lines)} pairs of edits")
