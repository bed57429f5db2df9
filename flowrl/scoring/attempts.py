"""One reward on one batch: what is known already, tries, and the search for the samples that make a batch fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import described
from flowrl.core.phases import lacking, out_of_memory
from flowrl.scoring.cache import ScoreCache

log = logging.getLogger("flowrl")
ScoreOnce = Callable[[Any, Sequence[str], Sequence[dict]], "dict[str, Tensor]"]


@dataclass(slots=True)
class Counts:
    """What happened to one reward since it was last asked."""

    calls: int = 0
    """Of its score function."""
    failures: int = 0
    """Calls that raised."""
    masked: int = 0
    """Samples without a score."""
    cached: int = 0
    """Samples whose score was known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that are scored together."""

    images: Any
    prompts: Sequence[str]
    metadata: Sequence[dict]

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(self.images[start:stop], self.prompts[start:stop], self.metadata[start:stop])

    def finite(self) -> list[int]:
        """Rows whose pictures hold no NaN and no inf: one pass over them, without a copy."""
        if isinstance(self.images, Tensor):
            sums = self.images.detach().sum(dim=tuple(range(1, self.images.ndim)), dtype=torch.float32)
            return sums.isfinite().nonzero().flatten().tolist()
        return [row for row, image in enumerate(self.images) if image.detach().sum(dtype=torch.float32).isfinite()]

    def pick(self, rows: Sequence[int]) -> Batch:
        images = self.images[list(rows)] if isinstance(self.images, Tensor) else [self.images[i] for i in rows]
        return Batch(images, [self.prompts[i] for i in rows], [self.metadata[i] for i in rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """How a reward's scores are had, whatever it raises."""

    name: str
    once: ScoreOnce
    """Raw outputs of a batch, each [B], checked."""
    outputs: Sequence[str]
    stops: type[Exception]
    """An exception that is not tried again: a broken contract."""
    retries: int
    isolate: bool
    cache: ScoreCache | None
    counts: Counts
    tell: Callable[[str], None]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Each output, [B] float32; NaN where every try failed, and for a picture that is not finite."""
        rows = batch.finite()
        if len(rows) == len(batch):
            return self._known_or_scored(batch)
        # No reward's fault, so none is asked: it could only raise, or make a number of what is none.
        self.tell(f"{len(batch) - len(rows)} of {len(batch)} pictures hold NaN or inf, so they have no score")
        scores = self.masked(len(batch))
        for name, values in (self._known_or_scored(batch.pick(rows)) if rows else {}).items():
            scores[name][rows] = values
        return scores

    def _known_or_scored(self, batch: Batch) -> dict[str, Tensor]:
        # A score from the cache has no gradient.
        if self.cache is None or any(getattr(image, "requires_grad", False) for image in batch.images):
            return self._scored(batch)
        keys = self.cache.keys(batch.images, batch.prompts, batch.metadata)
        result = [self.cache.get(key, self.outputs) for key in keys]
        rows = [i for i, scores in enumerate(result) if scores is None]
        self.counts.cached += len(batch) - len(rows)
        fresh = self._scored(batch.pick(rows) if len(rows) < len(batch) else batch) if rows else {}
        for place, i in enumerate(rows):
            result[i] = {name: float(fresh[name][place]) for name in self.outputs}
            self.cache.put(keys[i], result[i])
        return {name: torch.tensor([scores[name] for scores in result if scores]) for name in self.outputs}

    def _scored(self, batch: Batch) -> dict[str, Tensor]:
        tries = self.retries + 1
        for attempt in range(1, tries + 1):
            scores = self.attempt(batch, f"try {attempt} of {tries}")
            if scores is not None:
                return scores
        if self.isolate and len(batch) > 1:
            return Search(self, batch).run()
        return self.masked(len(batch))

    def attempt(self, batch: Batch, note: str) -> dict[str, Tensor] | None:
        """The scores of one call; None, told and counted, if it raises."""
        self.counts.calls += 1
        try:
            return self.once(batch.images, batch.prompts, batch.metadata)
        except self.stops:
            raise
        # A user's code may raise anything, sys.exit() included; the policy is retry, then mask.
        except (Exception, SystemExit) as error:
            if out_of_memory(error):  # no sample's fault, and a mask would hide it
                raise lacking(error, f"reward {self.name!r}") from error
            self.counts.failures += 1
            self.tell(f"reward {self.name!r} raised {described(error)}, {note}")
            log.debug("reward %r raised this, %s", self.name, note, exc_info=error)
            return None

    def masked(self, count: int) -> dict[str, Tensor]:
        """Scores of so many samples that have none."""
        return {name: torch.full((count,), torch.nan) for name in self.outputs}


class Search:
    """Halves of a batch, and halves of those, each tried once, until what fails is one sample.

    One bad sample of n costs 2 log2 n calls, and no batch more than 2 n. Where the first 2 log2 n calls have all
    failed, it is no sample's fault (a server is away) and the rest is masked untried. Both halves are tried before
    either is cut: bad samples beside each other, as those of a bad prompt are, do not look like that.
    """

    def __init__(self, attempts: Attempts, batch: Batch) -> None:
        self.attempts, self.batch = attempts, batch
        self.scores = attempts.masked(len(batch))
        self.left: int | None = 2 * math.ceil(math.log2(len(batch)))
        """Failures that it still takes to give up; None once a call has succeeded."""

    def run(self) -> dict[str, Tensor]:
        self._halves(0, len(self.batch))
        return self.scores

    def _halves(self, start: int, stop: int) -> None:
        middle = (start + stop + 1) // 2
        for part in [part for part in ((start, middle), (middle, stop)) if not self._tried(*part)]:
            self._halves(*part)

    def _tried(self, low: int, high: int) -> bool:
        """Whether there is nothing more to be done about a part."""
        if low == high or self.left == 0:
            return True
        part = self.batch.part(low, high)
        alone = f" for the prompt {part.prompts[0]!r}" if high - low == 1 else ""
        result = self.attempts.attempt(part, f"a part of {high - low} of its batch{alone}")
        if result is not None:
            self._keep(result, low, high)
            return True
        self.left = self.left and self.left - 1
        return high - low == 1

    def _keep(self, found: Mapping[str, Tensor], low: int, high: int) -> None:
        self.left = None
        for name, values in found.items():
            self.scores[name][low:high] = values
