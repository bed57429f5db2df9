"""Work in a thread while the program goes on."""

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Work that begins at once in a thread of its own. The thread does not keep a process alive that ends."""

    def __init__(self, work: Callable[[], Any], name: str = "background") -> None:
        self.ended, self._value = threading.Event(), None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # whoever waits raises it, KeyboardInterrupt and SystemExit included
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> Any:
        """Wait for the end of the work; what it returned, or the error that it raised."""
        self.ended.wait()
        if self._error is not None:
            raise self._error
        return self._value
