"""A result in its place on a page of docs/, and the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

MARKS = ("<!-- scripts.bench {} -->", "<!-- end -->")
"""Marks around the result of a benchmark in a page; the first has its name."""


def cpu() -> str:
    """Name of the CPU and its number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def show(text: str, page: Path | None, name: str) -> None:
    """Print a table, and write it into its place on a page."""
    print(text)
    if page is not None:
        put_between(page, name, text)


def put_between(file: Path, name: str, text: str) -> None:
    """Replace the text between the two marks of a benchmark in `file`.

    Raises:
        SystemExit: the file has no such marks.
    """
    before, first = file.read_text(encoding="utf-8") if file.is_file() else "", MARKS[0].format(name)
    head, opened, rest = before.partition(first)
    _, closed, tail = rest.partition(MARKS[1])
    if not (opened and closed):
        raise SystemExit(f"{file} has no place for the result: the lines {first} and {MARKS[1]}")
    file.write_text(f"{head}{first}\n{text}\n{MARKS[1]}{tail}", encoding="utf-8", newline="\n")
