"""The folder of a run that waits for votes."""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def under_way(folder: Path) -> Generator[None]:
    """The folder as a process that trains has it."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "command": "flowrl train run --resume"}))
    try:
        yield
    finally:
        os.close(lock)


@pytest.fixture
def waiting_run(tmp_path: Path) -> Generator[Path]:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\nseed: 0\nrewards: [{name: votes}]\n")
    with under_way(folder):
        yield folder
