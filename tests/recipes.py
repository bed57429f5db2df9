"""What the tests of the real models' recipes share."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.planning import memory
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "configs"
PROVENANCE = yaml.safe_load((Path(__file__).parent / "config" / "provenance.yaml").read_text(encoding="ascii"))
_ALL = sorted(
    f"{file.parent.name}/{file.stem}"
    for file in FOLDER.glob("*/*.yaml")
    if file.parent.name not in ("lab", "proxy", "judge", "frozen")
)
CARDS = [name for name in _ALL if re.search(r"-\d+gb$", name)]
"""`<recipe>-<n>gb`: what extends a recipe for one card of n GB; its values are those of the recipe."""
EVERY = [name for name in _ALL if name not in CARDS]
PAIRED = [name for name in EVERY if "pairs:" in (FOLDER / f"{name}.yaml").read_text(encoding="ascii")]
"""`<model>/<method>-<data>`: those that learn from given pairs."""
RECIPES = [name for name in EVERY if name not in PAIRED]
"""`<model>/<method>-<reward>` of the real models."""


def at(tree: Any, key: str) -> Any:
    """The value at `a.b.c`; the tree itself at ``."""
    for part in filter(None, key.split(".")):
        tree = tree[part]
    return tree


def published(name: str) -> dict[str, Any]:
    """Key -> value of a recipe by provenance.yaml."""
    entry, values = PROVENANCE["recipes"][name], {}
    for taken in entry["takes"]:
        values |= PROVENANCE["sets"][taken]["values"]
    return values | entry.get("values", {})


def words(name: str) -> str:
    """The text of a recipe in one line, without the signs of its comments."""
    return " ".join((FOLDER / f"{name}.yaml").read_text(encoding="ascii").replace("#", " ").split())


@cache
def recipe(name: str, *overrides: str) -> Resolved:
    return resolve(load_config(FOLDER / f"{name}.yaml", list(overrides)))


@cache
def _skeleton(path: str) -> Any:
    """The model without its weights, which takes seconds, for the first recipe of it."""
    return memory.skeleton(next(run for run in map(recipe, RECIPES) if run.model.config.path == path))


def adapter(run: Resolved) -> Any:
    """The run's adapter on the meta device; recipes of one model share its pipeline."""
    first = _skeleton(run.model.config.path)
    family = vars(run.model.module).get("FAMILY")
    # The generic adapter has none; of its models there is one recipe each.
    return first if family is None else family.adapter(first.pipeline, run.model.config)
