"""The command line starts quickly, lists what there is, and documents every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import COMMANDS, DEBUG, PAGES, main
from flowrl.core import registry


def flowrl(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "flowrl", *words], capture_output=True, text=True, timeout=120)


def test_help_names_every_command_and_loads_no_torch():
    result = flowrl("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert name in result.stdout
    code = "import sys, flowrl.cli as c; c._register(); print([m for m in ('torch', 'diffusers') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert loaded.stdout.strip() == "[]", loaded.stderr


@pytest.mark.parametrize("kind", sorted(registry.FOLDERS))
def test_every_component_is_listed_with_a_level(kind: str):
    for name in registry.names(kind):
        module = registry.load(kind, name)
        assert module.LEVEL in ("tested", "verified", "experimental"), name
        assert callable(module.aggregate if kind == "suites" else module.build)
        assert kind == "suites" or hasattr(module, "Config")
        assert module.__doc__


def test_an_unknown_command_exits_with_2():
    assert flowrl("trian").returncode == 2


@pytest.mark.parametrize("words", [(), ("--debug",)])
def test_a_failure_shows_its_traceback_on_debug_alone(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setenv(DEBUG, "")  # so that it is put back
    monkeypatch.delenv(DEBUG)
    monkeypatch.setattr(sys, "argv", ["flowrl", *words, "gallery", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr().err
    assert caught.value.code == 2
    assert "flowrl: " in printed
    assert ("Traceback" in printed) == bool(words)


LONG = {"": 32, "train": 33, "ask": 26, "sample": 40, "eval": 72, "score": 28, "pairs": 30, "serve": 33, "export": 30}
"""Help texts of more than 24 lines, with their number of lines."""


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_help_text_fits_a_screen_of_100_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["flowrl", *filter(None, [name]), "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert caught.value.code == 0
    assert max(map(len, lines)) <= 100
    assert len(lines) <= LONG.get(name, 24)
    page = PAGES[name or "train"]
    assert page in "\n".join(lines[-3:]), "the end names the page that shows the command at work"
    assert (Path(__file__).parents[2] / page).is_file()
    assert name or not [line for line in lines[1:] if line.endswith("...")]
