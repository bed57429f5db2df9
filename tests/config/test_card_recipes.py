"""Recipes for one card: what they extend, what they change, and what the plan said that they need."""

import re

import pytest
import yaml

from flowrl.commands import _listed
from tests.recipes import CARDS, EVERY, FOLDER, recipe, words

# Keys that say how memory is used. A batch is of forwards: an update sums the same samples.
MEMORY = ("model.memory.", "model.gradient_checkpointing")
BATCHES = ("rollout.batch_size", "optim.batch_size", "eval.batch_size")


def values(tree: object, place: str = "") -> dict[str, object]:
    if isinstance(tree, dict):
        return {k: v for key, one in tree.items() for k, v in values(one, f"{place}.{key}".lstrip(".")).items()}
    return {place: tree}


@pytest.mark.parametrize("name", CARDS)
def test_it_is_its_recipe_but_for_the_name_and_how_memory_is_used(name):
    origin, _, gigabytes = name.removesuffix("gb").rpartition("-")
    assert origin in EVERY
    own, base = values(recipe(name).tree()), values(recipe(origin).tree())
    changed = {key for key in own | base if own.get(key) != base.get(key)}
    assert all(key == "name" or key.startswith(MEMORY) or key in BATCHES for key in changed)
    assert own["name"] == f"{base['name']}-{gigabytes}gb"
    if recipe(name).rewards:  # half precision depends on the batch
        assert own["rollout.batch_size"] == own["optim.batch_size"]
    text = (FOLDER / f"{name}.yaml").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 120
    assert f"flowrl plan configs/{name}.yaml" in text
    assert f"-m flowrl train configs/{name}.yaml" in text
    assert "Departs" in text
    assert "not run here" in words(name).lower()
    assert f"one card of {gigabytes} GB: {yaml.safe_load(text)['extends']}" in words(name)


def test_the_plan_of_each_leaves_a_gibibyte_of_its_card_and_the_page_has_the_number():
    needed = {row["name"]: row["memory_gib"] for row in _listed.recipes()}
    page = (FOLDER.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    assert CARDS
    for name in CARDS:
        gib = needed[name]
        assert gib is not None, f"python -m scripts.bench recipe-memory {name}"
        assert gib <= float(re.findall(r"-(\d+)gb", name)[0]) - 1, name
        assert re.search(rf"\| `{name}` \|.*\| {gib:.1f} \|", page), name
