"""Several reward servers as one: the least busy is asked, one that fails rests for a while. A helper, not a reward."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0


@dataclass(slots=True)
class Server:
    """State of one server."""

    url: str
    outstanding: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0


class Servers:
    """Hands out servers, one for each request; safe between threads.

    A server that fails rests: 0.25 s, twice as long with each further failure, 15 s at most, each time between half and
    one and a half of that, so that many clients do not come back at once. One answer brings it back.

    Args:
        urls: of the servers.
        now: the clock, in seconds.
    """

    def __init__(self, urls: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self._now = now
        self._changed = threading.Condition()
        self._turn = 0
        # Its own generator: a reward leaves the global one alone.
        self._random = random.Random()

    def take(self, deadline: float) -> Server | None:
        """The least busy server that does not rest, in turn among equals; waits where all rest.

        None if none comes back before the deadline, a time of the clock.
        """
        with self._changed:
            while (now := self._now()) < deadline:
                awake = [server for server in self.servers if server.rests_until <= now]
                if awake:
                    return self._pick(awake)
                wakes = min(server.rests_until for server in self.servers)
                if wakes >= deadline:
                    return None
                self._changed.wait(wakes - now)
        return None

    def _pick(self, awake: list[Server]) -> Server:
        count = len(self.servers)
        order = {id(server): (k - self._turn) % count for k, server in enumerate(self.servers)}
        best = min(awake, key=lambda server: (server.outstanding, order[id(server)]))
        self._turn = (self.servers.index(best) + 1) % count
        best.outstanding += 1
        return best

    def succeeded(self, server: Server) -> None:
        with self._changed:
            server.outstanding -= 1
            server.failures, server.rests_until = 0, 0.0
            self._changed.notify_all()

    def failed(self, server: Server, at_least_s: float = 0.0) -> None:
        """Let it rest, for `at_least_s` if it asked for that itself."""
        with self._changed:
            server.outstanding -= 1
            now = self._now()
            # Requests that were under way together fail together: that is one failure.
            if server.rests_until <= now:
                server.failures += 1
                pause = min(_FIRST_PAUSE_S * 2 ** (server.failures - 1), _LONGEST_PAUSE_S)
                server.rests_until = now + max(pause * self._random.uniform(0.5, 1.5), at_least_s)

    def gave_up(self, server: Server) -> None:
        """The request ended in an error that is none of the server's."""
        with self._changed:
            server.outstanding -= 1
