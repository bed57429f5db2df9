"""What a resumed run may have another value of, by itself or on purpose."""

import json
import math
from pathlib import Path

import pytest
import yaml

from flowrl.apps.gallery.runs import load_run
from flowrl.core.errors import ConfigError
from flowrl.run.changes import ACCEPTABLE, Accepted, leaves
from tests.e2e.conftest import BASE, train
from tests.e2e.conftest import place as place

SMALL = (
    *("rollout.num_inference_steps=2", "rollout.group_size=2", "data.max_eval_prompts=1"),
    *("optim.learning_rate=4e-4", "optim.schedule=cosine"),
)


def rates(run: str) -> list[float]:
    return [
        json.loads(line)["optim/learning_rate"] for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()
    ]


def test_a_longer_schedule_is_told_at_the_start_and_in_the_report(place):
    """One update an iteration: iteration i of n has rate 2e-4 (1 + cos(pi (i - 1) / n))."""
    words = (*SMALL, "optim.updates_per_iteration=1")
    train("iterations=2", *words)
    train("iterations=3", *words, resume=True)
    train("iterations=3", *words, resume=True)
    at = [2e-4 * (1 + math.cos(math.pi * progress)) for progress in (0, 1 / 2, 2 / 3)]
    assert rates("run") == pytest.approx(at, rel=1e-9)
    told = "iterations was 2, now 3, and optim.schedule=cosine spans all of them: the learning rate was 0.0002 in the "
    assert told + "last update and is 0.0001 in the next one" in Path("runs/run/train.log").read_text()
    problems = [text for text in load_run(Path("runs/run")).problems if "Options have other values" in text]
    assert len(problems) == 1
    assert "since iteration 2" in problems[0]


def test_a_run_goes_on_at_another_rate_on_purpose_and_says_so(place):
    words = (*SMALL, "optim.updates_per_iteration=1", "optim.schedule=constant")
    train("iterations=2", *words)
    other = "optim.learning_rate=1e-5"
    with pytest.raises(ConfigError, match=r"optim\.learning_rate was 0\.0004, now 1e-05"):
        train("iterations=3", *words, other, resume=True)
    with pytest.raises(ConfigError, match=r"optim\.learning_rate was 0\.0004, now 1e-05"):
        train("iterations=3", *words, other, resume=True, accept=["files"])
    train("iterations=3", *words, other, resume=True, accept=["optim.learning_rate"])
    assert rates("run") == [4e-4, 4e-4, 1e-5]
    assert yaml.safe_load(Path("runs/run/config.yaml").read_text())["optim"]["learning_rate"] == 1e-5
    (change,) = json.loads(Path("runs/run/inputs.json").read_text())["changes"]
    assert change == {"iteration": 2, "what": ["optim.learning_rate was 0.0004, now 1e-05"], "options": True}
    assert any("Options have other values since iteration 2" in text for text in load_run(Path("runs/run")).problems)


@pytest.mark.slow
def test_evaluations_of_another_setting_have_a_base_of_their_own(place):
    """Accepted options that change scores: the base is evaluated again by the untouched weights."""
    words = (*SMALL, "optim.updates_per_iteration=1", "optim.schedule=constant")
    train("iterations=1", *words)
    other = ("model.vae_precision=float32", "eval.samples_per_prompt=2")
    keys = [word.partition("=")[0] for word in other]
    train("iterations=2", *words, *other, resume=True, accept=keys)
    train("name=whole", "iterations=1", *words, *other)
    files = [Path(f"runs/{name}/eval/base.json").read_text() for name in ("run", "whole")]
    assert files[0] == files[1]
    assert rates("run") == [4e-4, 4e-4]


@pytest.mark.slow
def test_the_moments_of_a_run_at_another_rate_are_those_of_its_checkpoint(place):
    """Adam's moments do not hold the rate: the update after a change is the old direction at the new length."""
    from safetensors.torch import load_file

    words = (
        *SMALL,
        "optim.updates_per_iteration=1",
        "optim.schedule=constant",
        "optim.weight_decay=0",
        "optim.ema=null",
    )
    states = {}
    for name, rate in (("one", 4e-4), ("two", 8e-4)):
        train(f"name={name}", "iterations=1", *words)
        options = (f"optim.learning_rate={rate}",)
        train(f"name={name}", "iterations=2", *words, *options, resume=True, accept=["optim.learning_rate"])
        folder = Path(f"runs/{name}/checkpoints")
        states[name] = [load_file(folder / f"iteration-{i:06d}/state.safetensors") for i in (1, 2)]
    for key in states["one"][0]:
        first, second = ([state.get(key) for state in states[name]] for name in states)
        assert first[0].equal(second[0])
        if key.startswith("weights/policy/"):
            moved, twice = first[1] - first[0], second[1] - second[0]
            assert moved.mul(2).sub(twice).abs().max() <= 4 * 2**-24 * max(1.0, float(first[1].abs().max()))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("seed", "place in the random numbers"),
        ("model.lora.rank", "weights of this very model"),
        ("optim.betas", "moments and averages"),
        ("rewards", "start another run, from these weights with model.init_lora"),
        ("optim", "it holds several options"),
        ("optim.learning_rat", "no such option; did you mean 'optim.learning_rate'"),
    ],
)
def test_other_keys_are_refused_by_name_with_the_reason(key, reason):
    tree = BASE | {"seed": 0, "model": {"lora": {"rank": 4}}, "optim": {"learning_rate": 1e-3, "betas": [0.9, 0.999]}}
    with pytest.raises(ConfigError, match=rf"--accept-changes {key}: .*{reason}.*takes files and optim\.learning_rate"):
        Accepted.of([key]).require_acceptable(tree)


def test_what_can_be_accepted_are_options(place):
    from flowrl.config.load import load_config, resolve

    known = leaves(resolve(load_config("run.yaml", ["data.max_eval_prompts=1"])).tree())
    assert set(ACCEPTABLE) <= known.keys()
