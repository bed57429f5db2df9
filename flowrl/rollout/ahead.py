"""Noise drawn ahead: a thread draws what the next steps need while the network works, so that a GPU does not wait."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_DEPTH = 2
"""Draws under way or waiting."""


def ahead_of(device: torch.device) -> bool:
    """Whether a thread pays: next to a GPU. On the CPU it would take its time from the network."""
    return device.type == "cuda"


def pinned(noise: Tensor) -> Tensor:
    """The noise in memory from which a GPU can copy while the host goes on; itself without a GPU."""
    return noise.pin_memory() if torch.cuda.is_available() else noise


class Ahead(Generic[T]):
    """Results of draws in their order, each made once: on a GPU in a thread, a few in advance, else when it is taken.

    A draw is a function of keys alone (flowrl/core/rng.py), so its bits do not depend on when and where it is made.
    As a context it ends its thread, also after a failure; what was drawn and not taken is dropped.
    """

    def __init__(self, draws: Iterable[Callable[[], T]], device: torch.device | str) -> None:
        self._draws = iter(draws)
        self._waiting: deque[Future[T]] = deque()
        self._pool = ThreadPoolExecutor(1, "noise") if ahead_of(torch.device(device)) else None

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(self, *failure: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def take(self) -> T:
        """The next result.

        Raises StopIteration: all were taken; Exception: what the draw raised.
        """
        if self._pool is None:
            return next(self._draws)()
        while len(self._waiting) <= _DEPTH and (draw := next(self._draws, None)) is not None:
            self._waiting.append(self._pool.submit(draw))
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft().result()
