"""Damaged files, failing disks and folders of results: one message, never a traceback."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError

from flowrl.apps.gallery.places import comparison_folder, page_folder
from flowrl.apps.pairs.folder import PairFolder
from flowrl.core import files
from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.files import fsync_all, out_folder, read_rows, write_atomically, writing
from flowrl.evaluation.results import Evaluation
from flowrl.media import media
from flowrl.run.folder import MetricsFile, RunFolder
from tests import toys
from tests.e2e.conftest import BASE, BRIGHTNESS
from tests.e2e.test_bad_input import command

# ---- a full disk: what is written to /dev/full meets one


FULL: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda file: MetricsFile(file).append({"iteration": 1}),
    ".summary.json.tmp": lambda file: write_atomically(file.with_name("summary.json"), "{}"),
    "a.png": lambda file: media.write(torch.rand(3, 64, 64), file.with_suffix("")),
    "a.webp": lambda file: media.write(torch.rand(3, 3, 16, 16), file.with_suffix("")),
    "pairs.jsonl": lambda file: PairFolder(file.parent, {}, {}).append([{"prompt": "a"}], {}),
}
"""File -> what writes it."""


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_named_with_the_file_and_the_way_on(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    told = r"could not be written \(No space left on device\); .* safe.*--resume"
    with pytest.raises(WriteError, match=told) as caught:
        FULL[name](tmp_path / name)
    assert caught.value.exit_code == 1
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, os.strerror(errno.EROFS)), SafetensorError("I/O error: No space left on device")]
)
def test_a_read_only_folder_and_what_safetensors_raises_are_told_alike(error):
    told = r"adapter could not be written .*; iteration 3 is safe"
    with pytest.raises(WriteError, match=told), writing("adapter", "iteration 3 is safe"):
        raise error


# ---- damaged files

GOOD = '{"iteration": 1, "a": 0.5}\n'


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x00garbage", b"[1]", b'{"a": 1}', b'{"iteration": null}', b"\0\0\0", b"nan", b"[" * 200_000]
)
def test_a_damaged_row_is_named_and_a_torn_last_one_left_out(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(GOOD.encode() + line + b"\n")
    assert read_rows(file) == ([json.loads(GOOD)], True)
    file.write_bytes(line + b"\n" + GOOD.encode())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1 is not a JSON object with an iteration; delete the line"):
        RunFolder(tmp_path).metrics.rows()


def evaluation(folder: Path, tag: str) -> Path:
    toys.evaluation(tag, 0, 1.0, 4, ("a", "b"), 1, {"reward": np.array([[0.5], [np.nan]])}).save(folder / "eval")
    return folder / "eval" / f"{tag}.json"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda text: text[:-9],
    "no text": lambda text: b"\xff" + text,
    "a list": lambda text: b"[]",
    "a key less": lambda text: text.replace(b'"prompts"', b'"other"'),
    "a score less": lambda text: text.replace(b"[0.5], ", b""),
    "nothing": lambda text: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("tag", "remedy"), [("base", "restore it from a copy"), ("tuned", "delete it: a resumed run")])
def test_a_damaged_evaluation_is_named_with_what_is_safe(tmp_path, damage, tag, remedy):
    file = evaluation(tmp_path, tag)
    assert np.isnan(Evaluation.load(file).scores["reward"][1, 0])
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{tag}\.json .*damaged.*{remedy}"):
        Evaluation.load(file)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"iteration": "a"}'])
def test_a_resume_names_an_evaluation_that_it_cannot_place(tmp_path, text):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "iteration-000002.json").write_text(text)
    with pytest.raises(ConfigError, match=r"iteration-000002\.json .*damaged"):
        RunFolder(tmp_path).forget_after(1)
    toys.evaluation("base", 0, 1.0, 4, (), 2, {"reward": np.zeros((0, 2))}).save(tmp_path)
    assert Evaluation.load(tmp_path / "base.json").prompts == (), "one without prompts is whole"


# ---- --out is a folder


def test_a_folder_of_results_is_made_and_tried(tmp_path):
    assert out_folder(tmp_path / "a" / "b", "index.html").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "dotted.jsonl").mkdir()
    assert out_folder(tmp_path / "dotted.jsonl", "scores.jsonl").is_dir()


@pytest.mark.parametrize(
    ("name", "file", "reason"),
    [
        ("file", "", "file: it is a file; give a folder"),
        ("file", "index.html", "it is a file; give a folder, in which it writes index.html"),
        ("page.html", "index.html", "it takes a folder.*; give --out .*page"),
        ("file/below", "", "cannot be written"),
    ],
)
def test_what_is_no_folder_is_refused(tmp_path, name, file, reason):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=reason):
        out_folder(tmp_path / name, file)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "words", ["sample tiny-sd3 circle", "eval run.yaml", "gallery run", "pairs run.yaml", "score a.png --reward jpeg"]
)
def test_every_command_refuses_a_file(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(BASE))
    Path("brightness.py").write_text(BRIGHTNESS)
    Image.new("RGB", (8, 8)).save("a.png")
    Path("file").write_text("kept")
    code, printed = command(monkeypatch, capsys, *words.split(), "--out", "file")
    assert code == 2, printed
    assert "--out file: it is a file; give a folder" in printed
    assert Path("file").read_text() == "kept"


# ---- reports


def runs(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.yaml").write_text("{}")
    return [folder / name for name in names]


def test_a_comparison_has_a_folder_of_its_own(tmp_path, monkeypatch):
    a, b = runs(tmp_path, "a", "b")
    assert page_folder([a], None) == page_folder([a, a], None) == a / "gallery"
    assert page_folder([a, b], None) == tmp_path / "gallery-a-b"
    (other,) = runs(tmp_path / "elsewhere", "b")
    assert comparison_folder([a, other]) not in (comparison_folder([a, b]), tmp_path / "gallery-a-b")
    monkeypatch.chdir(a)
    assert comparison_folder([Path("."), b]) == tmp_path / "gallery-a-b"


def test_no_comparison_and_no_other_run_takes_the_place_of_a_runs_own_report(tmp_path):
    a, b = runs(tmp_path, "a", "b")
    for which in ([a, b], [b]):
        with pytest.raises(ConfigError, match="it holds the report of the run 'a'; choose another folder"):
            page_folder(which, a / "gallery")
    assert page_folder([a], a / "gallery") == a / "gallery"
    assert page_folder([a, b], tmp_path / "both") == tmp_path / "both"


# ---- on the disk


def test_a_folder_is_on_the_disk_after_its_contents_and_a_failure_is_raised(tmp_path, monkeypatch):
    folder, synced = tmp_path / "a", list[Path]()
    (folder / "b").mkdir(parents=True)
    contents = {folder / "b", *(folder / "b" / f"{k}.png" for k in range(40))}
    for file in contents - {folder / "b"}:
        file.write_bytes(b"x")
    monkeypatch.setattr(files, "fsync", synced.append)
    fsync_all(folder)
    assert synced[-2:] == [folder, tmp_path]
    assert sorted(synced[:-2]) == sorted(contents)

    def fail(path: Path) -> None:
        if path.name == "7.png":
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        fsync_all(folder)
