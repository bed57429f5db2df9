"""notebooks/quickstart.ipynb: its cells in order, with few iterations, outside the checkout."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"
FEW = {"iterations": 2, "evaluated": 16}


def cells() -> list[tuple[list[str], str]]:
    """(tags, source) of each code cell that is Python."""
    listed = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in listed)
    code = [
        (cell["metadata"].get("tags", []), "".join(cell["source"])) for cell in listed if cell["cell_type"] == "code"
    ]
    return [(tags, text) for tags, text in code if "install" not in tags]


@pytest.mark.slow
def test_the_notebook_trains_and_shows_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    display = ModuleType("IPython.display")
    display.__dict__["HTML"] = shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, object] = {}
    for tags, text in cells():
        ast.parse(text)
        exec(compile(text, str(NOTEBOOK), "exec"), names)
        if "parameters" in tags:
            assert FEW.keys() <= names.keys()
            names |= FEW
    assert "srcdoc=" in shown[0]
    for name in ("notebook", "redness"):
        assert json.loads((tmp_path / "runs" / name / "summary.json").read_text())["iterations"] == 2
    assert "redness" in json.loads((tmp_path / "runs" / "redness" / "summary.json").read_text())["tuned"]
