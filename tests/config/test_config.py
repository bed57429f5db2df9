"""YAML to a strict configuration: what is refused, with which words, before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config.checks import check_model
from flowrl.config.load import load_config, resolve, run_tree
from flowrl.config.schema import to_tree
from flowrl.core.errors import ConfigError
from flowrl.core.strict import apply_override, parse_yaml, validate
from flowrl.data.options import PriorityConfig
from flowrl.models.base import ModelAdapter
from flowrl.models.pipelines.distilled import Distilled
from flowrl.scoring.build import build_rewards
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.scorer import Scorer
from tests.tables import table
from tests.tiny_sd3 import ROOT

TREE = {
    "name": "test",
    "iterations": 3,
    "model": {"name": "sd3", "path": "tiny-sd3"},
    "data": {"prompts": "shapes:train"},
    "rewards": [{"name": "shapes", "weight": 1.0}, {"name": "jpeg", "weight": 0.5}],
    "rollout": {"prompts_per_iteration": 4, "group_size": 6},
    "optim": {"updates_per_iteration": 2},
}


@pytest.fixture
def read(tmp_path):
    """load_config of TREE with overrides; `text` replaces TREE."""

    def load(*overrides: str, text: str | None = None) -> Any:
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(TREE) if text is None else text)
        return load_config(file, list(overrides))

    return load


def without(key: str) -> str:
    """TREE without a key, as YAML."""
    return yaml.safe_dump({k: v for k, v in TREE.items() if k != key})


def refusal(action, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*arguments)
    return str(caught.value)


# ---- YAML


# Plain YAML 1.1 reads 1e-4 as a string.
FLOATS = {
    **{"1e-4": 1e-4, "1E-4": 1e-4, "-1e-4": -1e-4, "1e4": 1e4, "1.5e3": 1500.0, "2.e3": 2000.0, "3.0e-05": 3e-5},
    **{".5": 0.5, "-.5": -0.5, "5.": 5.0, "1_000.5": 1000.5, ".inf": float("inf")},
}
INTEGERS = {"10": 10, "-10": -10, "1_000": 1000, "0": 0}
TEXTS = ["-e5", "+E1", "e5", "1e", "1e-4x", "1.2.3", "v1.0", "2025-01-31", "abc", "."]


@pytest.mark.parametrize(("text", "value"), [*FLOATS.items(), *INTEGERS.items(), *zip(TEXTS, TEXTS, strict=True)])
def test_a_scalar_is_a_float_an_integer_or_a_text(text, value):
    found = parse_yaml(text, "test")
    assert (type(found), found) == (type(value), value)


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_of_python_is_read_back_exactly(value):
    assert parse_yaml(repr(value), "test") == value
    assert parse_yaml(yaml.safe_dump({"x": value}), "test") == {"x": value}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "not valid YAML") for text in ("name: [unclosed", "name: !!python/object/apply:os.getcwd []")),
        *((text, "mapping") for text in ("", "just words", "- a\n- b")),
        *((without(key), f"{key}: is required") for key in ("name", "model", "data", "iterations")),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(read, text, reason):
    message = refusal(lambda: read(text=text))
    assert reason in message
    assert "config.yaml" in message or "required" in message


def test_a_missing_file_is_refused_and_two_mistakes_are_named_at_once(read, tmp_path):
    assert "does not exist" in refusal(load_config, tmp_path / "nowhere.yaml")
    assert "is a folder without config.yaml, so no run" in refusal(load_config, tmp_path)
    message = refusal(read, "iterations=x", "seed=y")
    assert "iterations = 'x'" in message
    assert "seed = 'y'" in message


# ---- keys, types, ranges


def test_a_good_file_is_read_with_its_defaults(read):
    run = read()
    assert run.rollout.num_inference_steps == 10
    assert run.optim.learning_rate == 3e-4
    assert run.samples_per_iteration == 24
    assert run.folder == Path("runs/test")
    assert read("rollout.guidance_scale=4").rollout.guidance_scale == 4.0, "a whole number where a float is due"


# ---- geometry


def test_a_group_of_one_is_refused_where_samples_of_a_prompt_are_compared_and_legal_elsewhere(read):
    one = "rollout.group_size=1", "rollout.prompts_per_iteration=4", "optim.updates_per_iteration=1"

    def refused(*overrides: str) -> str:
        return refusal(resolve, read(*one, *overrides))

    assert "algorithm.advantages.name=group compares" in refused()
    assert "rollout.group_size=1" in refused("algorithm={name: flow_grpo, advantages: {name: median}}")
    assert "try rollout.group_size=2" in refused(
        "algorithm={name: dgpo, advantages: {name: batch}}", "rollout.sampler=null"
    )
    filtered = "algorithm={name: diffusion_nft, advantages: {name: batch}, filter: {}}"
    assert "filter compares the samples of a prompt" in refused(filtered, "rollout.sampler=null")
    for method in ("flow_grpo, advantages: {name: batch}", "ddpo", "dpok, sde_steps: [0]"):
        assert resolve(read(*one, f"algorithm={{name: {method}}}")).run.rollout.group_size == 1


def test_a_priority_of_prompts_needs_prompts_rewards_and_what_it_is_by(read):
    one = "rollout.group_size=1", "rollout.prompts_per_iteration=4", "optim.updates_per_iteration=1"
    alone, bandit = "algorithm={name: ddpo}", "data.priority.by=ucb"
    dpok, critic = "algorithm={name: dpok, sde_steps: [0]}", "algorithm={name: rwr}"
    said = refusal(resolve, read(*one, alone, "data.priority={}"))
    assert "data.priority.by=spread: ddpo has no spread at rollout.group_size=1" in said
    assert "data.priority=null" in said
    assert "data.priority.by=ucb: dpok has no advantages" in refusal(resolve, read(*one, dpok, bandit))
    assert "data.priority.by=ucb: rwr has no advantages" in refusal(
        resolve, read(critic, bandit, "rollout.sampler=null")
    )
    pairs = "algorithm={name: diffusion_dpo}", "rewards=[]", "data={pairs: {path: some.jsonl}, priority: {}}"
    assert "diffusion_dpo has no prompts to draw, nor rewards" in refusal(
        resolve, read(*pairs, "rollout.sampler=null", "eval.rewards=[]")
    )
    assert "rewards is empty" in refusal(resolve, read("rewards=[]", "data.priority={}"))
    assert resolve(read(*one, alone, bandit)).run.data.priority == PriorityConfig(by="ucb")
    assert resolve(read("data.priority={}")).run.data.priority == PriorityConfig()


# ---- overrides


def test_overrides_reach_nested_keys_lists_and_missing_mappings(read):
    run = read("optim.learning_rate=1e-4", "rewards.1.weight=2", "model.lora.rank=8", "eval.best_guidance=[2, 3.5]")
    assert run.optim.learning_rate == 1e-4
    assert run.rewards == [{"name": "shapes", "weight": 1.0}, {"name": "jpeg", "weight": 2}]
    assert run.model["lora"] == {"rank": 8}
    assert run.eval.best_guidance == [2.0, 3.5]
    assert read("seed=1", "seed=2").seed == 2
    assert read("optim.max_grad_norm=null").optim.max_grad_norm is None
    assert read("output=runs=2").output == "runs=2"
    assert read("rewards=[{name: jpeg}]").rewards == [{"name": "jpeg"}]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("optim.learning_rate", ("not of the form key=value",)),
        ("=3", ("not of the form key=value",)),
        ("rewards.2.weight=1", ("rewards is a list of 2", "no item '2'")),
        ("rewards.-1.weight=1", ("rewards is a list of 2", "no item '-1'")),
        ("rewards.first.weight=1", ("no item 'first'",)),
        ("name.first=1", ("name is a plain value",)),
        ("seed=[1", ("not valid YAML",)),
    ],
)
def test_an_override_that_leads_nowhere_is_refused_with_the_word(word, words):
    message = refusal(apply_override, {"name": "x", "rewards": [{}, {}]}, word)
    assert repr(word) in message
    assert all(part in message for part in words), message


# ---- components


def test_resolving_finds_every_component_with_its_own_options(read):
    options = ("rollout.sampler={name: flow_sde, noise_level: 0.9}", "algorithm={name: flow_grpo, clip_range: 1e-3}")
    found = resolve(read(*options))
    assert (found.model.name, found.sampler.name, found.algorithm.name) == ("sd3", "flow_sde", "flow_grpo")
    assert found.sampler.config.noise_level == 0.9
    assert found.algorithm.config.clip_range == 1e-3
    assert [plan.entry.weight for plan in found.rewards] == [1.0, 0.5]
    assert found.eval_rewards == ()


def test_the_resolved_tree_reads_back_as_the_same_run(read, tmp_path):
    first = resolve(read("algorithm={name: flow_grpo, kl: {coef: 0.01}}", "optim.learning_rate=1e-5"))
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(first.tree()))
    assert resolve(load_config(file)).tree() == first.tree()
    file.write_text(yaml.safe_dump(to_tree(first.run)))
    assert load_config(file) == first.run


def test_an_option_of_a_run_folder_that_is_not_known_is_refused_as_in_any_file(read, tmp_path):
    tree = resolve(read()).tree()
    tree["optim"]["wieght"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert "optim.wieght: unknown key (value 1)" in refusal(load_config, tmp_path)


# ---- a user's one-file reward


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_with_a_score_function_is_a_reward(tmp_path):
    path = write(tmp_path, "def score(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n")
    plan = reward_plan({"path": path, "weight": 2.0}, "rewards.0")
    assert plan.name == "mine"
    built = plan.build()
    assert built.weight == 2.0
    assert built.reward.card.outputs == ("mine",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("defines neither score",)),
        ("score = 3\n", ("defines neither score",)),
        ("def build(config):\n    return None\n", ("is not a component", "Config and build")),
        ("import not_installed_anywhere\n", ("cannot be imported", "ModuleNotFoundError", "not_installed_anywhere")),
        ("def score(:\n", ("cannot be imported", "SyntaxError")),
        ("1 / 0\n", ("cannot be imported", "ZeroDivisionError")),
        ("import sys\nsys.exit(0)\n", ("cannot be imported", "SystemExit")),
    ],
)
def test_a_file_that_is_no_reward_is_refused_with_the_reason(tmp_path, text, words):
    path = write(tmp_path, text)
    message = refusal(reward_plan, {"path": path}, "rewards.0")
    assert message.startswith("rewards.0: ")
    assert path in message
    assert all(word in message for word in words), message


def test_a_file_that_is_missing_or_no_python_and_an_unknown_option_are_refused(tmp_path):
    assert "there is no such file" in refusal(reward_plan, {"path": str(tmp_path / "gone.py")}, "rewards.0")
    assert "must be a .py file" in refusal(reward_plan, {"path": "my_package.reward"}, "rewards.0")
    path = write(tmp_path, "def score(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    message = refusal(reward_plan, {"path": path, "wieght": 1.0}, "rewards.0")
    assert "rewards.0.wieght: unknown key; did you mean 'weight'?" in message


def test_a_file_with_config_and_build_has_its_own_strict_options(tmp_path):
    path = write(
        tmp_path,
        "from dataclasses import dataclass\nfrom flowrl.reward import Card, Reward\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Config:\n    level: float = 0.5\n\n"
        "def build(config):\n"
        "    return Reward(score=lambda i, p, m: [config.level] * len(p), card=Card(outputs=('level',)))\n",
    )
    built = reward_plan({"path": path, "level": 0.25}, "rewards.0").build()
    assert built.reward.score([], ["a", "b"], [{}, {}]) == [0.25, 0.25]
    assert "did you mean 'level'?" in refusal(reward_plan, {"path": path, "leve": 0.25}, "rewards.0")


STRICT, PARTIAL = "{name: shapes, outputs: {shapes_strict: 1}}", "{name: shapes, outputs: {shapes_partial: 1}}"


def test_entries_of_one_reward_with_the_same_options_share_what_is_built(read, tmp_path):
    path = write(tmp_path, "def score(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n")
    other = "{name: flowrl.rewards.shapes, surplus_penalty: 0.25, weight: 0}"  # by a dotted path, default spelt out
    found = resolve(read(f"rewards=[{STRICT}, {PARTIAL}, {other}, {{path: {path}}}, {{path: {path}, clip: [0, 1]}}]"))
    first, second, third, mine, clipped = build_rewards(found.rewards)
    assert first.reward is second.reward is third.reward
    assert (first.shares(), second.shares()) == ({"shapes_strict": 1.0}, {"shapes_partial": 1.0})
    assert mine.reward is clipped.reward
    assert mine.reward is not first.reward
    assert clipped.clip == (0, 1)


def test_entries_of_one_reward_with_other_options_need_a_prefix(read):
    other = "{name: shapes, surplus_penalty: 0.5}"
    message = refusal(resolve, read(f"rewards=[{STRICT}, {other}]"))
    assert "'shapes_strict' is produced by rewards.0 (shapes) and by rewards.1 (shapes)" in message
    assert "give one of them a prefix (prefix: a makes it a_shapes_strict)" in message
    message = refusal(resolve, read(f"rewards=[{STRICT}]", f"eval.rewards=[{other}]"))
    assert "rewards.0 (shapes) and by eval.rewards.0 (shapes)" in message
    found = resolve(read(f"rewards=[{STRICT}, {other[:-1]}, prefix: hard}}]"))
    first, second = build_rewards(found.rewards)
    assert first.reward is not second.reward
    assert Scorer([first, second]).outputs == (
        *("shapes_strict", "shapes_partial"),
        *("hard_shapes_strict", "hard_shapes_partial"),
    )


def test_two_models_of_one_reward_are_refused_before_either_is_looked_for(read):
    """Neither exists: the names are known without them, whatever options change them."""
    one, other = "name: clip_score, model: /nowhere/a", "name: clip_score, model: /nowhere/b"
    message = refusal(resolve, read(f"rewards=[{{{one}}}, {{{other}}}]"))
    assert "'clip_cos' is produced by rewards.0 (clip_score) and by rewards.1 (clip_score)" in message
    resolve(read(f"rewards=[{{{one}}}, {{{other}, prefix: b}}]"))
    resolve(read(f"rewards=[{{{one}}}, {{{other}, convention: percent}}]"))
    message = refusal(resolve, read(f"rewards=[{{{one}, prefix: b}}, {{{other}, prefix: b}}]"))
    assert "'b_clip_cos' is produced by rewards.0 (b_clip_score)" in message
    servers = "name: remote, servers: [http://127.0.0.1:1]"
    resolve(read(f"rewards=[{{{servers}, reward: a}}, {{{servers}, reward: b}}]"))  # only the servers know


@pytest.mark.parametrize("option", ["prefix: a", "timeout: 5"])
def test_one_reward_cannot_be_named_or_timed_in_two_ways(read, option):
    key = option.partition(":")[0]
    message = refusal(resolve, read(f"rewards=[{STRICT}, {PARTIAL[:-1]}, {option}}}]"))
    assert f"rewards.1.{key}={option.partition(': ')[2]}" in message
    assert "the reward of rewards.0 (shapes)" in message
    both = [each[:-1] + f", {option}}}" for each in (STRICT, PARTIAL)]
    resolve(read(f"rewards=[{', '.join(both)}]"))


@pytest.mark.parametrize("prefix", ["", "a b", "a/b", "a."])
def test_a_prefix_is_part_of_a_name(read, prefix):
    assert "must be letters, digits and _" in refusal(resolve, read(f"rewards=[{{name: jpeg, prefix: '{prefix}'}}]"))


def test_an_entry_that_says_the_same_twice_is_refused(read):
    message = refusal(resolve, read(f"rewards=[{STRICT}, {PARTIAL}, {STRICT}]"))
    assert "rewards.2 repeats rewards.0 (shapes)" in message
    assert "weight" in message
    message = refusal(resolve, read(f"rewards=[{STRICT}]", f"eval.rewards=[{PARTIAL}, {STRICT}]"))
    assert "eval.rewards.1 repeats rewards.0" in message
    assert "evaluated anyway" in message
    resolve(read(f"rewards=[{STRICT}]", f"eval.rewards=[{PARTIAL}]"))


# ---- tables


REFUSED = table(__file__, "refused")
"""(overrides, what the refusal says: the key and its value, and the remedy)."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_what_is_wrong_or_does_not_go_together_is_refused_before_a_model_is_loaded(read, row):
    message = refusal(lambda: resolve(read(*row[0].split("; "))))
    assert all(word in message for word in row[1:]), message


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"optim.updates_per_iteration={updates}" for updates in (1, 2, 3, 4, 6, 8, 12, 24)),
        # batch sizes need not divide anything
        *(f"rollout.batch_size={size}; optim.batch_size={size}; eval.batch_size={size}" for size in (1, 5, 7, 1000)),
        "algorithm.guidance_scale=4.5; rollout.guidance_scale=4.5",
        "algorithm.sde_steps=[0, 8]",
        "rollout.num_inference_steps=2",
        "rewards.0.weight=0",
        "rewards.0.clip=[-.inf, 1.0]; optim.max_grad_norm=.inf",
        "algorithm={name: dgpo}; optim.batch_size=6",
        "algorithm={name: awm, ratio: sample}; optim.batch_size=6",
        "algorithm={name: awm}; optim.batch_size=1; rollout.num_inference_steps=8",
        "algorithm={name: fpo}; optim.batch_size=8; rollout.num_inference_steps=1",
        "algorithm={name: raft, best: 5}",
        # Guidance of training is a method's own where it has no log-probs.
        "algorithm={name: diffusion_nft, guidance_scale: 2.0}; rollout.guidance_scale=4.5",
    ],
)
def test_their_neighbours_are_accepted_and_a_method_on_edges_has_its_sampler_written_out(read, overrides):
    resolved = resolve(read(*overrides.split("; ")))
    sampler = resolved.tree()["rollout"]["sampler"]
    assert (sampler and sampler["name"]) == ("flow_sde" if resolved.algorithm.name == "flow_grpo" else None)


