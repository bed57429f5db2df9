"""scripts/video_report.py: the report of a run of the lab, with fewer videos."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flowrl.core import media
from flowrl.gallery.runs import load_run
from tests.gallery.test_gallery import make_run
from tests.tiny_sd3 import script


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = script("video_report")
    monkeypatch.setattr(module.lab, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "report")
    monkeypatch.setattr(module, "CAPTIONS", 3)
    monkeypatch.setattr("sys.argv", ["video_report.py"])
    return module


def test_the_page_has_the_videos_of_the_first_captions_and_the_numbers_of_all(report: ModuleType, tmp_path: Path):
    with pytest.raises(SystemExit, match="is not a finished run"):
        report.main()
    run = make_run(tmp_path / "runs" / report.RUN, num_prompts=5, iterations=20)
    for image in run.glob("eval/*/*.png"):
        media.write(torch.rand(5, 3, 16, 16), image.with_suffix(""), fps=4)
        image.unlink()
    report.main()
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "of the 3 prompts with saved videos" in page
    assert "5 prompts" in page
    assert len(list(run.glob("eval/base/*.webp"))) == 5 * len(load_run(run).evaluations["base"].seeds), "the run stays"


def test_the_page_in_the_repository_is_of_the_cell_in_the_lab():
    report = script("video_report")
    cell = report.lab.load(report.lab.RESULTS)["video-sage_grpo/0"]["summary"]
    page = (report.FOLDER / "index.html").read_text(encoding="utf-8")
    gain = 100 * cell["difference"]["shapes_motion_strict"]["mean"]
    verdict = re.search(r"<h1[^>]*>([^<]*)", page)
    assert verdict is not None
    assert f"({gain:+.1f}, 95" in html.unescape(verdict[1])
    assert f"of the {report.CAPTIONS} prompts with saved videos" in page
