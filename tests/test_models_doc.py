"""docs/models.md is what its script writes."""

from __future__ import annotations

from flowrl import registry
from tests import tiny_sd3


def test_the_shipped_page_is_what_the_script_writes():
    script = tiny_sd3.script("make_models_doc")
    assert script.FILE.read_text(encoding="ascii") == script.page(), "run python -m scripts.make_models_doc"


def test_every_native_adapter_is_found_with_its_pipeline():
    found = tiny_sd3.script("make_models_doc").natives()
    assert set(found.values()) == set(registry.names("models")) - {"generic"}
    assert found["StableDiffusion3Pipeline"] == "sd3"
