"""The pictures of the documentation are what the code and the lab's cells give."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.lab import cells
from scripts.lab.curves import curve_of
from tests import tiny_sd3


@pytest.fixture(scope="module")
def script():
    return tiny_sd3.script("concept_pictures")


def test_the_shipped_pictures_are_what_the_script_draws(script):
    unlike = tiny_sd3.script("_svg").unlike

    drawn = script.pictures()
    assert sorted(drawn) == sorted(file.name for file in script.PAGES.glob("*.svg"))
    found = {name: unlike(text, (script.PAGES / name).read_text(encoding="utf-8")) for name, text in drawn.items()}
    assert {name: what for name, what in found.items() if what} == {}, "run python -m scripts.concept_pictures"


def test_every_picture_is_on_a_page(script):
    pages = "".join(page.read_text(encoding="utf-8") for page in script.PAGES.glob("*.md"))
    assert [file.name for file in script.PAGES.glob("*.svg") if f"]({file.name})" not in pages] == []


def test_a_kl_moves_the_least_loss_towards_no_shift(script):
    shifts = torch.linspace(0, 3, 301, dtype=torch.float64)
    least = [float(shifts[script.shifted_loss(shifts, None, coef).argmin()]) for coef in (0.0, 0.2, 1.0)]
    assert least == sorted(least, reverse=True)
    assert least[0] > least[1] > least[2] > 0


def test_two_pictures_differ_by_a_word_or_by_more_than_rounding():
    unlike = tiny_sd3.script("_svg").unlike

    assert unlike('<a x="1.0"/>', '<a x="1.1"/>') == ""
    assert unlike('<a x="1"/>', '<a x="2"/>') == "number 0: 1 instead of 2"
    assert unlike("<a/>", "<b/>") == "other parts or words"


def test_the_shipped_curves_are_those_of_the_cells():
    results = json.loads(cells.RESULTS.read_text(encoding="utf-8"))
    entries = [cells.read_entry(name, recipe, results) for name, recipe in cells.recipes().items()]
    drawn = {f"{entry.name}.svg": curve_of(entry) for entry in entries}
    drawn = {name: text for name, text in drawn.items() if text}
    shipped = {file.name: file.read_text(encoding="utf-8") for file in cells.CURVES.glob("*.svg")}
    assert drawn == shipped, "run python -m scripts.lab --write"
