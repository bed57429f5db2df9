"""The pictures of concepts show what holds, and the curves of the methods' pages are the lab's."""

import json

import torch

from scripts.lab import cells
from scripts.lab.curves import curve_of
from scripts.pages.concept_pictures import shifted_loss


def test_a_kl_moves_the_least_loss_towards_no_shift():
    shifts = torch.linspace(0, 3, 301, dtype=torch.float64)
    least = [float(shifts[shifted_loss(shifts, None, coef).argmin()]) for coef in (0.0, 0.2, 1.0)]
    assert least == sorted(least, reverse=True)
    assert least[0] > least[1] > least[2] > 0


def test_the_shipped_curves_are_those_of_the_cells():
    results = json.loads(cells.RESULTS.read_text(encoding="utf-8"))
    entries = [cells.read_entry(name, recipe, results) for name, recipe in cells.recipes().items()]
    drawn = {f"{entry.name}.svg": curve_of(entry) for entry in entries}
    drawn = {name: text for name, text in drawn.items() if text}
    shipped = {file.name: file.read_text(encoding="utf-8") for file in cells.CURVES.glob("*.svg")}
    assert drawn == shipped, "run python -m scripts.lab --write"
