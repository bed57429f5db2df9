"""Weights in few bits on tensors without values: their bytes are those of the libraries' own layers at work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrl.core.strict import validate
from flowrl.models import sd3
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.memory.meter import Meter, faked, measured
from flowrl.models.memory.savings import cast_frozen
from flowrl.planning import few_bits, forwards, memory
from tests import tiny_sd3 as tiny


def config(folder: Path, **options: Any) -> ModelConfig:
    base = {"path": str(folder), "max_sequence_length": tiny.TOKENS, "lora": {"rank": 4}}
    return validate(sd3.Config, base | options, "model")


def update(model: ModelAdapter) -> None:
    forwards.loss(model, 3, 4.0, reference=True).backward()


def planned(folder: Path, options: ModelConfig) -> tuple[int, int]:
    """(stored bytes of the denoiser, most further bytes of an update) of a plan."""
    model = sd3.skeleton(options, folder)
    few_bits.quantise([model.network], options)
    with torch.device("meta"):
        tiny.lora(model)
    cast_frozen([model.network], options)
    few_bits.imitate_casting([model.network], options)
    stored = memory.size(model.network)
    with faked(model.network):
        return stored, measured(lambda: update(model), grad=True)[0]


def stored_bytes(network: nn.Module) -> int:
    """Of parameters and buffers; those of torchao's tensors are inside."""
    total = 0
    for tensor in (*network.parameters(), *network.buffers()):
        kind = type(tensor)
        names = [*getattr(kind, "tensor_data_names", ()), *getattr(kind, "optional_tensor_data_names", ())]
        inner = [value for name in names if (value := getattr(tensor, name, None)) is not None] or [tensor]
        total += sum(value.numel() * value.element_size() for value in inner)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", False), ("bfloat16", True)])
def test_layerwise_casting_is_measured_as_it_is(folder, dtype, checkpointing):
    memory_ = {"layerwise_casting": "float8_e4m3fn"}
    options = config(folder, dtype=dtype, gradient_checkpointing=checkpointing, memory=memory_)
    model = sd3.build(options)
    tiny.lora(model)
    cast_frozen([model.network], options)
    with Meter() as meter:
        update(model)  # the hooks have stored the weights anew: from here on the meter knows them
        for p in model.network.parameters():
            p.grad = None
        start = meter.peak = meter.now
        update(model)
    stored, transient = planned(folder, options)
    assert stored == stored_bytes(model.network)
    # Where a checkpoint's recomputation stops early, one layer stays cast up until its next forward.
    assert meter.peak - start == pytest.approx(transient, rel=0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_measured_as_torchao_has_it(folder, dtype, checkpointing):
    pytest.importorskip("torchao", reason="int8 weights need the extra 'quant'")
    options = config(folder, dtype=dtype, gradient_checkpointing=checkpointing, memory={"quantize": "int8"})
    model = sd3.build(options)
    tiny.lora(model)
    found = stored_bytes(model.network), measured(lambda: update(model), grad=True)[0]
    assert planned(folder, options) == found


def test_nf4_stores_half_a_byte_and_a_scale_for_64_weights(folder):
    plain, small = (sd3.skeleton(config(folder, memory={"quantize": value}), folder).network for value in (None, "nf4"))
    few_bits.quantise([small], config(folder, memory={"quantize": "nf4"}))
    linears = [m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear)]
    expected = sum(-(-count // 2) + 4 * -(-count // 64) for count in linears)
    assert memory.size(small) == memory.size(plain) - 4 * sum(linears) + expected


def test_nf4_keeps_no_copy_for_the_backward_pass():
    """The product and its gradient are those of a plain layer of the same shape; what lives between them is not."""
    held = {}
    for kind in ("plain", "nf4"):
        layers: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        layers._keep_in_fp32_modules = None  # as diffusers' networks say it
        if kind == "nf4":
            few_bits.quantise([layers], config(Path("."), memory={"quantize": "nf4"}))
        with faked(layers):
            x = torch.empty(8, 64, requires_grad=True)
            with Meter() as meter:
                y = layers(x)
                held[kind] = meter.now
                y.sum().backward()
                assert x.grad is not None
                assert x.grad.shape == x.shape
    # No plain layer saves its frozen input, nor does this one: only outputs live.
    assert held["nf4"] == 8 * 64 * 4
    assert held["plain"] >= held["nf4"]


def test_nf4_is_measured_as_bitsandbytes_has_it():
    bnb = pytest.importorskip("bitsandbytes", reason="4-bit weights need the extra 'quant'")
    theirs = bnb.nn.Linear4bit(
        256, 512, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=False
    ).requires_grad_(False)
    theirs.to("cpu")  # quantises
    ours = nn.Sequential(nn.Linear(256, 512))
    few_bits.quantise([ours], config(Path("."), memory={"quantize": "nf4"}))
    ours.requires_grad_(False)
    assert memory.size(ours) == memory.size(theirs) + 4 * theirs.weight.quant_state.absmax.numel()
    x = torch.randn(8, 256, requires_grad=True)
    peaks = [measured(lambda layer=layer: layer(x).sum().backward(), grad=True)[0] for layer in (theirs, ours)]
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    assert peaks[1] == pytest.approx(peaks[0], rel=0.03)
