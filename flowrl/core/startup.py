"""The start of a command: imports of large libraries in a process of flowrl's own, and what is told before them.

Python looks for unreachable cycles whenever many objects are new, and imports make half a million that all last: a
fifth of the time of importing torch, diffusers and transformers, and every later look passes them again.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

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


def read_early(path: str | Path, words: Sequence[str] | None) -> None:
    """Read the argument CONFIG and the words after it, before libraries are loaded that take seconds.

    Raises:
        ConfigError: there is no such file, it is no YAML, or a word is no key=value.
    """
    from flowrl.core.strict import load_tree, overridden

    overridden(load_tree(path), list(words or ()))
