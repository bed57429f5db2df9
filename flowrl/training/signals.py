"""Signals: SIGINT and SIGTERM are remembered, and the work stops at its next check."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowrl.core.errors import Abandoned, LostProcess, Stopped
from flowrl.display import display
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Stop:
    """Checks whether to stop early."""

    here: Callable[[], bool] = lambda: False
    """Check where no other process waits: between batches of a reward, of the VAE, or of images that are read."""
    in_step: Callable[[], bool] = lambda: False
    """Check before each forward; the same answer on all processes if a forward needs all of them."""


NEVER = Stop()

_LOOK_S = 1.0
"""Seconds between looks for a request to stop, which are checks of a file."""


class Signals:
    """Signals of one process. The first is remembered, the second ends the process at once.

    A request to stop (`flowrl ask RUN stop`) ends the work in the same way.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.look: Callable[[], str | None] = lambda: None
        """Looks for a request to stop: who asked, or None. Of the first process; set by the trainer."""
        self.asked: str | None = None
        """Who asked the run to stop; None: nobody did, or not on this process."""
        self._looked = 0.0

    def here(self, *, now: bool = False) -> bool:
        """True if a signal or a request to stop has come to this process; `now` looks for one in any case."""
        time_s = time.monotonic()
        if self.asked is None and (now or time_s - self._looked > _LOOK_S):
            self._looked, self.asked = time_s, self.look()
        return bool(self.numbers) or self.asked is not None

    def stop(self, world: World, *, sharded: bool) -> Stop:
        """The checks of this process; `sharded`: every forward is a step of all processes together."""
        return Stop(self.here, (lambda: world.any(self.here())) if sharded else self.here)

    def honour(self, world: World, waiting: bool = False) -> bool:
        """Whether a request is `waiting` on some process, on all of them; all of them call this.

        Raises Abandoned: on all processes, if a signal or a request to stop has come to one of them.
        """
        stop, waiting = world.flags(self.here(now=waiting), waiting)
        if stop:
            raise Abandoned
        return waiting

    def stopped(self, world: World) -> Stopped:
        """The exception to end with, the same on all processes; all of them call this."""
        own = self.numbers[0] if self.numbers else None if self.asked is None else int(signal.SIGTERM)
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
            display.current().clear()  # before the process ends at once
            os._exit(128 + number)
        self.numbers.append(number)
