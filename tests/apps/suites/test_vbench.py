"""VBench: its list, the official weights against a hand-made table, the tools' folder and their results."""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.apps.suites import vbench
from flowrl.apps.suites.running.exchange import require_each_once
from flowrl.apps.suites.running.report import compare
from flowrl.commands import eval as evaluation
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item, Row, Table
from flowrl.media import media
from tests import tiny_pipelines
from tests.apps.suites.written import means, official
from tests.tables import table
from tests.tiny_suites import vbench as tiny

# A score for each dimension, its normalised value and its weight, by hand with Vchitect/VBench:scripts/constant.py.
HAND = table(__file__, "vbench_by_hand")
# quality: (.5 + .75 + .7 + .8 + .2 + .55 + .65) / 6.5; semantic: 5.45 / 9; total: (4 quality + semantic) / 5
QUALITY, SEMANTIC = 4.15 / 6.5, 5.45 / 9
TOTAL = (4 * QUALITY + SEMANTIC) / 5
HOW = (vbench.compat, vbench.aggregate)


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    return vbench.items(tiny.prompts(tmp_path))


def scored(items: list[Item], values: dict[str, float], samples: int = 2) -> list[Row]:
    """Rows whose mean in a dimension is its value: the two samples of a prompt lie as far below as above."""
    return [
        Row(
            item.id,
            item.text,
            k,
            scores={f"vbench_{tag}": values[tag] + (k - 0.5) / 50 for tag in item.tags if tag in values},
        )
        for item in items
        for k in range(samples)
    ]


def table_of(items: list[Item], *left_out: str, how=vbench.aggregate) -> Table:
    return how(scored(items, {name: hand[0] for name, hand in HAND.items() if name not in left_out}), items)


def test_the_list_is_read_from_a_file_a_folder_or_the_repository_and_one_text_is_one_prompt(tmp_path, items):
    file = tmp_path / "vbench" / "VBench_full_info.json"
    assert vbench.items(file) == vbench.items(tmp_path / "vbench") == items
    assert [item.tags for item in items[:1]] == [("subject_consistency", "motion_smoothness", "dynamic_degree")]
    car = next(item for item in items if item.text == "a red car")
    assert car.metadata == {"auxiliary_info": {"color": {"color": "red"}}}
    again = {
        "prompt_en": "a red car",
        "dimension": ["object_class"],
        "auxiliary_info": {"object_class": {"object": "car"}},
    }
    file.write_text(json.dumps([*tiny.RECORDS, again]))
    joined = vbench.items(file)
    assert len(joined) == len(items)
    car = next(item for item in joined if item.text == "a red car")
    assert car.tags == ("object_class", "color")
    assert set(car.metadata["auxiliary_info"]) == {"color", "object_class"}


