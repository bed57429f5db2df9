"""The comparison of several runs, from synthetic run folders."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.apps.gallery import build
from flowrl.apps.gallery.builder import render
from flowrl.apps.gallery.charts import Point, Style, front
from flowrl.apps.gallery.compare import wall
from flowrl.apps.gallery.compare.configurations import differences
from flowrl.apps.gallery.compare.curves import curve_places, over_training
from flowrl.apps.gallery.compare.page import comparison
from flowrl.apps.gallery.compare.scores import recipe, standings
from flowrl.apps.gallery.compare.shared import Shared, share
from flowrl.apps.gallery.images import OnDisk
from flowrl.apps.gallery.runs import load_run
from flowrl.commands.gallery import command
from flowrl.core.errors import ConfigError
from flowrl.media import media
from flowrl.statistics.intervals import interval
from tests.apps.folders import Page, change, write_run, write_scores

PROMPTS = [f"{color} {thing}" for color in ("red", "blue", "green") for thing in ("cat", "dog", "<b>hat</b> & co")] * 8
EVIL = "</script><script>alert(1)</script>"


def make_run(
    folder: Path,
    gain: float,
    *,
    seed: int = 0,
    count: int = 60,
    finished: bool = True,
    metric: str = "brightness",
    config: dict[str, Any] | None = None,
    **other: Any,
) -> Path:
    """A run whose scores rise by `gain` on average, with evaluations at iterations 2 and 4 and the first six images."""
    rng, common = np.random.default_rng([7, seed]), np.random.default_rng(3).random((count, 2))
    other.setdefault("prompts", [f"{k}: {text}" for k, text in enumerate(PROMPTS)][:count])
    levels = {0: common} | {i: common + gain * i / 4 + 0.1 * rng.normal(size=common.shape) for i in (2, 4)}
    tags = {"base": 0, "iteration-000002": 2, "iteration-000004": 4} | ({"tuned": 4} if finished else {})
    for tag, i in tags.items():
        shades = np.clip((200 * levels[i]).astype(int), 0, 255)
        images = {at: np.full((8, 8, 3), (shades[at], 40, 40)) for at in np.ndindex(min(6, count), 2)}
        write_scores(folder, tag, {metric: levels[i]}, images, iteration=i, **other)
    document = {
        "name": folder.name,
        "seed": seed,
        "output": str(folder.parent),
        "iterations": 4,
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
        "rollout": {"prompts_per_iteration": 3, "group_size": 4},
        "data": {"prompts": "a.txt", "eval_prompts": "b.txt"},
        "eval": {"tie": 0.05},
    } | (config or {})
    logged = {"nfe/rollout": 4.0, "nfe/train": 2.0, "time/iteration_s": 1.5, "perf/cpu_s": 3.0}
    rows = [{"iteration": i, "policy/kl_reference": 0.1 * i * gain, **logged} for i in range(1, 5)]
    summary = {"summary": {"status": "finished", "iterations": 4, "primary": metric}} if finished else {}
    return write_run(folder, document, rows, **summary)


def shared_by(*folders: Path) -> Shared:
    shared = share([load_run(folder) for folder in folders])
    assert shared is not None
    return shared


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five runs: two seeds of one recipe, two others, and one that is under way."""
    root = tmp_path_factory.mktemp("runs")
    slow = {"algorithm": {"name": "awm", "clip_range": 1e-4}}
    return [
        make_run(root / "grpo-seed0", 0.30),
        make_run(root / "grpo-seed1", 0.30, seed=1),
        make_run(root / "awm", 0.10, seed=2, config=slow),
        make_run(root / "worse", -0.10, seed=3, config={"algorithm": {"name": EVIL}}),
        make_run(root / "under way", 0.2, seed=4, finished=False, config={"rewards": [{"name": "x", "weight": 2.0}]}),
    ]


@pytest.fixture(scope="module")
def page(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(build(folders, tmp_path_factory.mktemp("page")))


def test_the_page_is_whole_in_itself_and_prompts_stay_text(page):
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"(src|href)=.?https?:", page.source)
    assert EVIL not in page.source
    assert "<b>hat" not in page.source
    assert f"{EVIL} · finished" in page.text("small")


def test_the_table_has_every_run_the_best_first_and_more_than_three_have_no_parts_of_their_own(page, folders):
    names = [text.strip() for text in page.texts["th"] if text.strip() in {f.name for f in folders}]
    assert (set(names[:2]), names[2:5]) == ({"grpo-seed0", "grpo-seed1"}, ["under way", "awm", "worse"])
    assert not [one for one in page.ids if one.startswith("run-")]
    assert {"comparison", "m0-seeds", "m0-curves", "m0-costs", "compare-config", "compare-images"} <= set(page.ids)
    assert "It is not finished: iteration 4 is in the place of the tuned model" in page.text("dd")


