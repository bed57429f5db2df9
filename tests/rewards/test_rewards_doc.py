"""docs/rewards.md is what its script writes."""

from __future__ import annotations

from tests import tiny_sd3


def test_the_shipped_page_is_what_the_script_writes():
    script = tiny_sd3.script("make_rewards_doc")
    assert script.FILE.read_text(encoding="utf-8") == script.page(), "run python -m scripts.make_rewards_doc"
