"""The repeated blocks of every family, and recomputing some of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.strict import validate
from flowrl.models import sd3
from flowrl.models.memory.blocks import blocks, checkpoint_blocks, repeated
from tests import native, tiny_sd3
from tests import tiny_pipelines as tiny


def network(case: str) -> nn.Module:
    pipe = tiny.make(case)
    return getattr(pipe, "transformer", None) or pipe.unet


@pytest.mark.parametrize("case", ["sd3", "sd", "sdxl", "flux", "qwen_image", "wan"])
def test_every_family_repeats_blocks_that_hold_none_of_each_other(case):
    net = network(case)
    found = repeated(net)
    assert len(found) > 1
    inside = {part for block in found for part in block.modules() if part is not block}
    assert not inside & set(found)
    # Where a LoRA's attention is, is in a block.
    attention = {part for part in net.modules() if "Attention" in type(part).__name__}
    within = {part for block in found for part in block.modules()}
    assert attention <= within | {part for part in attention if any(block in part.modules() for block in found)}


def test_a_network_without_a_declaration_has_no_blocks():
    assert blocks(nn.Linear(2, 2)) == repeated(nn.Linear(2, 2)) == []


def gradients(every: Any) -> tuple[dict[str, Tensor], list[int]]:
    """(gradients of an update, forwards of each block in one forward and backward)."""
    model = tiny_sd3.adapter(gradient_checkpointing=every)
    weights = tiny_sd3.lora(model, noise=0.1)
    calls = [0] * len(repeated(model.network))
    for place, block in enumerate(repeated(model.network)):
        block.register_forward_pre_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
    x, timestep, cond = native.point(model)
    model.predict(x, timestep, cond, 1.0).square().sum().backward()
    return {name: p.grad for name, p in weights.parameters.items() if p.grad is not None}, calls


@pytest.mark.parametrize("n", [2, 3])
def test_every_nth_block_is_recomputed_and_no_gradient_moves(n):
    plain, once = gradients(False)
    some, calls = gradients(n)
    assert once == [1] * len(once)
    assert calls == [2 if place % n == 0 else 1 for place in range(len(calls))]
    assert all(torch.equal(some[name], plain[name]) for name in plain)


def test_a_number_that_counts_no_blocks_is_refused():
    for value in (0, 1, -3):
        with pytest.raises(ConfigError, match=r"gradient_checkpointing=.* must be auto, true \(every block\), false"):
            validate(sd3.Config, {"path": "tiny-sd3", "gradient_checkpointing": value}, "model")
    with pytest.raises(ConfigError) as error:
        validate(sd3.Config, {"path": "tiny-sd3", "gradient_checkpointing": "yes"}, "model")
    assert str(error.value) == ("model.gradient_checkpointing = 'yes': must be true or false or auto or a whole number")


def test_checkpointing_that_a_network_does_not_have_is_refused():
    net: Any = network("sd3")
    with pytest.raises(
        ModelError, match=r"=99: SD3Transformer2DModel has \d blocks, .*; try model\.gradient_checkpointing=true, or "
    ):
        checkpoint_blocks(net, 99)
    type(net)._supports_gradient_checkpointing, kept = False, type(net)._supports_gradient_checkpointing
    try:
        for value in (True, "auto", 2):
            with pytest.raises(ModelError, match=r"SD3Transformer2DModel has no checkpointing in diffusers; try model"):
                checkpoint_blocks(net, value)
        checkpoint_blocks(net, False)
    finally:
        type(net)._supports_gradient_checkpointing = kept
