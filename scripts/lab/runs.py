"""Runs of the lab: a recipe trains in a folder of its own, may be interrupted at any time; what is kept of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.subprocesses import PARENT
from flowrl.evaluation.results import Evaluation
from flowrl.training.metrics import repeatable
from scripts.lab.edits import by_operation
from scripts.lab.page import EDIT, PARTIAL
from scripts.lab.recipes import ROOT, read_recipe

RUNS = Path(os.environ.get("FLOWRL_LAB_RUNS", ROOT / "runs" / "lab"))
"""Run folders, outside git; the environment variable moves them to where they outlive the checkout."""
SAVING = "checkpoint={every: 20, keep: 1}"
"""A run that is killed loses fewer iterations than with the recipe's own; no number depends on it."""
SPREAD = "eval.diversity=128"
"""Of every cell: it draws samples that are not scored, and moves no other number."""
POLLED_S = 5.0
"""Seconds between two looks at a run's CPU time, which are all that is known of a run that was killed."""
WAY = 128
"""Captions that the recipes' evaluations on the way have in common, with two images each."""
REPLAYED = 3
"""Iterations that a replay compares."""
SAMPLED = ("flowrl", "pairs", "--processes", "2", "--per-prompt", "4")
PAIRS = {
    "runs/pairs-shapes": (
        *(*SAMPLED, "--count", "2000", "configs/lab/online_dpo.yaml"),
        "rewards=[{name: shapes, outputs: {shapes_partial: 1.0}}]",
    ),
    "runs/pairs-motion": (
        *(*SAMPLED, "--count", "5000", "--margin", "0.2", "configs/lab/video-awm.yaml"),
        "rewards=[{name: shapes_motion, outputs: {shapes_motion_partial: 1.0}}]",
    ),
    "runs/pairs-edits": (
        *(*SAMPLED, "--count", "2000", "configs/lab/edit-awm.yaml"),
        "rewards=[{name: shapes_edit, outputs: {edit_partial: 1.0}}]",
    ),
    "runs/pairs-edits-source": ("scripts.pretraining", "edit-pairs"),
}
"""Folder of a preference set -> the module and its words that make it."""
TRAINS = ("flowrl", "rewards", "configs", "assets")
"""Folders that a run's numbers come from."""


class Failed(Exception):
    """A cell that cannot be kept; the others go on."""


@dataclass(frozen=True, slots=True)
class Run:
    """A recipe, trained with a seed."""

    name: str
    """Of its run folder."""
    recipe: Path
    seed: int
    words: tuple[str, ...] = ()
    """Further overrides, which make it another run."""
    processes: int = 2

    def command(self, output: Path, *further: str) -> list[str]:
        words = [f"name={self.name}", f"output={output}", f"seed={self.seed}", *self.words, *further]
        return [sys.executable, "-m", "flowrl", "train", str(self.recipe), *words, "--processes", str(self.processes)]

    def mark(self, code: str) -> dict[str, Any]:
        """What a run folder must be of, for the run to go on in it."""
        return {"code": code, "words": list(self.words)}


def cell_run(name: str, recipe: Path, seed: int) -> Run:
    return Run(f"{name}-seed{seed}", recipe, seed)


# ---- processes


