"""`flowrl pairs` on the embedded model: what it draws, keeps, refuses, and that it goes on where it was stopped."""

import json
import math
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.apps.pairs.drawing import group_scores
from flowrl.apps.pairs.folder import PairFolder
from flowrl.apps.pairs.plan import rollout_plan
from flowrl.commands._pair_check import look
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.data.preferences import load_preferences
from flowrl.diffusion.schedules import Schedule
from flowrl.media import media
from flowrl.scoring.scorer import Scores
from tests.e2e.conftest import finish, start
from tests.e2e.test_bad_input import command
from tests.tables import table

SHAPES = "rewards=[{name: shapes, outputs: {shapes_strict: 0.5, shapes_partial: 0.5}}]"
SMALL = ("data.max_prompts=5", "rollout.sampler=null", SHAPES)
# Tells all it scored, and ends the process it runs in at the fifth batch if asked to; the first three are the probe's.
TOLD = """
import json, os, signal
from pathlib import Path

def score(images, prompts, metadata):
    values = (images.mean(dim=(1, 2, 3)) * 256).round() / 256
    with Path("told.jsonl").open("a") as file:
        file.write(json.dumps([list(prompts), values.tolist()]) + chr(10))
    if Path("stop").exists() and len(Path("told.jsonl").read_text().splitlines()) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return values
"""


@pytest.fixture
def pairs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """`flowrl pairs run.yaml WORDS`: (exit code, what it printed)."""
    (place / "told.py").write_text(TOLD)

    def run(*words: str) -> tuple[int, str]:
        return command(monkeypatch, capsys, "pairs", "run.yaml", *SMALL, *words)

    return run


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "pairs.jsonl").read_text().splitlines()]


def header(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "pairs.json").read_text())


def test_pairs_are_the_best_and_the_worst_and_read_back_as_they_were_scored(pairs):
    code, printed = pairs("--out", "out")
    assert code == 0, printed
    made, done = lines("out"), header("out")["done"]
    assert done["groups"] == 5
    assert done["pairs"] + done["ties"] == 5
    assert done["pairs"] == len(made) >= 2
    assert f"{done['pairs']} pairs, {done['ties']} ties skipped" in printed
    assert f"{len(made)} of {len(made)} records are used" in printed
    found = load_preferences("out", "data.pairs")
    score = resolve(load_config("run.yaml", [SHAPES])).rewards[0].build().reward.score
    for k, line in enumerate(made):
        pair = found.read(k)
        assert (pair.prompt.text, pair.margin) == (line["prompt"], line["margin"])
        for name, picture in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert picture is not None
            assert isinstance(picture.source, Path)
            image = media.read(picture.source)
            assert picture.open().size == (image.shape[2], image.shape[1])
            again: Any = score(image[None], [line["prompt"]], [{}])
            told = line[f"{name}_scores"]
            assert {n: float(v) for n, v in again.items()} == {n: v for n, v in told.items() if n != "total"}
            assert told["total"] == 0.5 * told["shapes_strict"] + 0.5 * told["shapes_partial"]
        assert line["margin"] == line["chosen_scores"]["total"] - line["rejected_scores"]["total"] > 0
    with_model = header("out")["made_with"]
    assert with_model["model"]["path"] == "tiny-sd3"
    assert (with_model["sampler"], with_model["per_prompt"]) == (None, 4)
    assert header("out")["provenance"]["torch"] == metadata.version("torch")


