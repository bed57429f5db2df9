"""Where in a run the memory ran out: every phase that a failure leaves puts its name on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowrl.core.errors import OutOfMemory

# What else than torch's own class says so: CUDA's and cuBLAS's failures at an allocation, the allocator of the host.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


@contextmanager
def phase(name: str, advice: str = "") -> Iterator[None]:
    """A part of a run; lack of memory inside it is raised as `OutOfMemory` with the phases that it left, innermost
    first, and with `advice` where a command has its own."""
    try:
        yield
    except OutOfMemory as error:
        error.phases.append(name)
        raise
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise lacking(error, name, advice) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether a failure is lack of memory, on the device or on the host, in this process.

    An error of a class of its own is none: a reward may hand on the words of a server that has run out of it.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error).__module__ in ("builtins", "torch") and any(words in str(error) for words in _WORDS)


def lacking(error: BaseException, name: str, advice: str = "") -> OutOfMemory:
    """A lack of memory with the phase that it was in; `name` may be a reward's."""
    # torch goes on with advice about its allocator, and on a GPU with a C++ trace.
    words = ". ".join(str(error).split("\n", 1)[0].split(". ")[:3]).rstrip(". ")
    return OutOfMemory(words or type(error).__name__, [name], advice)