# ---- what looks right and is not


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nseed: 1\nname: b\n", ("line 3", "'name'", "first in line 1")),
        ("optim:\n  ema: {decay: 0.1, every: 2, decay: 0.2}\n", ("line 2", "'optim.ema.decay'")),
        ("rewards:\n- name: jpeg\n- weight: 1\n  weight: 2\n", ("line 4", "'rewards.1.weight'", "line 3")),
        ("a: &loop\n  b: *loop\n", ("line 1", "a.b contains itself")),
        ("a: !!int word\n", ("not valid YAML", "tag")),
        ("[" * 1500, ("not valid YAML", "too deeply")),
        ("a: \0\n", ("not valid YAML", "x0000")),
        ("a:\n\tb: 1\n", ('in "run.yaml", line 2', "replace the tab by spaces")),
    ],
)
def test_a_yaml_that_would_lose_or_break_something_is_refused_with_its_line(text, words):
    message = refusal(parse_yaml, text, "run.yaml")
    assert all(word in message for word in ("run.yaml", *words)), message


def test_merged_keys_may_be_overridden():
    assert parse_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\ne: *x\n", "k")["d"] == {"b": 3, "c": 2}


def test_a_configuration_that_is_no_utf8_is_refused_with_its_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes("name: a\noutput: caf\u00e9\n".encode("latin-1"))
    message = refusal(load_config, file)
    assert "run.yaml: not UTF-8 text" in message
    assert "line 2" in message


