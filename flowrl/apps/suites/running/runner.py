"""The samples of a suite, made and judged, on any number of processes.

A sample is (prompt id, k); its noise, its file and its line depend on nothing else. Processes share the samples that
are still to be done, each exactly once. An image is judged as it was saved, so its scores can be computed again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from flowrl.apps.suites.running.drawing import seed_of
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.core.errors import RewardFailure
from flowrl.display.display import Progress
from flowrl.evaluation.suite import Item, Row, Suite
from flowrl.training.world import ALONE, World

PATIENCE = 8
"""Samples in a row that a judge may fail on before it counts as away."""
Sample = tuple[Item, int]
Draw = Callable[[Sequence[Sample]], Sequence[Tensor] | Tensor]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge says of one image."""

    scores: dict[str, float | None]
    answers: list[Any] = field(default_factory=list)
    error: str = ""
    """Why a score is None, where the judge failed; "": it has none to give."""


class Judge(Protocol):
    """A judge of images or videos."""

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data of all that decides its scores: names, weights, options, versions."""
        ...

    @property
    def whole_prompts(self) -> bool:
        """Whether it must see all images of a prompt at once."""
        ...

    def __call__(self, images: Sequence[Tensor], items: Sequence[Item]) -> list[Judgement]:
        """One judgement for each image [3, H, W] or video [F, 3, H, W] in [0, 1]; a failure is one with an error."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Which samples are made, and how many at once."""

    suite: Suite
    items: Sequence[Item]
    """Those of this call; others of the suite may be in the folder too."""
    samples: int
    """Images of each prompt."""
    base_seed: int = 0
    batch_size: int = 4

    def all(self) -> list[Sample]:
        return [(item, k) for item in self.items for k in range(self.samples)]


def limited(items: Sequence[Item], limit: int | None) -> list[Item]:
    """The first `limit` prompts in an order of hashes of their ids, listed in the suite's order; None: all.

    So a part of a suite is spread over its tasks, and a larger part holds a smaller one.
    """
    if limit is None or limit >= len(items):
        return list(items)
    order = sorted(items, key=lambda item: hashlib.sha256(item.id.encode()).digest())
    chosen = {item.id for item in order[:limit]}
    return [item for item in items if item.id in chosen]


def fingerprint(items: Sequence[Item]) -> str:
    """Tells a list of prompts with their records from every other."""
    plain = [[item.id, item.text, item.metadata, item.tags] for item in items]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fill(task: Task, folder: ResultsFolder, draw: Draw, judge: Judge | None, world: World = ALONE) -> None:
    """Make and judge what is not yet done; at the end the folder holds a line for every judged sample.

    The folder is begun by the first process; `draw` makes images [B, 3, H, W] of samples; `judge` None: images alone
    are made.

    Raises RewardFailure: the judge is away; what was judged before is kept, and the same call goes on.
    """
    rows = world.gather(folder.collect() if world.main else None)[0]
    todo = _units(task, judge, [one for one in task.all() if not _done(folder, rows, one, judge)])
    own = todo[world.rank * len(todo) // world.size : (world.rank + 1) * len(todo) // world.size]
    lines = _Lines(folder, world.rank)
    bar = Progress(sum(map(len, own)), task.suite.name, show=world.main)
    for unit in own:
        for batch in _batches([one for one in unit if not folder.image(*one).is_file()], task.batch_size):
            for (item, k), image in zip(batch, draw(batch), strict=True):
                seed = seed_of(task.base_seed, item.id, k)
                folder.keep(image, item, k, {"prompt": item.text, "id": item.id, "k": k, "seed": seed})
        if judge is not None:
            lines.add(_judged(task, folder, judge, unit))
        bar.update(len(unit))
    bar.close()
    lines.close()
    world.barrier()
    if world.main:
        folder.collect()
    world.barrier()


def rows_of(task: Task, folder: ResultsFolder) -> list[Row]:
    """One row for every sample of the task, in its order; without a score where there is no line."""
    known = folder.rows()
    return [known.get((item.id, k)) or _row(task, folder, (item, k)) for item, k in task.all()]


def _units(task: Task, judge: Judge | None, todo: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that one process handles together: a batch, or all of a prompt where the judge compares them."""
    if judge is not None and judge.whole_prompts:
        items = {item.id: item for item, _ in todo}
        return [[(item, k) for k in range(task.samples)] for item in items.values()]
    return list(_batches(todo, task.batch_size))


def _batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    return (list(samples[start : start + size]) for start in range(0, len(samples), size))


def _done(folder: ResultsFolder, rows: dict[tuple[str, int], Row], sample: Sample, judge: Judge | None) -> bool:
    """Whether nothing is left to do; a sample that could not be judged is tried again."""
    if not folder.image(*sample).is_file():
        return False
    row = rows.get((sample[0].id, sample[1]))
    return judge is None or (row is not None and bool(row.scores) and None not in row.scores.values())


def _row(task: Task, folder: ResultsFolder, sample: Sample) -> Row:
    item, k = sample
    file = folder.image(item, k).relative_to(folder.path).as_posix()
    return Row(item.id, item.text, k, seed_of(task.base_seed, item.id, k), file)


def _judged(task: Task, folder: ResultsFolder, judge: Judge, unit: Sequence[Sample]) -> list[Row]:
    images = [folder.read(*sample) for sample in unit]
    try:
        judgements = judge(images, [item for item, _ in unit])
    except RewardFailure as error:
        raise RewardFailure(f"{error}; {_go_on(folder)}") from error
    result = []
    for sample, judgement in zip(unit, judgements, strict=True):
        row = _row(task, folder, sample)
        row.scores, row.answers, row.error = judgement.scores, judgement.answers, judgement.error
        result.append(row)
    return result


def _go_on(folder: ResultsFolder) -> str:
    # --rejudge would set aside what this judge has said so far.
    without = " without --rejudge" if folder.header.get("judged_before") else ""
    return (
        f"all that was made and judged so far is kept in {folder.path}: give the same command again{without} to go on"
    )


class _Lines:
    """Lines of judged samples, written at once, but for those that failed: they wait until the judge answers again."""

    def __init__(self, folder: ResultsFolder, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.failed: list[Row] = []
        self.answered = False

    def add(self, rows: Sequence[Row]) -> None:
        """Keep judged samples. Raises RewardFailure: the judge has failed too many times in a row."""
        for row in rows:
            # A question that failed takes its image's score, and the answers to the others say that the judge is there.
            if row.error and all(value is None for value in (*row.scores.values(), *row.answers)):
                self.failed.append(row)
                if len(self.failed) >= PATIENCE:
                    raise self._away()
            else:
                self.folder.append([*self.failed, row], self.rank)
                self.failed, self.answered = [], True

    def close(self) -> None:
        """Write what failed at the end. Raises RewardFailure: the judge has answered nothing at all."""
        if self.failed and not self.answered:
            raise self._away()
        if self.failed:
            self.folder.append(self.failed, self.rank)

    def _away(self) -> RewardFailure:
        return RewardFailure(
            f"the judge is away: it failed on {len(self.failed)} images in a row ({self.failed[-1].error}); "
            f"{_go_on(self.folder)} once it is back"
        )
