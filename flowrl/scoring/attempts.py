"""One reward on one batch: what is known already, tries, and the search for the samples that make a batch fail."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.errors import RewardError, described
from flowrl.display.phases import lacking, out_of_memory
from flowrl.scoring.cache import ScoreCache
from flowrl.scoring.surroundings import Batch

log = logging.getLogger("flowrl")
ScoreOnce = Callable[[Batch], dict[str, Tensor]]


@dataclass(slots=True)
class Counts:
    """Counts of one reward since they were last taken."""

    calls: int = 0
    """Calls of its score function."""
    failures: int = 0
    """Calls that raised."""
    masked: int = 0
    """Samples without a score."""
    cached: int = 0
    """Samples whose score was known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """How a reward's scores are had, whatever it raises."""

    name: str
    once: ScoreOnce
    """Raw outputs of a batch, each [B], checked."""
    outputs: Sequence[str]
    retries: int
    isolate: bool
    cache: ScoreCache | None
    counts: Counts
    report: Callable[[str], None]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Each output, [B] float32; NaN where every try failed, and for a sample that is not finite."""
        rows = batch.finite()
        if len(rows) == len(batch):
            return self._known_or_scored(batch)
        # No reward is called: it could only raise, or return a number for something that has none.
        self.report(f"{len(batch) - len(rows)} of {len(batch)} samples hold NaN or inf, so they have no score")
        scores = self.masked(len(batch))
        for name, values in (self._known_or_scored(batch.pick(rows)) if rows else {}).items():
            scores[name][rows] = values
        return scores

    def _known_or_scored(self, batch: Batch) -> dict[str, Tensor]:
        if self.cache is None or batch.needs_gradient:  # a score from the cache has none
            return self._scored(batch)
        samples = zip(batch.images, batch.prompts, batch.metadata, strict=True)
        keys = [self.cache.key(*sample) for sample in samples]
        result = [self.cache.get(key, self.outputs) for key in keys]
        rows = [i for i, scores in enumerate(result) if scores is None]
        self.counts.cached += len(batch) - len(rows)
        fresh = self._scored(batch.pick(rows) if len(rows) < len(batch) else batch) if rows else {}
        for place, i in enumerate(rows):
            scores = {name: float(fresh[name][place]) for name in self.outputs}
            self.cache.put(keys[i], scores)
            result[i] = scores
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
        """The scores of one call; None, reported and counted, if it raises."""
        self.counts.calls += 1
        try:
            return self.once(batch)
        except RewardError:  # a broken contract is not tried again
            raise
        # A user's code may raise anything, sys.exit() included; the policy is retry, then mask.
        except (Exception, SystemExit) as error:
            if out_of_memory(error):  # no sample's fault, and a mask would hide it
                raise lacking(error, f"reward {self.name!r}") from error
            self.counts.failures += 1
            self.report(f"reward {self.name!r} raised {described(error)}, {note}")
            log.debug("reward %r raised this, %s", self.name, note, exc_info=error)
            return None

    def masked(self, count: int) -> dict[str, Tensor]:
        """Scores of so many samples that have none."""
        return {name: torch.full((count,), torch.nan) for name in self.outputs}


class Search:
    """Halves of a batch, and halves of those, each tried once, until what fails is one sample.

    One bad sample of n costs 2 log2 n calls, and no batch more than 2 n. Where the first 2 log2 n calls have all
    failed, it is no sample's fault (a server is away) and the rest is masked untried. Both halves are tried before
    either is cut: bad samples next to each other, as those of a bad prompt are, do not look like that.
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
        """True where nothing more can be done about a part."""
        if low == high or self.left == 0:
            return True
        part = self.batch.part(low, high)
        alone = f" for the prompt {part.prompts[0]!r}" if high - low == 1 else ""
        result = self.attempts.attempt(part, f"a part of {high - low} of its batch{alone}")
        if result is not None:
            self.left = None
            for name, values in result.items():
                self.scores[name][low:high] = values
            return True
        self.left = self.left and self.left - 1
        return high - low == 1