def test_a_folder_without_the_list_or_the_results_is_named(items, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no VBench_full_info.json in it"):
        vbench.items(Path(__file__).parent)
    with pytest.raises(ConfigError, match=r"there is no \*_eval_results.json"):
        vbench.read_results(tmp_path / "vbench", items)


# ---- the official scores


def test_the_weighted_scores_are_those_of_a_table_by_hand(items):
    for name, (value, normalised, weight) in HAND.items():
        low, high, own = vbench.DIMENSIONS[name]
        assert ((value - low) / (high - low), own) == (pytest.approx(normalised, abs=1e-9), weight)
    table = table_of(items)
    found = means(table)
    for name, (value, _, _) in HAND.items():
        assert found[name] == pytest.approx(value)
    assert found["quality"] == pytest.approx(QUALITY)
    assert found["semantic"] == pytest.approx(SEMANTIC)
    assert found["total"] == pytest.approx(TOTAL)
    assert table.headline == "total"
    total = table.lines[-1]
    assert (total.n_prompts, total.n_images, total.n_scored) == (len(items), 2 * len(items), 2 * len(items))


def test_a_total_of_fewer_dimensions_is_named_so_and_the_official_script_counts_them_as_0(items):
    table = table_of(items, "color", "subject_consistency")
    found = means(table)
    assert found["quality of 6 of 7 dimensions"] == pytest.approx((4.15 - 0.5) / 5.5)
    assert found["semantic of 8 of 9 dimensions"] == pytest.approx((5.45 - 0.7) / 8)
    assert table.headline == "total of 14 of 16 dimensions"
    compat = means(table_of(items, "color", "subject_consistency", how=vbench.compat))
    assert compat["quality (compat)"] == pytest.approx((4.15 - 0.5 - 0.1462 / 0.8538) / 6.5)
    assert compat["semantic (compat)"] == pytest.approx((5.45 - 0.7) / 9)
    none = table_of(items, *vbench.SEMANTIC)
    assert none.headline == "quality"
    assert not any("total" in line.name for line in none.lines)


def moving() -> tuple[list[Item], list[Row]]:
    """Eight videos, whose three dimensions have the same score: 0.8, 0.82, ..."""
    many = [Item(f"{k}", f"prompt {k}", {"auxiliary_info": {}}, tuple(tiny.MOVING)) for k in range(8)]
    rows = [
        Row(item.id, item.text, 0, scores={f"vbench_{tag}": 0.8 + 0.02 * k for tag in tiny.MOVING})
        for k, item in enumerate(many)
    ]
    return many, rows


def test_a_prompts_dimensions_are_drawn_together():
    """Three dimensions of the same videos move together: as if apart, the interval would be too narrow."""
    many, rows = moving()
    line = vbench.aggregate(rows, many).lines[-1]
    assert line.name == "quality of 3 of 7 dimensions"
    values = torch.tensor([0.8 + 0.02 * k for k in range(8)], dtype=torch.float64)
    slope = (1 / 0.8538 + 1 / 0.2915 + 0.5) / 2.5
    error = float(values.std()) / math.sqrt(8) * slope
    assert (line.high - line.low) / 2 == pytest.approx(2.3646 * error, rel=1e-3), "t of 7 degrees"


def test_models_judged_in_different_dimensions_are_not_compared_in_their_means(items):
    """Both are a quality of 6 of 7 dimensions, of which one is another."""
    base, tuned = table_of(items, "subject_consistency"), table_of(items, "motion_smoothness")
    changed = {change.name for change in compare(base, tuned)}
    assert changed >= {"dynamic_degree", "semantic"}
    assert not any("quality of" in name or "total" in name for name in changed)
    base, tuned = (table_of(items, left_out, how=vbench.compat) for left_out in ("color", "scene"))
    changed = {change.name for change in compare(base, tuned)}
    assert "quality (compat)" in changed
    assert not any("semantic" in name for name in changed)


def test_a_dimension_that_counts_as_0_leaves_the_interval_and_the_number_of_prompts():
    many, rows = moving()
    compat, own = (next(one for one in how(rows, many).lines if "quality" in one.name) for how in HOW)
    assert (compat.n_prompts, own.n_prompts) == (8, 8)
    assert compat.high - compat.low == pytest.approx((own.high - own.low) * 2.5 / 6.5)
    unofficial = [Row(item.id, item.text, 0, scores={"motion": 0.5}) for item in many]
    with pytest.raises(ConfigError, match=r"--compat: .*official tools' results; give --results"):
        vbench.compat(unofficial, many)


def test_another_judge_has_its_mean_by_dimension_and_no_official_score(items):
    # The reward of that name has an output with the name of a dimension.
    rows = [Row(item.id, item.text, 0, scores={"motion": 0.5, "motion_smoothness": 0.9}) for item in items]
    table = vbench.aggregate(rows, items)
    assert table.headline == "motion"
    assert {line.name for line in table.lines} >= {"motion", "motion: color", "motion: subject_consistency"}
    assert not any("total" in line.name or "quality of" in line.name for line in table.lines)


# ---- the tools


def places(items: list[Item], samples: int = 2) -> list[tuple[Item, int, str]]:
    return [(item, k, vbench.layout(item, k)) for item in items for k in range(samples)]


@pytest.mark.parametrize("before", ["", "C:\\\\made\\\\videos\\\\"])
def test_the_tools_results_find_their_video_again(tmp_path, items, caplog, before):
    """On another system too, whose paths have other slashes."""
    out = tiny.results(tmp_path, places(items))
    for file in out.rglob("*_eval_results.json") if before else ():
        file.write_text(re.sub(r'"video_path": "[^"]*/', lambda _: f'"video_path": "{before}', file.read_text()))
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        found = vbench.read_results(out, items)
    assert not caplog.records
    require_each_once(found, items, 2, "--results")
    ship = next(item for item in items if item.text.startswith("a ship"))
    value = float(tiny.value(ship, 1, "overall_consistency"))
    assert found[ship.id, 1] == {
        "vbench_aesthetic_quality": pytest.approx(value),
        "vbench_imaging_quality": pytest.approx(value),
        "vbench_overall_consistency": pytest.approx(value),
    }
    assert found[items[0].id, 0]["vbench_dynamic_degree"] == 1
    assert found[items[0].id, 1]["vbench_dynamic_degree"] == 0


def results_file(folder: Path, dimension: str) -> Path:
    return folder / "evaluation_results" / f"tiny_{dimension}_eval_results.json"


def test_missing_and_foreign_videos_are_named(tmp_path, items):
    out = tiny.results(tmp_path, places(items))
    file = results_file(tmp_path, "human_action")
    mean, videos = json.loads(file.read_text())["human_action"]

    def changed(*rows: dict) -> None:
        file.write_text(json.dumps({"human_action": [mean, rows]}))

    changed(videos[0])
    with pytest.raises(
        ConfigError, match=r"1 of 2 videos of human_action have no result, the first is prompt '\w+' \(.a person"
    ):
        vbench.read_results(out, items)
    for place in ("x/a person is swimming-0.mp4", "x/a red car-0.mp4", "x/nothing.mp4"):
        changed(*videos, {"video_path": place, "video_results": 1})
        with pytest.raises(ConfigError, match="which is no video of this run in that dimension"):
            vbench.read_results(out, items)
    changed(*videos)
    results_file(tmp_path, "twice").write_text(file.read_text())
    with pytest.raises(ConfigError, match="human_action has results already, in another file"):
        vbench.read_results(out, items)


def test_videos_that_a_tool_leaves_out_by_rule_are_not_scored(tmp_path, items):
    out = tiny.results(tmp_path, places(items))
    for dimension in vbench.MAY_LACK:
        file = results_file(tmp_path, dimension)
        _, videos = json.loads(file.read_text())[dimension]
        file.write_text(json.dumps({dimension: [videos[0]["video_results"], videos[:1]]}))
    found = vbench.read_results(out, items)
    require_each_once(found, items, 2, "--results")
    car = next(item for item in items if item.text == "a red car")
    assert found[car.id, 1] == {"vbench_color": None}
    line = next(line for line in vbench.aggregate(official(found), items).lines if line.name == "color")
    assert (line.n_images, line.n_scored) == (2, 1)


@pytest.mark.parametrize(
    ("dimension", "value", "words"),
    [
        ("subject_consistency", 50, "is 50, and must be a number from 0 to 1; run the tool of"),
        ("subject_consistency", -3, "is -3, and must be"),
        ("scene", math.nan, "is nan, and must be"),
        ("color", math.inf, "is inf, and must be"),
        ("imaging_quality", 650, "is 650, and must be a number from 0 to 100"),
        ("temporal_style", -2, "is -2, and must be a number from -1 to 1"),
    ],
)
def test_a_score_that_no_tool_writes_is_refused_by_name(tmp_path, items, caplog, dimension, value, words):
    out = tiny.results(tmp_path, places(items))
    file = results_file(tmp_path, dimension)
    mean, videos = json.loads(file.read_text())[dimension]
    videos[1]["video_results"] = value
    file.write_text(json.dumps({dimension: [mean, videos]}))
    with pytest.raises(ConfigError, match=rf"{file.name}: {dimension} of '.*-1.mp4' {words}"):
        vbench.read_results(out, items)
    file.write_text(json.dumps({dimension: [mean, []]}))
    with pytest.raises(ConfigError, match=rf"{file.name}: {dimension} has no result of any video; run its tool again"):
        vbench.read_results(out, items)
    assert not caplog.records


def test_scores_at_the_ends_of_their_ranges_are_read(tmp_path, items):
    """Cosines in half precision can be a little more than 1, and similarities less than 0."""
    out = tiny.results(tmp_path, places(items))
    for dimension, value in (("background_consistency", 1.001), ("temporal_style", -0.05), ("imaging_quality", 100)):
        file = results_file(tmp_path, dimension)
        _, videos = json.loads(file.read_text())[dimension]
        videos[0]["video_results"] = value
        file.write_text(json.dumps({dimension: [0.5, videos]}))
    values = [value for own in vbench.read_results(out, items).values() for value in own.values()]
    assert {1.001, -0.05, 1.0} <= set(values)


def test_results_of_some_dimensions_need_no_videos_of_other_prompts(tmp_path, items):
    out = tiny.results(tmp_path, places(items))
    for file in out.iterdir():
        if not any(name in file.name for name in ("color", "scene")):
            file.unlink()
    found = vbench.read_results(out, items)
    require_each_once(found, items, 2, "--results")
    bird = next(item for item in items if item.text.startswith("a bird"))
    assert found[bird.id, 1] == {}
    table = vbench.aggregate(official(found), items)
    assert [line.name for line in table.lines] == ["color", "scene", "semantic of 2 of 9 dimensions"]
    assert (table.lines[-1].n_images, table.lines[-1].n_scored) == (4, 4)


def test_a_mean_that_is_not_that_of_its_videos_is_told(tmp_path, items, caplog):
    out = tiny.results(tmp_path, places(items))
    file = results_file(tmp_path, "scene")
    _, videos = json.loads(file.read_text())["scene"]
    file.write_text(json.dumps({"scene": [0.01, videos]}))
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        vbench.read_results(out, items)
    assert "scene says 0.0100, and its videos have a mean of" in caplog.text


def test_a_prompt_that_names_no_file_is_refused():
    for text in ("a/b", "x" * 260):
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            vbench.layout(Item("1", text), 0)
    assert vbench.layout(Item("1", "a dog"), 4) == "videos/a dog-4.mp4"


# ---- the command

MOTION = (
    "import flowrl\nCARD = flowrl.Card(outputs=('motion',), modality='video')\n"
    "def score(videos, prompts, metadata):\n    return videos.diff(dim=1).abs().mean(dim=(1, 2, 3, 4))\n"
)


def run(model: Path | str, out: Path, prompts: Path, **options: Any) -> dict:
    size = ["height=16", "width=16", "num_frames=5", f"max_sequence_length={tiny_pipelines.TOKENS}"]
    given: dict[str, Any] = {"settings": size, "steps": 1, "guidance": 1.0, "limit": 2, "samples": 2}
    evaluation.command(str(model), suite="vbench", prompts=prompts, out=out, **given | options)
    file = out / "result.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def test_a_tiny_video_model_is_judged_exported_and_its_official_results_come_back(tmp_path, capsys):
    pytest.importorskip("av", reason="the official tools read mp4")
    wan, out, official = tmp_path / "wan", tmp_path / "out", tmp_path / "official"
    tiny_pipelines.make("wan").save_pretrained(wan)
    prompts, judge = tiny.prompts(tmp_path), tmp_path / "motion.py"
    judge.write_text(MOTION)
    found = run(wan, out, prompts, judge=[str(judge)])
    assert found["models"]["model"]["headline"] == "motion"
    rows = [json.loads(line) for line in (out / "model" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        frames = media.read(out / "model" / row["file"])
        assert frames.shape == (5, 3, 16, 16)
        assert float(frames.diff(dim=0).abs().mean()) == pytest.approx(row["scores"]["motion"], rel=1e-5)
        assert media.read_note(out / "model" / row["file"])["seed"] == row["seed"]
    assert "2 videos each" in capsys.readouterr().out

    again = tmp_path / "again"
    assert run(wan, again, prompts, export=official) == {}
    assert "4 videos for the official evaluator" in capsys.readouterr().out
    files = places(vbench.items(official))
    assert all(media.facts(official / file) == (5, 16) for _, _, file in files)
    result = run(wan, again, prompts, results=[tiny.results(tmp_path, files)])
    assert result["models"]["model"]["headline"] == "quality of 3 of 7 dimensions"
    assert list(result["headers"]["model"]["judged_by"]) == ["official evaluator"]


@pytest.mark.parametrize(
    ("suite", "judge", "words"),
    [
        ("vbench", "shapes", "reward 'shapes' judges images, and the model makes videos"),
        ("vbench", None, "no judge of its own here"),
        ("geneval", "motion", "reward 'motion' judges videos, and the model makes images"),
    ],
)
def test_a_judge_of_the_other_kind_is_refused(tmp_path, suite, judge, words):
    prompts, judges = tiny.prompts(tmp_path) if suite == "vbench" else None, [judge] if judge else []
    with pytest.raises(ConfigError, match=words):
        evaluation.command(
            "tiny-sd3", suite=suite, prompts=prompts, out=tmp_path / "out", judge=judges, limit=1, steps=1
        )


def test_a_model_of_images_is_refused_for_a_suite_of_videos_and_the_reverse(tmp_path):
    judge = tmp_path / "bright.py"
    card = "from flowrl.reward import Card\n\nCARD = Card(outputs=('bright',), modality='any')\n\n\n"
    judge.write_text(card + "def score(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    prompts = tiny.prompts(tmp_path)
    with pytest.raises(ConfigError, match=r"this suite is for models of videos of two frames or more"):
        run("tiny-sd3", tmp_path / "a", prompts, judge=[str(judge)], settings=[])