def test_a_component_of_another_package_may_take_an_infinity_and_no_nan():
    config = dataclasses.make_dataclass("Config", [("bound", float)], namespace={"__module__": "theirs"})
    assert validate(config, {"bound": math.inf}, "rewards.0").bound == math.inf
    assert "rewards.0 must be a mapping" in refusal(validate, config, [1], "rewards.0")
    assert "nan" in refusal(validate, config, {"bound": math.nan}, "rewards.0")


def model_with(**facts: Any) -> ModelAdapter:
    """A model of which nothing else is known."""
    made = ModelAdapter()
    vars(made).update(facts)
    return made


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rollout.guidance_scale", "0.5"),
        ("eval.guidance_scale", "0"),
        ("algorithm.guidance_scale", "0.5"),
        ("eval.best_guidance", "[2, 0.9]"),
        ("algorithm", "{name: crd, reference_guidance: 0}"),
    ],
)
def test_guidance_below_the_scale_that_is_none_is_refused_where_it_changes_nothing(read, key, text):
    both = [f"{key}={text}", *(["rollout.guidance_scale=0.5"] if key.startswith("algorithm.") else [])]
    resolved = resolve(read(*both))
    message = refusal(check_model, resolved, ModelAdapter())
    assert message.startswith(key if not key.startswith("algorithm.") else "rollout.guidance_scale")
    assert "guides above 1 only; try " in message
    # The network takes the scale as an input; a pipeline that guides above 0; nothing is known yet.
    for adapter in (model_with(branches=lambda scale: 1), model_with(unguided=0.0), None):
        assert check_model(resolved, adapter) == []
    assert "guides above 0.7 only" in refusal(
        check_model, resolve(read("rollout.guidance_scale=0.6")), model_with(unguided=0.7)
    )
    assert check_model(resolve(read("rollout.guidance_scale=1")), ModelAdapter()) == []
    embedded = model_with(branches=lambda scale: 1)
    below = refusal(check_model, resolve(read("eval.guidance_scale=-1")), embedded)
    assert below.startswith("eval.guidance_scale=-1 must not be negative")


