"""Imports of large libraries in a process of flowrl's own.

Python looks for unreachable cycles whenever many objects are new, and imports make half a million that all last: a
fifth of the time of importing torch, diffusers and transformers, and every later look passes them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def own_process() -> None:
    """Say that this process is a command of flowrl's, so that `imports` may keep for good what is alive.

    A program that uses flowrl as a library says nothing, and is left as it is.
    """
    gc.freeze()


@contextmanager
def imports() -> Iterator[None]:
    """No look for cycles inside the block, and never one at what it has made; in a process of flowrl's own only."""
    if not gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