def test_runs_whose_files_differ_are_listed_each_by_its_own_metric(folders, tmp_path):
    listed = render([load_run(folder) for folder in folders[:2]], OnDisk(tmp_path), alike=False)
    (table,) = re.findall(r'<table class="wide results" id="comparison">.*?</table>', listed, re.DOTALL)
    assert table.count('data-label="Primary metric" class="left">brightness<') == 2


def test_a_run_is_not_compared_with_itself(folders, tmp_path):
    with pytest.raises(ConfigError, match="is named twice"):
        command([folders[0], folders[1], folders[1] / ".." / folders[0].name], out=tmp_path)


def test_differences_are_paired_and_those_of_chance_are_not_marked(folders, tmp_path):
    twin = make_run(tmp_path / "twin", 0.30, seed=5)
    shared = shared_by(*folders, twin)
    table = {row.run: row for row in standings(shared, shared.metrics[0])}
    leader = next(i for i, row in table.items() if row.over_leader is None)
    assert leader in (0, 1, 5)
    for i, row in table.items():
        metric = shared.metrics[0].metric
        before, after = (shared.table(i, metric, base=base) for base in (True, False))
        own = interval((after - before).mean(axis=1), shared.groups)
        change = row.over_base.estimate
        assert (change.mean, change.low, change.high) == pytest.approx((own["mean"], own["low"], own["high"]))
        # 0.1 of noise a seed, 60 prompts of 2: a standard error of 0.01.
        assert row.over_base.sure
        assert row.over_leader is None or row.over_leader.sure == (i in (2, 3, 4))


def test_runs_are_compared_on_what_they_share_and_told_what_was_left_out(folders, tmp_path):
    fewer = make_run(tmp_path / "fewer", 0.2, count=40)
    moved = [f"{k}: {text}" for k, text in enumerate(PROMPTS)][:60]
    moved[3], moved[9] = moved[9], moved[3]
    turned = make_run(tmp_path / "turned", 0.2, prompts=moved)
    shared = shared_by(folders[0], fewer, turned)
    assert shared.places.tolist() == [p for p in range(40) if p not in (3, 9)]
    other = make_run(tmp_path / "other", 0.2, guidance_scale=4.0, seeds=[0, 1])
    noted = shared_by(*folders[:2], other)
    assert noted.left_out == {2: ["compared, but evaluated with guidance 4.0 (most runs: 1.0)"]}
    assert "22 of the 60 prompts of its base evaluation have no counterpart" in shared.left_out[0][0]
    assert "2 of the 40 prompts" in shared.left_out[1][0]


def test_a_metric_of_another_reward_is_left_out_and_one_run_without_it_is_named(folders, tmp_path):
    first = make_run(tmp_path / "first", 0.2)
    second = make_run(tmp_path / "second", 0.2, made_with={"score brightness": "b"})
    shared = shared_by(folders[0], first, second)
    assert shared.metrics[0].members == (0, 1)
    assert "another version of the reward" in shared.left_out[2][0]
    alone = make_run(tmp_path / "alone", 0.2, metric="sharpness")
    runs = [load_run(folder) for folder in (folders[0], first, alone)]
    runs[2] = replace(runs[2], config=runs[2].config | {"algorithm": {"name": "another"}})
    values = comparison(runs, OnDisk(tmp_path), alike=True)
    assert dict(values["left_out"])["alone"] == [
        "the metric brightness: this run does not have it",
        "the metric sharpness: no other run has it",
    ]
    assert values["recipe_names"][-1] == "alone"
    assert "(2 runs)" in values["metrics"][0]["legend"], "both have seed 0"
    assert "alone" not in values["metrics"][0]["legend"], "a curve that is not drawn"


