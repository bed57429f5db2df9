"""The frozen video: the page and its pictures, from cells and saved videos of two runs."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from flowrl.media import media
from scripts.lab import frozen_video
from scripts.pages import strips
from tests import toys

METRICS = ("motion_smoothness", "motion_dynamics", "shapes_motion_strict", "shapes_motion_flicker")


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with its files elsewhere."""
    for name in ("NUMBERS", "PAGE", "CURVES", "STRIPS"):
        monkeypatch.setattr(frozen_video, name, tmp_path / getattr(frozen_video, name).name)
    monkeypatch.setattr(frozen_video, "RECIPES", tmp_path)
    for name in frozen_video.NAMES:
        (tmp_path / f"{name}.yaml").write_text("eval: {periodic_prompts: 2}\n")
    monkeypatch.setattr(frozen_video.runs, "RUNS", tmp_path / "runs")
    return frozen_video


def cell(change: float) -> dict:
    values = {name: {"mean": change, "low": change - 0.01, "high": change + 0.01, "n": 4} for name in METRICS}
    base = {name: value | {"mean": 0.5} for name, value in values.items()}
    rows = [{"iteration": at} | dict.fromkeys(METRICS, 0.5 + at * change / 60) for at in (0, 30, 60)]
    summary = {"iterations": 60, "base": base, "difference": values, "cpu_seconds": 700.0}
    return {"commit": None, "summary": summary, "curve": rows}


def save_run(folder: Path, level: float) -> None:
    """An evaluation of four captions before and after, with flat videos of their own level."""
    table = {name: np.zeros((4, 1)) for name in METRICS}
    for tag, shown in (("base", 0.25), ("tuned", level)):
        prompts = tuple(f"a red circle moves {k}" for k in range(4))
        toys.evaluation(tag, 60, 1.0, 10, prompts, 1, table).save(folder / "eval")
        for number in range(4):
            media.write(torch.full((9, 3, 32, 32), shown), folder / "eval" / tag / f"{number:05d}-0")


def test_the_page_says_what_each_run_changed_and_shows_its_frames(frozen: ModuleType, tmp_path: Path):
    with pytest.raises(SystemExit, match="not run yet: smooth, gated"):
        frozen.write_page()
    frozen.cells.write_results({"smooth/0": cell(-0.3), "gated/0": cell(0.2)}, frozen.NUMBERS)
    frozen.write_page()  # without run folders, as in a clone, the picture stays as it was
    assert not frozen.STRIPS.exists()
    for name, level in (("smooth", 0.5), ("gated", 0.75)):
        save_run(tmp_path / "runs" / f"frozen-{name}-seed0", level)
    frozen.write_page()
    text = frozen.PAGE.read_text()
    assert "| `motion_dynamics` | 0.500 | -0.300 [-0.310, -0.290] | +0.200 [+0.190, +0.210] |" in text
    assert "| smooth | 700 | - |" in text
    assert "table of all 4;" in text
    assert frozen.CURVES.read_text().count("<path") == 6
    sheet = np.asarray(media.open_image(frozen.STRIPS))
    # The last frame of each row: base, smoothness alone, gated.
    right, pitch = sheet.shape[1] - 34, 2 * 32 + 2
    levels = [sheet[strips.CAPTION + line * pitch + 32, right].tolist() for line in range(3)]
    assert levels == [[round(255 * level)] * 3 for level in (0.25, 0.5, 0.75)]
