"""`scripts.bench pair-check`: `flowrl pairs --check` of edit pairs against the bare decoding of their files."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from scripts.bench.timing import median_interval

TARGET = 1.3
"""Seconds of the check, as a multiple of those of decoding its distinct files on two processes."""
_SIDE = 512
_FAR = 50_000
"""Pairs to which the seconds are extrapolated."""


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_mib: float
    """Of the largest process."""


def report(pairs: int, sources: int, rounds: int) -> str:
    """The result in words.

    Raises:
        SystemExit: a command failed.
    """
    with tempfile.TemporaryDirectory() as place:
        whole, part = Path(place, "whole"), Path(place, "part")
        write_set(whole, pairs, sources)
        lines = (whole / "pairs.jsonl").read_text().splitlines(keepends=True)
        (whole / "part.jsonl").write_text("".join(lines[: pairs // 4]))
        part = whole / "part.jsonl"
        rows = []
        for number in range(rounds):
            commands = {"check": check_words(whole / "pairs.jsonl"), "bare": bare_words(whole)}
            order = list(commands) if number % 2 else list(reversed(commands))
            rows.append({name: cost(commands[name]) for name in order})
        quarter = cost(check_words(part))
    return told(rows, quarter, pairs, sources)


def told(rows: list[dict[str, Cost]], quarter: Cost, pairs: int, sources: int) -> str:
    def middle(name: str, what: str) -> float:
        return median_interval([getattr(row[name], what) for row in rows])[0]

    lines = [f"{pairs} JPEG pairs of {_SIDE} x {_SIDE} that share {sources} sources, {2 * pairs + sources} files"]
    for what, words in (("seconds", "seconds"), ("cpu_seconds", "seconds of CPU")):
        mid, low, high = median_interval([getattr(row["check"], what) / getattr(row["bare"], what) for row in rows])
        lines.append(
            f"check {middle('check', what):.1f}, bare decoding on two processes {middle('bare', what):.1f} {words}: "
            f"{mid:.2f} times ({low:.2f} to {high:.2f}, {len(rows)} rounds; target {TARGET})"
        )
    return "\n".join(
        (
            *lines,
            f"peak memory of the check {middle('check', 'peak_mib'):.0f} MiB, of a quarter of the pairs "
            f"{quarter.peak_mib:.0f} MiB",
            f"extrapolated to {_FAR} pairs: {middle('check', 'seconds') * _FAR / pairs:.0f} s",
            f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        )
    )


def write_set(folder: Path, pairs: int, sources: int) -> None:
    """Pictures of smooth colours with some noise, so that a file is as large as one of a photograph."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    grain = rng.normal(0, 12, (_SIDE, _SIDE, 3)).astype(np.int16)

    def picture(name: str) -> str:
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((_SIDE, _SIDE))
        turned = np.roll(grain, rng.integers(0, _SIDE, 2), (0, 1))
        Image.fromarray(np.clip(np.asarray(coarse) + turned, 0, 255).astype(np.uint8)).save(folder / name, quality=90)
        return name

    shared = [picture(f"source-{k}.jpg") for k in range(sources)]
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for k in range(pairs):
            record = {"prompt": f"edit {k}", "image": shared[k % sources]}
            record |= {name: picture(f"{name}-{k}.jpg") for name in ("chosen", "rejected")}
            file.write(json.dumps(record) + "\n")


def check_words(records: Path) -> list[str]:
    return [sys.executable, "-m", "flowrl", "pairs", str(records), "source=image", "--check"]


def bare_words(folder: Path) -> list[str]:
    return [sys.executable, "-m", "scripts.bench.pair_check", str(folder)]


def cost(words: list[str]) -> Cost:
    """What a command takes, with its children."""
    started = time.perf_counter()
    null = os.open(os.devnull, os.O_WRONLY)
    pid = os.posix_spawn(words[0], words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
    os.close(null)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with code {os.waitstatus_to_exitcode(status)}")
    return Cost(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def decode(files: list[Path]) -> None:
    for file in files:
        with Image.open(file) as image:
            image.convert("RGB")


def main() -> None:
    """Decode every image of a folder once, on two processes."""
    files = sorted(Path(sys.argv[1]).glob("*.jpg"))
    with multiprocessing.Pool(2) as pool:
        pool.map(decode, [files[k::2] for k in (0, 1)], chunksize=1)


if __name__ == "__main__":
    main()
