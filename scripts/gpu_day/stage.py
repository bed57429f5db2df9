"""Run one or several stages of a GPU day: each step once, with a time limit, its results kept as they come.

    python3 -m scripts.gpu_day.stage 1            stage 1, at most 9 minutes
    python3 -m scripts.gpu_day.stage 1 2 --small  a rehearsal of two stages on tiny-sd3, in this process
    python3 -m scripts.gpu_day.stage --only qwen,sdxl   some steps, by name

Files in $OUT (default: runs/gpu_day): results.jsonl, one measurement a line; steps.jsonl, one step a line; log.txt;
traces. A step that was done is not done again. Where $OUT is empty and the folder .gpu_day holds those files of an
earlier call, they are taken from there first. A step that fails does not stop the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_day._steps import STAGES, STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
EARLIER = ROOT / ".gpu_day"
KEPT = ("results.jsonl", "steps.jsonl")
STAGE_S = 540
"""Seconds of a stage."""
LEAST_S = 15
"""Seconds that must be left for a step to begin."""


class Day:
    """The folder of a GPU day: what was done, and the results."""

    def __init__(self, folder: Path, earlier: Path = EARLIER) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (earlier / name).is_file() and not (folder / name).is_file():
                shutil.copy(earlier / name, folder / name)

    @property
    def done(self) -> set[str]:
        """Names of the steps that were done."""
        return {row["step"] for row in self.rows("steps.jsonl") if row["status"] == "done"}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Objects of a file; a last line that a time limit cut off is left out."""
        file, result = self.folder / name, []
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
            with contextlib.suppress(ValueError):
                result.append(json.loads(line))
        return result

    def note(self, step: Step, status: str, seconds: float) -> None:
        """Write the end of a step."""
        row = {"step": step.name, "stage": step.stage, "status": status, "seconds": round(seconds, 1)}
        with (self.folder / "steps.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def words(self, words: Sequence[str]) -> list[str]:
        """The words of a command in this folder."""
        places = {"RESULTS": str(self.folder / "results.jsonl"), "FOLDER/": f"{self.folder}/"}
        result = []
        for word in words:
            for name, place in places.items():
                word = place if word == name else word.replace(name, place) if name.endswith("/") else word
            result.append(word)
        return result


def stages(day: Day, numbers: Sequence[int], *, small: bool, seconds: float, only: Sequence[str] = ()) -> None:
    """Run the steps of some stages that are not done, each stage at most so long; `only`: these, if some are named."""
    for number in numbers:
        end, measured = time.monotonic() + seconds, len(day.rows("results.jsonl"))
        for step in STEPS:
            words = step.small if small else step.words
            if step.stage != number or words is None or (only and step.name not in only):
                continue
            if step.name in day.done:
                print(f"{step.name}: done before", flush=True)
                continue
            left = end - time.monotonic()
            if left < LEAST_S:
                print(f"{step.name}: no time left in this stage; call it again", flush=True)
                continue
            started = time.monotonic()
            status = _small(day, words) if small else _run(day, words, min(step.limit_s, left))
            day.note(step, status, time.monotonic() - started)
            print(f"{step.name}: {status}, {time.monotonic() - started:.0f} s", flush=True)
        print(f"\nstage {number}\n{summary(day.rows('results.jsonl')[measured:])}", flush=True)


def _run(day: Day, words: Sequence[str], limit_s: float) -> str:
    """A step as a process of its own; "done", "failed with N" or "time limit"."""
    with (day.folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"\n== {' '.join(words)}\n")
        log.flush()
        try:
            command = [sys.executable, "-m", *day.words(words)]
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            return "time limit"
    return "done" if code == 0 else f"failed with {code}"


def _small(day: Day, words: Sequence[str]) -> str:
    """A step of a rehearsal in this process, which has imported everything already."""
    import runpy

    module, *rest = day.words(words)
    with (day.folder / "log.txt").open("a", encoding="utf-8") as log, _argv([module, *rest]):
        log.write(f"\n== {' '.join(words)}\n")
        try:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                runpy.run_module(module, run_name="__main__")
        except SystemExit as leaving:
            code = 0 if leaving.code is None else leaving.code
            return "done" if code == 0 else f"failed with {code}"
        except Exception as error:  # as in a process of its own, the next step goes on
            log.write(f"{type(error).__name__}: {error}\n")
            return "failed with 1"
    return "done"


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


SHOWN = ("kind", "shape", "backend", "phase", "variant", "overrides", "batch")
"""Names of a measurement, in the first column."""
HIDDEN = ("device", "torch", "config", "spent_s", "largest", "size", "dtype", "all")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Measurements in a few characters each, one a line."""
    lines = []
    for row in rows:
        recipe = Path(str(row.get("config", ""))).parent.name
        names = " ".join(str(row[key])[:48] for key in SHOWN if row.get(key) not in (None, ""))
        values = {k: v for k, v in row.items() if k not in (*SHOWN, *HIDDEN, "what")}
        text = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        lines.append(f"{row.get('what', '')} {recipe} {names}: {text}"[:300])
    return "\n".join(lines) or "nothing was measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", type=int, help=f"of {STAGES[0]} to {STAGES[-1]}; default: all")
    parser.add_argument("--small", action="store_true", help="tiny-sd3, for the CPU")
    parser.add_argument("--seconds", type=float, default=STAGE_S, help="of a stage")
    parser.add_argument("--only", default="", metavar="STEP,...", help="steps by name, by commas; default: all")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if unknown := sorted(set(only) - {step.name for step in STEPS}):
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(step.name for step in STEPS)}")
    if unknown := sorted(set(given.stages) - set(STAGES)):  # `choices` would refuse that none is given
        parser.error(f"no stage {unknown[0]}; there are {', '.join(map(str, STAGES))}")
    os.chdir(ROOT)
    day = Day(Path(os.environ.get("OUT") or ROOT / "runs" / "gpu_day").resolve())
    stages(day, given.stages or STAGES, small=given.small, seconds=given.seconds, only=only)


if __name__ == "__main__":
    main()
