"""`extends`: what is merged, where paths start, and how circles, missing files and bad keys are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config.extends import merged
from flowrl.config.load import load_config, resolve
from flowrl.config.schema import to_tree
from flowrl.core.errors import ConfigError
from scripts.lab.recipes import read_recipe
from tests.config.test_config import TREE, refusal

KEYS = st.sampled_from(["name", "a", "b", "algorithm"])
LEAVES = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2) | st.none()
TREES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8), max_size=4
)


@pytest.fixture
def write(tmp_path):
    def make(name: str, tree: dict[str, Any]) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(tree))
        return file

    return make


@settings(deadline=None, max_examples=60)
@given(base=TREES, own=TREES)
def test_what_the_file_says_holds_and_the_rest_is_the_bases(base, own):
    before = json.dumps([base, own])
    result = merged(base, own)
    assert json.dumps([base, own]) == before
    assert merged(base, {}) == base
    assert merged(result, own) == result
    assert set(result) == set(base) | set(own)
    for key, value in own.items():
        if not isinstance(value, dict):
            assert result[key] == value
        else:
            assert value.items() <= result[key].items() or any(isinstance(inner, dict) for inner in value.values())
    assert all(result[key] == base[key] for key in base.keys() - own.keys())


def test_a_name_that_changes_replaces_the_whole_mapping():
    base = {"algorithm": {"clip_range": 1e-4, "advantages": {"name": "group", "std": "global"}}}
    assert merged(base, {"algorithm": {"name": "awm"}}) == {"algorithm": {"name": "awm"}}
    assert merged(base, {"algorithm": {"path": "mine.py"}}) == {"algorithm": {"path": "mine.py"}}
    kept = merged(base, {"algorithm": {"name": "flow_grpo", "kl": {"coef": 1.0}}})["algorithm"]
    assert kept["clip_range"] == 1e-4
    other = merged(base, {"algorithm": {"advantages": {"name": "median"}}})["algorithm"]
    assert other == {"clip_range": 1e-4, "advantages": {"name": "median"}}
    # The adapter of a model is known by its path; to say it changes nothing.
    assert merged({"model": {"path": "tiny-sd3"}}, {"model": {"name": "sd3"}})["model"]["path"] == "tiny-sd3"
    assert merged({"name": "one", "seed": 1}, {"name": "two"}) == {"name": "two", "seed": 1}


def test_a_chain_gives_what_the_merged_file_would_and_the_resolved_tree_has_no_extends(write, tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("far/list.txt", "near.txt"):
        (tmp_path / name).write_text("a red square\na blue circle\n")
    write("far/base.yaml", TREE | {"data": {"prompts": "list.txt"}})
    write("middle.yaml", {"extends": "far/base.yaml", "optim": {"learning_rate": 1e-5}, "rewards": [{"name": "jpeg"}]})
    last = write("last.yaml", {"extends": "middle.yaml", "name": "last", "data": {"eval_prompts": "near.txt"}})
    run = load_config(last, ["seed=7"])
    whole = TREE | {
        "name": "last",
        "seed": 7,
        "rewards": [{"name": "jpeg"}],
        "data": {"prompts": str(tmp_path / "far/list.txt"), "eval_prompts": str(tmp_path / "near.txt")},
        "optim": {"updates_per_iteration": 2, "learning_rate": 1e-5},
    }
    assert to_tree(run) == to_tree(load_config(write("whole.yaml", whole)))
    assert "extends" not in resolve(run).tree()


def test_a_shipped_recipe_is_found_by_name_and_a_file_wins(write):
    file = write("mine.yaml", {"extends": "quickstart", "name": "mine", "iterations": 1})
    run = load_config(file)
    assert (run.name, run.iterations, run.algorithm["name"]) == ("mine", 1, "awm")
    write("quickstart", TREE)
    assert load_config(file).rollout.prompts_per_iteration == 4


def test_circles_missing_files_and_wrong_types_are_named_with_the_chain(write):
    one, two = write("one.yaml", {"extends": "two.yaml"}), write("two.yaml", {"extends": "one.yaml"})
    assert f"closes a circle: {one} -> {two} -> {one}; take extends out" in refusal(load_config, one)
    itself = write("self.yaml", {"extends": "./self.yaml"})
    assert f"{itself} -> {itself}" in refusal(load_config, itself)
    write("lost.yaml", {"extends": "quikstart"})
    first = write("first.yaml", {"extends": "lost.yaml"})
    message = refusal(load_config, first)
    for part in ("extends='quikstart': there is no", f"read as {first} -> ", "did you mean 'quickstart'?"):
        assert part in message
    for wrong in (["a.yaml", "b.yaml"], 3, None, ""):
        assert "must be one file or the name of a recipe" in refusal(load_config, write("w.yaml", {"extends": wrong}))
    assert "extends stands in a file alone" in refusal(load_config, "quickstart", ["extends=lab/awm"])


def test_messages_name_the_file_that_holds_the_key(write):
    base = write("base.yaml", TREE | {"optim": {"learning_rat": 1.0}, "algorithm": {"name": "flow_grpo", "clp": 1}})
    own = write("own.yaml", {"extends": "base.yaml", "seed": "x"})
    message = refusal(load_config, own)
    assert message.startswith("optim.learning_rat: unknown key")
    assert message.endswith(f"(in {base})")
    fixed = write("fixed.yaml", {"extends": "own.yaml", "optim": None})
    assert "optim" in refusal(load_config, fixed)
    base.write_text(yaml.safe_dump(TREE | {"algorithm": {"name": "flow_grpo", "clp": 1}}))
    assert refusal(load_config, own).endswith(f"(in {own})")
    assert refusal(load_config, own, ["seed=1"]).startswith("algorithm.clp: unknown key")
    assert refusal(load_config, own, ["seed=1"]).endswith(f"(in {base})")
    assert "(in " not in refusal(load_config, own, ["seed=y"])


def test_the_lab_reads_a_recipe_as_merged(write):
    base = Path("configs/lab/awm.yaml").resolve()
    assert read_recipe(base) == yaml.safe_load(base.read_text())
    assert read_recipe(write("same.yaml", {"extends": str(base)})) == read_recipe(base)
    assert read_recipe(write("other.yaml", {"extends": str(base), "seed": 5})) == read_recipe(base) | {"seed": 5}


def test_a_bad_base_is_named(write, tmp_path):
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not valid YAML"):
        load_config(write("b.yaml", {"extends": "broken.yaml"}))