@pytest.mark.parametrize("key", ["optim.ema.every", "optim.ema.first", "optim.warmup_updates"])
@pytest.mark.parametrize(("value", "noted"), [(5, True), (4, False)])
def test_what_a_run_of_too_few_updates_never_gets_to_is_noted_with_their_number(read, key, value, noted):
    words = (f"{key}={value}", "iterations=2", "optim.updates_per_iteration=2")
    notes = check_model(resolve(read(*words)), ModelAdapter())
    assert [note.partition(":")[0] for note in notes] == [f"{key}=5"] * noted
    assert not noted or "4 updates" in notes[0]


@pytest.mark.parametrize(("gamma", "noted"), [(0.5, True), (1.1, False)])
def test_notes_of_a_method_are_those_of_its_options(read, gamma, noted):
    notes = check_model(resolve(read(f"algorithm={{name: advantage_flow, gamma: {gamma}}}")), None)
    assert [note.partition(" ")[0] for note in notes] == ["algorithm.gamma=0.5"] * noted


def test_a_reward_that_takes_videos_for_another_frame_rate_is_noted():
    entries = "rewards=[{name: shapes_motion}, {name: motion}, {name: motion, prefix: slow, fps: 4}]"
    resolved = resolve(load_config(ROOT / "configs" / "lab" / "video-flow_grpo.yaml", [entries]))
    notes = check_model(resolved, model_with(num_frames=9, fps=16.0))
    assert [note.partition(":")[0] for note in notes] == ["rewards.2.fps=4"]
    assert "saved and shown at 16 (model.fps); set it to 16 unless" in notes[0]
    assert check_model(resolved, model_with(num_frames=9, fps=4.0)) == []
    assert check_model(resolved, model_with(num_frames=1, fps=16.0)) == []


