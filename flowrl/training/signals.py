"""Signals: SIGINT and SIGTERM are remembered, and the work stops at its next check."""

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
    """Checks whether to stop early."""

    here: Callable[[], bool] = _never
    """Check where no other process waits: between batches of a reward, of the VAE, or of images that are read."""
    in_step: Callable[[], bool] = _never
    """Check before each forward; the same answer on all processes if a forward needs all of them."""


NEVER = Stop()


class Signals:
    """Signals of one process. The first is remembered, the second ends the process at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def here(self) -> bool:
        """True if a signal has come to this process."""
        return bool(self.numbers)

    def stop(self, world: World, *, sharded: bool) -> Stop:
        """The checks of this process; `sharded`: every forward is a step of all processes together."""
        return Stop(self.here, (lambda: world.any(self.here())) if sharded else self.here)

    def honour(self, world: World) -> None:
        """Raise Abandoned on all processes if a signal has come to one of them; all of them call this."""
        if world.any(self.here()):
            raise Abandoned

    def stopped(self, world: World) -> Stopped:
        """The exception to end with, the same on all processes; all of them call this."""
        own = self.numbers[0] if self.numbers else None
        try:
            known = [n for n in world.gather(own) if n]
        except LostProcess:  # another process has ended: each follows its own signal
            known = [own] if own else []
        return Stopped(known[0] if known else int(signal.SIGTERM))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are remembered inside the block."""
        before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        if self.numbers:
            os._exit(128 + number)
        self.numbers.append(number)
