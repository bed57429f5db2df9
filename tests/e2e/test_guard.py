"""Runs whose guard warns, stops or goes back: weights, folder, exit, and what goes on afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowrl.apps.gallery.runs import load_run
from flowrl.apps.gallery.watched import Watched
from flowrl.apps.publish.export import export
from flowrl.commands import eval as evaluation
from flowrl.commands.train import AFTER
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.run import checkpoint, handover
from flowrl.run.trained import load_run_model
from tests.e2e.conftest import ROOT, digest, finish, start, train

# Brightness is trained on, and its opposite is watched.
HACKED = (
    *("eval.every=1", "eval.rewards=[{path: darkness.py}]", "data.max_eval_prompts=16", "eval.samples_per_prompt=2"),
    *("optim.learning_rate=1e-2", "iterations=3", "checkpoint={every: 2, keep: 1}", "guard.patience=1"),
)
DARKNESS = "def score(images, prompts, metadata):\n    return {'darkness': -images.mean(dim=(1, 2, 3))}\n"


@pytest.fixture
def hacked(place: Path) -> Path:
    (place / "darkness.py").write_text(DARKNESS)
    return place


def summary(run: str) -> dict[str, Any]:
    return json.loads(Path("runs", run, "summary.json").read_text())


def guard_state(run: str, iteration: int) -> dict[str, Any]:
    folder = checkpoint.path_of(Path("runs", run, "checkpoints"), iteration)
    return json.loads((folder / "state.json").read_text())["guard"]


def test_a_run_that_is_stopped_says_so_in_its_folder_and_is_not_resumed_as_it_is(hacked: Path):
    result = train("name=stopped", *HACKED, "guard.mode=stop", after=AFTER)
    facts, ended = result["guard"], result["iterations"]
    assert (result["status"], facts["alarm"]) == ("guarded", "below base")
    assert facts["taken"] == facts["ended"] == ended < 3
    assert f"iteration {ended} " in facts["sentence"]
    # The half that the guard did not see.
    assert result["difference"]["darkness"]["n"] == facts["judged_prompts"] == 8
    assert not facts["beat_base"]
    stamp = json.loads(Path("runs/stopped/adapter/flowrl.json").read_text())
    assert stamp["status"] == "guarded"
    assert stamp["guard"]["sentence"] == facts["sentence"]
    for text in (Path("runs/stopped/adapter/README.md"), Path("runs/stopped/gallery/index.html")):
        shown = text.read_text()
        for words in (
            "The guard (stop) ended the run",
            "Training did not help",
            "8 prompts that the guard did not see",
        ):
            assert words in shown
    assert load_run(Path("runs/stopped")).finished
    assert len(Path("runs/stopped/metrics.jsonl").read_text().splitlines()) == ended
    watched = Watched(Path("runs/stopped"))
    watched.look()
    assert watched.state()["text"] == f"Ended by its guard at iteration {ended}. {facts['sentence']}"
    with pytest.raises(ConfigError, match=rf"ended this run after iteration {ended}.*guard.mode=warn"):
        train("name=stopped", *HACKED, "guard.mode=stop", resume=True)


@pytest.mark.slow
def test_a_run_that_goes_back_has_the_weights_of_its_best_evaluation(hacked: Path):
    result = train("name=back", *HACKED, "guard.mode=rollback", after=AFTER)
    facts, saved = result["guard"], checkpoint.available(Path("runs/back/checkpoints"))
    assert result["status"] == "guarded"
    assert facts["taken"] == facts["best"] < facts["ended"] == result["iterations"]
    assert saved == [facts["taken"], facts["ended"]]  # keep is 1
    assert handover.chosen(Path("runs/back")) == facts["taken"]
    assert handover.outdated(Path("runs/back")) is None
    assert json.loads(Path("runs/back/eval/tuned.json").read_text())["iteration"] == facts["taken"]
    assert f"of iteration {facts['taken']}." in Path("runs/back/adapter/README.md").read_text()
    alone = train("name=alone", *HACKED, "guard.mode=off", "eval.every=0", f"iterations={facts['taken']}")
    assert "guard" not in alone
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert Path("runs/back/adapter", weights).read_bytes() == Path("runs/alone/adapter", weights).read_bytes()
    # What others make of the run is of the weights that the guard took.
    result_of_all = load_file(Path("runs/back/adapter", weights))
    sampled = load_run_model(Path("runs/back"))[0].pipeline.transformer.state_dict()
    for found in (sampled, load_file(export(Path("runs/back"), "merged", Path("merged")) / weights)):
        assert all(torch.equal(found[name], value) for name, value in result_of_all.items())
    evaluation.command("runs/back", out=Path("evaluated"))
    found = [json.loads(file.read_text()) for file in Path("evaluated").rglob("*.json")]
    made = [one["scores"] for one in found if "scores" in one]
    assert made == [json.loads(Path("runs/alone/eval/tuned.json").read_text())["scores"]]
    # A kill between the decision and the end: the checkpoints stay, the rest is made again.
    for name in ("summary.json", "adapter/flowrl.json", "eval/tuned.json"):
        Path("runs/back", name).unlink()
    again = train("name=back", *HACKED, "guard.mode=rollback", resume=True)
    assert again["guard"] == facts
    assert again["difference"] == result["difference"]


@pytest.mark.slow
def test_two_processes_end_together_and_both_go_back(hacked: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    code, output = finish(start("train", "run.yaml", "name=two", *HACKED, "guard.mode=rollback", "--processes", "2"))
    assert code == 0, output
    facts = summary("two")["guard"]
    assert summary("two")["status"] == "guarded"
    assert facts["taken"] < facts["ended"]
    assert facts["sentence"] in output
    assert json.loads(Path("runs/two/eval/tuned.json").read_text())["iteration"] == facts["taken"]
    # Each process draws a share of the last evaluation's images: of the same weights as the one that was taken.
    earlier = json.loads(Path(f"runs/two/eval/iteration-{facts['taken']:06d}.json").read_text())
    tuned = json.loads(Path("runs/two/eval/tuned.json").read_text())
    scores = dict(zip(earlier["prompts"], earlier["scores"]["darkness"], strict=True))
    np.testing.assert_allclose([scores[p] for p in tuned["prompts"]], tuned["scores"]["darkness"], rtol=1e-5)


@pytest.mark.slow
def test_a_guard_that_warns_moves_no_number_and_a_stopped_run_goes_on_as_if_it_had_been_warned(hacked: Path):
    whole = train("name=warned", *HACKED)
    assert (whole["status"], whole["guard"]["mode"]) == ("finished", "warn")
    assert whole["difference"]["brightness"]["n"] == 16
    stopped = train("name=stopped", *HACKED, "guard.mode=stop")
    assert stopped["guard"]["sentence"] == whole["guard"]["alarms"][0]["sentence"]
    on = train("name=stopped", *HACKED, "guard.mode=warn", resume=True)
    assert (on["status"], on["iterations"]) == ("finished", 3)
    assert digest("stopped", 3) == digest("warned", 3)
    assert guard_state("stopped", 3) == guard_state("warned", 3)
    assert on["difference"] == whole["difference"]
    train("name=none", *HACKED, "guard.mode=off", "iterations=2")
    train("name=none", *HACKED, resume=True)
    assert digest("none", 3) == digest("warned", 3)
    for name in ("iteration-000001", "tuned"):
        one, other = (json.loads(Path("runs", run, "eval", f"{name}.json").read_text()) for run in ("none", "warned"))
        assert one["scores"] == other["scores"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["guard.mode=stop"], "guard.mode=stop: eval.every is 0.*guard.mode=off"),
        (["guard.mode=stop", "eval.every=2"], "guard.mode=stop: the run trains on all that it evaluates .brightness."),
        (["guard.metric=brightness", "eval.every=2"], "guard.metric=brightness: the run trains on it.*eval.rewards"),
        (
            ["guard.metric=brightnes", "eval.every=2", "eval.rewards=[{name: jpeg}]"],
            "guard.metric=brightnes: no reward of the run has that output",
        ),
        (["guard.patience=0"], "guard.*patience=0 must be positive"),
        (["guard.diversity=1.5"], "diversity=1.5 must be below 1"),
        (["guard.mode=halt"], "guard.mode = 'halt'.*rollback"),
    ],
)
def test_a_guard_that_cannot_work_is_refused_before_anything_is_loaded(place: Path, words: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        resolve(load_config("run.yaml", words))


def test_by_default_there_is_a_guard_only_where_it_can_work(place: Path):
    assert resolve(load_config("run.yaml")).run.guard.mode is None
    resolve(load_config("run.yaml", ["eval.every=2"]))
    assert load_config("run.yaml", ["guard.mode=off"]).guard.mode in ("off", False)


def test_a_limit_of_a_metric_that_the_method_does_not_log_is_told_of(place: Path):
    words = ("eval.every=1", "eval.rewards=[{name: jpeg}]", "data.max_eval_prompts=4", "iterations=2")
    train(*words, "eval.num_inference_steps=1", "eval.samples_per_prompt=1", "guard.norm_ratio=1.2")
    said = Path("runs/run/train.log").read_text()
    assert said.count("guard.norm_ratio=1.2: this method logs no matching/norm_ratio, so there is no alarm") == 1


def test_too_few_prompts_for_two_halves(place: Path):
    words = ("eval.every=1", "eval.rewards=[{name: jpeg}]", "data.max_eval_prompts=3", "iterations=1")
    with pytest.raises(ConfigError, match=r"have 3 different prompts.*it needs 4"):
        train(*words, "guard.mode=stop")
