"""Checkpoints: atomic, verified, kept or dropped; and text files written whole."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from flowrl.core.errors import CheckpointError
from flowrl.core.files import fsync, write_atomically
from flowrl.run import checkpoint
from flowrl.run.checkpoint import Checkpoint, available, load, path_of, save


def make(iteration: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(iteration)
    tensors = {
        "weights/a": torch.randn(3, 4, generator=generator),
        "weights/view": torch.randn(4, 3, generator=generator).T,
        "optim/step": torch.tensor(float(iteration)),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "counts": torch.tensor([2**40, -1]),
        "flags": torch.tensor([True, False]),
    }
    return Checkpoint(iteration, tensors, {"algorithm": {"window": [1, 2]}, "seconds": 1.5, "none": None})


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.iteration == expected.iteration
    assert found.state == expected.state
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert found.tensors[name].dtype == value.dtype
        assert torch.equal(found.tensors[name], value)


def test_a_checkpoint_comes_back_bitwise(tmp_path):
    assert save(tmp_path, make(7), keep=3) == tmp_path / "iteration-000007"
    assert_same(load(tmp_path, 7), make(7))
    assert sorted(p.name for p in path_of(tmp_path, 7).iterdir()) == [
        "manifest.json",
        "state.json",
        "state.safetensors",
    ]


def test_saving_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, make(1), keep=3)
    other = Checkpoint(1, {"a": torch.ones(2)}, {"new": True})
    save(tmp_path, other, keep=3)
    assert_same(load(tmp_path, 1), other)


def test_only_the_newest_are_kept(tmp_path):
    for iteration in (1, 2, 10, 3):
        save(tmp_path, make(iteration), keep=2)
    assert available(tmp_path) == [3, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration-000003", "iteration-000010"]


def test_only_finished_checkpoints_count(tmp_path):
    assert available(tmp_path / "nowhere") == []
    save(tmp_path, make(4), keep=3)
    (tmp_path / ".iteration-000009.tmp").mkdir()
    (tmp_path / "iteration-12").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert available(tmp_path) == [4]


# ---- atomic


def test_a_checkpoint_gets_its_name_only_when_it_is_complete_and_on_disk(tmp_path, monkeypatch):
    synced, renamed = [], []
    real_sync, real_rename = fsync, os.rename

    def sync(path: Path) -> None:
        synced.append(str(path))
        real_sync(path)

    def rename(source: Path, target: Path) -> None:
        assert not Path(target).exists()
        manifest = json.loads((Path(source) / "manifest.json").read_text())
        for name in ("state.safetensors", "state.json"):
            assert (Path(source) / name).stat().st_size == manifest[name]["bytes"]
        assert {str(Path(source) / n) for n in ("state.safetensors", "state.json", "manifest.json")} <= set(synced)
        assert str(source) in synced
        renamed.append(str(target))
        real_rename(source, target)

    monkeypatch.setattr(checkpoint, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, make(1), keep=3)
    assert renamed == [str(path_of(tmp_path, 1))]
    assert synced[-1] == str(tmp_path)


def test_the_leftover_of_a_killed_save_is_no_obstacle(tmp_path):
    leftover = tmp_path / ".iteration-000002.tmp"
    leftover.mkdir()
    (leftover / "state.safetensors").write_bytes(b"half")
    save(tmp_path, make(2), keep=3)
    assert_same(load(tmp_path, 2), make(2))
    assert not leftover.exists()


@pytest.mark.parametrize("killed_at", ["second name", "removal"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(tmp_path, monkeypatch, killed_at):
    """The only checkpoint of a run is written again after a resumed evaluation."""

    class Killed(BaseException):
        pass

    names, real_rename, real_remove = [], os.rename, shutil.rmtree

    def rename(source: Path, target: Path) -> None:
        names.append(target)
        if killed_at == "second name" and len(names) == 2:
            raise Killed
        real_rename(source, target)

    def remove(path: Path, ignore_errors: bool = False) -> None:
        if killed_at == "removal" and len(names) == 2:
            raise Killed
        real_remove(path, ignore_errors=ignore_errors)

    folder, other = tmp_path / "checkpoints", Checkpoint(1, {"a": torch.ones(2)}, {"new": True})
    save(folder, make(1), keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(shutil, "rmtree", remove)
        with pytest.raises(Killed):
            save(folder, other, keep=1)
    assert len(names) == 2
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["iteration-000001"]
    assert_same(load(folder, 1), make(1) if killed_at == "second name" else other)


def test_a_disk_that_fails_while_a_checkpoint_is_replaced_leaves_the_earlier_one(tmp_path, monkeypatch):
    names, real = [], os.rename

    def rename(source: Path, target: Path) -> None:
        names.append(target)
        if len(names) == 2:
            full()
        real(source, target)

    save(tmp_path, make(1), keep=1)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="iteration 1 is safe"):
        save(tmp_path, Checkpoint(1, {"a": torch.ones(2)}, {}), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001"]
    assert_same(load(tmp_path, 1), make(1))


def full(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(safetensors.torch, "save_file"), (Path, "write_text"), (os, "fsync"), (os, "rename"), (Path, "mkdir")],
    ids=["tensors", "state", "fsync", "rename", "mkdir"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(tmp_path, monkeypatch, owner, name, first):
    kept = [] if first else [save(tmp_path, make(1), keep=1).name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, make(2), keep=1)
    words = (os.strerror(errno.ENOSPC), *(("no earlier checkpoint",) if first else ("iteration 1 is safe", "--resume")))
    assert all(word in str(caught.value) for word in words)
    assert [p.name for p in tmp_path.iterdir()] == kept
    if kept:
        assert_same(load(tmp_path, 1), make(1))
    save(tmp_path, make(2), keep=1)
    assert available(tmp_path) == [2]


# ---- damage


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def tamper(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, tamper, Path.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_damaged_file_is_refused_with_the_way_back(tmp_path, name, damage):
    save(tmp_path, make(3), keep=3)
    save(tmp_path, make(6), keep=3)
    damage(path_of(tmp_path, 6) / name)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, 6)
    assert str(path_of(tmp_path, 6)) in str(caught.value)
    assert "go on from iteration 3" in str(caught.value)
    assert_same(load(tmp_path, 3), make(3))


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"state.safetensors": 1}', "3", "\udcff"])
def test_a_manifest_that_is_missing_or_broken_is_refused(tmp_path, content):
    save(tmp_path, make(3), keep=3)
    manifest = path_of(tmp_path, 3) / "manifest.json"
    manifest.unlink() if content is None else manifest.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="go on from the start"):
        load(tmp_path, 3)
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path, 5)


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    save(tmp_path, make(1), keep=1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="another version"):
        load(tmp_path, 1)


# ---- text files


def test_a_text_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "summary.json"
    write_atomically(file, "old")
    assert file.read_text() == "old"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="space"):
            write_atomically(file, "new")
    assert file.read_text() == "old"
    write_atomically(file, "new \u00e9")
    assert file.read_text(encoding="utf-8") == "new \u00e9"
    assert [p.name for p in file.parent.iterdir()] == ["summary.json"]