def test_rounds_go_on_with_fresh_noise_until_there_are_enough_whatever_comes_between(pairs, monkeypatch):
    """In one go; and stopped by a signal, torn by a crash, then asked for more."""
    words = ("rewards=[{path: told.py}]", "data.max_prompts=3", "--per-prompt", "3")
    code, printed = pairs("--out", "once", "--count", "7", *words)
    assert code == 0, printed
    once = lines("once")
    assert len(once) == 7
    # The extremes are those of all that was scored for the prompt in that round.
    rounds: dict[tuple[str, int], list[float]] = {}
    for prompts, values in map(json.loads, Path("told.jsonl").read_text().splitlines()[3:]):
        for text in dict.fromkeys(prompts):
            number = sum(key[0] == text for key in rounds)
            rounds[text, number] = [v for p, v in zip(prompts, values, strict=True) if p == text]
    for line in once:
        scored = rounds[line["prompt"], line["drawn"]["round"]]
        assert len(scored) == 3
        assert line["chosen_scores"]["told"] == max(scored)
        assert line["rejected_scores"]["told"] == min(scored)
    assert {line["drawn"]["round"] for line in once} >= {0, 1, 2}
    pictures = [Path("once", line[side]).read_bytes() for line in once for side in ("chosen", "rejected")]
    assert len(set(pictures)) == len(pictures)

    Path("told.jsonl").unlink()
    Path("stop").touch()
    code, printed = pairs("--out", "parts", "--count", "4", *words)
    assert code == 143, printed
    assert "the same command goes on" in printed
    before = lines("parts")
    assert 0 < len(before) < 4
    Path("stop").unlink()
    with Path("parts/pairs.jsonl").open("a") as file:  # as a call that is killed before it tells how far it is
        file.write(json.dumps(once[len(before)]) + '\n{"prompt": "half a li')
    code, printed = pairs("--out", "parts", "--count", "4", *words)
    assert code == 0, printed
    assert lines("parts") == once[:4]
    code, printed = pairs("--out", "parts", "--count", "7", *words, "rollout.batch_size=2")
    assert code == 0, printed
    assert Path("parts/pairs.jsonl").read_bytes() == Path("once/pairs.jsonl").read_bytes()
    assert sorted(os.listdir("parts/images")) == sorted(os.listdir("once/images"))
    for name in os.listdir("parts/images"):  # those behind the fourth pair were drawn in other batches
        one, other = (media.read(Path(out, "images", name)) for out in ("once", "parts"))
        assert float((one - other).abs().max()) <= 1 / 255 + 1e-6  # rounding to 8 bits may fall to either side
    monkeypatch.setattr("flowrl.apps.pairs.drawing.Pairing", None)  # there is nothing to load a model for
    code, printed = pairs("--out", "parts", "--count", "7", *words)
    assert code == 0, printed


def test_ties_and_samples_without_a_score_are_counted_and_left_out(pairs, place, monkeypatch):
    monkeypatch.setattr("flowrl.apps.pairs.drawing.PATIENCE", 1)
    (place / "odd.py").write_text(
        "def score(images, prompts, metadata):\n"
        "    value = images.mean(dim=(1, 2, 3)) * 0 + 0.5\n"
        "    if len(value) > 4:\n"
        "        value[1], value[0] = 0.7, float('nan')\n"  # of the first prompt alone
        "    return value\n"
    )
    words = ("rewards=[{path: odd.py}]", "data.max_prompts=3", "rollout.prompts_per_iteration=3")
    code, printed = pairs("--out", "out", *words)
    assert code == 0, printed
    assert "1 pairs, 2 ties skipped, 1 samples not scored" in printed
    (line,) = lines("out")
    assert line["margin"] == pytest.approx(0.2)
    assert line["drawn"]["chosen"] == 1
    code, printed = pairs("--out", "wide", *words, "--margin", "0.3", "--count", "2")
    assert code == 1, printed
    assert "0 pairs of 2: in a whole round over the prompts no sample was more than 0.3 above another" in printed
    assert header("wide")["done"]["ties"] == 3


REFUSED: list[tuple[tuple[str, ...], str]] = table(__file__, "refused_pairs")


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_what_cannot_give_pairs_is_refused_and_nothing_is_drawn(pairs, place, words, reason):
    (place / "own.jsonl").write_text('{"prompt": "a", "margin": 1}\n')
    (place / "fails.py").write_text("def score(images, prompts, metadata):\n    raise RuntimeError('no')\n")
    for name, content in (("full/notes.txt", "mine"), ("foreign/pairs.json", "{}")):
        (place / name).parent.mkdir()
        (place / name).write_text(content)
    code, printed = pairs(*words)
    assert code == 2, printed
    assert reason in printed
    assert "Traceback" not in printed
    assert not list(place.glob("*/images/*"))


def test_a_folder_of_pairs_made_otherwise_is_refused_with_what_differs(pairs):
    words = ("rewards=[{path: told.py}]", "data.max_prompts=1", "--per-prompt", "2", "rollout.num_inference_steps=2")
    code, printed = pairs("--out", "out", *words)
    assert code in (0, 1), printed  # two samples may be a tie
    before = header("out")
    Path("told.py").write_text(TOLD + "\n")
    code, printed = pairs("--out", "out", *words, "seed=1", "data.max_prompts=2")
    assert code == 2, printed
    for told in ("seed was 0, now 1", "prompts.count was 1, now 2", "rewards.0.sha256 was"):
        assert told in printed
    assert header("out") == before


def test_a_broken_reward_ends_the_command_as_it_ends_a_training(pairs, place):
    (place / "late.py").write_text(
        "def score(images, prompts, metadata):\n"
        "    if len(prompts) > 4:\n"
        "        raise RuntimeError('the server is gone')\n"
        "    return images.mean(dim=(1, 2, 3))\n"
    )
    words = ("rewards=[{path: late.py, isolate: false, retries: 0}]", "data.max_prompts=2")
    code, printed = pairs("--out", "out", *words)
    assert code == 1, printed
    assert "could not be scored" in printed
    assert "the server is gone" in printed
    assert lines("out") == []


