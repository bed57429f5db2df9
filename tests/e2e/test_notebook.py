"""The notebooks: their cells in order, with few iterations, outside the checkout."""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def cells(name: str) -> list[tuple[list[str], str]]:
    """(tags, source) of each code cell that is Python."""
    listed = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))["cells"]
    code = [
        (cell["metadata"].get("tags", []), "".join(cell["source"])) for cell in listed if cell["cell_type"] == "code"
    ]
    return [(tags, text) for tags, text in code if "install" not in tags]


def execute(name: str, few: dict[str, int]) -> dict[str, Any]:
    """The names that a notebook leaves, with these values in place of its parameters."""
    names: dict[str, Any] = {}
    for tags, text in cells(name):
        exec(compile(text, name, "exec"), names)
        if "parameters" in tags:
            assert few.keys() <= names.keys()
            names |= few
    return names


@pytest.mark.slow
def test_the_quickstart_trains_and_shows_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    display = ModuleType("IPython.display")
    display.__dict__["HTML"] = shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    execute("quickstart.ipynb", {"iterations": 2, "evaluated": 16})
    assert "srcdoc=" in shown[0]
    for name in ("notebook", "redness"):
        assert json.loads((tmp_path / "runs" / name / "summary.json").read_text())["iterations"] == 2
    assert "redness" in json.loads((tmp_path / "runs" / "redness" / "summary.json").read_text())["tuned"]


@pytest.mark.slow
def test_flow_grpo_from_parts_has_the_gradient_of_a_session_and_trains(tmp_path, monkeypatch, capsys):
    """Its own asserts: ratio 1 before the first update, and the gradient norm of a session."""
    monkeypatch.chdir(tmp_path)
    left = execute("flow_grpo_from_parts.ipynb", {"iterations": 4, "evaluated": 16})
    assert capsys.readouterr().out.count("gradient") == 3
    assert bool((left["ratios"] != 1).any()), "the second update of an iteration is off policy"
    assert list(tmp_path.iterdir()) == []


def test_flow_grpo_from_parts_is_at_most_120_lines_and_uses_neither_session_nor_trainer_to_train():
    text = "\n".join(text for _, text in cells("flow_grpo_from_parts.ipynb"))
    assert len([line for line in text.splitlines() if line.strip()]) <= 120
    names = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert (names.count("Session"), names.count("Trainer")) == (1, 0)  # one to compare with


def test_stored_outputs_are_small():
    for file in NOTEBOOKS.glob("*.ipynb"):
        outputs = [cell.get("outputs") for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]]
        assert len(json.dumps(outputs)) < 5000, file.name
