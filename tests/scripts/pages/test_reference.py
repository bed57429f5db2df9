"""docs/reference/ is what its script writes, and holds every key."""

from __future__ import annotations

import pytest

from flowrl.commands._option_texts import option_texts
from flowrl.config.schema import RunConfig
from tests import tiny_sd3


@pytest.fixture(scope="module")
def script():
    return tiny_sd3.script("reference_pages")


def test_the_shipped_pages_are_what_the_script_writes(script):
    shipped = {page.name: page.read_text(encoding="utf-8") for page in script.PAGES.glob("*.md")}
    written = script.pages()
    assert sorted(shipped) == sorted(written)
    assert [name for name in written if written[name] != shipped[name]] == [], "run python -m scripts.reference_pages"


def test_every_key_of_a_configuration_has_one_row_with_its_meaning(script):
    rows = [line.split(" | ") for line in script.configuration().splitlines() if line.startswith("| `")]
    assert sorted(row[0].strip("|` ") for row in rows) == sorted(one.name for one in option_texts(RunConfig))
    assert [row[0] for row in rows if not row[-1].strip("| ")] == []


def test_a_cell_breaks_no_table_and_loses_no_angle_bracket(script):
    assert script.cell("a | `<b>` <c>\n d") == "a \\| `<b>` &lt;c> d"
