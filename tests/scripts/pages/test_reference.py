"""docs/reference/ holds every key of a configuration."""

from flowrl.commands._option_texts import option_texts
from flowrl.config.schema import RunConfig
from scripts.pages import reference


def test_every_key_of_a_configuration_has_one_row_with_its_meaning():
    rows = [line.split(" | ") for line in reference.configuration().splitlines() if line.startswith("| `")]
    assert sorted(row[0].strip("|` ") for row in rows) == sorted(one.name for one in option_texts(RunConfig))
    assert [row[0] for row in rows if not row[-1].strip("| ")] == []


def test_a_cell_breaks_no_table_and_loses_no_angle_bracket():
    assert reference.cell("a | `<b>` <c>\n d") == "a \\| `<b>` &lt;c> d"
