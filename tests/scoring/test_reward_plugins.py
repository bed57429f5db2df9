"""Rewards that installed packages bring, and what a run refuses about rewards before it trains."""

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.data.prompts import Prompt
from flowrl.reward import Card
from flowrl.run.assembly.parts import assemble
from flowrl.scoring import build
from flowrl.scoring.build import build_scorers, require_metadata, require_modality
from flowrl.scoring.entries import reward_plan

SCORE = "def score(images, prompts, metadata):\n    return [0.5] * len(prompts)\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a package with a module and entry points of the group, name -> value."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, **entries: str) -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "reward.py").write_text(SCORE)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[flowrl.rewards]\n{lines}")

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_package_brings_a_reward_by_name(installed):
    installed("alpha", brightness="alpha.reward")
    built = reward_plan({"name": "brightness", "weight": 2.0}, "rewards.0").build()
    assert built.reward.score([], ["a"], [{}]) == [0.5]
    assert (built.name, built.weight, built.reward.card.outputs) == ("brightness", 2.0, ("brightness",))
    assert all(isinstance(entry, EntryPoint) for entry in registry.plugins("rewards")["brightness"])
    assert registry.plugins("samplers") == {}, "only rewards are brought"


def test_an_unknown_name_is_answered_with_those_of_packages_too(installed):
    installed("alpha", brightness="alpha.reward")
    with pytest.raises(registry.UnknownName, match=r"did you mean 'brightness'\?"):
        registry.load("rewards", "brightnes")


def test_a_name_that_two_packages_bring_is_refused_and_both_are_named(installed):
    installed("alpha", brightness="alpha.reward")
    installed("beta", brightness="beta.reward")
    with pytest.raises(ConfigError, match=r"given twice: alpha.reward of alpha and beta.reward of beta.*dotted path"):
        reward_plan({"name": "brightness"}, "rewards.0")
    assert reward_plan({"name": "beta.reward"}, "rewards.0").module.__name__ == "beta.reward"


def test_a_built_in_name_means_the_built_in_one_and_the_clash_is_told(installed, caplog):
    installed("alpha", jpeg="alpha.reward")
    assert reward_plan({"name": "jpeg"}, "rewards.0").module.__name__ == "flowrl.rewards.jpeg"
    assert "the name 'jpeg' of alpha.reward of alpha is that of a built-in one" in caplog.text


@pytest.mark.parametrize(
    ("value", "words"), [("alpha.reward:score", "must name a module"), ("gone.reward", "no module 'gone.reward'")]
)
def test_an_entry_point_that_names_no_module_is_refused(installed, value, words):
    installed("alpha", brightness=value)
    with pytest.raises(ConfigError, match=words):
        reward_plan({"name": "brightness"}, "rewards.0")


# ---- what a reward needs of the prompts and of the model


PLAN: Any = SimpleNamespace(name="r0", module=None)


WHOLE, BARE = Prompt("whole", {"include": [], "images": ["a.png"]}), Prompt("bare")


def test_a_prompt_without_what_a_reward_requires_is_named():
    card = Card(outputs=("a",), requires=("include",))
    require_metadata("data.prompts", [WHOLE], [PLAN], [card])
    require_metadata("data.prompts", [BARE], [PLAN], [None])
    with pytest.raises(ConfigError, match=r"data\.prompts: prompt 2, 'bare', has no 'include', .* reward 'r0'"):
        require_metadata("data.prompts", [WHOLE, BARE], [PLAN], [card])


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason"),
    [
        ("ocr", Prompt('a sign "Open"', {}), Prompt("a sign", {}), "asks for no text"),
        (
            "geneval",
            Prompt("a dog", {"include": [{"class": "dog", "count": 1}]}),
            Prompt("no dog", {"include": [{"class": "dog", "count": 0}]}),
            "count=0 must be at least 1",
        ),
        ("shapes", Prompt("a red circle"), Prompt("a cat"), "reward 'shapes'"),
        ("jpeg", Prompt("anything", {}), None, ""),
    ],
)
def test_a_prompt_that_a_reward_cannot_judge_is_named_before_anything_is_loaded(name, good, bad, reason):
    plan = reward_plan({"name": name}, "rewards.0")
    require_metadata("data.prompts", [good], [plan], [plan.card])
    if bad is not None:
        with pytest.raises(ConfigError, match=rf"data\.prompts: prompt 2, .*{reason}"):
            require_metadata("data.prompts", [good, bad], [plan], [plan.card])


def test_a_reward_that_is_only_evaluated_asks_nothing_of_the_training_prompts():
    jpeg, shapes = (reward_plan({"name": name}, "rewards.0") for name in ("jpeg", "shapes"))
    scorer, watched = build_scorers(
        [jpeg], [shapes], [Prompt("a cat")], ("data.eval_prompts", [Prompt("a red circle")])
    )
    assert [len(one.entries) for one in (scorer, watched) if one is not None] == [1, 2]
    with pytest.raises(ConfigError, match=r"data\.eval_prompts: prompt 1, 'a cat'.*reward 'shapes'"):
        build_scorers([jpeg], [shapes], [Prompt("a red circle")], ("data.eval_prompts", [Prompt("a cat")]))


def test_a_reward_on_edits_needs_source_pictures():
    card = Card(outputs=("a",), modality="edit")
    require_metadata("data.prompts", [WHOLE], [PLAN], [card])
    with pytest.raises(ConfigError, match="has no 'images'"):
        require_metadata("data.prompts", [BARE], [PLAN], [card])


@pytest.mark.parametrize(
    ("modality", "clips", "words"),
    [
        ("image", False, None),
        ("image", True, "judges images, and the model makes videos"),
        ("video", True, None),
        ("video", False, "judges videos, and the model makes images"),
        ("any", False, None),
        ("any", True, None),
        ("edit", True, "judges images"),
    ],
)
def test_a_reward_that_cannot_judge_what_the_model_makes_is_refused(modality, clips, words):
    card = Card(outputs=("a",), modality=modality)
    if words is None:
        require_modality("r", card, videos=clips)
    else:
        with pytest.raises(ConfigError, match=f"'r' {words}"):
            require_modality("r", card, videos=clips)


def test_a_run_without_what_its_reward_requires_ends_before_anything_is_loaded(monkeypatch, tmp_path):
    from flowrl.config.load import load_config, resolve
    from flowrl.training.world import ALONE

    def loaded(*given: object) -> None:
        raise AssertionError("a reward was built")

    monkeypatch.setattr(build, "build_rewards", loaded)
    config = load_config("configs/quickstart.yaml", ["rewards=[{name: geneval}]", f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=r"data\.prompts: prompt 1, .* has no 'include', which the reward 'geneval'"):
        assemble(resolve(config), ALONE, tmp_path)
