"""`scripts.bench start`: CPU seconds from the start of `flowrl train` to its first iteration, next to imports alone.

Each measurement is a process of its own, the two kinds in turn. The run ends where the base would be evaluated, which
is the last thing before the first iteration and not a part of the start. CPU seconds, since other programs disturb them
least; on an idle core they are the seconds on a clock.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TARGET = 2.0
"""Most seconds beyond the imports of torch, diffusers' class and peft."""
PLACE = "FLOWRL_BENCH_START"
"""Environment variable: the file that the measured process writes."""
PARTS = ("imports of the command", "configuration", "prompts", "rewards", "model", "probes of rewards", "texts")
"""Parts of a start in its order; the rest has no name."""
_IMPORTS = "import torch, peft, time\nfrom diffusers import {}\nprint(time.process_time())"
_START = "from scripts.bench.start import watch; watch()\nfrom flowrl.cli import main; main()"


def report(config: str, overrides: list[str], rounds: int, cpu: str) -> str:
    """The result as Markdown.

    Raises:
        SystemExit: the run does not start; its own message is on the screen.
    """
    kind = _pipeline_class(config, overrides)
    alone: list[float] = []
    starts: list[dict[str, float]] = []
    for _ in range(rounds):
        alone.append(float(_run([sys.executable, "-P", "-c", _IMPORTS.format(kind)], {}).split()[-1]))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "seconds.json"
            words = [sys.executable, "-P", "-c", _START, "train", config, *overrides, f"output={folder}/run"]
            _run(words, {PLACE: str(file)})
            if not file.is_file():
                raise SystemExit("bench start: the run ended before its first iteration")
            starts.append(json.loads(file.read_text(encoding="utf-8")))
    seconds = {name: statistics.median(row.get(name, 0.0) for row in starts) for name in (*PARTS, "whole")}
    beside = statistics.median(alone)
    over = seconds["whole"] - beside
    lines = ["| part of the start | CPU s |", "|---|---|"]
    lines += [f"| {name} | {seconds[name]:.2f} |" for name in PARTS]
    lines += [
        f"| everything else | {seconds['whole'] - sum(seconds[name] for name in PARTS):.2f} |",
        f"| whole start | {seconds['whole']:.2f} |",
        f"| imports alone: torch, diffusers' {kind}, peft | {beside:.2f} |",
        "",
        f"Beyond the imports {over:.2f} s, target {TARGET:g} s: {'met' if over <= TARGET else 'missed'}. `{config}`, "
        f"medians of {rounds} processes of each kind in turn, {cpu}, load average {os.getloadavg()[0]:.1f}.",
    ]
    return "\n".join(lines)


def _pipeline_class(config: str, overrides: list[str]) -> str:
    """The class that the model's module names; the imports of a generic one are those of its base class."""
    from flowrl.config.load import load_config, resolve

    module = resolve(load_config(config, overrides)).model.module
    return vars(module).get("PIPELINE", "DiffusionPipeline")


def _run(words: list[str], more: dict[str, str]) -> str:
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    done = subprocess.run(words, env=os.environ | places | more, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench start: a measured process ended with exit code {done.returncode}")
    return done.stdout


# ---- inside the measured process


def watch() -> None:
    """Make this process's `flowrl train` end where it would evaluate the base, and write its seconds there."""
    from flowrl.core.startup import imports, own_process

    own_process()
    with imports():  # as the command has them
        places = watched()
    seconds: dict[str, float] = defaultdict(float, {PARTS[0]: time.process_time()})
    for owner, attribute, name in places:
        setattr(owner, attribute, _timed(seconds, name, getattr(owner, attribute)))

    def leave(*_: Any, **__: Any) -> NoReturn:
        seconds["whole"] = time.process_time()
        Path(os.environ[PLACE]).write_text(json.dumps(seconds), encoding="utf-8")
        os._exit(0)

    from flowrl.run import report

    setattr(report.Report, "before", leave)  # noqa: B010, a method is no attribute to assign


def watched() -> list[tuple[Any, str, str]]:
    """Owner, attribute and part of each function whose seconds are counted; imports what the command imports."""
    from flowrl.config import components, load
    from flowrl.run import trainer
    from flowrl.run.assembly import data, rewards

    assert trainer.Trainer  # imported with the others, whose time is that of its imports
    return [
        (load, "load_config", "configuration"),
        (load, "resolve", "configuration"),
        (data, "run_prompts", "prompts"),
        (rewards, "build_scorers", "rewards"),
        (components.Component, "build", "model"),  # those of sampler and method take no time
        (rewards, "probe", "probes of rewards"),
        (data, "embedded", "texts"),
    ]


def _timed(seconds: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its CPU seconds added to `name`."""

    def wrapped(*args: Any, **options: Any) -> Any:
        begun = time.process_time()
        try:
            return function(*args, **options)
        finally:
            seconds[name] += time.process_time() - begun

    return wrapped
