"""Signals: SIGINT and SIGTERM are remembered, and followed where the work asks whether to leave off."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowrl.core.errors import Abandoned, LostProcess, Stopped
from flowrl.training.world import World


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Stop:
    """Whether to leave off."""

    here: Callable[[], bool] = _never
    """Asked where no other process waits: between the batches of a reward, the VAE's, or those of pictures read."""
    in_step: Callable[[], bool] = _never
    """Asked before each forward: all processes or none, where a forward needs all of them."""


NEVER = Stop()


class Signals:
    """Of one process. The first is remembered, the second ends it at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def here(self) -> bool:
        """Whether one has come to this process."""
        return bool(self.numbers)

    def stop(self, world: World, *, sharded: bool) -> Stop:
        """Whether to leave off; `sharded`: every forward is a step of all processes together."""
        return Stop(self.here, (lambda: world.any(self.here())) if sharded else self.here)

    def honour(self, world: World) -> None:
        """Raise Abandoned on all processes if a signal has come to one of them; all of them ask."""
        if world.any(self.here()):
            raise Abandoned

    def stopped(self, world: World) -> Stopped:
        """What to leave with, the same on all processes, all of which ask."""
        own = self.numbers[0] if self.numbers else None
        try:
            known = [n for n in world.gather(own) if n]
        except LostProcess:  # one that has left already: each goes by its own
            known = [own] if own else []
        return Stopped(known[0] if known else int(signal.SIGTERM))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are remembered inside the block."""
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: object) -> None:
        if self.numbers:
            os._exit(128 + number)
        self.numbers.append(number)