def code_now() -> str:
    """Of what trains, as the working tree is now: two runs of one value have the same code, recipes and models."""
    commands = (["rev-parse", *(f"HEAD:{place}" for place in TRAINS)], ["diff", "HEAD", "--", *TRAINS])
    told = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout for words in commands]
    return hashlib.sha256(b"".join(told)).hexdigest()[:16]


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, text: str) -> None:
    """Whole or not at all, whenever this process is killed."""
    other = file.with_name(f"{file.name}.new")
    other.write_text(text, encoding="utf-8")
    os.replace(other, file)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command of flowrl; it ends when this process is killed."""
    # In a session of its own a signal to the group, such as Ctrl-C, reaches it once, passed on by this process.
    environment = os.environ | {PARENT: str(os.getpid())}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def used(pid: int) -> float:
    """CPU seconds so far of a process, the children that it waited for, and its living descendants; 0 without /proc."""
    place = Path("/proc") / str(pid)
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        children = (place / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(used(int(child)) for child in children)


class Ledger:
    """`lab.json` of a run folder: what the folder is of, and what its parts have cost.

    `cpu_seconds` is the CPU time of all `parts`, with the start of each; `load` the machine's highest load average of
    a minute, about 2 where nothing else ran.
    """

    def __init__(self, folder: Path, mark: dict[str, Any]) -> None:
        self.file, self.mark = folder / "lab.json", mark
        self.before, self.load, self.parts = 0.0, 0.0, 1

    def goes_on(self) -> bool:
        """Whether the folder holds the same run; its costs are taken over then."""
        kept = read(self.file) if self.file.is_file() else {}
        if {key: kept.get(key) for key in self.mark} != self.mark:
            return False
        self.before, self.load, self.parts = kept["cpu_seconds"], kept["load"], kept["parts"] + 1
        return True

    def note(self, cpu_seconds: float) -> None:
        """Write what the run has cost so far, this part `cpu_seconds`."""
        self.load = max(self.load, round(os.getloadavg()[0], 1))
        costs = {"cpu_seconds": round(self.before + cpu_seconds, 1), "load": self.load, "parts": self.parts}
        write(self.file, json.dumps(self.mark | costs) + "\n")


def attend(command: Sequence[str], ledger: Ledger | None = None) -> int:
    """Run a command to its end; its exit code.

    SIGINT, SIGTERM and SIGHUP are passed on once, as SIGTERM, and this process ends after the command, which saves.
    """
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if children and len(received) == 1:
            children[0].terminate()

    heard = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        children.append(start(command))
        if received:
            children[0].terminate()
        while True:
            try:
                code = children[0].wait(timeout=POLLED_S)
                break
            except subprocess.TimeoutExpired:
                if ledger is not None:
                    ledger.note(used(children[0].pid))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ledger is not None:
            ledger.note(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        print(f"stopped by signal {received[0]}; the same command goes on", flush=True)
        raise SystemExit(128 + received[0])
    return code


def make_pairs(recipe: Path) -> None:
    """The preference set that a recipe learns from; one that the same code made is kept."""
    pairs = read_recipe(recipe).get("data", {}).get("pairs")
    if pairs is None:
        return
    words, folder = PAIRS[pairs["path"]], ROOT / pairs["path"]
    mark = {"words": list(words), "code": code_now()}
    file = folder.with_name(f"{folder.name}.lab.json")
    if folder.is_dir() and not (file.is_file() and read(file) == mark):
        shutil.rmtree(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps(mark) + "\n")
    command = [sys.executable, "-m", *words, "--out", pairs["path"]]
    print(" ".join(command), flush=True)
    if code := attend(command):
        raise Failed(f"{' '.join(words[:2])} ended with code {code}")


def train(run: Run) -> tuple[Path, int]:
    """Train a run, or go on with it where the same recipe, words and code were interrupted; its folder and exit code.

    Raises:
        Failed: the code or the recipe is another one at its end.
    """
    make_pairs(run.recipe)
    command, folder, code = run.command(RUNS, SAVING, SPREAD), RUNS / run.name, code_now()
    ledger = Ledger(folder, run.mark(code))
    if ledger.goes_on():
        command.append("--resume")
    elif folder.is_dir():
        # Resuming would mix the numbers of two recipes or codes, or hand out a finished run's old ones as new.
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ledger.note(0.0)
    print(" ".join(command), flush=True)
    ended = attend(command, ledger)
    if code_now() != code:
        raise Failed("the recipe, its model or the code changed while it ran: which of them its numbers are of is open")
    return folder, ended


def run_cell(run: Run) -> dict[str, Any]:
    """A cell: what is kept of its run, and where that comes from.

    Raises:
        Failed: it did not finish.
    """
    folder, code = train(run)
    if code:
        raise Failed(f"it ended with code {code}; {folder / 'train.log'} says why")
    return origin(folder) | {"summary": measured(folder) | costs(folder)}


# ---- what is kept


def costs(folder: Path) -> dict[str, float]:
    """What a run folder's parts have cost."""
    ledger = read(folder / "lab.json")
    return {key: ledger[key] for key in ("cpu_seconds", "load", "parts")}


