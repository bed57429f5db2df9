"""Phases of a run, for the display, and for messages about memory: each that a lack of memory leaves adds its name."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from flowrl.core.errors import OutOfMemory
from flowrl.display.display import working

# Texts of errors without a class of their own: failed allocations of CUDA, cuBLAS and the host.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


@contextmanager
def phase(name: str, advice: str = "") -> Generator[None]:
    """A part of a run. Raises OutOfMemory: no memory inside it; with its phases, innermost first, and `advice`."""
    try:
        with working(name):
            yield
    except OutOfMemory as error:
        error.phases.append(name)
        raise
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise lacking(error, name, advice) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory of this process, on the device or the host.

    Errors of other classes are not, whatever their text: a reward may repeat that of its server.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error).__module__ in ("builtins", "torch") and any(words in str(error) for words in _WORDS)


def lacking(error: BaseException, name: str, advice: str = "") -> OutOfMemory:
    """The error about a lack of memory in a phase or reward `name`."""
    # Without torch's advice about its allocator and its C++ trace.
    words = ". ".join(str(error).split("\n", 1)[0].split(". ")[:3]).rstrip(". ")
    return OutOfMemory(words or type(error).__name__, [name], advice)
