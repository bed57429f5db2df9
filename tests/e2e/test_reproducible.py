"""Runs that are killed, stopped, resumed, repeated or shared: bitwise, or as near as floats allow."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import assert_same_gradient, digest, finish, start, train

LORA = "model.lora={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    "extra",
    [
        (LORA, "algorithm.kl.coef=0.1"),
        ("model.lora={kind: lokr, rank: 4, alpha: 8}", "algorithm.kl.coef=0.1", "optim.name=adafactor"),
        pytest.param(("model.lora={kind: dora, rank: 4, alpha: 8}", "algorithm.kl.coef=0.1"), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("algorithm.kl.coef=0.1", "optim.ema=null"), marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_training_is_bitwise_the_uninterrupted_one(place: Path, extra: tuple[str, ...]):
    train("name=whole", *extra)
    train("name=parts", "iterations=2", *extra)
    train("name=parts", *extra, resume=True)
    assert digest("parts", 4) == digest("whole", 4)
    rows = [json.loads(line) for line in Path("runs/parts/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    whole, parts = (json.loads(Path(f"runs/{name}/summary.json").read_text()) for name in ("whole", "parts"))
    for summary in (whole, parts):
        del summary["seconds"]
    assert parts == whole  # bitwise: the one has its base from the file, the other in memory


@pytest.mark.slow
def test_the_same_run_twice_gives_bitwise_the_same_weights_and_another_seed_others(place: Path):
    train("name=one", "iterations=2")
    train("name=two", "iterations=2")
    train("name=other", "iterations=2", "seed=1")
    assert digest("one", 2) == digest("two", 2)
    assert digest("one", 2) != digest("other", 2)


def _pictures(run: str) -> dict[str, np.ndarray]:
    files = sorted(Path(f"runs/{run}/eval/base").glob("*.png"))
    return {file.name: np.asarray(Image.open(file)).astype(int) for file in files}


@pytest.mark.slow
def test_pictures_at_fixed_weights_do_not_depend_on_batches_or_processes(place: Path):
    train("name=small", "iterations=0", "eval.batch_size=2", "data.max_eval_prompts=6")
    train("name=large", "iterations=0", "eval.batch_size=8", "data.max_eval_prompts=6")
    code, output = finish(
        start("train", "run.yaml", "name=two", "iterations=0", "data.max_eval_prompts=6", "--processes", "2")
    )
    assert code == 0, output
    small, large, two = (_pictures(name) for name in ("small", "large", "two"))
    assert len(small) == 6
    for name, picture in small.items():
        # 1e-4 in [0, 1] is far less than one of 255 levels; rounding may still tip a pixel by one.
        assert np.abs(picture - large[name]).max() <= 1
        assert np.abs(picture - two[name]).max() <= 1


def test_one_and_two_processes_roll_out_the_same_rewards_and_take_the_same_first_update(place: Path):
    train("name=one", "iterations=1", "optim.updates_per_iteration=1")
    words = ("name=two", "iterations=1", "optim.updates_per_iteration=1", "--processes", "2")
    code, output = finish(start("train", "run.yaml", *words))
    assert code == 0, output
    rows = [json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in ("one", "two")]
    assert rows[0]["reward/total_mean"] == pytest.approx(rows[1]["reward/total_mean"], abs=1e-5)
    assert_same_gradient("one", "two")


def _wait_for(file: Path, text: str, process, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if file.is_file() and text in file.read_text():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"{text!r} never came to {file}")


def _workers(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"PPid:\t{parent}\n" in (entry / "status").read_text():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_kill_9_of_parent_or_worker_then_resume_ends_bitwise_where_the_whole_run_ends(place: Path, victim: str):
    words = ("iterations=6", "checkpoint.every=2", "--processes", "2")
    code, output = finish(start("train", "run.yaml", "name=whole", *words))
    assert code == 0, output
    process = start("train", "run.yaml", "name=parts", *words)
    _wait_for(Path("runs/parts/metrics.jsonl"), '"iteration": 3', process)
    workers = _workers(process.pid)
    assert len(workers) == 2
    os.kill(process.pid if victim == "parent" else workers[1], signal.SIGKILL)
    code, output = finish(process)
    assert code not in (0, 2), output
    for pid in workers:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists(), "a worker outlived the run"
    code, output = finish(start("train", "run.yaml", "name=parts", *words, "--resume"))
    assert code == 0, output
    assert "resumed after iteration" in output
    assert digest("parts", 6) == digest("whole", 6)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_the_last_finished_iteration_and_resume_ends_bitwise_equal(
    place: Path, number: int, expected: int
):
    train("name=whole", "iterations=5")
    process = start("train", "run.yaml", "name=parts", "iterations=5", "checkpoint.every=100")
    _wait_for(Path("runs/parts/metrics.jsonl"), '"iteration": 2', process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == expected, output
    assert "--resume" in output
    train("name=parts", "iterations=5", "checkpoint.every=100", resume=True)
    assert digest("parts", 5) == digest("whole", 5)
