"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from flowrl.models.memory.host_memory import LARGEST_BLOCK, keep_freed_memory
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "keep":
    assert keep_freed_memory()
size = 8 * 2**20
def use():
    blocks = [libc.malloc(size) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of four rounds of 8 blocks of 8 MiB, each written to and freed."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS, how], env=environment, capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_memory_that_was_freed_is_mapped_once():
    assert faults("keep") < 0.1 * faults("leave")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_options_of_the_environment_are_left_alone(monkeypatch):
    from flowrl.models.memory.host_memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
