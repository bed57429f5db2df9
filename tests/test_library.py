"""docs/library.md: every listing of the page is executed, in a folder outside the repository."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (file|run|shell)(?:: (\S+))? -->\n)?```(\w+)\n(.*?)```\n", re.S)
LISTINGS = {name: text for _, name, _, text in BLOCK.findall(PAGE) if name}
RUN = [name for kind, name, _, _ in BLOCK.findall(PAGE) if kind == "run"]
QUICK = "iteration.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with every file of the page."""
    place = tmp_path_factory.mktemp("library")
    for name, text in LISTINGS.items():
        (place / name).write_text(text)
    return place


def execute(folder: Path, *words: str) -> str:
    """What a Python process prints; it must end well."""
    known = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=os.environ | known, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


def imports(text: str) -> int:
    return len([node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)])


def test_every_listing_is_named_and_so_executed():
    for kind, name, language, text in BLOCK.findall(PAGE):
        assert kind == "shell" if language == "bash" else name, text


def test_one_iteration_takes_at_most_twelve_lines_and_four_imports():
    assert lines(LISTINGS["iteration.py"]) <= 12
    assert imports(LISTINGS["iteration.py"]) <= 4


def test_a_method_a_sampler_and_a_reward_take_at_most_thirty_lines_each():
    for name in ("my_method.py", "my_sampler.py", "my_reward.py"):
        assert len(LISTINGS[name].splitlines()) <= 30, name


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_listing_runs(folder, name):
    shown = execute(folder, name)
    assert "FAIL" not in shown
    if name == QUICK:
        assert re.search(r"loss -?\d.*\nreward \d.* gradient \d", shown)


@pytest.mark.slow
def test_a_run_with_own_files_trains_and_keeps_copies_of_them(folder):
    (command,) = [text for kind, _, _, text in BLOCK.findall(PAGE) if kind == "shell"]
    assert command.startswith("flowrl ")
    execute(folder, "-m", *command.split())
    run = folder / "runs" / "mine"
    assert (run / "summary.json").is_file()
    kept = {path.name for path in (run / "inputs").rglob("*.py")}
    assert kept == {"my_method.py", "my_sampler.py", "my_reward.py"}


@pytest.mark.slow
def test_the_command_line_tries_the_laws_too(folder):
    shown = execute(folder, "-m", "flowrl", "doctor", "--check", "my_sampler.py", "noise_level=0.5")
    assert "ok    without noise" in shown
    (folder / "broken.py").write_text(LISTINGS["my_sampler.py"].replace("0.5 * step.noise_level", "0.5"))
    words = [sys.executable, "-m", "flowrl", "doctor", "--check", "broken.py"]
    done = subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAIL  without noise: std " in done.stdout


def test_every_public_name_is_documented_and_loads_nothing_before_it_is_used():
    for name in flowrl.__all__:
        if name != "__version__":
            assert f"`{name}" in PAGE, name
            assert getattr(flowrl, name).__doc__, name
