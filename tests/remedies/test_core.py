"""Remedies of files, commands and models that one function gives."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from flowrl.core.errors import Remedy
from tests.remedies import follows
from tests.remedies.following import (
    command_fault,
    each_ends,
    goes_further,
    loaded,
    numbered,
    provoked,
    recipe,
    require_package,
    stand_in,
    with_remedy,
    words_of,
)


@follows("flowrl/config/locate.py:_refuse_elsewhere")
def test_a_path_of_the_working_directory_is_given_on_the_command_line(tmp_path, monkeypatch):
    own, here = tmp_path / "own", tmp_path / "here"
    own.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    Path("list.txt").write_text("a red circle\n")
    tree = recipe("flow_grpo") | {"data": {"prompts": "list.txt"}}
    each_ends(lambda remedy: loaded(own, tree, words_of(remedy)), "config/locate.py:_refuse_elsewhere")


@follows("flowrl/config/trackers.py:require", "flowrl/config/trackers.py:require#2")
def test_a_tracker_that_is_not_installed_is_installed_or_left_out(monkeypatch):
    from flowrl.config import trackers

    present = trackers.installed

    def act(remedy: Remedy) -> None:
        given = ["tensorboard", "clearml"]
        if remedy.command:
            assert remedy.command == "pip install clearml"
            monkeypatch.setattr(trackers, "installed", lambda name: name == "clearml" or present(name))
        if remedy.without:
            assert remedy.without == "trackers.1"
            monkeypatch.setattr(trackers, "installed", present)
            given.pop()
        with suppress(ImportError):  # the options of one that is not here are not known
            trackers.require(given)

    each_ends(act, "config/trackers.py:require 1 2")


@follows("flowrl/core/files.py:out_folder")
def test_a_folder_is_named_without_the_file(tmp_path):
    from flowrl.core.files import out_folder

    def act(remedy: Remedy) -> None:
        option, folder = remedy.flag.split() or ("--out", str(tmp_path / "page.html"))
        assert option == "--out"
        out_folder(Path(folder), "index.html")

    each_ends(act, "core/files.py:out_folder")


@follows("flowrl/media/first_frame.py:require_frame")
def test_a_first_frame_is_cropped():
    from flowrl.media.first_frame import require_frame

    def act(remedy: Remedy) -> None:
        require_frame((64, 64), 16, 32, crop=remedy.settings.get("model.first_frame") == "crop")

    each_ends(act, "media/first_frame.py:require_frame")


def without_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a package one that is not installed."""
    monkeypatch.setitem(sys.modules, name, None)


@follows("flowrl/media/mp4.py:library")
def test_the_extra_of_videos_has_their_package(monkeypatch):
    from flowrl.media.mp4 import library

    def act(remedy: Remedy) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if remedy.command:
                require_package(remedy, "av")
            else:
                without_module(patch, "av")
            library("a.mp4")

    each_ends(act, "media/mp4.py:library")


@follows("flowrl/commands/serve.py:command")
def test_the_extra_of_the_server_has_its_packages(monkeypatch):
    def act(remedy: Remedy) -> None:
        if remedy.command:
            require_package(remedy, "fastapi", "uvicorn")
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: None)
            command_fault(["serve", "--reward", "jpeg"])

    each_ends(act, "commands/serve.py:command")


class Pictures:
    """A pipeline without frames."""

    def __call__(self, prompt: str) -> None: ...


@follows("flowrl/commands/sample.py:Video.require")
@pytest.mark.parametrize("asked", [("mp4", None), ("webp", 8.0)])
def test_kinds_of_videos_are_left_out_for_images(asked):
    from flowrl.commands.sample import Video

    def video(remedy: Remedy) -> Video:
        assert remedy.without in ("", Video(*asked).asked)
        return Video("webp", None) if remedy.without else Video(*asked)

    for act in (
        lambda remedy: video(remedy).require_kind(Pictures()),
        lambda remedy: video(remedy).require(Pictures(), 1),
    ):
        each_ends(act, "commands/sample.py:Video.require")


@follows("flowrl/commands/sample.py:_records")
def test_an_image_is_left_out_where_records_name_theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("edits.jsonl").write_text('{"prompt": "bluer", "image": "a.png"}\n')
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(name)
    line = ["sample", "nowhere/model", "edits.jsonl", "--image", "b.png"]
    fault = provoked(lambda: command_fault(line), numbered("commands/sample.py:_records"))
    for remedy in fault.remedies:
        assert goes_further(with_remedy(line, remedy), fault)


@follows("flowrl/apps/suites/running/procedure.py:_load")
def test_a_run_that_learned_its_noise_is_evaluated_without_a_suite(tmp_path, monkeypatch):
    from flowrl.apps.suites.running import procedure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(procedure, "load", lambda *given, **named: stand_in(noise="means and stds"))
    line = ["eval", "tiny-sd3", "--suite", "geneval", "--out", "out", "--judge", "jpeg"]
    fault = provoked(lambda: command_fault(line), numbered("apps/suites/running/procedure.py:_load"))
    for remedy in fault.remedies:
        assert goes_further(with_remedy(line, remedy), fault)


@follows(*numbered("apps/command_line.py:_require_frames 1 2"), "flowrl/apps/command_line.py:_require_positions")
def test_frames_and_sides_of_a_call_are_those_that_fit():
    from flowrl.apps.command_line import call_of
    from tests import tiny_pipelines as tiny

    wan = tiny.make("wan")
    own, step = {"height": 16, "width": 16}, wan.vae_scale_factor_temporal

    def act(remedy: Remedy, first: str) -> None:
        words = [first, *(word for word in remedy.flag.split() if word != "--set")]
        call_of(wan, own, None, None, words)

    each_ends(lambda remedy: act(remedy, f"num_frames={4 * step + 2}"), "apps/command_line.py:_require_frames")
    each_ends(lambda remedy: act(remedy, "width=1000000"), "apps/command_line.py:_require_positions")
    wan.transformer.register_to_config(patch_size=[2, 2, 2])
    each_ends(lambda remedy: act(remedy, f"num_frames={2 * step + 1}"), "apps/command_line.py:_require_frames 2")
