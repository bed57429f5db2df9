"""What stands beside a win rate at every door: which pairs are ties, and how much the images change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.apps.gallery import build, movement, results
from flowrl.apps.gallery.compare.scores import standings
from flowrl.apps.gallery.runs import load_run
from flowrl.apps.publish.card_facts import Facts, verdicts
from flowrl.evaluation import moved
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import win_rate
from flowrl.media import media
from flowrl.run.report import format_win_rate
from tests import toys
from tests.apps.folders import write_run
from tests.apps.gallery.test_compare import shared_by

LEVELS = 0.25
"""A quarter of the pixels is one level brighter."""
SENTENCE = "The LoRA hardly moves: on the same noise the images differ from the base's by 0.25 of 255 levels."
WON, TIED = 8, 28
"""Of the 40 images of `evaluations`."""


def evaluations() -> tuple[Evaluation, Evaluation]:
    """Scores 0, 1, 2, 3 in turn, of std sqrt(1.25): 24 of 40 rise by less than a twentieth of it, 0.0559, 4 rise by 1
    on equal images, 8 rise and 4 fall by 1."""
    before = np.arange(40.0)[:, None] % 4
    change = np.repeat([0.05, 1.0, 1.0, -1.0], [24, 4, WON, 4])[:, None]
    marks = np.asarray([[f"{k:016x}"] for k in range(40)])
    after = np.where(np.arange(40)[:, None] // 4 == 6, marks, np.char.add("f", marks))
    base = toys.evaluation(
        "base", 0, 1.0, 4, tuple(f"prompt {k}" for k in range(40)), 1, {"look": before}, digests=marks
    )
    return base, replace(base, tag="tuned", iteration=4, scores={"look": before + change}, digests=after)


def write(folder: Path, *, suffix: str = ".png") -> Path:
    """The folder of a finished run."""
    config: dict[str, Any] = {"name": folder.name, "seed": 0, "model": {"lora": {"rank": 4}}, "eval": {"tie": 0.05}}
    write_run(folder, config, [{"iteration": 4}])
    base, tuned = evaluations()
    for one, brighter in ((base, 0), (tuned, 1)):
        one.save(folder / "eval")
        image = torch.full((3, 8, 8), 100 / 255)
        image[:, :4, :4] += brighter / 255
        frames = image if suffix == ".png" else image.expand(5, -1, -1, -1)
        media.write(frames, folder / "eval" / one.tag / "00003-0", fps=4)
    rate = win_rate(base, tuned, "look", tie=0.05)
    summary = {"status": "finished", "iterations": 4, "primary": "look", "evaluated_on": "held-out prompts"}
    (folder / "summary.json").write_text(json.dumps(summary | {"win_rate": {"look": rate}}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [write(root / "one"), write(root / "two")]


def test_every_door_counts_what_nobody_sees_as_ties_and_says_how_much_the_images_change(folders):
    """8 of 12 that are not tied, and 28 of 40 ties; by equal scores it was 36 of 40."""
    run = load_run(folders[0])
    (metric,) = results.metrics_of(run)
    tone, report = results.win_rate(run, metric) or ("", "")
    card = " ".join(verdicts(Facts.of(run)))
    for said in (report, card):
        assert "66.7 % of 12 images" in said
        assert "70.0 % of all are ties" in said
        assert "at most 0.0559 apart, 0.05 of the base" in said
        assert SENTENCE.replace("'", "") in said.replace("\\", "").replace("'", "")
    assert tone == "same", "what nobody can see is no success"
    terminal = format_win_rate("look", run.summary["win_rate"]["look"])
    assert "66.7% of 12 images" in terminal
    assert f"{TIED} ties, 70.0% (a tie: scores at most 0.0559 apart, 0.05 of the base's std, or images" in terminal
    shared = shared_by(*folders)
    for standing in standings(shared, shared.metrics[0]):
        assert standing.win.mean == pytest.approx((WON + TIED / 2) / 40)
        assert standing.over_base.estimate.mean == pytest.approx((24 * 0.05 + 4 + 8 - 4) / 40), "all differences count"
    page = build(folders).read_text()
    assert page.count(SENTENCE.replace("'", "&#39;")) >= 2
    assert "at most 0.05 of the base" in page


def test_a_change_that_nobody_sees_is_no_success_in_the_title(folders, monkeypatch):
    """Four decimals: from 0.1268 to 0.1268 nothing rose, and what rises while the images stay has no colour."""
    run = load_run(folders[0])
    metric = results.Metric("look", percent=False, decimals=4)

    def title(gain: float) -> tuple[str, str]:
        base, change = results.Estimate(0.12680), results.Estimate(gain, 0.9 * gain, 1.1 * gain)
        tuned = results.Estimate(base.mean + gain)
        return results.verdict(run, metric, {"base": base, "tuned": tuned, "difference": change})

    assert title(1e-6)[0].startswith("look did not change visibly: from 0.1268 to 0.1268")
    assert title(0.01)[0].startswith("look rose from 0.1268 to 0.1368")
    assert [title(gain)[1] for gain in (1e-6, 0.01)] == ["same", "same"]
    monkeypatch.setattr(movement, "of_run", lambda run: moved.Moved(moved.HALF_LEVEL, 1))
    assert [title(gain)[1] for gain in (1e-6, 0.01)] == ["same", "better"]


def test_videos_are_measured_and_what_is_not_saved_is_not_known(tmp_path):
    run = load_run(write(tmp_path / "run", suffix=".webp"))
    found = movement.of_run(run)
    assert found is not None
    assert (found.levels, found.pairs, found.noun) == (pytest.approx(LEVELS), 1, "video")
    assert moved.sentence(found).startswith("The model hardly moves: on the same noise the videos differ")
    next((run.folder / "eval/tuned").glob("*.webp")).unlink()
    assert "is not known" in movement.of_run_in_words(run)
    assert moved.sentence(replace(found, levels=moved.HALF_LEVEL)).startswith("On the same noise")
