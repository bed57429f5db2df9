"""Scoring beside sampling: finished batches of a rollout go to some rewards while the next ones are sampled.

Only rewards whose cards say `overlap` take part, each in one thread of its own, which has the batches in their order.
Each sample meets the reward as it would afterwards, tries and masks are the Scorer's, and the batches are those of the
rollout whatever the timing, so that the scores are the same. Rewards of whole groups wait for the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowrl.reward import Scorer, Scores


class Ahead:
    """Scores of B samples whose pictures come batch by batch.

    Args:
        scorer: of the run.
        prompts, metadata: of all B samples, in the order in which the pictures will come.
    """

    def __init__(self, scorer: Scorer, prompts: Sequence[str], metadata: Sequence[dict]) -> None:
        self.scorer, self.prompts, self.metadata = scorer, prompts, metadata
        self.done = 0
        self.errors: list[str] = []
        early = [e for e in scorer.distinct if e.reward.card.overlap and not e.reward.card.needs_groups]
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._lanes = [(entry, _thread(device)) for entry in early]
        self._found: list[list[Future[dict[str, Tensor]]]] = [[] for _ in early]

    def __bool__(self) -> bool:
        """Whether any reward takes part."""
        return bool(self._lanes)

    def close(self) -> None:
        """What waits is not scored; what is under way ends by itself, so that a slow server holds up no one's end."""
        for _, pool in self._lanes:
            pool.shutdown(wait=False, cancel_futures=True)

    def add(self, images: Tensor) -> None:
        """The next pictures, [b, ...].

        Raises:
            RewardError: a reward has broken its contract on earlier ones.
        """
        part = slice(self.done, self.done + len(images))
        self.done = part.stop
        # Laid out as a part of the whole would be: a sum over other strides may differ in its last bit.
        given = images.contiguous(), self.prompts[part], self.metadata[part], self.errors
        for (entry, pool), found in zip(self._lanes, self._found, strict=True):
            for earlier in found:
                if earlier.done():
                    earlier.result()
            found.append(pool.submit(self.scorer.raw, entry, *given))

    def scores(self, images: Tensor) -> Scores:
        """The scores, when all pictures [B, ...] are there; the other rewards score them now.

        Raises:
            RewardError: as `Scorer.score`.
        """
        if not self._lanes:
            return self.scorer.score(images, self.prompts, self.metadata)
        assert self.done == len(self.prompts), "pictures are missing"
        early = {id(entry): found for (entry, _), found in zip(self._lanes, self._found, strict=True)}
        joined: dict[int, dict[str, Tensor]] = {}
        for entry in self.scorer.distinct:
            if id(entry) not in early:
                joined[id(entry)] = self.scorer.raw(entry, images, self.prompts, self.metadata, self.errors)
        for key, found in early.items():
            parts = [future.result() for future in found]
            joined[key] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        ordered: dict[str, Tensor] = {}
        for entry in self.scorer.distinct:
            ordered |= joined[id(entry)]
        return self.scorer.combine(ordered, self.errors)


def _thread(device: int | None) -> ThreadPoolExecutor:
    """One thread; the current GPU is a thread's own, and a new thread's is the first."""
    if device is None:
        return ThreadPoolExecutor(1, "flowrl-reward")
    return ThreadPoolExecutor(1, "flowrl-reward", torch.cuda.set_device, (device,))
