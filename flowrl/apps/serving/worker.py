"""The worker process: it builds one reward, and scores the batches it is handed over a socket.

Images are decoded here and not in the server, so that a file that crashes a decoder ends a worker, not the service.
"""

import dataclasses
import hashlib
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

from flowrl.apps.serving.frames import Result, failed, pack_frame, read_frame, unpack_items
from flowrl.apps.serving.messages import Item
from flowrl.core.errors import Fault, described
from flowrl.core.subprocesses import watch_parent
from flowrl.core.versions import versions
from flowrl.core.wire import fingerprint, plain_card
from flowrl.media.transport import unpack
from flowrl.reward import RewardError
from flowrl.scoring.entries import RewardPlan, check_plans, reward_plan
from flowrl.scoring.one_call import score_once
from flowrl.scoring.surroundings import Batch, Conduct
from flowrl.scoring.weighted import WeightedReward


def score_items(entry: WeightedReward, items: list[Item]) -> list[Result]:
    """A result for each item: one that fails spoils no other, but for a reward that needs whole groups."""
    outputs, whole = entry.reward.card.outputs, entry.reward.card.needs_groups
    results: dict[int, Result] = {}
    samples: dict[int, Any] = {}
    for row, item in enumerate(items):
        try:
            samples[row] = unpack(item.image)
        except Exception as error:  # PIL raises many kinds for what is no image; none may end the worker
            results[row] = failed(outputs, "image", f"the image cannot be decoded: {error}")
    if whole and results:
        text = "another image of the group cannot be decoded"
        return [results.get(row) or failed(outputs, "raised", text) for row in range(len(items))]
    rows = list(samples)
    batches = [rows] if rows else []
    while batches:
        batch = batches.pop()
        try:
            scores = _score_rows(entry, [items[row] for row in batch], [samples[row] for row in batch])
        except (Exception, SystemExit) as error:  # a reward may raise anything
            if len(batch) > 1 and not whole:
                batches += [[row] for row in batch]
                continue
            kind = "refused" if isinstance(error, RewardError) else "raised"
            text = str(error) if kind == "refused" else described(error)
            scores = [failed(outputs, kind, text) for _ in batch]
        results |= dict(zip(batch, scores, strict=True))
    return [results[row] for row in range(len(items))]


def _score_rows(entry: WeightedReward, items: list[Item], samples: list[Any]) -> list[Result]:
    same = len({sample.shape for sample in samples}) == 1
    images = torch.stack(samples) if same else samples
    with tempfile.TemporaryDirectory(prefix="flowrl-sources-") as folder:
        metadata = [_with_sources(item, Path(folder) / str(row)) for row, item in enumerate(items)]
        conduct = Conduct()
        table = score_once(entry, Batch(images, [item.prompt for item in items], metadata), conduct)
    results = []
    for values in zip(*(table[name].tolist() for name in entry.reward.card.outputs), strict=True):
        scores = {n: None if v != v else v for n, v in zip(entry.reward.card.outputs, values, strict=True)}
        missing = [name for name, value in scores.items() if value is None]
        why = "".join(f" ({reason})" for reason in conduct.reasons[-1:])
        error = {"kind": "nan", "text": f"the reward returned NaN for {', '.join(missing)}{why}"} if missing else None
        results.append({"scores": scores, "error": error})
    return results


def _with_sources(item: Item, stem: Path) -> dict[str, Any]:
    """The metadata, with the images sent along as files of ours."""
    if not item.sources:
        return item.metadata
    paths = [stem.with_name(f"{stem.name}-{k}.png") for k in range(len(item.sources))]
    for path, source in zip(paths, item.sources, strict=True):
        path.write_bytes(source.data)
    return item.metadata | {"images": [str(path) for path in paths]}


# ---- the process


def introduce(plan: RewardPlan, entry: WeightedReward) -> dict[str, Any]:
    """The reward as the server announces it."""
    card = plain_card(entry.reward.card)
    source = None
    if plan.entry.path is not None:
        source = hashlib.sha256(Path(plan.entry.path).read_bytes()).hexdigest()
    options = plan.config and dataclasses.asdict(plan.config)
    mark = fingerprint(plan.name, source, options, card)
    return {"card": card, "fingerprint": mark, "options": options, "versions": versions()}


def main(connection: socket.socket) -> None:
    """Serve the socket until its other end is closed."""
    # Ctrl-C goes to the whole group of processes: when the workers end is for the server to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What a reward prints goes to the log, not between the server's own lines.
    os.dup2(2, 1)
    # The process that workers are forked from ends with the server, even by kill -9 while a reward hangs.
    watch_parent(os.getppid())
    file = connection.makefile("rwb")

    def answer(header: Any) -> None:
        file.writelines(pack_frame(header))
        file.flush()

    first = read_frame(file)
    if first is None:
        return
    options, _ = first
    try:
        plan = reward_plan(options, "--reward")
        check_plans([("--reward", plan)])
        entry = plan.build()
        answer(introduce(plan, entry))
    except (Exception, SystemExit) as error:  # reported to the server, which ends with it or tries again
        answer({"failed": str(error) if isinstance(error, Fault) else described(error)})
        return
    while (frame := read_frame(file)) is not None:
        answer(score_items(entry, unpack_items(*frame)))
