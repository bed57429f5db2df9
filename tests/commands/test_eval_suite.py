"""`flowrl eval --suite` on tiny models: tables, comparison, going on, refusals, the official evaluator's folder."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.apps.suites import geneval
from flowrl.apps.suites.running.exchange import of_models
from flowrl.commands import eval as evaluation
from flowrl.commands import list as listing
from flowrl.commands.new import write
from flowrl.core import assets
from flowrl.core.errors import ConfigError, ModelError, RewardFailure

BRIGHT = "def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n"
AWAY = "def score(images, prompts, metadata):\n    raise ConnectionError('no server')\n"


@pytest.fixture
def bright(tmp_path):
    file = tmp_path / "bright.py"
    file.write_text(BRIGHT)
    return str(file)


def run(target: str, out: Path, **options):
    """The command; what it wrote as result.json."""
    evaluation.command(target, out=out, **({"suite": "geneval", "steps": 1, "limit": 3, "samples": 1} | options))
    file = out / "result.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def scores_of(out: Path, name: str) -> list[float]:
    lines = (out / "model" / "samples.jsonl").read_text().splitlines()
    return [json.loads(line)["scores"][name] for line in lines]


def test_the_same_weights_under_another_name_differ_in_nothing_and_the_command_goes_on(tmp_path, bright, capsys):
    out, same = tmp_path / "out", str(assets.asset_folder("tiny-sd3", "model_index.json"))
    result = run("tiny-sd3", out, base=same, judge=[bright])
    assert {change["name"] for change in result["changes"]} >= {"all images"}
    for change in result["changes"]:
        assert (change["mean"], change["win_rate"], change["p_holm"]) == (0.0, 0.5, 1.0)
        assert (change["low"], change["high"]) in ((0.0, 0.0), (None, None))
    assert "## Paired difference" in (out / "table.md").read_text()
    header = result["headers"]["model"]
    assert header["made_with"]["pipeline"] == "StableDiffusion3Pipeline"
    assert header["made_with"]["steps"] == 1
    assert header["judged_by"]["bright"]["outputs"] == ["bright"]
    assert {"torch", "commit", "command"} <= set(header["facts"])
    rows = [json.loads(line) for line in (out / "model" / "samples.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (out / "base" / "samples.jsonl").read_text().splitlines()]
    assert rows == other
    assert set(rows[0]) == {"id", "prompt", "k", "seed", "file", "scores", "answers", "error"}
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.png")}
    again = run("tiny-sd3", out, base=same, judge=[bright], limit=4)
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert len(list(out.rglob("*.png"))) == 8
    assert again["models"]["model"]["lines"][-1]["n_images"] == 4
    with pytest.raises(ConfigError, match=r"steps was 1, now 2.*another folder with --out"):
        run("tiny-sd3", out, judge=[bright], steps=2)
    assert "4 of the 553 official prompts, 1 image each" in capsys.readouterr().out


def test_a_suite_of_the_users_own_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("suite", "mine", tmp_path / "own")
    evaluation.command("tiny-sd3", suite=str(tmp_path / "own" / "mine.py"), steps=1, limit=2, samples=1)
    result = json.loads((tmp_path / "eval" / "mine-tiny-sd3" / "result.json").read_text())
    assert (result["suite"], result["headers"]["model"]["made_with"]["suite"]) == ("mine", "mine")
    assert result["models"]["model"]["headline"] == "overall"
    (tmp_path / "own" / "mine.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"--suite .*mine\.py cannot be imported: ZeroDivisionError"):
        evaluation.command("tiny-sd3", suite="own/mine.py")


def test_the_same_judge_twice_shows_its_own_noise(tmp_path):
    out, fickle = tmp_path / "out", tmp_path / "fickle.py"
    fickle.write_text(
        "import itertools\nCOUNT = itertools.count()\n\n\ndef score(images, prompts, metadata):\n"
        "    return [float((next(COUNT) * 7) % 5) for _ in prompts]\n"
    )
    assert run("tiny-sd3", out, judge=[str(fickle)], limit=4)["judge_noise"] == {}
    first = scores_of(out, "fickle")
    noise = run("tiny-sd3", out, judge=[str(fickle)], limit=4, rejudge=True)["judge_noise"]["fickle"]
    change = [after - before for before, after in zip(first, scores_of(out, "fickle"), strict=True)]
    assert noise["n"] == 4
    assert noise["shift"] == pytest.approx(statistics.mean(change))
    assert noise["sd"] == pytest.approx(statistics.stdev(change) / 2**0.5)
    assert noise["floor"] == pytest.approx(1.96 * statistics.stdev(change) / 2, rel=1e-3)
    assert "The judge's own noise" in (out / "table.md").read_text()


def test_a_judge_that_scores_nothing_ends_in_code_1_and_says_why(tmp_path, capsys):
    out, blind = tmp_path / "out", tmp_path / "blind.py"
    blind.write_text("def score(images, prompts, metadata):\n    return [float('nan')] * len(prompts)\n")
    with pytest.raises(SystemExit) as caught:
        run("tiny-sd3", out, judge=[str(blind)])
    assert caught.value.code == 1
    assert "model: none of 3 samples is scored: the judge gave NaN" in capsys.readouterr().err
    assert "0/3" in (out / "table.md").read_text()


def test_another_judge_needs_the_word_and_a_judge_that_is_away_keeps_the_images(tmp_path, bright):
    out, away = tmp_path / "out", tmp_path / "away.py"
    away.write_text(AWAY)
    with pytest.raises(RewardFailure, match=r"judge is away.*no server.*same command again") as caught:
        run("tiny-sd3", out, judge=[str(away)])
    assert str(out / "model") in str(caught.value)
    assert len(list(out.rglob("*.png"))) == 3
    with pytest.raises(ConfigError, match=r"scores of another judge: .*--rejudge"):
        run("tiny-sd3", out, judge=[bright])
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.png")}
    result = run("tiny-sd3", out, judge=[bright], rejudge=True)
    assert result["models"]["model"]["lines"][-1]["n_scored"] == 3
    assert {file: file.stat().st_mtime_ns for file in files} == files


def test_the_official_evaluators_folder_goes_out_and_its_results_come_back(tmp_path, bright):
    out, official = tmp_path / "out", tmp_path / "official"
    assert run("tiny-sd3", out, export=official) == {}
    places = sorted(official.rglob("*.png"))
    assert [place.relative_to(official).parts[1:] for place in places] == [("samples", "00000.png")] * 3
    records = [json.loads((place.parents[1] / "metadata.jsonl").read_text()) for place in places]
    known = {item.id: item.metadata for item in geneval.items(None)}
    assert records == [known[place.parents[1].name] for place in places]
    lines = [json.dumps({"filename": str(place), "correct": True}) for place in places]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(lines[:-1]))
    with pytest.raises(ConfigError, match=r"1 of 3 samples have no result"):
        run("tiny-sd3", out, results=[results])
    results.write_text("\n".join(lines))
    result = run("tiny-sd3", out, results=[results])
    assert {line["mean"] for line in result["models"]["model"]["lines"]} == {1.0}
    assert list(result["headers"]["model"]["judged_by"]) == ["official evaluator"]
    with pytest.raises(ConfigError, match=r"images made in another way: base_seed was 0, now 7\. Give the old values"):
        run("tiny-sd3", out, results=[results], seed=7)
    with pytest.raises(ConfigError, match="give one file for MODEL, and with --base a second one"):
        run("tiny-sd3", out, results=[results], base="tiny-sd")


@pytest.mark.parametrize("name", ["{}/results.csv", "out/{}_results.csv", "model-eval/{}/r.csv"])
def test_results_that_are_called_by_the_other_model_are_refused(name):
    files = {each: Path(name.format(each)) for each in ("model", "base")}
    assert of_models(["model", "base"], list(files.values())) == files
    with pytest.raises(ConfigError, match=r"the (first|second) file is that of .* and this is called by (base|model)"):
        of_models(["model", "base"], [files["base"], files["model"]])
    assert of_models(["model", "base"], [Path("base/a.csv"), Path("base/b.csv")])["base"] == Path("base/b.csv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "genevl"}, r"did you mean 'geneval'"),
        ({"suite": "drawbench"}, r"give them with --prompts PATH. They are here: hub dataset sayakpaul/drawbench"),
        ({"settings": ["hight=64"]}, r"--set hight: .*did you mean 'height'"),
        ({"base": "tiny-sd3"}, r"is MODEL itself: there is nothing to compare"),
        (
            {"overrides": ["model.name=sd"]},
            r"model.name=sd: for an evaluation by .*, without --suite; leave out model.name=sd",
        ),
        ({"suite": None}, r"--judge.*: for a benchmark suite, which --suite names .*; leave out --judge"),
        ({"results": [Path("r.jsonl")]}, r"--judge: --results takes the scores of the official .*; leave out --judge$"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, bright, options, words):
    with pytest.raises(ConfigError, match=words):
        run("tiny-sd3", tmp_path / "out", **({"judge": [bright]} | options))


@pytest.mark.parametrize(("option", "value"), [("guidance", 0.0), ("seed", 3), ("batch_size", 8)])
def test_options_of_a_suite_are_refused_without_one(option, value):
    with pytest.raises(ConfigError, match=rf"--{option.replace('_', '-')}: for a benchmark suite, which --suite"):
        evaluation.command("quickstart", **{option: value})


@pytest.mark.parametrize(
    ("suite", "name", "text"),
    [("wise", "culture.json", "[]"), ("geneval2", "data.jsonl", ""), ("t2i_compbench", "color_val.txt", "\n")],
)
def test_a_file_without_a_prompt_is_refused_before_anything_is_loaded(tmp_path, suite, name, text):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"there is no prompt in it; give those of github "):
        run("tiny-sd3", tmp_path / "out", suite=suite, prompts=file)


def test_a_folder_that_is_no_model_is_refused_with_what_to_give(tmp_path, bright):
    with pytest.raises(ModelError, match=r"model_index.json"):
        run(str(tmp_path), tmp_path / "out", judge=[bright])


@pytest.mark.parametrize("given", ["MODEL", "--base"])
def test_a_folder_that_is_no_model_is_named_before_a_judge_is_built(tmp_path, given):
    bad, judge = tmp_path / "bad", tmp_path / "unbuilt.py"
    bad.mkdir()
    judge.write_text("raise ConnectionError('the judge was asked first')\n")
    model, base = (str(bad), None) if given == "MODEL" else ("tiny-sd3", str(bad))
    with pytest.raises(ModelError, match=r"bad' is not a diffusers pipeline: .*give the folder that") as caught:
        run(model, tmp_path / "out", judge=[str(judge)], base=base)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_suites_are_listed_with_prompts_judge_and_differences(capsys):
    listing.command("suites")
    text = " ".join(capsys.readouterr().out.split())
    assert "553, generated here" in text
    assert "200, not shipped: --prompts" in text
    listing.command("suites", "geneval")
    assert "differs: noise by (prompt, k)" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_that_are_killed_go_on_to_what_one_makes(tmp_path, bright):
    def words(out: Path, *more: str) -> list[str]:
        own = ["--suite", "geneval", "--limit", "6", "--samples", "2", "--steps", "1", "--batch-size", "2"]
        return [sys.executable, "-m", "flowrl", "eval", "tiny-sd3", *own, "--judge", bright, "--out", str(out), *more]

    both, one = tmp_path / "both", tmp_path / "one"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(words(both, "--processes", "2"), env=environment, start_new_session=True)
    deadline = time.monotonic() + 240
    while not list(both.rglob("samples-*.jsonl")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    child.wait(60)
    done = subprocess.run(words(both, "--processes", "2"), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run("tiny-sd3", one, judge=[bright], limit=6, samples=2)
    for name in ("model/samples.jsonl", "table.md"):
        assert (both / name).read_text() == (one / name).read_text().replace(str(one), str(both))


def test_settings_in_which_base_and_model_differ_are_named(tmp_path, bright):
    result = run("tiny-sd3", tmp_path / "out", base="tiny-sd", judge=[bright], limit=1)
    assert "Base and model differ in settings too: pipeline (base 'StableDiffusionPipeline'" in result["settings"]
    assert "steps" not in result["settings"].partition("settings too")[2]
