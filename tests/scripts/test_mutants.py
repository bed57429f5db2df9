"""scripts/mutants.py on a tree of one formula and one test."""

import re
from pathlib import Path

import pytest

from scripts import mutants
from tests.tiny_sd3 import ROOT

FORMULA = "def half(x):\n    return x / 2\n\n\ndef unused(x):\n    return x + 1\n"
TEST = """
from flowrl.losses.toy import half

def test_half():
    assert half(4) == 2

def test_no():
    assert 0
"""
FILES = {
    "flowrl/__init__.py": "",
    "flowrl/losses/toy.py": FORMULA,
    "tests/losses/test_toy.py": TEST,
    "pytest.ini": "[pytest]\nmarkers =\n    slow\n    gpu\naddopts = -q\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow  # a Python process a run
def test_a_mutant_is_caught_by_the_first_test_that_fails_and_another_survives(root, tmp_path_factory):
    bench = mutants.Bench(root, tmp_path_factory.mktemp("bench"))
    caught = bench(mutants.Mutant("factor", "losses", "x / 2", "x / 3", "a half"), ("tests/losses",))
    assert caught.by == "tests/losses/test_toy.py::test_half", "test_no fails without a mutant too"
    lived = bench(mutants.Mutant("offset", "losses", "x + 1", "x + 2", "one more"), ("tests/losses",))
    assert lived.by is None
    assert (bench.tree / "flowrl" / "losses" / "toy.py").read_text() == FORMULA
    found = mutants.table(
        [mutants.Mutant("factor", "losses", "x / 2", "x / 3", "a half")], [caught], {"factor": None, "gone": None}
    )
    assert "1 of 1 caught; of the 1 that were tried before, 0 then and 1 now" in found


def test_a_text_that_is_not_there_once_is_an_error_with_the_mutants_name(root):
    for old, count in (("x * 2", 0), ("return x", 2)):
        with pytest.raises(ValueError, match=re.escape(f"mutant 'lost': the text {old!r} stands {count} times")):
            mutants.locate(mutants.Mutant("lost", "losses", old, "x", "nothing"), root)


def test_every_mutant_stands_in_this_tree():
    """Also a list for whoever rewords a formula: the mutant moves with it."""
    every = mutants.read(ROOT / "scripts" / "mutants.yaml")
    assert len(every) >= 30
    assert {mutant.room for mutant in every} == set(mutants.NEAR)
    for mutant in every:
        mutants.locate(mutant, ROOT)
