"""The pairs of a finished run: base and tuned on one prompt and seed, in an order and on sides that are drawn.

P prompts, K evaluation seeds.
"""

import hashlib
import shlex
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.apps.gallery.images import imaged
from flowrl.apps.gallery.runs import Evaluation, Run, load_run
from flowrl.core.errors import ConfigError
from flowrl.core.polls import Vote
from flowrl.data.prompt_files import REFERENCE
from flowrl.run.people import polls


@dataclass(frozen=True, slots=True, kw_only=True)
class VotePair:
    """Two images of a prompt that people compare."""

    prompt: str
    group: str
    """Name in the stored votes of the samples that both are of."""
    distinct: int
    """Number of the distinct prompt, equal for prompts that are the same."""
    first: Path
    """Image; of a finished run that of the base."""
    second: Path
    """The other; of a finished run that of the tuned model, on the same prompt and noise."""
    second_left: bool
    """Whether the second is shown on the left."""
    sources: tuple[Path, ...] = ()
    """Images that the prompt edits."""


class Finished:
    """The pairs of a run that has ended, as a ballot takes them: they stay as they are."""

    def __init__(self, pairs: Sequence[VotePair]) -> None:
        self._pairs = pairs

    def pairs(self, votes: Collection[Vote]) -> Sequence[VotePair]:
        """The pairs that may be asked now, in the order in which they are asked for."""
        return self._pairs

    def turn(self) -> AbstractContextManager[None]:
        """In this block a vote is added or taken back, and nobody counts."""
        return nullcontext()

    def refusal(self, group: str, *images: str) -> str | None:
        """Why no vote on these images of a group, or on any, counts any more, for the voter; None: it does."""
        if not polls.of_training(group):
            return None
        return "That vote was one of the training, which has counted it: it stays."

    def progress(self, votes: Collection[Vote], answered: int, total: int) -> dict[str, Any]:
        """`progress`, how far a voter has come, in words; `waits`: whether pairs may come by themselves."""
        return {"progress": f"{answered} of {total} answered", "waits": False}


def load_pairs(folder: Path) -> list[VotePair]:
    """The pairs of a finished run in the order in which they are asked for.

    The order and the sides are drawn by identity (seed of the run, prompt, seed of the image), so they are the same
    whenever the command is called, and nobody can choose them. Of every prompt one pair comes before any has its
    second one, so that few votes are spread over many prompts, which the interval of the result is over.

    Raises ConfigError: no run, or one without images of the tuned model; with the remedy.
    """
    run = load_run(folder)
    before, after = run.base, run.evaluations.get("tuned")
    if before is None or after is None:
        missing = "base" if before is None else "tuned"
        status = run.summary.get("status")
        why = f"the run has not finished (status {status})" if status else "the run has not finished"
        why = "its evaluation was not written, or was deleted" if run.finished else why
        command = str(run.summary.get("command") or f"flowrl train {shlex.quote(str(folder))} --resume")
        raise ConfigError(
            f"RUN {folder} has no eval/{missing}.json: {why}; finish it with `{command}`, or give a run that has ended"
        )
    found = _drawn(run, before, after)
    if not found:
        raise ConfigError(
            f"RUN {folder} has no prompt and seed of which images of both base and tuned were saved; train with "
            "eval.save_images above 0 (64 unless set), and copy the folder eval/ of the run along with its files"
        )
    return found


def _drawn(run: Run, before: Evaluation, after: Evaluation) -> list[VotePair]:
    seed, numbers = run.config.get("seed") or 0, before.groups
    queues: dict[int, list[tuple[str, VotePair]]] = defaultdict(list)
    for p, k in np.argwhere(imaged(run)).tolist():
        files = before.image(p, k), after.image(p, k)
        if files[0] is None or files[1] is None:
            continue
        place = _draw(seed, "order", before.prompts[p], before.seeds[k], p)
        pair = VotePair(
            prompt=before.prompts[p],
            group=f"prompt-{p:05d}-seed-{before.seeds[k]}",
            distinct=int(numbers[p]),
            first=files[0],
            second=files[1],
            second_left=drawn_left(seed, "side", before.prompts[p], before.seeds[k], p),
            sources=tuple(file for name, file in before.given(p).items() if name != REFERENCE),
        )
        queues[pair.distinct].append((place, pair))
    by_place = itemgetter(0)
    ranked = [((rank, each[0]), each[1]) for q in queues.values() for rank, each in enumerate(sorted(q, key=by_place))]
    return [pair for _, pair in sorted(ranked, key=by_place)]


def drawn_left(*identity: object) -> bool:
    """Whether the second of two is on the left, drawn by identity."""
    return int(_draw(*identity)[0], 16) < 8


def _draw(*identity: object) -> str:
    """Random hexadecimal digits of an identity."""
    return hashlib.sha256("\0".join(map(str, identity)).encode("utf-8", "replace")).hexdigest()
