"""The static report, built from synthetic run folders drawn with the shapes renderer."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import shapes
from flowrl.apps.gallery import best_of, build, builder, certainty, charts, facts, images, rendering, results
from flowrl.apps.gallery.live import Served
from flowrl.apps.gallery.results import Metric
from flowrl.apps.gallery.runs import load_run
from flowrl.core.errors import ConfigError
from flowrl.media import media
from flowrl.statistics.intervals import clusters
from flowrl.statistics.paired import sign_test
from tests.apps.folders import EVIL, NUM_PROMPTS, Page, change, estimate, make_run

WORSE = {"mean": -0.2, "low": -0.3, "high": -0.1, "n": 4}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(run_folder: Path) -> Page:
    return Page(build([run_folder]))


def test_the_page_stands_in_the_run_with_its_sections_in_the_promised_order(run_folder, page):
    assert [path.name for path in (run_folder / "gallery").iterdir()] == ["index.html"], "no temporary file"
    order = ("results", "curves", "pairs", "film", "worst", "best", "prompts", "config")
    assert [i for i in page.ids if i.removeprefix("run-0-") in order] == [f"run-0-{name}" for name in order]
    assert len(set(page.ids)) == len(page.ids)


def test_the_verdict_is_made_from_the_summary(run_folder, page):
    summary = json.loads((run_folder / "summary.json").read_text())
    base, tuned, change = (100 * summary[block]["shapes_strict"]["mean"] for block in ("base", "tuned", "difference"))
    low, high = (100 * summary["difference"]["shapes_strict"][key] for key in ("low", "high"))
    expected = f"rose from {base:.1f} % to {tuned:.1f} % (+{change:.1f}, 95 % CI {low:.1f} to {high:.1f})"
    assert page.text("h1").replace("\u00a0", " ") == f"Strict accuracy {expected}"


def test_every_drawn_pair_is_on_the_page_with_its_prompt(run_folder, page):
    drawn = [i for i in page.ids if i.startswith("run-0-pair-")]
    assert len({anchor.split("-")[3] for anchor in drawn}) == len(drawn) == images.NUM_PAIRS
    assert {anchor.split("-")[4] for anchor in drawn} == {"0", "1"}
    prompts = shapes.prompts("heldout")[:NUM_PROMPTS]
    for anchor in drawn:
        prompt = int(anchor.split("-")[3])
        assert prompts[prompt] in page.texts["p"]
        assert f"#{prompt} \u00b7 seed {anchor.split('-')[4]}" in page.texts["p"]
    assert "drawn with fixed seed 0" in page.text("p")


def test_regressions_are_sorted_worst_first_and_gains_best_first(page):
    assert page.deltas["worst"] == sorted(page.deltas["worst"])
    assert page.deltas["worst"]
    assert page.deltas["best"] == sorted(page.deltas["best"], reverse=True)
    assert max(page.deltas["worst"]) < 0 < min(page.deltas["best"])


def test_the_ranking_takes_the_largest_drops_never_an_unscored_pair_and_saved_pictures_first():
    gain = np.array([[0.5, -0.1], [np.nan, -0.9], [-0.4, 0.0]])
    assert images.largest_drops(gain, np.ones_like(gain, dtype=bool)) == [(1, 1), (2, 0), (0, 1)]
    available = np.arange(50)[:, None] >= 47
    assert {p for p, _ in images.largest_drops(-np.ones((50, 1)), available)[:3]} == {47, 48, 49}


def test_the_page_refers_to_nothing_outside_itself(page):
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page.source)
    assert not re.search(r"https?:|[\"'(]//|url\(|@import", without_pictures)
    assert all(link.startswith(("data:image/", "#")) for link in page.links)
    anchors = {link[1:] for link in page.links if link.startswith("#")}
    assert anchors <= set(page.ids)


def test_prompts_and_names_are_text_and_never_markup(tmp_path):
    prompts = [EVIL, *shapes.prompts("heldout")[:11], "a lone surrogate \ud800"]
    folder = make_run(tmp_path / "evil", name="<script>alert(1)</script>", prompts=prompts)
    (folder / "provenance.json").write_text(json.dumps({"<b>cpu</b>": "<img src=x onerror=alert(2)>"}))
    evil = Page(build([folder, folder], tmp_path / "page"))
    assert evil.source.count("<script") == 1
    assert "<img src=x" not in evil.source
    assert "<b>cpu" not in evil.source
    assert EVIL in evil.texts["p"]
    assert EVIL in evil.texts["td"]
    assert ("alt", f"base: {EVIL}") in evil.attributes
    assert "<script>alert(1)</script>" in evil.text()
    assert not any(name.startswith("on") for name, _ in evil.attributes)


def test_only_the_pages_own_script_may_run(page):
    policy = next(value for name, value in page.attributes if value.startswith("default-src"))
    digest = base64.b64encode(hashlib.sha256(page.texts["script"][0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "connect-src" not in policy


def test_every_style_and_script_file_stands_in_the_page_once_and_none_can_end_its_element(tmp_path, page, run_folder):
    both = Page(build([run_folder, run_folder], tmp_path / "both")).source
    for file in sorted(rendering.TEMPLATES.glob("*/*.*s")):
        text = file.read_text()
        assert both.count(text) == (file.stem != "live"), file
        assert page.source.count(text) == (file.stem not in ("compare", "live")), file
        assert not re.search(r"</(script|style)|<!--", text), file


def test_small_pictures_are_exact_and_large_ones_thumbnails_that_link_to_the_file(tmp_path, page):
    assert 'class="pixelated"' in page.source
    assert "data:image/webp" not in page.source
    folder = make_run(tmp_path / "large", num_prompts=2, size=512)
    large = Page(build([folder]))
    assert 'class="pixelated"' not in large.source
    assert "data:image/webp" in large.source
    assert ("width", "384") in large.attributes
    assert ("width", "512") not in large.attributes
    files = [link for link in large.links if not link.startswith(("data:", "#"))]
    assert files
    assert all((folder / "gallery" / link).is_file() for link in files)


def test_a_video_is_one_small_image_of_its_frames_and_links_to_the_file(tmp_path):
    ramp = torch.linspace(0, 1, 33).view(33, 1, 1, 1).expand(33, 3, 144, 256)
    shown = images.OnDisk(tmp_path / "gallery").image(media.write(ramp, tmp_path / "clip", fps=24), images.PAIR_PX)
    assert shown is not None
    assert (shown["width"], shown["height"], shown["pixelated"]) == (192, 108, False)
    assert shown["link"] == "../clip.webp"
    reel = shown["reel"]
    assert (reel.frames, reel.columns, reel.rows) == (images.VIDEO_FRAMES, 4, 6)
    assert reel.frames * reel.frame_ms == pytest.approx(1000 * 33 / 24, abs=0.1), "as fast as the file"
    page: Any = Image.open(io.BytesIO(base64.b64decode(shown["src"].removeprefix("data:image/webp;base64,"))))
    across, down = reel.cell(192), reel.cell(108)
    assert page.size == (4 * across, 6 * down) == (4 * 208, 6 * 112)
    chosen = np.linspace(0, 32, 24).round()
    for number in range(24):
        level = page.convert("RGB").getpixel((number % 4 * across + 96, number // 4 * down + 54))[0]
        assert level == pytest.approx(255 * chosen[number] / 32, abs=6), "quality 60"


def test_a_small_video_is_exact_and_a_frozen_one_is_a_video(tmp_path):
    video = torch.rand(5, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    video[2] = video[1]
    shown = images.encoded(media.write(video, tmp_path / "small"), 384)
    assert (shown.pixelated, shown.whole, shown.reel) == (True, True, images.Reel(5, 5, 62.5, True))
    page = np.asarray(Image.open(io.BytesIO(shown.data)).convert("RGB"))
    for number, frame in enumerate(video):
        cut = page[:16, 26 * number : 26 * number + 24].transpose(2, 0, 1)
        np.testing.assert_array_equal(cut, (frame * 255).round())
    still = images.encoded(media.write(video[:1].repeat(9, 1, 1, 1), tmp_path / "frozen"), 384)
    assert still.reel == images.Reel(9, 3, 62.5, True)
    assert images.encoded(media.write(video, tmp_path / "sheet"), 384, cells=2).reel is None, "trees show one frame"


def test_the_report_of_a_video_model_speaks_of_videos(tmp_path):
    folder = make_run(tmp_path / "moving", num_prompts=4)
    assert "the base image of the same noise" in Page(build([folder])).text("p")
    for image in folder.glob("eval/*/*.png"):
        media.write(torch.rand(5, 3, 16, 16), image.with_suffix(""), fps=4)
        image.unlink()
    page = Page(build([folder]))
    assert load_run(folder).noun == "video"
    assert "the base video of the same noise" in page.text("p")
    assert not any("images" in text for text in page.texts["p"])


def test_a_served_page_shows_a_video_as_a_page_on_disk_does(tmp_path):
    forms = ["webp", *(["mp4"] if importlib.util.find_spec("av") else [])]
    for (name, size, frames), form in itertools.product((("small", (20, 30), 7), ("large", (144, 256), 33)), forms):
        file = media.write(torch.rand(frames, 3, *size), tmp_path / name, fps=24, form=form)
        served, embedded = Served([tmp_path]).image(file, 384), images.OnDisk(tmp_path).image(file, 384)
        assert served is not None
        assert embedded is not None
        for key in ("width", "height", "pixelated", "reel"):
            assert served[key] == embedded[key]
        assert "px=384" in served["src"], "the server makes the same image"


def test_a_served_page_names_the_package_that_a_video_needs(tmp_path, monkeypatch):
    """Without it the page would say that no image was saved."""
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "00000-0.mp4").write_bytes(b"ftyp")
    with pytest.raises(ConfigError, match=r"00000-0.mp4 needs .* pip install 'flowrl\[video\]'"):
        Served([tmp_path]).image(tmp_path / "00000-0.mp4", 384)


def test_the_film_runs_from_base_to_tuned(page):
    frames = ["base", "20", "40", "60", "80", "100", "tuned (120)"]
    alts = [value for name, value in page.attributes if name == "alt" and re.match(r"20: ", value)]
    assert all(frame in page.texts["th"] for frame in frames)
    assert "120" not in page.texts["th"]
    assert len(alts) == images.MAX_FILMS
    assert "have no room here" not in page.text("p")


def test_the_film_shows_the_first_prompts_and_of_the_others_those_that_gained_most(tmp_path):
    folder = make_run(tmp_path / "run", num_prompts=16, iterations=40)
    names = [f"{p:05d}-0.png" for p in range(16)]
    for name in names[8:14]:  # prompts 14 and 15 have no image during training
        shutil.copy(folder / "eval" / "tuned" / name, folder / "eval" / "iteration-000020" / name)
    after = [0.0] * 16
    after[0], after[3], after[5], after[6], after[9], after[10], after[13], after[14] = -1, 0.9, 0.2, -3, 0.4, 0.2, 2, 9

    def film(sign: int = 1, **changed: object) -> tuple[list[int], int]:
        for tag, column in (("base", [0.0] * 16), ("tuned", [sign * value for value in after])):
            scores = {"shapes_strict": [[value, 7.0] for value in column]}
            change(folder / "eval" / f"{tag}.json", scores=scores)
        change(folder / "summary.json", lower_is_better=["shapes_strict"] if sign < 0 else [], **changed)
        run = load_run(folder)
        found = images.film(run, results.metrics_of(run), images.OnDisk(tmp_path))
        return [row["prompt_id"] for row in found["rows"]], found["gains"]

    assert film() == ([0, 1, 2, 3, 13, 9, 5, 10], 4)
    assert film(-1) == ([0, 1, 2, 3, 13, 9, 5, 10], 4)
    said = Page(build([folder])).text("p")
    assert (
        "The first prompts of the evaluation set, whatever their scores, then of the others the 4 with the largest"
        in said
    )
    assert "from base to tuned (40)" in said
    assert Page(build([folder])).text("small").count("by gain") == 4
    after[9:14] = [0.0] * 5
    assert film() == ([0, 1, 2, 3, 4, 6, 7, 5], 1)
    after[5] = math.nan
    assert film() == (list(range(8)), 0)
    assert "of the others with saved images none gained" in Page(build([folder])).text("p")


def test_the_film_says_how_many_evaluations_it_leaves_out(run_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(images, "MAX_FRAMES", 3)
    run = load_run(run_folder)
    film = images.film(run, results.metrics_of(run), images.OnDisk(tmp_path))
    assert (film["frames"], film["left_out"]) == (["base", "60", "tuned (120)"], 4)
    assert "Evaluations in between that have no room here: 4." in Page(build([run_folder], tmp_path / "page")).text("p")


def test_every_prompt_has_a_row_and_what_was_not_scored_is_a_dash(run_folder, page):
    assert set(shapes.prompts("heldout")[:NUM_PROMPTS]) <= set(page.texts["td"])
    assert f"{2 * NUM_PROMPTS - 1} of {2 * NUM_PROMPTS} images" in page.texts["small"]
    document = json.loads((run_folder / "eval" / "tuned.json").read_text())
    assert document["scores"]["shapes_partial"][-1][-1] is None
    assert Metric("a", percent=False, decimals=2).change(float("nan")) == "\u2013"


def test_the_curves_are_drawn_and_labelled(page):
    titles = page.text("span")
    for title in ("Training reward: strict accuracy", "Held-out: strict accuracy", "Clip fraction", "Gradient norm"):
        assert title in titles
    assert "Training reward: total" not in titles, "the total repeats the only reward"
    assert "policy/ratio_mean" in titles
    assert "note" not in titles.split()


def test_a_run_under_way_still_builds_and_says_so(tmp_path):
    folder = make_run(tmp_path / "half", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 81, "reward/sha')
    half = Page(build([folder]))
    assert "This run has not finished." in half.text("b")
    assert "There is no summary.json yet." in half.text("div")
    assert "so far, at iteration 80, no interval yet" in half.text("h1")
    assert "80 of 120 iterations" in half.text("span")
    # Only the film's prompts have pictures so far.
    assert len([i for i in half.ids if i.startswith("run-0-pair-")]) == 8


@pytest.mark.parametrize("summary", ["{}", '{"status": "interrupted", "base": null}', '{"base": {"shapes_str'])
def test_a_partial_summary_is_no_obstacle(tmp_path, summary):
    folder = make_run(tmp_path / "partial", finished=False, num_prompts=4)
    (folder / "summary.json").write_text(summary)
    assert "This run has not finished." in Page(build([folder])).text("b")


def test_iterations_and_time_of_a_run_under_way_are_those_of_its_rows_too(tmp_path):
    folder = make_run(tmp_path / "resumed", finished=False, num_prompts=4)
    # Written when the run was resumed after iteration 20; 80 rows are there.
    stated = {"status": "running", "iterations": 20, "seconds": 1000.0}
    (folder / "summary.json").write_text(json.dumps(stated))
    run = load_run(folder)
    after = sum(row["time/iteration_s"] for row in run.rows[20:])
    assert facts.status(run) == "died, 80 of 120 iterations"
    assert facts.seconds(run) == pytest.approx(1000 + after)
    change(folder / "summary.json", status="stopped", iterations=80, seconds=1100.0)
    assert facts.seconds(load_run(folder)) == 1100.0


def of_fewer(folder: Path, count: int) -> None:
    """Evaluations during training of the first prompts alone."""
    for path in (folder / "eval").glob("iteration-*.json"):
        document = json.loads(path.read_text())
        scores = {name: table[:count] for name, table in document["scores"].items()}
        first = {key: document[key][:count] for key in ("prompts", "distinct", "digests", "sharpness")}
        change(path, scores=scores, **first)


def test_base_and_rival_of_a_run_under_way_are_of_the_prompts_that_its_evaluation_has(tmp_path):
    folder = make_run(tmp_path / "few", finished=False)
    of_fewer(folder, 5)
    tables = {
        tag: np.asarray(json.loads((folder / "eval" / f"{tag}.json").read_text())["scores"]["shapes_strict"])
        for tag in ("base", "base-guidance-3", "iteration-000080")
    }
    # As a run writes it at its start, of all prompts.
    stated = {"base": {"shapes_strict": estimate(tables["base"])}, "primary": "shapes_strict", "status": "running"}
    best = {"shapes_strict": estimate(tables["base-guidance-3"]), "guidance_scale": 3.0}
    (folder / "summary.json").write_text(json.dumps(stated | {"base_best_guidance": best}))
    run = load_run(folder)
    found = results.estimates_of(run, results.metrics_of(run)[0])
    for block, tag in (("base", "base"), ("base_best_guidance", "base-guidance-3"), ("tuned", "iteration-000080")):
        assert found[block].mean == pytest.approx(tables[tag][:5].mean())
        assert not found[block].bounded, "the interval of the summary is that of other prompts"
    assert found["difference"].mean == pytest.approx(found["tuned"].mean - found["base"].mean)
    for path in (folder / "eval").glob("iteration-*.json"):
        path.unlink()
    assert results.estimates_of(load_run(folder), results.metrics_of(run)[0])["base"].bounded, "nothing to compare yet"


def test_a_finished_run_that_goes_on_is_shown_by_its_latest_evaluation(tmp_path):
    folder = make_run(tmp_path / "longer", num_prompts=4, iterations=40)
    later = json.loads((folder / "eval" / "base.json").read_text()) | {"iteration": 60}
    (folder / "eval" / "iteration-000060.json").write_text(json.dumps(later))
    finished = load_run(folder)
    assert finished.after is not None
    assert finished.after.tag == "tuned", "of a run that has ended the result counts, as after a rollback"
    change(folder / "summary.json", status="running", tuned=None, difference=None)
    run = load_run(folder)
    metrics = results.metrics_of(run)
    assert run.after is not None
    assert run.after.label == "iteration 60"
    sentence = results.verdict(run, metrics[0], results.estimates_of(run, metrics[0]))[0]
    assert "so far, at iteration 60" in sentence
    frames = images.film(run, metrics, images.OnDisk(tmp_path))["frames"]
    assert frames == ["base", "20", "tuned (40)", "60"]


def test_a_run_that_has_only_a_configuration_still_builds(tmp_path):
    (tmp_path / "config.yaml").write_text("name: fresh\n")
    assert Page(build([tmp_path])).text("h1") == "Nothing has been evaluated yet"


def test_a_metric_that_got_worse_is_pointed_out_and_the_models_own_guidance_is_no_rival(tmp_path):
    folder = make_run(tmp_path / "hacked", num_prompts=4)
    base = json.loads((folder / "summary.json").read_text())["base"]
    best = {**base, "guidance_scale": 1.0}
    change(folder / "summary.json", difference={"shapes_partial": WORSE}, base_best_guidance=best)
    page = Page(build([folder]))
    assert "Partial score got worse: \u22120.2" in page.text("span")
    assert "The fair rival" not in page.text()
    assert "Base, best CFG" not in page.texts["th"]
    change(folder / "config.yaml", eval={"best_guidance": [2.0, 3.0]})
    page = Page(build([folder]))
    assert "best guidance (scale 1, its own), reaches" in page.text("span")
    assert "Base, best CFG" in page.texts["th"]


def test_the_base_line_of_a_curve_covers_the_prompts_of_the_curve(tmp_path):
    folder = make_run(tmp_path / "subset", num_prompts=8)
    of_fewer(folder, 3)
    run = load_run(folder)
    assert run.base is not None
    expected = run.base.scores["shapes_strict"][:3].mean()
    metric = results.metrics_of(run)[0]
    assert results.level_while_training(run, run.base, metric) == pytest.approx(expected)
    assert "held-out evaluations of 3 prompts" in Page(build([folder])).text("p")


def test_the_tuned_model_ends_the_curve_of_evaluations(tmp_path):
    folder = make_run(tmp_path / "short", num_prompts=8)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # A trainer that leaves the last evaluation to the tuned one.
    last = {key: value for key, value in json.loads(lines[-1]).items() if not key.startswith("eval/")}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]))
    run = load_run(folder)
    x, y = results.evaluated_curve(run, results.metrics_of(run)[0])
    assert x.tolist() == [20, 40, 60, 80, 100, 120]
    assert y[-1] == pytest.approx(run.summary["tuned"]["shapes_strict"]["mean"])


def test_lower_is_better_turns_the_ranking_and_the_colours(tmp_path):
    folder = make_run(tmp_path / "lower", num_prompts=20, tuned=0.95)
    change(folder / "summary.json", lower_is_better=["shapes_strict"])
    lower = Page(build([folder]))
    assert ("class", "verdict worse") in lower.attributes
    assert min(lower.deltas["worst"]) > 0 > max(lower.deltas["best"] or [-1])
    metric = Metric("unsafe", percent=True, decimals=3, sign=-1)
    assert [metric.single(x) for x in (1.0, 0.0)] == ["fail", "pass"]
    rows = images.film(load_run(folder), results.metrics_of(load_run(folder)), images.OnDisk(tmp_path))["rows"]
    tones = {(cell["score"], cell["tone"]) for row in rows for cell in row["cells"]}
    assert tones == {("pass", "better"), ("fail", "worse")}
    scores = json.loads((folder / "eval" / "base.json").read_text())["scores"]["shapes_strict"]
    assert rows[0]["cells"][0]["score"] == ("fail" if scores[0][0] else "pass"), "1 is a failure"


def test_two_runs_get_a_table_on_top_and_a_part_each(tmp_path, run_folder):
    other = make_run(tmp_path / "other", name="other-run", tuned=0.5)
    both = Page(build([run_folder, other], tmp_path / "both"))
    assert both.ids.index("comparison") < both.ids.index("run-0") < both.ids.index("run-1")
    assert {"run-0-worst", "run-1-worst"} <= set(both.ids)
    assert both.text("h2").count("Worst regressions") == 2
    assert "Held-out strict accuracy over training" in both.text("span")
    assert {"#run-0", "#run-1"} <= set(both.links)


# ---- what the prompts of an evaluation are


def told_of(folder: Path, name: str, **data: object) -> Path:
    """The run as one that was evaluated on prompts of that name."""
    change(folder / "summary.json", evaluated_on=name)
    change(folder / "config.yaml", **({"data": data} if data else {}))
    return folder


def test_training_prompts_are_called_so_everywhere_and_get_no_verdict(tmp_path):
    folder = told_of(make_run(tmp_path / "run", num_prompts=8), "training prompts")
    change(folder / "summary.json", difference={"shapes_partial": WORSE})
    page = Page(build([folder]))
    seen = page.text(*(tag for tag in page.texts if tag not in ("script", "style", "pre")))
    assert "held-out" not in seen.lower()
    assert page.text("h1") == "No verdict: no prompts were held out, and every number below is of training prompts"
    assert ("class", "verdict same") in page.attributes
    assert not {("class", "change better"), ("class", "change worse")} & set(page.attributes)
    assert "Training prompts: strict accuracy" in page.text("span")
    for heading in ("Results", "Side by side", "Filmstrip", "Worst regressions", "Best gains"):
        assert f"{heading} on training prompts" in page.text("h2")
    assert "Every training prompt" in page.text("h2")
    assert "Means over the training prompts" in page.text("p")
    assert "8 training prompts" in page.text("td")
    assert "Partial score got worse on training prompts" in page.text("span")


def test_a_method_that_learns_its_own_prompts_is_judged_on_them(tmp_path):
    page = Page(build([told_of(make_run(tmp_path / "find", num_prompts=8), "its own prompts")]))
    assert page.text("h1").startswith("Strict accuracy on its own prompts did not change measurably: from")
    assert "held-out" not in page.text("p", "span", "h1", "h2").lower()
    assert "Its own prompts: strict accuracy" in page.text("span")


def test_runs_on_different_prompts_are_told_apart_where_they_are_compared(tmp_path, run_folder):
    other = told_of(make_run(tmp_path / "other", name="other-run", num_prompts=8), "training prompts")
    both = Page(build([run_folder, other], tmp_path / "both.html"))
    assert "on training prompts" in both.text("small")
    assert "Held-out strict accuracy over training" not in both.text("span")
    assert "strict accuracy over training" in both.text("span")


def test_a_share_of_the_prompts_says_where_it_comes_from(tmp_path):
    folder = told_of(make_run(tmp_path / "share", num_prompts=8), "held-out prompts", prompts="list.txt")
    held_out = {"source": "data.eval_share=0.1 of data.prompts=list.txt", "prompts": 8, "share": 0.1}
    change(folder / "summary.json", held_out=held_out)
    page = Page(build([folder]))
    assert "8 held-out prompts (data.eval_share=0.1 of data.prompts=list.txt)" in page.text("dd")
    assert page.text("h1").startswith("Strict accuracy did not change measurably: from")


def test_copies_of_a_prompt_are_counted_once(tmp_path):
    folder = make_run(tmp_path / "copies", prompts=shapes.prompts("heldout")[:6] * 2)
    assert "6 prompts" in Page(build([folder])).text("td")
    for path in (folder / "eval").glob("*.json"):
        change(path, distinct=list(range(12)))  # with other reference images
    assert "12 prompts" in Page(build([folder])).text("td")


def test_a_folder_that_is_no_run_is_named_with_the_remedy_and_one_is_required(tmp_path):
    for reason in ("there is no such folder", "it has no config.yaml"):
        with pytest.raises(ValueError, match=rf"nothing is not a run: {reason}; pass the folder that flowrl train"):
            build([tmp_path / "nothing"])
        (tmp_path / "nothing").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="name at least one run folder"):
        build([])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"scores": {"shapes_strict": [[1.0, 0.0]]}},
            r"base\.json is damaged .*shapes_strict is \[1, 2\] for 4 prompts",
        ),
        ({"seeds": None}, r"base\.json is damaged"),
    ],
)
def test_a_broken_evaluation_is_named_with_the_remedy(tmp_path, values, message):
    folder = make_run(tmp_path / "broken", num_prompts=4)
    change(folder / "eval" / "base.json", **values)
    with pytest.raises(ValueError, match=message) as raised:
        build([folder])
    assert "restore it from a copy" in str(raised.value)


def test_a_broken_image_and_a_broken_log_line_are_named(tmp_path):
    folder = make_run(tmp_path / "broken", num_prompts=4)
    (folder / "eval" / "base" / "00001-0.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"00001-0\.png is not an image"):
        build([folder])
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\nbroken\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a JSON object"):
        build([folder])


def test_a_report_of_512_prompts_stays_under_four_megabytes(tmp_path):
    assert build([make_run(tmp_path / "full", num_prompts=512, num_pictured=96)]).stat().st_size < 4_000_000


def test_a_failed_build_keeps_the_previous_page(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", num_prompts=2)
    page = build([folder])
    before = page.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        build([folder])
    assert page.read_bytes() == before
    assert len(list(page.parent.iterdir())) == 1


def test_a_gap_breaks_the_curve_a_hostile_name_stays_text_and_the_moving_mean_keeps_a_constant():
    x = np.arange(4.0)
    gap, constant = np.array([1.0, np.nan, 1.0, 1.0]), np.array([2.0] * 10 + [np.nan] + [2.0] * 69)
    svg = charts.line_chart([charts.Series("a", x, gap)])
    assert len(re.findall(r"M[\d.]", svg)) == 2
    assert charts.line_chart([charts.Series("a", x, np.full(4, np.nan))]) == ""
    assert "<script" not in charts.line_chart([charts.Series(EVIL, x, x), charts.Series("b", x, x)])
    np.testing.assert_allclose(charts.smooth(constant), 2.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([np.arange(60.0)], "a bootstrap over prompts"),
        ([np.arange(9.0), np.zeros(9)], "made for few prompts (t, bootstrap-t or score intervals)"),
        ([np.arange(60.0), np.r_[np.ones(20), np.zeros(40)]], "a bootstrap or, where few prompts differ"),
    ],
    ids=["many", "few", "many of which few differ"],
)
def test_the_page_says_how_its_intervals_are_made(values, words):
    assert words in certainty.method([clusters(row) for row in values])


def test_a_warning_tells_of_fewer_prompts_that_differ_than_any_test_needs():
    before = np.zeros((8, 2))
    after = before.copy()
    after[:6, 0] = 1.0
    groups = np.arange(8)
    assert certainty.told_apart(before, after, groups) == (6, 8)
    assert certainty.warning("x", 6, 8) == ""
    after[5] = np.nan
    told = certainty.told_apart(before, after, groups)
    assert told == (5, 7)
    assert certainty.warning("strict accuracy", *told).startswith("By strict accuracy base and tuned differ on 5 of 7")
    assert "on none of 8" in certainty.warning("x", 0, 8)
    # The reason of the number: all of five gaining is no sign at 5 %, all of six is.
    assert sign_test(np.ones(certainty.LEAST - 1)) > 0.05 > sign_test(np.ones(certainty.LEAST))


def test_reports_of_few_prompts_that_differ_say_so(tmp_path):
    runs = [make_run(tmp_path / name, name=name, num_prompts=8, iterations=20) for name in ("one", "two")]
    for run, differ in zip(runs, (3, 7), strict=True):
        scores = json.loads((run / "eval" / "base.json").read_text())["scores"]
        strict = [[1.0 - row[0], *row[1:]] if p < differ else row for p, row in enumerate(scores["shapes_strict"])]
        change(run / "eval" / "tuned.json", scores={"shapes_strict": strict})
    told = "By strict accuracy base and tuned differ on 3 of 8 prompts"
    one, two = (build([run]).read_text(encoding="utf-8") for run in runs)
    assert told in one
    assert "made for few prompts" in one
    assert "base and tuned differ on" not in two
    assert "3 of 8 prompts differ" in build(runs, tmp_path / "both").read_text(encoding="utf-8")


def test_the_gallery_loads_no_model_library():
    for path in Path(builder.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"torch", "diffusers", "transformers", "matplotlib"}
    code = "import sys, flowrl.apps.gallery; print([m for m in ('torch', 'diffusers') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert loaded.stdout.strip() == "[]", loaded.stderr


def with_best(folder: Path, verdict: str) -> dict[str, dict[str, dict[str, float]]]:
    """The run with a search whose best scales are 3 for the base and 2 for the tuned model; the blocks by hand."""
    tables = {
        tag: np.asarray(json.loads((folder / "eval" / f"{tag}.json").read_text())["scores"]["shapes_strict"])
        for tag in ("base-guidance-3", "tuned")
    }
    raised = np.maximum(tables["tuned"], np.arange(tables["tuned"].size).reshape(tables["tuned"].shape) % 3 == 0)
    document = json.loads((folder / "eval" / "tuned.json").read_text())
    document |= {"guidance_scale": 2.0, "scores": {"shapes_strict": raised.tolist()}}
    (folder / "eval" / "tuned-guidance-2.json").write_text(json.dumps(document))
    means = {"base": {"1": 0.4, "2": 0.45, "3": 0.5}, "tuned": {"1": 0.6, "2": 0.7, "3": 0.55}}
    blocks = {
        "tuned_best_guidance": {"shapes_strict": estimate(raised), "guidance_scale": 2.0},
        "difference_best_guidance": {"shapes_strict": estimate(raised - tables["base-guidance-3"])},
        "guidance_search": means | {"metric": "shapes_strict", "how": "chosen by dice on <7> captions"},
    }
    change(folder / "summary.json", **blocks)
    change(folder / "config.yaml", eval={"best_guidance": [2.0, 3.0], "verdict": verdict})
    return blocks


@pytest.mark.parametrize("verdict", ["same", "best"])
def test_each_at_its_best_guidance_is_the_title_or_a_remark_and_both_have_an_interval(tmp_path, verdict):
    folder = make_run(tmp_path / "searched", tuned=0.6)
    found = with_best(folder, verdict)["difference_best_guidance"]["shapes_strict"]
    page, text = Page(build([folder])), f"95 % CI {100 * found['low']:.1f} to {100 * found['high']:.1f}"
    text = text.replace("-", "\u2212")
    each = "with each model at its best guidance (base 3, tuned 2)"
    assert (each in page.text("h1")) == (verdict == "best")
    assert (each in page.text("span")) == (verdict == "same")
    assert text in page.text("h1" if verdict == "best" else "span").replace("\u00a0", " ")
    assert ("At the same guidance strict accuracy" in page.text("span")) == (verdict == "best")
    assert "Each guidance was chosen by dice on <7> captions." in page.text("span")
    assert {"Tuned, best CFG", "Paired difference, each at its best CFG"} <= set(page.texts["th"])
    assert "70.0 %" in page.texts["td"]
    run = load_run(folder)
    rows = results.guidance_search(run, results.metrics_of(run))
    assert rows is not None
    assert rows["rows"][1] == ("2", ["45.0 %", "70.0 %"])


def test_the_rival_has_an_interval_while_the_tuned_model_was_not_searched_for(tmp_path):
    folder = make_run(tmp_path / "rival")
    ends = json.loads((folder / "summary.json").read_text())["base_best_guidance"]["shapes_strict"]
    said = f"(95 % CI {100 * ends['low']:.1f} to {100 * ends['high']:.1f})"
    assert said in Page(build([folder])).text("span")


def test_the_best_of_n_is_drawn_for_both_and_the_bases_stands_beside_one_tuned_image(tmp_path):
    folder = make_run(tmp_path / "chosen")
    assert "Best of n" not in Page(build([folder])).text("summary")
    base = [{"mean": mean, "low": mean - 0.02, "high": mean + 0.02} for mean in (0.46, 0.6, 0.72)]
    value = {"chose": True, "base": base, "tuned": [{**each, "mean": each["mean"] + 0.2} for each in base]}
    value["rival"] = [{"mean": 0.66 - each["mean"], "low": -0.09, "high": -0.03} for each in base]
    change(folder / "summary.json", best_of={"by": "jpeg + shapes", "judges": {"shapes_strict": value, "gone": value}})
    page = Page(build([folder]))
    assert "Best of n images of a prompt" in page.text("summary")
    said = next(text for text in page.texts["p"] if "fair rival" in text)
    assert "the best by jpeg + shapes is judged by the metric" in said
    assert "Such images were selected, and no other number is of them." in said
    assert (
        "By strict accuracy, which is part of what chose, the fair rival, the base's best of 3, reaches 72.0 % with 3 "
        "times the network evaluations; one tuned image is \u22126.0 beside it (95 % CI \u22129.0 to \u22123.0)."
    ) in said
    assert "With training counted" not in said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [row | {"nfe/rollout": 10.0, "nfe/train": 20.0} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    change(folder / "config.yaml", rollout={"prompts_per_iteration": 4, "group_size": 8})
    # 120 iterations of 32 samples at 30 evaluations, in images of 20 steps, of which the rival takes 2 more each.
    said = next(text for text in Page(build([folder])).texts["p"] if "fair rival" in text)
    assert f"the base's best of 3 costs less up to {120 * 32 * 30 // 20 // 2:,} images." in said
    shown = best_of.view(load_run(folder), results.metrics_of(load_run(folder)))
    assert shown is not None
    assert [chart["key"] for chart in shown["charts"]] == ["shapes_strict"]
    assert "base from 46.0 % to 72.0 %; tuned from 66.0 % to 92.0 %" in shown["charts"][0]["svg"]


@pytest.mark.parametrize(("change_", "tone"), [(-0.002, "worse"), (-0.0002, "same"), (0.003, "same")])
def test_sharpness_is_a_remark_and_blur_a_bad_one(tmp_path, change_, tone):
    folder = make_run(tmp_path / "sharp")
    assert "Sharpness" not in Page(build([folder])).text("span")
    difference = {"mean": change_, "low": change_ - 0.0001, "high": change_ + 0.0001}
    change(
        folder / "summary.json",
        sharpness={"base": {"mean": 0.02}, "tuned": {"mean": 0.02 + change_}, "difference": difference},
    )
    run = load_run(folder)
    metrics = results.metrics_of(run)
    said = results.remarks(run, metrics, {m.name: results.estimates_of(run, m) for m in metrics})
    assert [(found, f"{100 * change_ / 0.02:+.1f} %" in text) for found, text in said if "Sharpness" in text] == [
        (tone, True)
    ]
