"""The kinds of a LoRA keep the contract of the plain one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings
from flowrl.models.sd3 import Config
from flowrl.models.weights.precision import _Joined
from flowrl.models.weights.roles import Weights
from tests import tiny_sd3 as tiny

KINDS = ("rslora", "dora", "lokr")


def made(kind: Any, **options: Any) -> tuple[Any, Weights]:
    model = tiny.adapter(**options)
    return model, tiny.lora(model, LoraSettings(rank=4, alpha=10, kind=kind))


def moved(weights: Weights) -> None:
    generator = torch.Generator().manual_seed(5)
    for p in weights.parameters.values():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)


def replayed(model: Any) -> Tensor:
    """The prediction with gradients on."""
    torch.manual_seed(3)
    x = torch.randn(2, *model.latent_shape())
    return model.predict(x, torch.tensor([900.0, 300.0]), model.encode(tiny.PROMPTS), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_roles_replay_gradients_state_and_files(tmp_path, kind):
    base = tiny.output(tiny.adapter())
    model, weights = made(kind)
    assert torch.equal(tiny.output(model), base), "the update is 0 at the start"
    tiny.backward(model, weights)
    ends = ".lokr_w1" if kind == "lokr" else ".lora_B"
    first = {n: p for n, p in weights.parameters.items() if ends in n}
    dead = [n for n, p in first.items() if p.grad is None or not p.grad.any()]
    assert len(first) == len(weights.layers)
    assert all(any(name.startswith(module) for module in model.dead_lora_modules()) for name in dead)
    weights.snapshot("old")
    moved(weights)
    out = tiny.output(model)
    assert not torch.allclose(out, base, atol=1e-3)
    replay = replayed(model)
    assert replay.requires_grad
    assert torch.equal(replay.detach(), out), "the ratio on replay is 1"
    for role in ("reference", "old"):
        with weights.using(role):
            assert torch.equal(tiny.output(model), base)
    assert torch.equal(tiny.output(model), out)
    other, its_weights = made(kind)
    its_weights.load_state({key: value.clone() for key, value in weights.state().items()})
    assert torch.equal(tiny.output(other), out)
    weights.save(tmp_path, type(model.pipeline))
    plain = tiny.pipeline()
    file = "pytorch_lora_weights.safetensors"
    if kind == "lokr":
        plain.transformer.load_lora_adapter(str(tmp_path), prefix="transformer", weight_name=file)
    else:
        plain.load_lora_weights(str(tmp_path))
    assert_close(tiny.output(tiny.adapter(plain)), out, atol=1e-5, rtol=0)


def test_the_joined_product_is_used_for_the_kinds_that_it_computes():
    joined = {kind: all(isinstance(layer, _Joined) for layer in made(kind)[1].layers) for kind in ("lora", *KINDS)}
    assert joined == {"lora": True, "rslora": True, "dora": False, "lokr": False}


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_in_half_precision_the_update_begins_at_zero(kind):
    pipeline = tiny.pipeline()
    pipeline.transformer.bfloat16()
    base = tiny.output(tiny.adapter(pipeline, dtype="bfloat16"))
    model = tiny.adapter(pipeline, dtype="bfloat16")
    tiny.lora(model, LoraSettings(rank=4, alpha=10, kind=kind))
    assert torch.equal(tiny.output(model), base)


@pytest.mark.parametrize("kind", ["dora", "lokr"])
@pytest.mark.parametrize("option", [{"shard": True}, {"compile": "blocks"}])
def test_what_reads_the_frozen_weight_refuses_other_storage(kind, option):
    with pytest.raises(ValueError, match=rf"lora\.kind={kind} with"):
        Config(path="tiny", lora=LoraSettings(kind=kind), **option)


def test_a_rank_that_no_adapted_matrix_can_have_is_refused_with_the_largest():
    model = tiny.adapter()
    with pytest.raises(
        ModelError, match=r"rank=4096 is above the width of every adapted matrix, (\d+) at most"
    ) as told:
        tiny.lora(model, LoraSettings(rank=4096, alpha=10))
    (remedy,) = told.value.remedies
    tiny.lora(tiny.adapter(), LoraSettings(rank=remedy.settings["model.lora.rank"], alpha=10))
