"""Trackers: what they are sent and when, what a resumed run adds, and how one that fails is left out."""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.config.schema import RunConfig
from flowrl.config.trackers import Entry, require
from flowrl.core.errors import ConfigError
from flowrl.data.options import DataConfig
from flowrl.media import media
from flowrl.run import tracker_runs, trackers
from flowrl.run.folder import RunFolder
from flowrl.run.tracker_runs import numbers
from flowrl.run.trackers import Trackers
from tests import toys


class Recorder(GeneralTracker):
    """What every tracker of accelerate has, which notes its calls."""

    name = "recorder"
    requires_logging_directory = False
    made: ClassVar[list[Recorder]] = []
    broken: Exception | None = None
    stuck: threading.Event | None = None

    def __init__(self, run_name: str, color: str = "red"):
        super().__init__()
        self.project, self.color, self.calls = run_name, color, list[tuple[Any, ...]]()
        Recorder.made.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.calls.append(("configuration", values))

    def log(self, values, step=None, **kwargs):
        if Recorder.stuck is not None:
            Recorder.stuck.wait()
        if Recorder.broken is not None:
            raise Recorder.broken
        self.calls.append(("row", step, values))

    def log_images(self, values, step=None, **kwargs):
        self.calls.append(
            ("images", step, {name: [image.shape for image in images] for name, images in values.items()})
        )

    def finish(self):
        self.calls.append(("finish",))

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        steps = [call[1] for call in self.calls if call[0] == "row"]
        assert steps == sorted(set(steps))
        return {call[1]: call[2] for call in self.calls if call[0] == "row"}


