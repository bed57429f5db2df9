"""What guard, trackers, progress display and a live page cost a run: pairs of the quickstart with and without them.

    python -m scripts.bench watching --pairs 8 --iterations 40
    python -m scripts.bench watching --shares --iterations 20    the parts alone, in one run

Each pair trains twice with the same seed, in turns first: plain (guard off, no tracker, --quiet), and watched (a guard
that stops, TensorBoard and wandb offline, the display in a terminal, `flowrl watch` polled once a second as its page
does). CPU seconds and seconds are those between the rows of the second and the last iteration, evaluations and
checkpoints between them included; so a tracker's start is not in them. CPU seconds are of the run and its child
processes; those of the server of `flowrl watch` are printed apart. Pairs of whole runs differ by 3 % for other reasons
on a busy machine. `--shares` trains one watched run and gives the CPU seconds of each part's own functions by thread,
as a share of the run's, which other jobs hardly touch.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.timing import median_interval

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("eval.every=10", "eval.periodic_prompts=32", "data.max_eval_prompts=64", "eval.best_guidance=[]")
PLAIN = ("guard.mode=off", "--quiet")
WATCHED = ("guard.mode=stop", "guard.metric=clip_cos", "trackers=[tensorboard, {name: wandb}]")
REWARD = "eval.rewards=[{name: clip_score, model: tiny-clip}]"
ADDRESS = "http://127.0.0.1:8765"


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and its children."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            used = each.cpu_times()
            total += used.user + used.system
    return total


@contextmanager
def live_page(folder: Path) -> Iterator[psutil.Process]:
    """`flowrl watch` of a run, whose changes are asked for once a second."""
    words = [sys.executable, "-m", "flowrl", "watch", str(folder), "--port", ADDRESS.rsplit(":", 1)[1], "--no-open"]
    server, ended = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), threading.Event()

    def poll() -> None:
        while not ended.wait(1.0):
            with suppress(OSError):
                for path in ("state", "parts"):
                    urllib.request.urlopen(f"{ADDRESS}/{path}", timeout=5).read()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield psutil.Process(server.pid)
    finally:
        ended.set()
        server.terminate()
        server.wait()


def rows(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.is_file() else 0


def train(folder: Path, iterations: int, words: tuple[str, ...]) -> tuple[float, float, float]:
    """(CPU seconds, seconds) between the second row and the last one, and the CPU seconds of the live page."""
    watched = words is WATCHED
    command = [sys.executable, "-m", "flowrl", "train", str(ROOT / "configs" / "quickstart.yaml"), f"output={folder}"]
    command += [*WORDS, REWARD, f"iterations={iterations}", *words]
    file = folder / "quickstart" / "metrics.jsonl"
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TERM": "xterm"}
    own, other = pty.openpty()
    out = other if watched else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    threading.Thread(target=drain, args=(own,), daemon=True).start()
    marks: list[tuple[float, float]] = []
    served = 0.0

    def follow(page: psutil.Process | None) -> float:
        used = 0.0
        for wanted in (2, iterations):
            while rows(file) < wanted and process.poll() is None:
                time.sleep(0.05)
            marks.append((cpu_seconds(psutil.Process(process.pid)), time.perf_counter()))
            used = cpu_seconds(page) - used if page else 0.0
        return used

    while not file.exists() and process.poll() is None:
        time.sleep(0.05)
    if watched:
        with live_page(file.parent) as page:
            served = follow(page)
    else:
        follow(None)
    code = process.wait()
    os.close(other)
    if code:
        raise SystemExit(f"the run ended with code {code}: {' '.join(command)}")
    (first, began), (last, ended) = marks
    return last - first, ended - began, served


def drain(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


def parts() -> dict[str, list[tuple[Any, str]]]:
    """Part -> (owner, name) of its functions, none of which calls another one."""
    from flowrl.display import display
    from flowrl.run.guarding import Guarding
    from flowrl.run.trackers import Line, Trackers

    return {
        "guard": [(Guarding, name) for name in ("look", "settle")],
        "trackers, in the loop": [(Trackers, name) for name in ("add", "send")],
        "trackers, their threads": [(Line, "_send")],
        "display": [(display.Display, name) for name in ("refresh", "send")],
    }


def shares(iterations: int) -> None:
    """Print the CPU seconds of each part of a watched run, and their share of the run's between its rows."""
    from flowrl.commands.train import command
    from flowrl.run.trainer import Trainer

    spent: dict[str, float] = defaultdict(float)
    marks: list[float] = []
    lock = threading.Lock()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with lock:
                    spent[name] += time.thread_time() - started

        return wrapped

    counted = "_record"
    record = getattr(Trainer, counted)

    def marked(*args: Any, **kwargs: Any) -> Any:
        try:
            return record(*args, **kwargs)
        finally:
            marks.append(time.process_time())
            if len(marks) == 2:
                spent.clear()

    for name, functions in parts().items():
        for owner, function in functions:
            setattr(owner, function, timed(name, getattr(owner, function)))
    setattr(Trainer, counted, marked)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TERM": "xterm"}
    own, other = pty.openpty()
    os.dup2(other, 2)  # a terminal, so that the display draws
    threading.Thread(target=drain, args=(own,), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="flowrl-cost-") as folder:
        words = [f"output={folder}", *WORDS, REWARD, f"iterations={iterations}", *WATCHED]
        command(str(ROOT / "configs" / "quickstart.yaml"), words)
    whole = marks[-1] - marks[1]
    for name, seconds in sorted(spent.items()):
        print(f"{name}: {seconds:.3f} s of {whole:.1f} s, {seconds / whole:.2%}")


def compare(pairs: int, iterations: int) -> None:
    """Print CPU seconds and seconds of pairs of runs, and the ratios of both."""
    ratios: dict[str, list[float]] = {"cpu": [], "seconds": []}
    for number in range(pairs):
        took = {}
        for words in (PLAIN, WATCHED) if number % 2 else (WATCHED, PLAIN):
            folder = Path(tempfile.mkdtemp(prefix="flowrl-cost-"))
            try:
                took[words] = train(folder, iterations, words)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        for k, name in enumerate(ratios):
            ratios[name].append(took[WATCHED][k] / took[PLAIN][k])
        print(
            json.dumps({"plain": took[PLAIN][:2], "watched": took[WATCHED][:2], "page": took[WATCHED][2]}), flush=True
        )
    for name, values in ratios.items():
        middle, low, high = median_interval(values)
        print(f"{name}: watched / plain {middle:.3f} ({low:.3f} to {high:.3f}), {len(values)} pairs")
