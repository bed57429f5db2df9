"""The option tables of the method pages: as the code has them, of every method, and none by hand."""

import re

import pytest

from flowrl.commands._option_texts import OptionText, option_texts
from flowrl.core import registry
from scripts.pages import option_tables


@pytest.mark.parametrize("name", registry.names("algorithms"))
def test_a_method_page_names_every_option_once(name):
    text = (option_tables.PAGES / f"{name}.md").read_text(encoding="utf-8")
    tables = [match.group() for match in option_tables.MARKED.finditer(text) if match["of"] == name]
    assert len(tables) == 1
    keys = re.findall(r"^\| `algorithm\.([\w.]+)` \|", tables[0], re.MULTILINE)
    assert len(keys) == len(set(keys))
    wanted = {one.name for one in option_texts(registry.load("algorithms", name).Config)}
    # The keys of a shared mapping stand on a page of their own, which its row leads to.
    folded = {key for key in wanted if any(key.startswith(f"{given}.") for given in keys)}
    assert set(keys) <= wanted
    assert wanted - set(keys) <= folded


def test_no_page_has_a_table_of_options_by_hand():
    by_hand = [
        page.name
        for page in option_tables.PAGES.glob("*.md")
        if re.search(r"^\| key \|", option_tables.MARKED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    ]
    assert by_hand == []


def test_a_shared_mapping_is_one_row_with_what_differs():
    options = list(option_texts(registry.load("algorithms", "ddpo").Config))
    row = next(one for one in option_tables.folded(options) if one.name == "advantages")
    assert row.default == "{name: batch, eps: 1e-06, history: {buffer_size: 16, min_count: 16, decay: null}}"
    lag = [
        OptionText(f"old.{key}", "", default, "") for key, default in option_tables.own(option_tables.LagConfig).items()
    ]
    rows = list(option_tables.folded([OptionText("old", "mapping", "as below", "Pace."), *lag]))
    assert [one.default for one in rows] == ["its own"]
    assert rows[0].about.startswith("Pace. Its keys: `flat`")
