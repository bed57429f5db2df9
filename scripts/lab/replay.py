"""The start of a recipe, repeated: are the numbers of its cells still the same?"""

from __future__ import annotations

import math
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.lab.runs import REPLAYED, Run, first_rows, make_pairs, read, start


def replay(run: Run) -> dict[str, Any]:
    """Base accuracy and first metrics of a run as the code is now.

    The unchanged run is started and stopped by a signal, since a smaller `iterations` would change what depends on
    it, such as a linear learning rate.
    """
    make_pairs(run.recipe)
    with tempfile.TemporaryDirectory(prefix="flowrl-lab-") as output:
        command, folder = run.command(Path(output)), Path(output) / run.name
        print(" ".join(command), f"(until iteration {REPLAYED})", flush=True)
        process = start(command)
        try:
            while process.poll() is None and len(first_rows(folder)) < REPLAYED:
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGTERM)  # does nothing to a process that has ended
            code = process.wait()
        if code not in (0, 128 + signal.SIGTERM) or len(first_rows(folder)) < REPLAYED:
            raise SystemExit(f"the replay of {run.name} ended with code {code} before iteration {REPLAYED}")
        summary = read(folder / "summary.json")
        return {key: summary[key] for key in ("base", "base_best_guidance")} | {"start": first_rows(folder)}


# ---- comparing


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{prefix} {key}".strip()).items()}


def differences(cell: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """Numbers of a cell that its replay does not repeat; none: the same.

    Held-out means and intervals must agree to 1e-6, metrics to a relative 1e-5. A metric that is new is no difference.
    """
    recorded = cell.get("start", [])
    if len(recorded) < REPLAYED:
        return [f"only {len(recorded)} iterations recorded"]
    bases = [
        _flat({key: source[key] for key in ("base", "base_best_guidance")}) for source in (cell["summary"], replayed)
    ]
    parts = [("", *bases, {"abs_tol": 1e-6, "rel_tol": 0.0})]
    for old, new in zip(recorded, replayed["start"], strict=True):
        parts.append((f"iteration {old['iteration']} ", old, new, {"rel_tol": 1e-5}))
    result = []
    for place, old, new, tolerance in parts:
        for key, value in old.items():
            other = new.get(key, "missing")
            numbers = all(isinstance(v, int | float) for v in (value, other))
            if not (math.isclose(value, other, **tolerance) if numbers else value == other):
                result.append(f"{place}{key}: {value} recorded, {other} now")
    return result
