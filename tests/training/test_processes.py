"""Processes: how many this machine bears, who ends whom, and what a failure of one means for the others."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from flowrl.rewards._judges.chat_api import Http
from flowrl.rewards._remote import options as remote

from flowrl.core import files
from flowrl.core.errors import Abandoned, ConfigError, Diverged, Elsewhere, RewardError, RewardFailure
from flowrl.core.files import fsync, write_atomically
from flowrl.run import checkpoint, status
from flowrl.run.folder import RunFolder
from flowrl.run.launch import launch
from flowrl.scoring.options import RewardEntry
from flowrl.training.world import BACKEND, World, join, require_devices, unused_accelerator
from tests.training.test_sharding import everywhere


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    """cards(n, backend): a machine with n GPUs, as torch reports them, and the backend that the launcher names."""

    def have(count: int, backend: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv(BACKEND, raising=False)
        if backend is not None:
            monkeypatch.setenv(BACKEND, backend)

    return have


@pytest.mark.parametrize(
    ("count", "processes", "backend", "words"),
    [
        (2, 3, None, ["3 processes on 2 GPUs", "--backend gloo"]),
        (1, 2, "nccl", ["2 processes on 1 GPU:"]),
        (0, 2, "nccl", ["nccl needs GPUs"]),
        (0, 2, "mpi", ["'mpi'", "gloo and nccl"]),
    ],
)
def test_processes_that_the_gpus_cannot_bear_are_refused(cards, count, processes, backend, words):
    cards(count, backend)
    with pytest.raises(ConfigError) as caught:
        require_devices(processes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("count", "backend"), [(2, None), (2, "nccl"), (1, "gloo"), (0, None), (0, "gloo")])
def test_two_processes_have_a_gpu_each_share_one_through_gloo_or_use_none(cards, count, backend):
    cards(count, backend)
    assert require_devices(2) == backend


@pytest.mark.parametrize(
    ("found", "cuda", "named"), [("mps", False, True), ("cuda", True, False), (None, False, False)]
)
def test_an_accelerator_that_is_not_used_is_named_at_the_start(monkeypatch, caplog, found, cuda, named):
    device = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    state = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: state)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join().device.type == "cpu"
    assert ("'mps', which flowrl does not use" in caplog.text) is named
    assert (unused_accelerator() is not None) is named


def test_processes_wait_longer_for_each_other_than_any_call_of_a_reward_may_take(monkeypatch):
    """torch's 600 s between GPUs end a run whose reward tries its servers for 900."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(BACKEND, raising=False)
    seen: dict[str, Any] = {}

    def state(**options: Any) -> SimpleNamespace:
        seen.update(options)
        return SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cpu"))

    monkeypatch.setattr(accelerate, "PartialState", state)
    join()
    waits = seen["timeout"].total_seconds()
    assert waits >= 4 * remote.Config(servers=["http://x"], reward="x").deadline_s
    for make in (
        lambda: remote.Config(servers=["http://x"], reward="x", deadline_s=waits),
        lambda: Http(deadline_s=waits),
        lambda: RewardEntry(name="x", timeout=waits),
    ):
        with pytest.raises(ValueError, match="other processes wait"):
            make()


def test_more_processes_than_cores_are_warned_about_before_they_start(monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def start(*args: object, **options: object) -> None:
        assert warnings
        raise InterruptedError("far enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(InterruptedError):
        launch(["train"], 2, warn=warnings.append)
    assert "2 processes on 1 CPU core:" in warnings[0]


def test_a_worker_whose_launcher_is_gone_ends_before_it_has_loaded_anything(tmp_path: Path):
    """Its parent is another process than the launcher that its environment names."""
    folder = RunFolder(tmp_path)
    descriptor = folder.lock()
    worker = subprocess.Popen(
        [sys.executable, "-c", "from flowrl.cli import main; main()", "list", "samplers"],
        env=os.environ | {"FLOWRL_PARENT": "1", "WORLD_SIZE": "2", "RANK": "0"},
        pass_fds=[descriptor],
        stdout=subprocess.DEVNULL,
    )
    folder.unlock()
    assert worker.wait(timeout=60) == 1
    assert not status.is_locked(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "met"),
    [
        (None, RewardError("no score"), (RewardError, RewardError)),
        (None, ZeroDivisionError("no spread"), (Elsewhere, ZeroDivisionError)),
        (None, Diverged("NaN"), (Diverged, Diverged)),
        (RewardFailure("away"), None, (RewardFailure, RewardFailure)),
        (RewardFailure("away"), Diverged("NaN"), (Diverged, Diverged)),
        (Abandoned(), Diverged("NaN"), (Diverged, Diverged)),
        (Abandoned(), RewardFailure("away"), (RewardFailure, RewardFailure)),
        (None, Abandoned(), (Abandoned, Abandoned)),
        (SystemExit(0), None, (SystemExit, Elsewhere)),
        (None, None, (type(None), type(None))),
    ],
)
def test_what_ends_one_process_ends_all_at_the_same_place(first, second, met):
    def work(world: World) -> tuple[BaseException, bool] | None:
        def mine() -> None:
            error = (first, second)[world.rank]
            if error is not None:
                raise error

        try:
            return world.in_step(mine)
        except BaseException as error:  # SystemExit and Abandoned are not Exceptions
            return error, world.shares(error)

    found, shared = zip(*(result or (None, True) for result in everywhere(2, work)), strict=True)
    assert tuple(map(type, found)) == met
    assert all(shared) or met[0] is Abandoned
    if met == (Diverged, Diverged):
        assert {(error.status, str(error)) for error in found} == {("diverged", "NaN")}
    if met == (RewardFailure, RewardFailure):
        assert {str(error) for error in found} == {"away"}


# ---- the run folder


@pytest.mark.parametrize(
    ("said", "held", "now"),
    [
        ("running", False, "died"),
        ("running", True, "running"),
        ("failed", True, "running"),
        ("failed", False, "failed"),
        ("finished", True, "finished"),
    ],
)
def test_a_folder_says_running_only_while_a_process_holds_it(tmp_path: Path, said: str, held: bool, now: str):
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.write_json(status.SUMMARY, {"status": said, "reason": "because", "command": "flowrl train x --resume"})
    if not held:
        folder.unlock()
    found = status.read(tmp_path)
    folder.unlock()
    assert found["status"] == now
    assert (status.describe(found) == "") == (now in ("running", "finished"))
    assert ("--resume" in status.describe(found)) == (now in ("died", "failed"))


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(tmp_path: Path):
    kept = ("metrics.jsonl", ".lock", "checkpoints/iteration-000001/state.json", "eval/base.tmp", "adapter/.gitkeep")
    left = (
        *("checkpoints/.iteration-000002.tmp/state.safetensors", "adapter/transformer/.tmpAbC12x", ".summary.json.tmp"),
        *("eval/.base.json.tmp", "gallery/.index.html.123.tmp", ".writable-x1y2", "adapter/.tmp_dir/part"),
    )
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    checkpoint.remove_leftovers(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(kept)
    assert not [p for p in tmp_path.rglob(".*tmp*")]


def test_a_text_file_is_on_the_disk_before_it_has_its_name_and_its_name_is_too(tmp_path: Path, monkeypatch):
    events: list[str] = []
    sync, replace = fsync, os.replace
    monkeypatch.setattr(files, "fsync", lambda path: (events.append(Path(path).name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("named"), replace(a, b)))
    write_atomically(tmp_path / "summary.json", "{}")
    assert events == [".summary.json.tmp", "named", tmp_path.name]
