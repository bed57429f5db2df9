"""Sums that divide once, metrics.jsonl, the progress bar, the log."""

import json
import logging
import math
import pickle
import re
import shutil
import time

import pytest
import torch

from flowrl.core.errors import WriteError
from flowrl.display.console import DEBUG, close_log_file, journal, log, set_up_logging
from flowrl.losses.batches import LossOutput
from flowrl.run.folder import MetricsFile
from flowrl.training.metrics import Sums, Timer


def output(count: int, value: float) -> LossOutput:
    return LossOutput(
        loss=torch.tensor(0.0),
        metrics={"policy/loss": torch.tensor(value * count)},
        per_step={"policy/ratio": torch.full((count,), value)},
    )


# ---- sums


def test_means_weigh_every_edge_alike_whatever_the_microbatch():
    sums = Sums()
    sums.add_loss(output(3, 1.0), 3, torch.tensor([0, 0, 1]))
    sums.add_loss(output(1, 5.0), 1, torch.tensor([1]))
    found = sums.means()
    assert found["policy/loss"] == pytest.approx((3 * 1.0 + 5.0) / 4)
    assert found["policy/ratio/step00"] == pytest.approx(1.0)
    assert found["policy/ratio/step01"] == pytest.approx((1.0 + 5.0) / 2)


def test_merged_sums_are_those_of_all_processes_together():
    """Also where one has seen other steps, or nothing at all; sums travel between processes."""
    parts, whole = [Sums(), Sums(), Sums()], Sums()
    for part, each, steps in ((parts[0], output(3, 1.0), [0, 0, 0]), (parts[1], output(1, 5.0), [7])):
        for sums in (part, whole):
            sums.add_loss(each, len(steps), torch.tensor(steps))
    assert Sums().merge(pickle.loads(pickle.dumps(parts))).means() == whole.means()
    assert whole.means()["policy/loss"] == pytest.approx(2.0)


def test_merging_leaves_the_parts_alone_and_a_metric_without_a_count_out():
    part = Sums()
    part.add("seen", 6.0, 3.0)
    part.add("unseen", 0.0, 0.0)
    assert Sums().merge([part, part]).values["seen"] == 12.0
    assert part.means() == {"seen": 2.0}


# ---- the file


@pytest.fixture
def file(tmp_path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl")


def test_rows_are_appended_and_read_back(file):
    assert file.rows() == []
    rows = [{"iteration": 1, "reward/a_mean": 0.5}, {"iteration": 2, "reward/a_mean": 0.25}]
    for row in rows:
        file.append(row)
    assert file.rows() == rows
    assert file.file.read_text().count("\n") == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_and_the_line_is_json(file, value):
    file.append({"iteration": 1, "a": value, "b": 1})
    line = file.file.read_text()
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert file.rows() == [{"iteration": 1, "a": None, "b": 1}]


def test_a_resume_drops_the_rows_past_its_checkpoint_and_goes_on_cleanly(file):
    for k in range(1, 6):
        file.append({"iteration": k})
    with file.file.open("a") as stream:
        stream.write('{"iteration": 6, "rew')
    assert [row["iteration"] for row in file.rows()] == [1, 2, 3, 4, 5]  # the torn line of a killed run is dropped
    file.truncate(3)
    assert [row["iteration"] for row in file.rows()] == [1, 2, 3]
    file.append({"iteration": 4})
    assert [row["iteration"] for row in file.rows()] == [1, 2, 3, 4]
    file.truncate(0)
    assert file.file.read_text() == ""


# ---- time and progress


def test_a_timer_adds_up_the_phases_also_when_one_fails():
    timer = Timer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(RuntimeError), timer.phase("reward"):
        raise RuntimeError
    assert 0.02 <= timer.seconds["rollout"] < 5
    assert set(timer.seconds) == {"rollout", "reward"}


# ---- the log


@pytest.fixture
def restored_log():
    before = (log.handlers[:], log.level, log.propagate)
    yield
    for handler in log.handlers:
        handler.close()
    log.handlers[:], log.level, log.propagate = before[0], before[1], before[2]


@pytest.mark.parametrize("main", [True, False])
def test_messages_of_all_processes_are_logged_once_and_warnings_of_each(tmp_path, capsys, restored_log, main):
    set_up_logging(tmp_path / "train.log", main=main, rank=0 if main else 1)
    log.info("a message")
    log.warning("a warning\nof two lines")
    journal.error("the end")
    screen, kept = capsys.readouterr().out, (tmp_path / "train.log").read_text()
    assert "a warning\nof two lines" in screen
    assert ("a message" in screen) == ("INFO a message" in kept) == main
    assert "the end" not in screen
    who = "" if main else "process 1: "
    for line in (f"WARNING {who}a warning", f"WARNING {who}of two lines", f"ERROR {who}the end"):
        assert f" {line}\n" in kept


@pytest.mark.parametrize("debug", [True, False])
def test_every_line_of_a_traceback_has_its_time_and_the_screen_shows_it_on_debug(
    tmp_path, capsys, monkeypatch, restored_log, debug
):
    monkeypatch.setenv(DEBUG, "1") if debug else monkeypatch.delenv(DEBUG, raising=False)
    set_up_logging(tmp_path / "train.log", main=True)
    try:
        raise ValueError("of somebody's code")
    except ValueError:
        log.debug("a reward raised", exc_info=True)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines[0].endswith("DEBUG a reward raised")
    assert lines[-1].endswith("DEBUG ValueError: of somebody's code")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG ", line) for line in lines)
    assert ("Traceback" in capsys.readouterr().out) == debug


def test_a_log_on_a_full_disk_is_told_once_and_ends_nothing(tmp_path, capfd, restored_log):
    (tmp_path / "train.log").symlink_to("/dev/full")
    set_up_logging(tmp_path / "train.log", main=True)
    for k in range(3):
        log.info("message %d", k)
    for handler in log.handlers:
        handler.close()
    printed = capfd.readouterr()
    assert printed.err.count("train.log cannot be written (No space left on device)") == 1
    assert "Traceback" not in printed.err
    assert "message 2" in printed.out
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"train\.log could not be written"):
        set_up_logging(tmp_path / "file" / "train.log", main=True)


def test_a_log_whose_folder_is_gone_is_told_once_and_raises_nothing(tmp_path, capfd, restored_log):
    folder = tmp_path / "run"
    folder.mkdir()
    set_up_logging(folder / "train.log", main=True)
    for handler in log.handlers:
        handler.close()  # as uvicorn's logging.config does with every handler of the process
    shutil.rmtree(folder)
    for k in range(2):
        log.info("message %d", k)
    printed = capfd.readouterr()
    assert printed.err.count("train.log cannot be written (No such file or directory)") == 1
    assert "message 1" in printed.out
    close_log_file()
    log.info("after the run")
    assert "after the run" in capfd.readouterr().out


def test_setting_up_twice_does_not_double_the_messages(capsys, restored_log):
    for _ in range(2):
        set_up_logging(None, main=True)
    log.info("once")
    assert capsys.readouterr().out.count("once") == 1
    assert logging.getLogger("flowrl") is log
