"""docs/models.md is what its script writes."""

from __future__ import annotations

import pytest

from tests import tiny_sd3


@pytest.mark.slow
def test_the_shipped_page_is_what_the_script_writes():
    script = tiny_sd3.script("make_models_doc")
    assert script.FILE.read_text(encoding="ascii") == script.page(), "run python -m scripts.make_models_doc"