@pytest.fixture
def recorder() -> Iterator[type[Recorder]]:
    PartialState()
    register_tracker_class(Recorder)
    yield Recorder
    Recorder.made, Recorder.broken, Recorder.stuck = [], None, None
    del LOGGER_TYPE_TO_CLASS["recorder"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with the evaluation of the base, and images of the first two prompts."""
    folder = RunFolder(tmp_path / "run")
    evaluate(folder, "base", 0, 0.25)
    return folder


def evaluate(folder: RunFolder, tag: str, iteration: int, value: float) -> None:
    scores = {"jpeg": np.array([[value], [np.nan], [value]])}
    (folder.path / "eval" / tag).mkdir(parents=True)
    toys.evaluation(tag, iteration, 1.0, 2, ("a", "b", "c"), 1, scores).save(folder.path / "eval")
    for prompt in range(2):
        Image.new("RGB", (6, 4), "red").save(folder.path / "eval" / tag / f"{prompt:05d}-0.png")


def row(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "loss": iteration / 3, "bad": float("nan"), "count": iteration}


def going(folder: RunFolder, given: list[Any], iterations: int = 6) -> Trackers:
    config = RunConfig(
        name="run",
        model={"path": "x"},
        data=DataConfig(prompts="x"),
        iterations=iterations,
        output=str(folder.path.parent),
        trackers=given,
    )
    return Trackers(config, {"optim": {"lr": 0.1, "ema": None}, "rewards": [{"name": "jpeg"}], "trackers": 1}, folder)


def train(folder: RunFolder, going: Trackers, start: int, stop: int, every: int = 2) -> None:
    """Iterations with a checkpoint after `every` of them, as the trainer has them."""
    going.open(start)
    for iteration in range(start + 1, stop + 1):
        folder.metrics.append(row(iteration))
        going.add(row(iteration))
        if iteration % every == 0:
            going.send(iteration)


def test_rows_are_sent_once_and_in_order_over_a_kill_a_resumption_and_the_end(folder, recorder):
    first = going(folder, [{"name": "recorder", "project": "mine", "color": "blue"}])
    train(folder, first, 0, 3)
    first.leave(2)  # a kill comes anywhere: nothing past the newest checkpoint was sent
    (one,) = recorder.made
    assert (one.project, one.color) == ("mine", "blue")
    assert one.calls[0] == ("configuration", {"optim.lr": 0.1, "optim.ema": "null", "rewards.0.name": "jpeg"})
    assert list(one.rows) == [0, 1, 2]
    assert one.rows[0] == {"eval/jpeg": 0.25}
    assert ("images", 0, {"eval/images": [(4, 6, 3)] * 2}) in one.calls
    folder.metrics.truncate(2)
    second = going(folder, ["recorder"])
    evaluate(folder, "iteration-000004", 4, 0.5)
    train(folder, second, 2, 6)
    evaluate(folder, "tuned", 6, 0.75)
    second.finish({"iterations": 6, "status": "finished", "win_rate": {"jpeg": {"rate": 0.5}}})
    second.finish({"iterations": 6, "status": "finished"})
    two = recorder.made[1]
    assert list(two.rows) == [3, 4, 5, 6]
    assert "configuration" not in {call[0] for call in two.calls}
    assert [call[1] for call in two.calls if call[0] == "images"] == [4, 6]
    rows = one.rows | two.rows
    assert all(rows[i] == {"loss": i / 3, "count": i} for i in range(1, 6))
    assert rows[6] == {
        "loss": 2.0,
        "count": 6,
        "eval/jpeg": 0.75,
        "summary/iterations": 6,
        "summary/win_rate/jpeg/rate": 0.5,
    }
    assert two.calls[-1] == ("finish",)


def test_a_tracker_that_is_added_gets_the_earlier_rows_and_an_ended_run_starts_none(folder, recorder):
    train(folder, going(folder, []), 0, 4)
    assert not (folder.path / "trackers.json").exists()
    added = going(folder, ["recorder"])
    train(folder, added, 4, 6)
    added.finish({"iterations": 6})
    assert list(recorder.made[0].rows) == [0, 1, 2, 3, 4, 5, 6]
    again = going(folder, ["recorder"])
    again.open(6)
    again.finish({"iterations": 6})
    assert len(recorder.made) == 1


@pytest.mark.parametrize("error", [ConnectionError("no network"), OSError(28, "No space left on device")])
def test_a_tracker_that_fails_is_named_once_and_gets_what_it_missed_from_a_resumed_run(folder, recorder, caplog, error):
    recorder.broken = error
    first = going(folder, ["recorder"])
    with caplog.at_level(logging.WARNING, "flowrl"):
        train(folder, first, 0, 6)
        first.finish({"iterations": 6})
    (told,) = [record.message for record in caplog.records if "tracker recorder" in record.message]
    assert str(error) in told
    assert "is sent when the run is resumed" in told
    recorder.broken = None
    caplog.clear()
    second = going(folder, ["recorder"], iterations=7)
    train(folder, second, 6, 7)
    second.finish({"iterations": 7})
    # It was told iteration 0 when it failed, and whether it kept that is not known.
    assert list(recorder.made[-1].rows) == [1, 2, 3, 4, 5, 6, 7]
    assert "iterations 0 to 0" in caplog.text


def test_a_tracker_that_hangs_is_left_alone(folder, recorder, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "_PATIENCE_S", 0.3)
    recorder.stuck = threading.Event()
    stuck = going(folder, ["recorder"])
    with caplog.at_level(logging.WARNING, "flowrl"):
        train(folder, stuck, 0, 6)
        stuck.finish({"iterations": 6})
    recorder.stuck.set()
    assert "has not taken the rest" in caplog.text


def test_notes_that_cannot_be_written_end_the_tracker_and_not_the_run(folder, recorder, caplog):
    (folder.path / "trackers.json").mkdir()
    with caplog.at_level(logging.WARNING, "flowrl"):
        on = going(folder, ["recorder"])
        train(folder, on, 0, 4)
        on.finish({"iterations": 4})
    assert caplog.text.count("trackers.json could not be written") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["tensorbord"], ("trackers.0 = 'tensorbord'", "did you mean 'tensorboard'", "wandb")),
        ([3], ("trackers.0 = 3", "name of a tracker")),
        ([{"log_dir": "x"}], ("trackers.0 = ", "`name`")),
        (
            ["tensorboard", {"name": "tensorboard"}],
            ("trackers.1 = 'tensorboard'", "trackers.0", "leave out trackers.1"),
        ),
        ([{"name": "tensorboard", "flush": 1}], ("trackers.0.flush = 1", "did you mean 'flush_secs'")),
        ([{"name": "tensorboard", "project": "x"}], ("trackers.0.project", "no such option")),
        (["clearml"], ("trackers.0 = 'clearml'", "pip install clearml")),
    ],
)
def test_what_cannot_be_tracked_is_refused_with_key_value_reason_and_remedy(given, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        require(given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_damaged_note_of_the_trackers_is_refused(folder, recorder):
    (folder.path / "trackers.json").write_text("{")
    with pytest.raises(ConfigError, match=r"trackers.json is damaged.*delete it"):
        going(folder, ["recorder"])


# ---- files that are read back


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, value) of TensorBoard's files, as TensorBoard reads them."""
    read = EventAccumulator(str(folder / "trackers/tensorboard"), {"scalars": 0, "images": 0})
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_curves_of_tensorboard_are_the_rows_in_float32_each_iteration_once(folder):
    PartialState()
    generator = np.random.default_rng(0)
    rows = [{"iteration": i} | {f"m/{k}": v for k, v in enumerate(generator.normal(size=3) * 1e3)} for i in range(1, 9)]
    for each in rows:
        folder.metrics.append(each)
    first = going(folder, ["tensorboard"], iterations=8)
    first.open(5)
    first.leave(5)
    # A kill in the midst of sending: what stands in the files is more than what is noted.
    note = folder.path / "trackers.json"
    told = json.loads(note.read_text())
    told["tensorboard"] |= {"sent": 2}
    note.write_text(json.dumps(told))
    folder.path.rename(folder.path.with_name("renamed"))
    moved = RunFolder(folder.path.with_name("renamed"))
    second = going(moved, ["tensorboard"], iterations=8)
    second.open(5)
    evaluate(moved, "tuned", 8, 0.75)
    second.finish({"iterations": 8, "seconds": 1.5})
    found = curves(moved.path)
    for name in ("m/0", "m/1", "m/2"):
        assert found[name] == [(each["iteration"], float(np.float32(each[name]))) for each in rows]
    assert found["eval/jpeg"] == [(0, 0.25), (8, 0.75)]
    assert found["summary/seconds"] == [(8, 1.5)]
    assert len(list((moved.path / "trackers").iterdir())) == 1


@pytest.mark.parametrize("form", ["webp", "mp4"])
def test_of_a_video_four_frames_are_sent_side_by_side(tmp_path, recorder, form):
    """Of both kinds that `eval.videos` writes."""
    if form == "mp4":
        pytest.importorskip("av", reason="needs the extra video")
    frames = torch.linspace(0, 1, 7).view(7, 1, 1, 1).expand(7, 3, 16, 24)
    sent = recorder("run")
    file = media.write(frames, tmp_path / "00000-0", form=form)
    tracker_runs.log_images(Entry("trackers.0", "recorder"), sent, [file], 3)
    assert sent.calls[-1] == ("images", 3, {"eval/images": [(16, 4 * 24, 3)]})


@given(st.lists(st.binary(max_size=70000), max_size=6), st.integers(0, 40))
def test_records_of_a_log_are_read_back_over_blocks_and_without_a_torn_end(records, torn):
    log, ends = bytearray(b":W&B\x00\x00\x00"), list[int]()
    for record in records:
        left, first = record, True
        while first or left:
            room = 32768 - len(log) % 32768
            if room < 7:
                log += bytes(room)
                room = 32768
            part, left = left[: room - 7], left[room - 7 :]
            kind = (1 if first else 4) if not left else (2 if first else 3)
            log += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
        ends.append(len(log))
    kept = max(len(log) - torn, 7)
    file = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"flowrl-{threading.get_ident()}.wandb"
    file.write_bytes(log[:kept])
    try:
        assert list(tracker_runs.records(file)) == [r for r, end in zip(records, ends, strict=True) if end <= kept]
    finally:
        file.unlink()


def test_numbers_of_a_row_are_finite_and_no_names_are_lost():
    counted = Counter(numbers({"a": {"b": 1, "c": float("inf")}, "a/d": 2, "e": None, "f": "x"}))
    assert counted == {"a/b": 1, "a/d": 2}
