"""Work in a thread while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Work that begins at once in a thread of its own. The thread does not keep a process alive that ends."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="background", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # whoever waits raises it
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
