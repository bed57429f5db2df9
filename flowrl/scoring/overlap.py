"""Scoring in parallel: some rewards score finished images while the next ones are sampled or read.

Only rewards whose cards say `overlap` take part, and next to a GPU those with `overlap_on_gpu`. Each has a thread of
its own, which has its batches in their order; the latter have a CUDA stream of their own too. Each sample
meets the reward as it would without, tries and masks are the Scorer's, and the batches do not depend on timing, so that
the scores are the same. `Ahead` has the samples of a rollout, whose batches are parts of one whole; `Beside` has
batches that are complete in themselves.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.media.eight_bits import EightBitImages
from flowrl.reward import Card
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.scoring.surroundings import BESIDE, OF_THE_PROCESS, Batch, Latents, Settings
from flowrl.scoring.time_limits import Ambient
from flowrl.scoring.weighted import WeightedReward

Outputs = dict[str, Tensor]
CPU = torch.device("cpu")
_ASK_S = 0.2
"""Seconds between two looks at whether to stop, while a slow reward is waited for."""


class SideStream:
    """A CUDA stream for a reward that scores on the GPU while it samples: the kernels of both run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """The work that this thread has asked of the GPU so far: a decoded batch, moved or loaded weights."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        """Work of this thread goes into the stream, after what `mark` names.

        At the end the stream is idle: no memory that this thread frees is still read, and scores are there.
        """
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.stream.synchronize()


def overlaps(card: Card, device: torch.device) -> bool:
    """Whether a reward may score while samples are drawn on `device`."""
    return card.overlap or (card.overlap_on_gpu and device.type == "cuda")


class Lanes:
    """A thread for each of some rewards, in the surroundings of the one that makes this. Samples are drawn on the
    device; on a GPU the rewards that may score there have a stream each. `parts`: batches are parts of one whole, so
    that rewards of whole groups take no part.
    """

    def __init__(self, scorer: Scorer, device: torch.device, *, parts: bool) -> None:
        self.scorer, self.ambient, self.before = scorer, Ambient(), Settings(OF_THE_PROCESS)
        cards = [(entry, entry.reward.card) for entry in scorer.distinct]
        entries = [entry for entry, card in cards if overlaps(card, device) and not (parts and card.needs_groups)]
        self.pools = [(entry, ThreadPoolExecutor(1, "flowrl-reward")) for entry in entries]
        on_gpu = [entry for entry in entries if device.type == "cuda" and entry.reward.card.overlap_on_gpu]
        self.streams = {id(entry): SideStream(device) for entry in on_gpu}
        self._on_gpu: list[Future[Outputs]] = []

    def __bool__(self) -> bool:
        return bool(self.pools)

    def submit(self, batch: Batch, errors: list[str]) -> dict[int, Future[Outputs]]:
        """`Scorer.raw` on a batch, by the identity of the entry."""
        begun: dict[int, Future[Outputs]] = {}
        for entry, pool in self.pools:
            stream = self.streams.get(id(entry))
            after = nullcontext() if stream is None else stream.after(stream.mark())
            begun[id(entry)] = pool.submit(self.ambient.run, self._beside, after, entry, batch, errors)
            if stream is not None:
                self._on_gpu.append(begun[id(entry)])
        return begun

    def quiet(self) -> None:
        """Wait until no reward is at work on the GPU.

        For what follows: a decoder sets switches of the whole process (cuDNN's precision), which would reach a reward's
        kernels, so that its scores depended on timing.

        Raises Abandoned: the run is to stop.
        """
        for future in self._on_gpu:
            self._end(future)
        self._on_gpu.clear()

    def _beside(
        self, after: AbstractContextManager[None], entry: WeightedReward, batch: Batch, errors: list[str]
    ) -> Outputs:
        BESIDE.set(True)  # in the copy of the context that this call has
        with after:
            return self.scorer.raw(entry, batch, errors)

    def settle(self) -> None:
        """Put back, and report, what the rewards changed of the process; no thread may be at work."""
        changed = self.before.put_back() if self.pools else []
        self.scorer.report_changed(" or ".join(entry.name for entry, _ in self.pools), changed)

    def close(self) -> None:
        """Drop the batches that wait; the one under way ends by itself, so that a slow server delays no exit."""
        for _, pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def result(self, future: Future[Outputs]) -> Outputs:
        """The outputs of a thread, once they are there. Raises Abandoned: the run is to stop."""
        self._end(future)
        return future.result()

    def _end(self, future: Future[Outputs]) -> None:
        while not wait((future,), timeout=_ASK_S).done:
            if self.scorer.stop():
                raise Abandoned

    def others(self, batch: Batch, errors: list[str]) -> dict[int, Outputs]:
        """Outputs of the rewards without a thread, which score the batch now."""
        own = {id(entry) for entry, _ in self.pools}
        return {id(e): self.scorer.raw(e, batch, errors) for e in self.scorer.distinct if id(e) not in own}

    def combine(self, found: Mapping[int, Outputs], errors: Sequence[str]) -> Scores:
        """The scores from every reward's outputs, in the order of the rewards."""
        joined: Outputs = {}
        for entry in self.scorer.distinct:
            joined |= found[id(entry)]
        return self.scorer.combine(joined, errors)


class Ahead:
    """Scores of B samples whose images come batch by batch. Rewards of whole groups wait for the groups. Prompts and
    metadata are of all B samples, in the order in which the images will come; they are drawn on the device.
    """

    def __init__(
        self, scorer: Scorer, prompts: Sequence[str], metadata: Sequence[dict], device: torch.device = CPU
    ) -> None:
        self.scorer, self.prompts, self.metadata = scorer, prompts, metadata
        self.done = 0
        self.errors: list[str] = []
        self.lanes = Lanes(scorer, device, parts=True)
        self._begun: list[dict[int, Future[Outputs]]] = []

    def __bool__(self) -> bool:
        """True where a reward takes part."""
        return bool(self.lanes)

    def close(self) -> None:
        self.lanes.close()

    def quiet(self) -> None:
        """As `Lanes.quiet`, to be called before the next images are decoded."""
        self.lanes.quiet()

    def add(self, images: EightBitImages, *, early: bool = True) -> None:
        """The next b images. `early` False keeps what a reward raised for `scores`: this process must go on with the
        others. Raises RewardError: a reward has broken its contract on earlier ones.
        """
        part = slice(self.done, self.done + len(images))
        self.done = part.stop
        for earlier in self._begun if early else ():
            for future in earlier.values():
                if future.done():
                    future.result()
        batch = Batch(images, self.prompts[part], self.metadata[part])
        self._begun.append(self.lanes.submit(batch, self.errors))

    def scores(self, images: EightBitImages, latents: Latents | None = None) -> Scores:
        """The scores, when all B images are there; the other rewards, those on latents among them, score them now.

        Raises RewardError: as `Scorer.score`.
        """
        if not self.lanes:
            return self.scorer.score(images, self.prompts, self.metadata, latents)
        assert self.done == len(self.prompts), "images are missing"
        result = self.lanes.others(Batch(images, self.prompts, self.metadata, latents), self.errors)
        for entry, _ in self.lanes.pools:
            parts = [self.lanes.result(futures[id(entry)]) for futures in self._begun]
            result[id(entry)] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.lanes.settle()
        return self.lanes.combine(result, self.errors)


class Beside(AbstractContextManager["Beside"]):
    """Scores of one batch after another, each as `Scorer.score` gives them; used as a context.

    Where a reward overlaps, a batch's scores come back when the next batch is added, or with the rest; so no more than
    two batches of images are held, however slow the reward is. Without a scorer nothing is ever due. `device` as in
    `Lanes`.
    """

    def __init__(self, scorer: Scorer | None, device: torch.device = CPU) -> None:
        self.lanes = None if scorer is None else Lanes(scorer, device, parts=False)
        self._waiting: deque[tuple[Any, dict[int, Outputs], dict[int, Future[Outputs]], list[str]]] = deque()

    def __exit__(self, *error: object) -> None:
        if self.lanes is not None:
            self.lanes.close()

    def add(self, key: Any, batch: Batch) -> list[tuple[Any, Scores]]:
        """Begin with a batch, and (key, scores) of what is due: the batch before, or this one where none overlaps.

        Raises RewardError: as `Scorer.score`, perhaps for the batch before.
        """
        if self.lanes is None:
            return []
        errors: list[str] = []
        begun = self.lanes.submit(batch, errors)
        self._waiting.append((key, self.lanes.others(batch, errors), begun, errors))
        return self._take(1 if self.lanes else 0)

    def quiet(self) -> None:
        """As `Lanes.quiet`, to be called before the next batch is decoded."""
        if self.lanes is not None:
            self.lanes.quiet()

    def rest(self) -> list[tuple[Any, Scores]]:
        """(key, scores) of the batches that have not come back yet."""
        due = self._take(0)
        if self.lanes is not None:
            self.lanes.settle()
        return due

    def _take(self, left: int) -> list[tuple[Any, Scores]]:
        due = []
        while self.lanes is not None and len(self._waiting) > left:
            key, now, begun, errors = self._waiting.popleft()
            later = {place: self.lanes.result(future) for place, future in begun.items()}
            due.append((key, self.lanes.combine(now | later, errors)))
        return due