def test_runs_that_share_nothing_are_refused_by_name_with_the_remedy(folders, tmp_path):
    alien = make_run(tmp_path / "alien", 0.2, prompts=[f"another {k}" for k in range(60)])
    with pytest.raises(ConfigError, match=r"alien shares no prompt with .*grpo-seed0.*data\.eval_prompts"):
        build([*folders, alien], tmp_path / "page")
    other = make_run(tmp_path / "other", 0.2, metric="sharpness")
    with pytest.raises(ConfigError, match=r"share no metric .*has brightness; .*has sharpness.*eval\.rewards"):
        build([folders[0], other], tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_seeds_of_one_recipe_are_one_row_with_their_mean_and_spread(folders):
    runs = [load_run(folder) for folder in folders]
    values = comparison(runs, OnDisk(folders[0].parent), alike=True)
    assert [row["name"] for row in values["metrics"][0]["recipes"]] == ["grpo (2 seeds)"]
    shared = share(runs)
    assert shared is not None
    found = recipe(shared, shared.metrics[0], (0, 1))
    means = [np.nanmean(shared.table(i, shared.metrics[0].metric, base=False)) for i in (0, 1)]
    assert found.tuned["mean"] == pytest.approx(np.mean(means))
    assert found.tuned["sd"] == pytest.approx(np.std(means, ddof=1))
    # Two recipes of the same beginning are told apart.
    others = {"algorithm": {"name": "grpo", "clip_range": 1.0}}
    renamed = [
        replace(run, name=f"run{i}", config=run.config | (others if i > 1 else {}))
        for i, run in enumerate(runs[:2] * 2)
    ]
    names = comparison(renamed, OnDisk(folders[0].parent), alike=True)["recipe_names"]
    assert names == ["run0, run1", "run2, run3"]
    # A seed that was trained twice is no second seed.
    twice = comparison([runs[0], runs[0], runs[2]], OnDisk(folders[0].parent), alike=True)
    assert twice["metrics"][0]["recipes"] == []
    assert twice["recipe_names"] == ["grpo-seed0 (2 runs)", "awm"]
    thrice = comparison([runs[0], runs[1], runs[0]], OnDisk(folders[0].parent), alike=True)
    assert thrice["recipe_names"] == ["grpo (2 seeds)"]


def drawn_over_training(shared: Shared, monkeypatch) -> tuple[dict[str, dict[str, list[float]]], tuple]:
    """(quantity -> run -> the values of its points, what `over_training` returns)."""
    seen: dict[str, dict[str, list[float]]] = {}

    def keep(lines, axis, *, percent):
        seen[axis.name] = {line.label: line.x.tolist() for line in lines}
        return "drawn"

    monkeypatch.setattr("flowrl.apps.gallery.charts.line_chart", keep)
    styles = {i: Style(i) for i in range(len(shared.runs))}
    return seen, over_training(shared, shared.metrics[0], styles, "", curve_places(shared))


def test_curves_run_from_the_base_over_what_training_has_spent(folders, monkeypatch):
    seen, (charts, missing) = drawn_over_training(shared_by(*folders), monkeypatch)
    assert [chart["key"] for chart in charts] == ["iterations", "samples", "evaluations", "seconds"]
    assert missing == []
    assert seen["iterations"]["awm"] == [0, 2, 4]
    # 12 samples an iteration, 6 evaluations and 0.125 s each.
    assert seen["training samples"]["awm"] == [0, 24, 48]
    assert seen["network evaluations in training"]["awm"] == [0, 144, 288]
    assert seen["time of training, seconds"]["awm"] == [0, 3, 6]


def test_evaluations_of_other_prompts_are_no_points_of_a_curve(tmp_path, monkeypatch):
    """Without a prompt that all evaluations have, curves are over those of base and tuned, and the page says so."""
    folders = [make_run(tmp_path / name, 0.2, count=4) for name in ("one", "two")]
    file = folders[0] / "eval" / "iteration-000002.json"
    change(file, prompts=["another"] * 4)
    built = build(folders, tmp_path / "page")
    said = "evaluations during training with other prompts are left out: one."
    assert said in Page(built).text("p").replace("Evaluations", "evaluations")
    shared = shared_by(*folders)
    found = drawn_over_training(shared, monkeypatch)[0]["iterations"]
    assert (len(found["one"]), len(found["two"])) == (2, 3)


def test_a_run_without_scores_is_never_the_leader(tmp_path):
    folders = [make_run(tmp_path / name, gain) for name, gain in (("bare", 0.1), ("good", -0.2), ("bad", 0.2))]
    for folder in folders:
        change(folder / "summary.json", lower_is_better=["brightness"])
    change(folders[0] / "eval" / "tuned.json", scores={"brightness": [[None, None]] * 60})
    shared = shared_by(*folders)
    table = standings(shared, shared.metrics[0])
    assert [row.run for row in table] == [1, 2, 0], "lower is better"
    assert table[1].over_leader is not None
    assert np.isfinite(table[1].over_leader.estimate.low)


def test_names_of_runs_and_metrics_keep_their_capitals_in_sentences(tmp_path):
    settings: list[dict[str, Any]] = [{"algorithm": {"name": name}} for name in ("one", "two")]
    pairs = zip(("GRPO-Mine", "other"), settings, strict=True)
    folders = [make_run(tmp_path / name, 0.1, metric="CLIP", config=config) for name, config in pairs]
    file = folders[0] / "metrics.jsonl"
    rows = [json.loads(line) | {"nfe/rollout": None} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(build(folders, tmp_path / "page"))
    assert "Network evaluations in training: not logged by GRPO-Mine." in page.text("p")
    assert {"CLIP during training", "CLIP against cost"} <= set(page.texts["h2"])


def test_the_front_has_the_runs_that_no_other_beats_in_both():
    marks = [Point(name, Style(0), x, y, 0, 0) for name, x, y in (("a", 1, 1), ("b", 2, 3), ("c", 3, 2), ("d", 2, 2))]
    assert [mark.label for mark in front(marks, 1)] == ["a", "b"]
    assert [mark.label for mark in front(marks, -1)] == ["a"]


def test_only_keys_that_differ_are_listed_and_never_the_seed(folders):
    rows = dict(differences([load_run(folder) for folder in folders[:3]]))
    assert set(rows) == {"algorithm.clip_range", "algorithm.name"}
    assert rows["algorithm.clip_range"] == ["0.001", "0.001", "0.0001"]


def test_images_end_where_the_budget_is_spent_and_the_page_says_so(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(wall, "BUDGET", 1000)
    small = Page(build(folders, tmp_path / "small"))
    assert "of 6 rows fit the size of this page" in small.text("p")
    assert "all runs have the same one" in small.text("p")


def test_a_comparison_of_video_models_speaks_of_videos(tmp_path):
    folders = [make_run(tmp_path / name, gain, count=4) for name, gain in (("one", 0.1), ("two", 0.2))]
    for image in [file for folder in folders for file in folder.glob("eval/*/*.png")]:
        media.write(torch.rand(5, 3, 16, 16), image.with_suffix(""), fps=4)
        image.unlink()
    said = [text for text in Page(build(folders, tmp_path / "page")).texts["p"] if "images" in text or "videos" in text]
    assert any("8 videos of each model" in text for text in said)
    assert not any("image" in text for text in said)


def test_runs_of_other_sizes_share_the_seed_and_not_the_noise(tmp_path):
    sizes = {"one": 32, "two": 32, "wide": 48}
    folders = [
        make_run(tmp_path / name, 0.1, count=4, config={"model": {"path": "m", "height": 32, "width": width}})
        for name, width in sizes.items()
    ]
    alike, other = Page(build(folders[:2], tmp_path / "alike")), Page(build(folders, tmp_path / "other"))
    assert "Differences are of the same prompt and noise; 95 %" in alike.text("p")
    assert "The same prompts and noise" in alike.texts["h2"]
    assert "between runs of the same prompt and noise seed, since the sizes or models of the runs" in other.text("p")
    assert "Differences are of the same prompt" not in other.text("p")
    assert "The same prompts and noise seeds" in other.texts["h2"]
    # The frames of a generic model stand elsewhere.
    clips = [
        make_run(tmp_path / f"clip{n}", 0.1, count=4, config={"model": {"path": "m", "call": {"num_frames": n}}})
        for n in (9, 17)
    ]
    assert "The same prompts and noise seeds" in Page(build(clips, tmp_path / "clips")).texts["h2"]


def test_runs_of_one_name_are_told_apart_where_they_are_only_listed(tmp_path):
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    for folder in folders:
        write_run(folder, {"name": "run"})
    page = Page(build(folders, tmp_path / "page"))
    assert {"run (one/run)", "run (two/run)"} <= set(page.texts["a"])


def test_runs_without_evaluations_still_give_a_page(tmp_path):
    bare = Page(build([write_run(tmp_path / name, {"name": name}) for name in ("one", "two")], tmp_path / "page"))
    assert bare.text("td").count("nothing has been evaluated yet") == 2


def test_runs_that_searched_for_their_best_guidance_are_compared_at_it_too(tmp_path):
    """The paired difference on what all share, which here is fewer prompts than the searched run has."""
    folders = [make_run(tmp_path / "searched", 0.2), make_run(tmp_path / "plain", 0.1, count=20)]
    rng = np.random.default_rng(5)
    tables = {"base": rng.random((60, 2)), "tuned": rng.random((60, 2)) + 0.3}
    known = load_run(folders[0]).base
    assert known is not None
    for name, table in tables.items():
        told = {"prompts": list(known.prompts), "guidance_scale": 3.0, "iteration": 4 * (name == "tuned")}
        write_scores(folders[0], f"{name}-guidance-3", {"brightness": table}, **told)
    change(folders[0] / "summary.json", **{f"{name}_best_guidance": {"guidance_scale": 3.0} for name in tables})
    shared = share([load_run(folder) for folder in folders])
    assert shared is not None
    found = {row.run: row.at_best for row in standings(shared, shared.metrics[0])}
    by_hand = interval((tables["tuned"] - tables["base"])[:20].mean(1), shared.groups)
    assert (found[0].mean, found[0].low) == (pytest.approx(by_hand["mean"]), pytest.approx(by_hand["low"]))
    assert not found[1].known
    page = Page(build(folders, tmp_path / "page"))
    assert "Over its base, each at its best CFG" in page.texts["th"]
    assert any(cell.startswith(f"+{by_hand['mean']:.3f}"[:5]) for cell in page.texts["td"])
