"""What runs in a worker process: it builds one reward, and scores the batches it is handed over a socket.

Pictures are decoded here and not in the server, so that a file that crashes a decoder ends a worker, not the service.

A frame is the length of a JSON header and of what follows it, the header, and the pictures' bytes one behind the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flowrl.serving.messages import Item, dumps
from rewards._wire import Picture

if TYPE_CHECKING:
    from flowrl.components import RewardPlan
    from flowrl.reward import WeightedReward

LENGTHS = struct.Struct(">IQ")
"""Bytes of the header, and of the pictures."""
Result = dict[str, Any]
"""{"scores": {output: number or None}, "error": {"kind", "text"} or None}."""


def pack_frame(header: Any, pictures: tuple[bytes, ...] = ()) -> list[bytes]:
    """The parts of a frame, to be written one behind the other."""
    head = dumps(header)
    return [LENGTHS.pack(len(head), sum(map(len, pictures))), head, *pictures]


def pack_items(items: list[Item]) -> list[bytes]:
    """A batch as a frame."""

    def plain(item: Item) -> dict[str, Any]:
        pictures = [(p.format, p.shape, len(p.data)) for p in (item.picture, *item.sources)]
        return {"id": item.id, "prompt": item.prompt, "metadata": item.metadata, "pictures": pictures}

    data = tuple(picture.data for item in items for picture in (item.picture, *item.sources))
    return pack_frame([plain(item) for item in items], data)


def unpack_items(records: list[dict[str, Any]], data: bytes) -> list[Item]:
    """The batch of a frame's header and pictures."""
    items, place = [], 0
    for record in records:
        pictures = []
        for kind, shape, size in record["pictures"]:
            pictures.append(Picture(kind, tuple(shape), data[place : place + size]))
            place += size
        items.append(Item(record["id"], record["prompt"], record["metadata"], pictures[0], tuple(pictures[1:])))
    return items


def failed(outputs: tuple[str, ...], kind: str, text: str) -> Result:
    """No scores, and why."""
    return {"scores": dict.fromkeys(outputs), "error": {"kind": kind, "text": text[:2000]}}


# ---- scoring


def score_items(entry: WeightedReward, items: list[Item]) -> list[Result]:
    """A result for each item: one that fails spoils no other, but for a reward that needs whole groups."""
    from rewards._pixels import unpack

    outputs, whole = entry.reward.card.outputs, entry.reward.card.needs_groups
    results: dict[int, Result] = {}
    samples: dict[int, Any] = {}
    for row, item in enumerate(items):
        try:
            samples[row] = unpack(item.picture)
        except (OSError, ValueError, SyntaxError) as error:  # what PIL raises for what is no picture
            results[row] = failed(outputs, "picture", f"the picture cannot be decoded: {error}")
    if whole and results:
        text = "another picture of the group cannot be decoded"
        return [results.get(row) or failed(outputs, "raised", text) for row in range(len(items))]
    rows = list(samples)
    batches = [rows] if rows else []
    while batches:
        batch = batches.pop()
        try:
            found = _score_rows(entry, [items[row] for row in batch], [samples[row] for row in batch])
        except Exception as error:  # a reward may raise anything
            if len(batch) > 1 and not whole:
                batches += [[row] for row in batch]
                continue
            kind = "refused" if type(error).__name__ == "RewardError" else "raised"
            text = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
            found = [failed(outputs, kind, text) for _ in batch]
        results |= dict(zip(batch, found, strict=True))
    return [results[row] for row in range(len(items))]


def _score_rows(entry: WeightedReward, items: list[Item], samples: list[Any]) -> list[Result]:
    import torch

    from flowrl.reward import score_once

    same = len({sample.shape for sample in samples}) == 1
    images = torch.stack(samples) if same else samples
    with tempfile.TemporaryDirectory(prefix="flowrl-sources-") as folder:
        metadata = [_with_sources(item, Path(folder) / str(row)) for row, item in enumerate(items)]
        table = score_once(entry, images, [item.prompt for item in items], metadata)
    results = []
    for values in zip(*(table[name].tolist() for name in entry.reward.card.outputs), strict=True):
        scores = {n: None if v != v else v for n, v in zip(entry.reward.card.outputs, values, strict=True)}
        missing = [name for name, value in scores.items() if value is None]
        error = {"kind": "nan", "text": f"the reward returned NaN for {', '.join(missing)}"} if missing else None
        results.append({"scores": scores, "error": error})
    return results


def _with_sources(item: Item, stem: Path) -> dict[str, Any]:
    """The metadata, with the pictures sent along as files of ours."""
    if not item.sources:
        return item.metadata
    paths = [stem.with_name(f"{stem.name}-{k}.png") for k in range(len(item.sources))]
    for path, source in zip(paths, item.sources, strict=True):
        path.write_bytes(source.data)
    return item.metadata | {"images": [str(path) for path in paths]}


# ---- the process


def introduce(plan: RewardPlan, entry: WeightedReward) -> dict[str, Any]:
    """What the server must know of the reward."""
    import dataclasses
    import hashlib

    from rewards._wire import fingerprint, plain_card

    card = plain_card(entry.reward.card)
    source = None
    if plan.entry.path is not None:
        source = hashlib.sha256(Path(plan.entry.path).read_bytes()).hexdigest()
    options = plan.config and dataclasses.asdict(plan.config)
    return {"card": card, "fingerprint": fingerprint(plan.name, source, options, card)}


def main(descriptor: int, parent: int) -> None:
    """Serve the socket until its other end is closed."""
    # Ctrl-C goes to the whole group of processes: when the workers end is for the server to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(parent)
    file = socket.socket(fileno=descriptor).makefile("rwb")

    def answer(header: Any) -> None:
        file.writelines(pack_frame(header))
        file.flush()

    options, _ = _read(file)
    try:
        from flowrl.components import reward_plan

        plan = reward_plan(options, "--reward")
        entry = plan.build()
        answer(introduce(plan, entry))
    except (Exception, SystemExit) as error:  # told to the server, which ends with it or tries again
        answer({"failed": f"{type(error).__name__}: {error}"})
        return
    while (frame := _read(file)) is not None:
        answer(score_items(entry, unpack_items(*frame)))


def _read(file: IO[bytes]) -> tuple[Any, bytes] | None:
    """(header, pictures) of the next frame; None at the end."""
    lengths = file.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, rest = LENGTHS.unpack(lengths)
    return json.loads(file.read(head)), file.read(rest)


def _end_with(parent: int) -> None:
    """End this process when the server is gone, even by kill -9 while a reward hangs."""
    from flowrl.distributed import watch_parent

    if os.getppid() != parent:
        os._exit(1)
    watch_parent(parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