def processor() -> str:
    """The processor's name and its vector instructions; provenance.json has its architecture only."""
    import torch

    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    result = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = result[1].strip() if result else platform.processor() or "unknown"
    # Processors of one name differ in them, and sums with them.
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def origin(folder: Path) -> dict[str, str]:
    """Where the numbers of a run folder come from: commit, date and processor."""
    facts = read(folder / "provenance.json")
    return {"commit": facts["commit"], "date": facts["started"][:10], "processor": processor()}


def first_rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the first iterations of a run folder that are whole, without what depends on the machine."""
    file, rows = folder / "metrics.jsonl", []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    for line in lines[:REPLAYED]:
        if line.endswith("\n"):
            rows.append(repeatable(json.loads(line)))
    return rows


def all_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def measured(folder: Path) -> dict[str, Any]:
    """The summary that a cell keeps of a finished run, with its evaluations per sample and its curve."""
    summary, rows = read(folder / "summary.json"), all_rows(folder)
    kept = (
        "seconds",
        "iterations",
        "base",
        "base_best_guidance",
        "tuned_best_guidance",
        "difference_best_guidance",
        "guidance_search",
        "sharpness",
        "diversity",
        "best_of",
        "tuned",
        "difference",
        "win_rate",
        "moved",
        "implicit_accuracy",
    )
    # Where samples are given, none are drawn.
    evaluations = {part: sum(row.get(f"nfe/{part}", 0) for row in rows) / len(rows) for part in ("rollout", "train")}
    result: dict[str, Any] = {"evaluations": evaluations, "curve": curve(folder)}
    if EDIT in summary["base"]:
        both = {tag: Evaluation.load(folder / "eval" / f"{tag}.json") for tag in ("base", "tuned")}
        result["operations"] = {tag: by_operation(each) for tag, each in both.items()}
    return {key: summary[key] for key in kept if key in summary} | result


def on_the_way(folder: Path, captions: int = WAY) -> list[Evaluation]:
    """Base, evaluations on the way and result of a run folder, on the first `captions`; those on fewer are left out.

    A run that diverged has no result.
    """
    every = [Evaluation.load(file) for file in _evaluations(folder) if file.is_file()]
    captions = min(captions, len(every[0].prompts))
    return [_cut(each, captions) for each in every if len(each.prompts) >= captions]


def evaluations(folder: Path) -> list[Evaluation]:
    """Base, evaluations on the way and result of a finished run, each on all its captions."""
    return [replace(each, iteration=_iteration(each)) for each in map(Evaluation.load, _evaluations(folder))]


def _evaluations(folder: Path) -> list[Path]:
    """Files of the evaluations of a run folder, in their order."""
    parts = folder / "eval"
    return [parts / "base.json", *sorted(parts.glob("iteration-*.json")), parts / "tuned.json"]


def _iteration(evaluation: Evaluation) -> int:
    """The base is evaluated before the first iteration, whatever its record says of a resumed run."""
    return 0 if evaluation.tag == "base" else evaluation.iteration


def _cut(evaluation: Evaluation, captions: int) -> Evaluation:
    """The first captions of an evaluation, by strict accuracy alone."""
    first = evaluation.of(np.arange(len(evaluation.prompts)) < captions)
    table = {name: first.scores[name] for name in PARTIAL if name in first.scores}
    return replace(first, iteration=_iteration(evaluation), scores=table)


def curve(folder: Path, captions: int = WAY) -> list[dict[str, float]]:
    """Strict accuracy, and CPU seconds of the iterations so far, at the base, on the way and at the end."""
    spent = np.concatenate([[0.0], np.cumsum([row["perf/cpu_s"] for row in all_rows(folder)])])
    return [
        {
            "iteration": each.iteration,
            "cpu_seconds": round(float(spent[each.iteration]), 1),
        }
        | {name: round(float(np.nanmean(scores)), 6) for name, scores in each.scores.items()}
        for each in on_the_way(folder, captions)
    ]


def mean_scores(folder: Path, captions: int, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Means of every evaluation of a finished run over its first `captions` prompts, by iteration.

    Base and result are evaluated on all held-out prompts, those on the way on the first of them alone.
    """
    rows = []
    for evaluation in evaluations(folder):
        row = {name: round(float(np.nanmean(evaluation.scores[name][:captions])), 6) for name in metrics}
        rows.append({"iteration": evaluation.iteration} | row)
    return rows
