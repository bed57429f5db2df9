"""The start of a command: imports of large libraries in a process of flowrl's own.

Python looks for unreachable cycles whenever many objects are new, and imports make half a million that all last: a
fifth of the time of importing torch, diffusers and transformers, and every later look passes them again.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_OWN: ContextVar[bool] = ContextVar("flowrl_own_process", default=False)


def own_process() -> None:
    """Say that this process is a command of flowrl's, so that `imports` may keep for good what is alive.

    A program that uses flowrl as a library says nothing, and is left as it is.
    """
    _OWN.set(True)


@contextmanager
def imports() -> Generator[None]:
    """No look for cycles inside the block, and never one at what it has made; in a process of flowrl's own only."""
    if not _OWN.get() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
