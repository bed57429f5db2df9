"""`flowrl list KIND NAME` and `flowrl list recipes`: options with defaults and meaning, recipes by model and method."""

import dataclasses
import json
import subprocess
import sys
from typing import Annotated, Literal

import pytest

from flowrl.commands import _listed
from flowrl.commands import list as listing
from flowrl.commands._option_texts import option_texts
from flowrl.core import assets, registry
from flowrl.core.errors import Fault


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    coef: float = 0.0
    """Weight,
    in units."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    size: int
    """Number of things."""
    mode: Annotated[Literal["a", "b"] | None, "mark"] = None
    inner: Inner = dataclasses.field(default_factory=lambda: Inner(coef=0.5))
    """The inner ones."""
    none: Inner | None = None


def test_options_have_type_default_and_the_text_under_the_field():
    rows = [(one.name, one.type, one.default, one.about) for one in option_texts(Outer)]
    assert rows == [
        ("size", "integer", "required", "Number of things."),
        ("mode", "a or b or null", "null", ""),
        ("inner", "mapping", "as below", "The inner ones."),
        ("inner.coef", "number", "0.5", "Weight, in units."),
        ("none", "mapping or null", "null", ""),
        ("none.coef", "number", "0", "Weight, in units."),
    ]


@pytest.mark.parametrize("kind", ["models", "samplers", "algorithms", "rewards"])
def test_every_component_shows_each_of_its_options_and_has_a_page(kind):
    for name in registry.names(kind):
        facts = _listed.described(kind, name)
        config = registry.load(kind, name).Config
        shown = [one["name"] for one in facts["options"] if "." not in one["name"]]
        assert shown == [item.name for item in dataclasses.fields(config)], name
        assert (assets.PACKAGE.parent / facts["page"]).is_file(), name
        assert facts["level"] in ("tested", "verified", "experimental")


def test_a_list_and_a_component_as_json(capsys):
    for kind in ("credits", "recipes", "samplers"):
        listing.command(kind, None, True)
        assert len(json.loads(capsys.readouterr().out)) >= 6
    listing.command("rewards", "jpeg", True)
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert facts["options"][1] == {
        "name": "quality",
        "type": "integer",
        "default": "95",
        "about": "JPEG quality, 1 to 95. Sizes differ by a few bytes between builds of libjpeg.",
        "depth": 0,
    }
    listing.command("credits", "gdpo")
    assert "options, below algorithm.advantages\n  name: group" in capsys.readouterr().out


def test_a_list_and_a_reward_need_no_torch():
    code = (
        "import sys\nfrom flowrl.commands.list import command\n"
        "for words in ('models',), ('algorithms',), ('rewards',), ('rewards', 'ocr'), ('suites', 'geneval'):\n"
        "    command(*words)\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("kind", "name"), [("samplers", None), ("suites", "geneval"), ("rewards", "jpeg")])
def test_what_is_not_stored_is_imported(kind, name, capsys, monkeypatch):
    listing.command(kind, name)
    stored = capsys.readouterr().out
    monkeypatch.setattr(registry, "stored", lambda kind: {})
    listing.command(kind, name)
    assert capsys.readouterr().out == stored


def test_unknown_names_give_the_nearest():
    for kind, wrong, right in (
        ("algorithms", "awn", "awm"),
        ("credits", "medain", "median"),
        ("rewards", "ocrr", "ocr"),
    ):
        with pytest.raises(Fault, match=f"did you mean '{right}'"):
            _listed.described(kind, wrong)


def test_recipes_tell_model_method_and_a_memory_that_is_of_the_same_options(monkeypatch):
    rows = {row["name"]: row for row in _listed.recipes()}
    assert set(rows) == set(assets.recipes())
    assert (rows["quickstart"]["model"], rows["quickstart"]["method"]) == ("tiny-sd3", "awm")
    assert rows["quickstart"]["memory_gib"] > 0
    same = _listed.recipe_tree
    monkeypatch.setattr(_listed, "recipe_tree", lambda name: same(name) | {"seed": 99})
    assert {row["memory_gib"] for row in _listed.recipes()} == {None}