@pytest.mark.slow
def test_processes_share_the_prompts_and_make_the_same_pairs(pairs, place):
    code, printed = pairs("--out", "one", "--count", "6")
    assert code == 0, printed
    process = start("pairs", "run.yaml", *SMALL, "--out", "two", "--count", "6", "--processes", "2")
    code, printed = finish(process, 600)
    assert code == 0, printed
    assert lines("two") == lines("one")
    assert header("two")["done"] == header("one")["done"]
    assert sorted(os.listdir("two/images")) == sorted(os.listdir("one/images"))


# ---- the parts


def scores(*totals: float) -> Scores:
    values = torch.tensor([totals])
    return Scores({"r": values[0]}, values, torch.ones(1))


def test_the_best_and_the_worst_are_judged_among_the_samples_with_a_score():
    found = group_scores(7, scores(math.nan, 2.0, 5.0, 1.0, 5.0, 1.0))
    assert (found.number, found.best, found.worst, found.margin, found.masked) == (7, 2, 3, 4.0, 1)
    assert found.scores == ({"total": 5.0, "r": 5.0}, {"total": 1.0, "r": 1.0})
    for few in (scores(math.nan, math.nan), scores(math.nan, 3.0)):
        assert math.isnan(group_scores(0, few).margin)
    assert group_scores(0, scores(3.0, 3.0)).margin == 0


def test_a_reward_that_is_only_looked_at_may_fail():
    values = torch.tensor([[1.0, 2.0], [math.nan, math.nan]])
    found = group_scores(0, Scores({"a": values[0], "b": values[1]}, values, torch.tensor([1.0, 0.0])))
    assert found.scores == ({"total": 2.0, "a": 2.0, "b": None}, {"total": 1.0, "a": 1.0, "b": None})


def test_samples_follow_the_ode_or_the_law_of_the_sampler_at_all_steps_but_the_last(place):
    schedule = Schedule(torch.tensor([1.0, 0.7, 0.4, 0.0]), torch.tensor([1000.0, 700.0, 400.0]))

    def levels(*words: str) -> tuple[float, ...]:
        return rollout_plan(resolve(load_config("run.yaml", list(words))), schedule).noise_level

    assert levels("rollout.sampler=null") == (0, 0, 0)
    assert levels("algorithm.sde_steps=[0]") == (0.7, 0.7, 0)  # the method's window is for training


