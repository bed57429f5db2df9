"""Freed memory of the host stays with the process, so that the next tensor finds it mapped.

glibc gives the end of its heap, and large blocks, back to the kernel as soon as they are free. The tensors of a forward
on the CPU come and go, so the kernel maps the same pages again and again, and fills them with zeros each time: 25,000
page faults in an iteration of the quickstart. No value depends on it.
"""

import ctypes
import os
import sys
from pathlib import Path

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK = 32 * 2**20
"""Bytes from which on a block is mapped alone and given back when it is freed: the most that every glibc takes."""
KEPT = 512 * 2**20
"""Most free bytes at the end of the heap that the process keeps."""


def keep_freed_memory() -> bool:
    """Let this process keep freed memory from here on, up to `KEPT`; whether it does.

    False: the C library is not glibc, or the environment sets malloc's options itself.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    options = {_MMAP_THRESHOLD: LARGEST_BLOCK, _TRIM_THRESHOLD: KEPT}
    return all([bool(mallopt(option, size)) for option, size in options.items()])


def available_bytes() -> int | None:
    """Bytes of host memory that can be taken without swapping; None where the system does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
