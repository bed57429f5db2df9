"""Every suite at work: drawn, judged, interrupted, exported and read back. Its laws: tests/contracts/test_suites.py."""

import json
import math

import pytest

from flowrl.apps.suites.running.drawing import Drawing
from flowrl.apps.suites.running.exchange import export, fingerprint, with_results
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.report import compare, markdown, plain
from flowrl.apps.suites.running.runner import Task, fill, limited, rows_of
from flowrl.core import registry
from flowrl.core.errors import ConfigError, RewardFailure
from flowrl.evaluation import suite as base
from scripts.pretraining import kontext
from tests import tiny_pipelines as tiny
from tests import tiny_sd3, tiny_suites
from tests.tiny_suites import StandIn

NAMES = registry.names("suites")
EDITS = ("imgedit", "gedit")


@pytest.fixture(scope="module")
def pictures():
    pipeline = tiny_sd3.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return Drawing(pipeline, {"num_inference_steps": 1, "guidance_scale": 1.0, "height": 32, "width": 32})


@pytest.fixture(scope="module")
def videos():
    pipeline = tiny.make("wan")
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": tiny.TOKENS}
    return Drawing(pipeline, {"num_inference_steps": 1, "guidance_scale": 1.0} | size, videos=True)


@pytest.fixture(scope="module")
def edits():
    pipeline = kontext.build_pipeline(0, tiny_sd3.ROOT / "assets" / "tiny-sd3")
    pipeline.set_progress_bar_config(disable=True)
    return Drawing(pipeline, {"num_inference_steps": 1, "guidance_scale": 1.0} | kontext.CALL)


@pytest.fixture(params=NAMES)
def suite(request):
    return base.load_suite(request.param)


@pytest.fixture
def draw(request, suite):
    return request.getfixturevalue("videos" if suite.facts.videos else "edits" if suite.name in EDITS else "pictures")


def folder_of(suite, path):
    return ResultsFolder(path, suite.facts.videos)


@pytest.fixture
def items(suite, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    return suite.items(tiny_suites.prompts(suite.name, suite, folder))


def task_of(suite, items, samples=1, count=2):
    return Task(suite=suite, items=limited(items, count), samples=samples, batch_size=2)


def test_a_suite_runs_end_to_end_is_interrupted_and_goes_on(suite, items, draw, tmp_path):
    task, folder = task_of(suite, items), folder_of(suite, tmp_path / "out")
    folder.begin({"model": "tiny"}, StandIn(suite).facts, {})
    with pytest.raises(RewardFailure, match=r"the judge is away.*give the same command again"):
        fill(task, folder, draw, StandIn(suite, fails=range(1, 99)))
    files = {file.name: file.stat().st_mtime_ns for file in (folder.path / "images").iterdir()}
    assert len(files) == (4 if suite.facts.videos else 2), "a video's note is a file of its own"
    judge = StandIn(suite)
    fill(task, folder, draw, judge)
    assert {file.name: file.stat().st_mtime_ns for file in (folder.path / "images").iterdir()} == files
    fill(task, folder, draw, judge)
    assert judge.seen == 2  # nothing is judged twice
    rows = rows_of(task, folder)
    table = suite.aggregate(rows, task.items)
    assert any(not math.isnan(line.mean) for line in table.lines)
    same = compare(table, table)
    assert all(math.isnan(one.mean) or (one.mean, one.win_rate, one.p_holm) == (0.0, 0.5, 1.0) for one in same)
    assert suite.facts.title in markdown(suite, {"model": table}, same)
    assert json.dumps(plain(table))


def test_a_results_folder_is_told_by_what_is_in_it(tmp_path):
    for name in ("one", "two", "renamed", "changed"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / ("b.json" if name == "renamed" else "a.json")).write_text(
            "0" if name == "changed" else "1"
        )
    one, *others = (fingerprint(tmp_path / name) for name in ("one", "two", "renamed", "changed"))
    assert [other == one for other in others] == [True, False, False]


def test_the_official_folder_is_written_and_its_results_are_read_back(suite, items, draw, tmp_path):
    samples = suite.facts.images_per_prompt
    if suite.facts.videos:
        pytest.importorskip("av", reason="official evaluators of videos read mp4")
    task, folder = task_of(suite, items, samples), folder_of(suite, tmp_path / "out")
    folder.begin({"model": "tiny"}, {}, {})
    if suite.layout is None:
        assert suite.read_results is None
        with pytest.raises(ConfigError, match="no official evaluator"):
            export(task, folder, tmp_path / "official")
        return
    with pytest.raises(ConfigError, match="samples are missing"):
        export(task, folder, tmp_path / "official")
    fill(task, folder, draw, None)
    out = tmp_path / "official"
    places = [(item, k, suite.layout(item, k)) for item, k in task.all()]
    assert export(task, folder, out) == len({place for _, _, place in places})
    assert all((out / place).is_file() for _, _, place in places)
    with pytest.raises(ConfigError, match="not empty"):
        export(task, folder, out)
    if suite.read_results is None:
        with pytest.raises(ConfigError, match="--judge"):
            with_results(task, folder, out)
        return
    own = tiny_suites.tiny(suite.name)
    assert own is not None, f"write results() in tests/tiny_suites/{suite.name}.py"
    rows = with_results(task, folder, own.results(tmp_path, places))
    assert all(None not in row.scores.values() for row in rows)
    table = suite.aggregate(rows, task.items)
    assert any(not math.isnan(line.mean) for line in table.lines)
    # The second prompt is lost as a whole: some evaluators have one result for all images of a prompt.
    first = [one for one in places if one[0] is not task.items[1]]
    with pytest.raises(ConfigError, match=r"have no result, the first is prompt"):
        with_results(task, folder, own.results(tmp_path, first))
    with pytest.raises(ConfigError, match=r"already|twice|double"):
        with_results(task, folder, own.results(tmp_path, [*places, places[-1]]))