# ---- a look at a set


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes records of pictures a.png, b.png, c.png, one equal to a.png and one that is cut off."""
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate("abc"):
        Image.new("RGB", (6 + k, 4), (50 * k, 10, 10)).save(f"{name}.png")
    Path("same.png").write_bytes(Path("a.png").read_bytes())
    Path("cut.png").write_bytes(Path("a.png").read_bytes()[:40])
    return lambda *records: Path("pairs.jsonl").write_text("\n".join(map(json.dumps, records)))


GOOD = {"prompt": "x", "chosen": "a.png", "rejected": "c.png"}


def test_a_check_opens_every_picture_and_tells_what_a_training_would_meet(put, monkeypatch, capsys):
    put(GOOD, GOOD | {"rejected": "same.png"}, GOOD | {"margin": 0}, GOOD | {"rejected": None})
    code, printed = command(monkeypatch, capsys, "pairs", "pairs.jsonl", "--check", "max_broken=0.3")
    assert code == 0, printed
    assert "methods on pairs: broken 25.00% of 4 records, max_broken=0.3: ok" in printed
    assert "methods on winners alone: broken 0.00% of 4 records, max_broken=0.3: ok" in printed
    assert "3 of 3 records have readable images, of 6x4 to 8x4 pixels" in printed
    assert "1 distinct prompts" in printed
    assert "1 records of two equal images: line 2" in printed
    assert "skipped 1, tie: line 3" in printed
    put(GOOD, GOOD | {"chosen": "cut.png"}, GOOD | {"chosen": "gone.png"})
    code, printed = command(monkeypatch, capsys, "pairs", "pairs.jsonl", "--check")
    assert code == 1, printed
    assert "1 records with an image that cannot be read" in printed
    assert "line 2, chosen (cut.png)" in printed
    assert "methods on pairs: broken 66.67% of 3 records, max_broken=0.1: too much" in printed
    assert look("pairs.jsonl", ["max_broken=0.7"])


def test_a_check_is_of_pairs_unless_there_are_winners_only(put, capsys):
    """A missing or unreadable loser is nothing to methods on winners, and breaks the record for the others."""
    alone = {"prompt": "x", "chosen": "a.png"}
    put(GOOD, alone, GOOD | {"rejected": "cut.png"})
    assert not look("pairs.jsonl", [])
    printed = capsys.readouterr().out
    assert "methods on pairs: broken 66.67% of 3 records, max_broken=0.1: too much" in printed
    assert "methods on winners alone: broken 0.00% of 3 records, max_broken=0.1: ok" in printed
    put(alone, alone)
    assert look("pairs.jsonl", [])
    assert "methods on pairs: broken 100.00% of 2 records, max_broken=0.1: nothing to use" in capsys.readouterr().out
    put(alone, alone | {"chosen": "cut.png"})
    assert not look("pairs.jsonl", [])


def test_a_check_opens_sources_and_names_what_is_wrong_with_them_by_record(put, capsys):
    moving = [Image.new("RGB", (6, 4), (k, k, 9)) for k in (0, 90)]
    moving[0].save("moving.gif", save_all=True, append_images=moving[1:])
    edits = [GOOD | {"image": name} for name in ("b.png", "b.png", "cut.png", "moving.gif", "gone.png")]
    put(*edits, GOOD | {"image": "b.png", "chosen": "cut.png"})
    assert not look("pairs.jsonl", ["source=image"])
    printed = capsys.readouterr().out
    assert "skipped 1, source not an image: line 4 (image=" in printed
    assert "skipped 1, missing image: line 5 (image='gone.png')" in printed
    assert "2 of 4 records have readable images" in printed
    assert "2 records with an image that cannot be read: SOURCE='pairs.jsonl', line 3, image (" in printed
    assert "line 6, chosen (cut.png)" in printed
    assert "methods on pairs: broken 66.67% of 6 records" in printed
    assert "methods on winners alone: broken 66.67% of 6 records" in printed
    assert look("pairs.jsonl", ["source=image", "max_broken=0.7"])


def test_a_check_names_a_set_that_mixes_images_and_videos(put, capsys):
    for name in ("moving", "other"):
        frames = [Image.new("RGB", (6, 4), (k, k, len(name))) for k in (0, 90)]
        frames[0].save(f"{name}.gif", save_all=True, append_images=frames[1:])
    videos = {"chosen": "moving.gif", "rejected": "other.gif"}
    put(GOOD, GOOD | videos, GOOD, GOOD | {"chosen": "moving.gif"})
    assert not look("pairs.jsonl", [])
    printed = capsys.readouterr().out
    assert "1 records of an image and a video: line 4" in printed
    assert "images and videos in one set, the fewer count as broken: 2 of images, the first line 1; " in printed
    assert "; 1 of videos, the first line 2" in printed
    assert "methods on pairs: broken 50.00% of 4 records" in printed
    put(GOOD | videos)
    assert look("pairs.jsonl", [])
    assert "in one set" not in capsys.readouterr().out
    for name in ("cut.png", "short.png"):
        Path(name).write_bytes(Path("a.png").read_bytes()[:40])
    put(GOOD | {"chosen": "cut.png", "rejected": "short.png"}, GOOD, GOOD | videos)
    assert not look("pairs.jsonl", [])
    assert "1 of images, the first line 2; 1 of videos, the first line 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "words", "reason"),
    [
        ({"text": "x", "chosen": "a.png"}, [], "needs a column 'prompt' or 'caption'"),
        (GOOD, ["chozen=a"], "did you mean 'chosen'"),
        (GOOD, ["max_broken=2"], "max_broken=2"),
        (GOOD | {"chosen": "gone.png"}, [], "no record can be used"),
    ],
)
def test_a_check_refuses_what_is_no_set(put, record, words, reason):
    put(record)
    with pytest.raises(ConfigError, match=reason):
        look("pairs.jsonl", words)
    put({"text": "x", "best": "a.png"})
    assert look("pairs.jsonl", ["prompt=text", "chosen=best"])


def test_a_folder_whose_making_was_killed_is_gone_on_with(tmp_path, monkeypatch):
    """Behind each of its steps: the header half written, written alone, and with the pictures' folder."""

    class Killed(Exception):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    for number, place in enumerate(("os.replace", "pathlib.Path.touch", "os.truncate", "pathlib.Path.mkdir")):
        out = tmp_path / str(number)
        out.mkdir()
        (out / ".lock").touch()
        folder = PairFolder(out, {"seed": 0}, {})
        with monkeypatch.context() as patched:
            patched.setattr(place, killed)
            with pytest.raises(Killed):
                folder.begin()
        assert PairFolder(out, {"seed": 0}, {}).begin().pairs == 0
        assert (out / "pairs.jsonl").read_bytes() == b""
        assert (out / "images").is_dir()
        # Nothing is made yet, so a call that was refused may go on with other options.
        assert PairFolder(out, {"seed": 1}, {}).begin().pairs == 0
        assert json.loads((out / "pairs.json").read_text())["made_with"] == {"seed": 1}
