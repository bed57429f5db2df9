"""Facts of components from their source: as an import has them, without torch."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from flowrl.core import registry
from flowrl.core.excerpt import Excerpt


def options(config: type) -> list[tuple[str, object]]:
    return [(item.name, item.default) for item in dataclasses.fields(config)]


@pytest.mark.parametrize("kind", registry.FOLDERS)
def test_facts_are_those_of_an_import(kind):
    for name in registry.names(kind):
        facts, module = registry.facts(kind, name), registry.load(kind, name)
        assert (facts.about, facts.get("LEVEL")) == (inspect.getdoc(module), vars(module).get("LEVEL"))
        if kind == "rewards":
            assert facts.value("CARD") == module.CARD
            assert repr(options(facts.value("Config"))) == repr(options(module.Config))


def test_a_list_of_cards_needs_no_torch():
    code = (
        "import sys\nfrom flowrl.core import registry\n"
        "assert all(registry.facts('rewards', name).value('CARD') for name in registry.names('rewards'))\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("import unheard_of\nX = 2 + Y\n", NameError),
        ("import unheard_of\nY = 3\nX = 2 * Y\nZ = unheard_of.z\n", 6),
        ("def f(a: unheard_of.T) -> int:\n    return a + Y\nfor Y in (1, 2):\n    pass\nX = f(Y)\nY = 7\n", 4),
        (
            "import os.path, unheard_of\ntry:\n    import json as j\nexcept OSError:\n    j = 2\nX = j.loads('1')\n",
            1,
        ),
        ("X = 1\nX = X + 1\nif X > 1:\n    X = 5\nelse:\n    X = unheard_of\n", 5),
    ],
)
def test_only_the_statements_that_a_name_needs_are_run(tmp_path, monkeypatch, source, value):
    (tmp_path / "some_component.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = Excerpt("some_component", "nowhere")
    if isinstance(value, int):
        assert own.value("X") == own.get("X") == value
    else:
        with pytest.raises(value):
            own.value("X")
