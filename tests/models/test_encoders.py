"""Text encoders that are loaded again after they were freed: the same embeddings, and nothing else of the model."""

from pathlib import Path

import pytest
import torch

from flowrl.config.components import component
from flowrl.core.errors import ModelError
from flowrl.models.memory import encoders
from tests import tiny_pipelines as tiny

PROMPTS = ["a red circle", "two blue squares"]


# The encoder of the tiny qwen_image is a stub that cannot be saved.
@pytest.mark.parametrize("case", [pytest.param("sd", marks=pytest.mark.slow), "sdxl", "sd3", "flux", "wan", "generic"])
def test_encoders_that_are_borrowed_give_the_same_embeddings_and_are_freed_again(case: str, tmp_path: Path):
    pipe = tiny.make("flux" if case == "generic" else case)
    pipe.save_pretrained(tmp_path)
    name = {"name": case, "path": str(tmp_path)} | ({"height": 32, "width": 32} if case == "wan" else {})
    model = component("models", name, "model")
    adapter = model.module.build(model.config)
    with torch.no_grad():
        before = adapter.encode(PROMPTS).to("cpu")
    adapter.free_text_encoders()
    with pytest.raises(ModelError):
        adapter.encode(PROMPTS)
    weights = [parameter.clone() for parameter in adapter.network.parameters()]
    random = torch.get_rng_state()
    with encoders.borrowed_encoders(adapter, model.config), torch.no_grad():
        again = adapter.encode(PROMPTS).to("cpu")
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in before.tensors.items():
        other = again.tensors[key]
        pairs = zip(value, other, strict=True) if isinstance(value, list) else [(value, other)]
        assert all(torch.equal(one, two) for one, two in pairs), key
    assert all(torch.equal(one, two) for one, two in zip(weights, adapter.network.parameters(), strict=True))
    with pytest.raises(ModelError):
        adapter.encode(PROMPTS)
