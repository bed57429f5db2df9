"""Adapters with random weights have the shapes and the parts of the real ones, and no text encoders."""

from pathlib import Path

import pytest
import torch

from flowrl.core import registry
from flowrl.core.errors import ModelError
from flowrl.models.base import MemorySettings
from scripts.bench.random_weights import LONGEST, SHORTEST, random_adapter
from tests import native
from tests import tiny_pipelines as tiny

CPU = torch.device("cpu")
KINDS = [
    name if name in ("sd3", "qwen_image") else pytest.param(name, marks=pytest.mark.slow)
    for name in ("sd", "sdxl", "sd3", "flux", "qwen_image", "wan", "wan 2.2")
]


@pytest.mark.parametrize("name", KINDS)
def test_it_has_the_shapes_of_the_pipeline_and_predicts(name: str, tmp_path: Path):
    kind = native.KINDS[name]
    real, pipe = native.kind(name)
    pipe.save_pretrained(tmp_path)
    module = registry.load("models", kind.family)
    size = dict(zip(("height", "width"), kind.sizes[0], strict=True))
    config = module.Config(path=str(tmp_path), dtype="bfloat16", **size, **kind.options, **native.tokens(pipe))
    made = random_adapter(module, config, CPU)
    assert made.latent_shape() == real.latent_shape()
    assert made.condition_shapes().keys() == real.condition_shapes().keys()
    assert {n: p.shape for n, p in made.network.named_parameters()} == {
        n: p.shape for n, p in real.network.named_parameters()
    }
    assert not made.pipeline.components["text_encoder"]
    made.to(CPU)
    cond = made.encode(tiny.PROMPTS[:2])
    x = torch.randn(2, *made.latent_shape(), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert bool(made.predict(x, made.schedule(4).timesteps[:1].expand(2), cond, kind.scale).isfinite().all())
        assert bool(made.decode(torch.zeros(1, *made.latent_shape())).isfinite().all())
    for parameter in made.network.parameters():
        if parameter.ndim > 1 and parameter.numel() > 3000:
            assert float(parameter.detach().float().std()) == pytest.approx(0.02, rel=0.1)
    wide = [n for n, p in made.network.named_parameters() if p.dtype == torch.float32]
    assert bool(wide) == (kind.family == "wan"), "what diffusers keeps in float32 alone"


def test_a_text_has_the_same_rows_in_every_batch_and_lengths_differ_where_the_model_has_them(tmp_path: Path):
    _, pipe = native.kind("qwen_image")
    pipe.save_pretrained(tmp_path)
    module = registry.load("models", "qwen_image")
    made = random_adapter(module, module.Config(path=str(tmp_path), height=16, width=16), CPU)
    texts = [f"prompt {k}" for k in range(6)]
    rows = made.encode(texts)["prompt_embeds"]
    lengths = {len(row) for row in rows}
    assert SHORTEST <= min(lengths) < max(lengths) <= LONGEST
    assert torch.equal(made.encode(texts[3:4])["prompt_embeds"][0], rows[3])
    assert not torch.equal(rows[0][:SHORTEST], rows[1][:SHORTEST])


def test_what_needs_files_is_refused():
    sd3, generic = registry.load("models", "sd3"), registry.load("models", "generic")
    with pytest.raises(ModelError, match="native adapters alone"):
        random_adapter(generic, generic.Config(path="tiny-sd3"), CPU)
    with pytest.raises(ModelError, match="its configuration is not embedded"):
        random_adapter(sd3, sd3.Config(path="nobody/nothing"), CPU)
    quantised = sd3.Config(path="tiny-sd3", lora=native.LORA, memory=MemorySettings(quantize="int8"))
    with pytest.raises(ModelError, match=r"model\.memory\.quantize='int8' is read from files"):
        random_adapter(sd3, quantised, CPU)