UNWATCHED = {
    "eval.rewards=[] guard.mode=null": "add a reward that is not trained on to eval.rewards (",
    "eval.every=0 guard.mode=null": "add eval.every=20 (",
    "guard.mode=off": "add guard.mode=rollback (",
    "eval.rewards=[] eval.every=0 guard.mode=off": "to eval.rewards, eval.every=20, guard.mode=rollback (",
}


@pytest.mark.parametrize("method", ["draft", "refl", "drtune", "leap_align", "flowbp", "srpo", "prfl"])
@pytest.mark.parametrize("words", UNWATCHED)
def test_a_climb_that_nothing_watches_is_noted_with_what_to_add(method, words):
    """A guard that is asked for (rollback) and has nothing to watch is refused; the note is of the others."""
    recipe = ROOT / "configs" / "lab" / f"{method}.yaml"
    resolved = resolve(load_config(recipe, words.split()))
    for adapter in (ModelAdapter(), None):
        (note,) = check_model(resolved, adapter)
        assert f"whose gradient {method} climbs" in note
        assert UNWATCHED[words] in note
    assert check_model(resolve(load_config(recipe)), ModelAdapter()) == []


def test_the_rate_that_a_warm_up_ends_at_is_the_one_of_the_last_update(read):
    words = ("optim.warmup_updates=8", "iterations=2", "optim.updates_per_iteration=2", "optim.learning_rate=1e-4")
    assert "ends at 5e-05" in check_model(resolve(read(*words)), ModelAdapter())[0]


