"""The report of a run of the lab, with fewer videos."""

import html
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.apps.gallery.runs import load_run
from flowrl.media import media
from scripts.lab import cells
from scripts.pages import strips, video_report
from tests import toys
from tests.apps.folders import make_run


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(video_report.runs, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(video_report, "FOLDER", tmp_path / "report")
    monkeypatch.setattr(video_report, "STRIPS", tmp_path / "strips.png")
    monkeypatch.setattr(video_report, "CAPTIONS", 3)
    return video_report


def test_the_page_has_the_videos_of_the_first_captions_and_the_numbers_of_all(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SystemExit, match="is not a finished run"):
        report.main([])
    run = make_run(tmp_path / "runs" / report.RUN, num_prompts=5, iterations=20)
    for image in run.glob("eval/*/*.png"):
        media.write(torch.rand(5, 3, 16, 16), image.with_suffix(""), fps=4)
        image.unlink()
    monkeypatch.setattr(report, "draw", lambda run: Image.new("RGB", (1, 1)))  # of captions that ask for motion
    report.main([])
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "of the 3 prompts with saved videos" in page
    assert "5 prompts" in page
    assert len(list(run.glob("eval/base/*.webp"))) == 5 * len(load_run(run).evaluations["base"].seeds), "the run stays"


def test_filmstrips_are_of_one_caption_of_each_task_and_say_what_is_right(report: ModuleType, tmp_path: Path):
    prompts = ("a red circle moves left", "a red circle stays", "a blue cross moves up", "a blue cross rests")
    for tag, level in (("base", 0.25), ("tuned", 0.75)):
        table = {"shapes_motion_strict": np.full((4, 1), float(tag == "tuned"))}
        toys.evaluation(tag, 60, 1.0, 10, prompts, 1, table).save(tmp_path / "eval")
        for number in range(4):
            media.write(torch.full((9, 3, 32, 32), level), tmp_path / "eval" / tag / f"{number:05d}-0")
    sheet = np.asarray(report.draw(tmp_path))
    block = strips.CAPTION + 2 * (2 * 32 + strips.GAP)
    assert sheet.shape[0] == 2 * block, "two tasks"
    rows = [block * task + strips.CAPTION + line * (2 * 32 + strips.GAP) + 32 for task in (0, 1) for line in (0, 1)]
    assert [tuple(sheet[row, strips.LABEL - 5].tolist()) for row in rows] == [strips.WRONG, strips.RIGHT] * 2
    assert [int(sheet[row, strips.LABEL + 10, 0]) for row in rows] == [64, 191] * 2


def test_a_caption_that_tuned_alone_gets_right_is_preferred_and_the_counts_are_of_all(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = ("a red circle moves left", "a red circle stays", "a blue cross moves up", "a blue cross rests")
    for tag, right in (("base", [1, 0, 0, 0]), ("tuned", [1, 0, 1, 1])):
        table = {"shapes_motion_strict": np.array(right, dtype=float)[:, None]}
        toys.evaluation(tag, 60, 1.0, 10, prompts, 1, table).save(tmp_path / "eval")
    monkeypatch.setattr(report, "strips", lambda rows, captions, right: (captions, right))
    captions, right = report.draw(tmp_path)
    assert captions == {
        1: "a red circle stays   (right of 2 such captions: base 0, tuned 1)",
        2: "a blue cross moves up   (right of 2 such captions: base 1, tuned 2)",
    }
    assert right == {("base", 1): False, ("tuned", 1): False, ("base", 2): False, ("tuned", 2): True}


def test_no_absolute_path_stands_in_the_page_in_the_repository():
    page = (video_report.FOLDER / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<(script|style)>.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.search(r"(?:^|[\s\"'=(,])(?:/|~/)[\w.-]+/", html.unescape(text))


def test_the_page_in_the_repository_is_of_the_cell_in_the_lab():
    cell = cells.load(cells.RESULTS)["video-sage_grpo/0"]["summary"]
    page = (video_report.FOLDER / "index.html").read_text(encoding="utf-8")
    gain = 100 * cell["difference"]["shapes_motion_strict"]["mean"]
    verdict = re.search(r"<h1[^>]*>([^<]*)", page)
    assert verdict is not None
    assert f"({gain:+.1f}, 95" in html.unescape(verdict[1])
    assert f"of the {video_report.CAPTIONS} prompts with saved videos" in page
