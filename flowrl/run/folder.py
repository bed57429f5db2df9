"""The run folder: its lock, its configuration and contents, its progress, `metrics.jsonl`."""

import copy
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError, Moved, Remedy
from flowrl.core.files import damaged, evaluation_remedy, json_ready, read_object, read_rows, write_atomically, writing
from flowrl.core.versions import versions
from flowrl.data import contents
from flowrl.data.contents import Input
from flowrl.display.display import working
from flowrl.evaluation import previews
from flowrl.evaluation.evaluator import PLACES
from flowrl.evaluation.held_out import splits
from flowrl.run import checkpoint, inputs
from flowrl.run.changes import MAY_CHANGE, Accepted, differences
from flowrl.run.launch import LOCKED
from flowrl.run.status import LOCK


class MetricsFile:
    """`metrics.jsonl`: one object per iteration, appended and on the disk at once; NaN is written as null."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, row: dict[str, Any]) -> None:
        with writing(self.file), self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(json_ready(row)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Complete rows; a torn last line of a killed run is dropped. Raises ConfigError: another line is damaged."""
        return read_rows(self.file)[0]

    def truncate(self, iteration: int) -> None:
        """Drop rows past a checkpoint."""
        kept = [row for row in self.rows() if row["iteration"] <= iteration]
        write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in kept))


NOTHING = Accepted()


def _locked(descriptor: int) -> bool:
    """Whether the lock of a file could be taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class RunFolder:
    """`<output>/<name>`; one writer at a time."""

    def __init__(self, path: Path, key: str = "output") -> None:
        self.path, self.key = path, key
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def lock(self, wait_s: float = 5.0) -> int:
        """Lock the folder until every process that inherited the returned descriptor has ended.

        Raises ConfigError: not writable, or another run is using it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"{self.key}: the run folder {self.path} cannot be written ({error.strerror}); choose another place"
            ) from None
        if not _locked(descriptor):
            deadline = time.monotonic() + wait_s
            with working(f"waiting for the process that uses {self.path}"):
                while not _locked(descriptor):
                    if time.monotonic() > deadline:
                        os.close(descriptor)
                        raise ConfigError(
                            f"the run folder {self.path} is in use by another process; wait for it, or choose another "
                            "name"
                        )
                    time.sleep(0.1)
        self._lock = descriptor
        return descriptor

    def hold(self) -> bool:
        """Lock the folder, or take over the lock that the launcher of this process holds; whether that was so.

        A folder that was moved since the launcher locked it is not made again: `require_own` tells of it.
        """
        held = os.environ.get(LOCKED)
        if held is None:
            self.lock()
            return False
        self._lock = os.dup(int(held))
        self.require_own()
        return True

    def require_own(self) -> None:
        """Look whether the locked folder is still at this path. Raises Moved: it was moved, deleted or replaced."""
        if self._lock is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK)):
                return
        now = None
        with suppress(OSError):  # not Linux
            file = Path(os.readlink(f"/proc/self/fd/{self._lock}"))
            now = file.parent if file.is_file() else None
        gone = "replaced by another" if (self.path / LOCK).exists() else "deleted"
        where = gone if now is None else f"moved to {now}"
        resumes = now is not None and self.key == "output"
        raise Moved(
            f"the folder {self.path} was {where} while it was being written, so nothing more is written there; "
            + ("what it held is gone" if now is None else "what it holds is safe"),
            remedies=[Remedy(command=f"flowrl train {shlex.quote(str(now))} --resume")] if resumes else [],
        )

    def try_lock(self) -> bool:
        """Lock the folder if it can be written and no other process has locked it."""
        try:
            self.lock(0.0)
        except ConfigError:
            return False
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, resolved: Resolved, resume: bool, accept: Accepted = NOTHING) -> int:
        """Prepare the folder and return the finished iteration, 0: the start; without `resume` a run is refused.

        Raises ConfigError: the folder holds a run, or one with another configuration or other contents of files.
        """
        tree, file = resolved.tree(), self.path / "config.yaml"
        saved = checkpoint.available(self.checkpoints)
        # An evaluation is a part of a run too: that of the base comes before the first row.
        started = bool(saved or self.metrics.rows() or any((self.path / "eval").glob("*.json")))
        now = inputs.collect(resolved)
        record, agreed = contents.read(self.path) if started else None, list[str]()
        accept.require_acceptable(tree)
        if file.is_file() and started:
            old, same = yaml.safe_load(file.read_text(encoding="utf-8")), copy.deepcopy(tree)
            # Without a split the share has no effect.
            may_change = MAY_CHANGE if splits(resolved) else (*MAY_CHANGE, "data.eval_share")
            inputs.alike(old, same, record, now)
            changed = differences(old, same, may_change)
            accept.require(self.path, changed, tree)
            agreed = accept.agreed(changed)
            if not resume:
                raise ConfigError(
                    f"the run folder {self.path} already holds this run, or choose another name",
                    Remedy(flag="--resume"),
                )
        start = saved[-1] if resume and saved else 0
        if started and record is None:
            contents.say("%s has no %s: the earlier contents of its files are not known", self.path, contents.FILE)
        inputs.update(self.path, record, now, start, accept.files, agreed)
        write_atomically(file, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return start

    def agree_on_sets(self, sets: Sequence[Input], start: int, accept: bool) -> None:
        """Hold data sets, once they are scanned, against the folder's record, and update that.

        Raises ConfigError: another set than the run was started with, and `accept` is false.
        """
        inputs.update(self.path, contents.read(self.path), sets, start, accept)

    def forget_after(self, iteration: int) -> None:
        """Drop metrics and evaluations after a checkpoint: they are made again. Raises ConfigError: a damaged file."""
        self.metrics.truncate(iteration)
        for file in (file for place in PLACES for file in (self.path / place).glob("*.json")):
            result = read_object(file, evaluation_remedy(file)).get("iteration")
            if not isinstance(result, int):
                raise damaged(file, KeyError("iteration"), evaluation_remedy(file))
            if result > iteration:
                file.unlink()
        previews.forget_after(self.path, iteration)

    def add_row(self, row: dict[str, Any]) -> None:
        """Append a row to `metrics.jsonl`.

        Raises Moved: this is no longer the run's folder; WriteError: the disk is full or not writable.
        """
        self.require_own()
        self.metrics.append(row)

    def write_json(self, name: str, value: Any) -> None:
        self.require_own()
        write_atomically(self.path / name, json.dumps(json_ready(value), indent=1) + "\n")


def commit() -> str:
    """The git commit of this flowrl, and whether its checkout has uncommitted changes."""
    root = Path(__file__).resolve().parents[2]
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    found = git.stdout.strip() or "not a git checkout"
    return found + (" with uncommitted changes" if git.returncode == 0 and dirty.stdout.strip() else "")


def provenance(resolved: Resolved, device: str, processes: int) -> dict[str, Any]:
    """Code, versions, hardware, command and seed, for `provenance.json`."""
    return versions() | {
        "commit": commit(),
        "command": " ".join(["flowrl", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {device}",
        "processes": processes,
        "threads_per_process": torch.get_num_threads(),
        "seed": resolved.run.seed,
        "rewards": ", ".join(f"{plan.label} x {plan.entry.weight}" for plan in resolved.rewards),
        "levels": {"algorithm": resolved.method.level},
    }