SAMPLES = ("rollout.sampler=null", "optim.batch_size=8")


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("{name: crd}", r"^algorithm\.reference_guidance=4\.5: .*takes no CFG"),
        ("{name: crd, reference_guidance: 1.0}", None),
        ("{name: crd, kl: {coef: 0.0}}", None),
        ("{name: dgpo}", None),
    ],
)
def test_guidance_of_the_reference_is_refused_where_the_checkpoint_takes_none(read, method, reason):
    """By default CRD guides the untouched network: a distilled one was never made for that."""

    resolved = resolve(read(f"algorithm={method}", "model={name: sd, path: any}", *SAMPLES))
    adapter = model_with(distilled=Distilled(kind="adversarial", evidence="for a test"))
    if reason is None:
        check_model(resolved, adapter)
    else:
        assert re.search(reason, refusal(check_model, resolved, adapter))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: caf\xe9\n", "not UTF-8 text"),
        (b"name: a\0b\n", "not valid YAML"),
        (b"model: {path: tiny-sd3}\nrollout: {num_in", "not valid YAML"),
        (b"model: {path: tiny-sd3}\n", "is damaged: it has no rollout.num_inference_steps"),
        (b"- a\n", "a configuration is a mapping"),
    ],
)
def test_a_damaged_configuration_of_a_run_is_named_by_what_reads_it(tmp_path, content, words):
    from flowrl.run.trained import load_run_model

    (tmp_path / "config.yaml").write_bytes(content)
    for read in (lambda folder: run_tree(folder, "rollout.num_inference_steps"), load_run_model):
        message = refusal(read, tmp_path)
        assert str(tmp_path / "config.yaml") in message
        assert words in message
