"""The tutorials: every command of every page runs, on tiny models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.pages.tutorials import FOLDER, PAGES, ROOT, TIMES, Block, blocks, faults, program, replaced


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_one_has_at_its_end_and_every_command_can_be_run(page: Path):
    text = page.read_text(encoding="ascii")
    found = blocks(text)
    assert "At the end you have" in text.split("\n## ")[0], "a reader wants to know what the page is for"
    assert any(block.commands for block in found if not block.title)
    assert [fault for block in found for fault in faults(block)] == []


def test_pages_are_there():
    assert FOLDER / "first_reward.md" in PAGES


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("rm -r runs\n", ""),
        ("flowrl train quickstart\n", ""),
        ("flowrl train quickstart\n", "iterations=2 optim.learning_rate=1"),
        ("flowrl train quickstart\n", "instead true"),
        ("flowrl plan a\nflowrl plan b\n", "instead flowrl plan c"),
        ("flowrl train quickstart\n", "installs"),
    ],
)
def test_a_command_that_is_not_declared_is_refused(text: str, test: str):
    assert faults(Block("bash", "", text, test))


def test_a_stand_in_is_added_to_commands_with_a_configuration_alone():
    block = Block("bash", "", "flowrl train a.yaml x=1 \\\n  y=2   # why\nflowrl gallery runs/a\n", "iterations=2")
    assert [replaced(block, line) for line in block.commands] == [
        "flowrl train a.yaml x=1 y=2 iterations=2",
        "flowrl gallery runs/a",
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if TIMES.search(page.read_text(encoding="ascii"))], ids=lambda page: page.stem
)
def test_the_times_of_a_page_are_those_of_its_commands(page: Path):
    text = page.read_text(encoding="ascii")
    found = TIMES.search(text)
    assert found is not None
    timed = [row.split("`")[1] for row in found.group().splitlines()[2:]]
    written = [line for block in blocks(text) if block.as_written and block.test != "serves" for line in block.commands]
    assert timed == [line for line in written if program(line) == "flowrl"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path):
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": places, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.pages", "tutorials", str(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
