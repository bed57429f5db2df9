"""Memory options: the same run with less on the device, for native and generic adapters; what cannot be is refused."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.strict import validate
from flowrl.models import generic, sd3
from flowrl.models.memory import savings
from flowrl.models.weights.roles import Weights
from tests import native, tiny_sd3
from tests import tiny_pipelines as tiny

LORA = {"rank": 4, "alpha": 10}
CPU = torch.device("cpu")


def config(**options: Any) -> sd3.Config:
    """As a YAML file gives it."""
    return validate(sd3.Config, {"path": "tiny", "max_sequence_length": tiny.TOKENS} | options, "model")


def adapter(case: str, **options: Any) -> Any:
    """A native adapter, or `generic:NAME`, around a tiny pipeline."""
    family, _, name = case.partition(":")
    pipe = tiny.make(name or family)
    if options.get("dtype") == "bfloat16":
        native.halved(pipe)
    return native.entered(name, pipe=pipe, **options) if name else sd3.Sd3(pipe, config(**options))


def adapted(model: Any) -> Weights:
    """Its LoRA with a B that is not zero, and what the configuration does to the frozen weights."""
    weights = native.lora(model, noise=0.1)
    savings.cast_frozen(weights.components.values(), model.config)
    return weights


def gradients(model: Any, weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
    """(guided prediction, gradients of a fixed function of it)."""
    x, timestep, cond = native.point(model)
    output = model.predict(x, timestep, cond, 3.0).float()
    (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    return output.detach(), {name: p.grad for name, p in weights.parameters.items() if p.grad is not None}


# ---- VAE


@pytest.mark.parametrize("case", ["sd3", "generic:flux", "generic:wan", "generic:qwen_image", "generic:sd"])
def test_sliced_decoding_gives_the_same_pictures(case):
    plain, sliced = adapter(case), adapter(case, memory={"vae_slicing": True})
    latents = torch.randn(3, *plain.latent_shape(), generator=torch.Generator().manual_seed(0))
    calls = []
    sliced.pipeline.vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    pictures = sliced.decode(latents)
    assert len(calls) >= 3
    assert_close(pictures, torch.cat([plain.decode(one) for one in latents.split(1)]), atol=1e-6, rtol=0)
    # A batch of clips is rounded in another order.
    assert_close(pictures, plain.decode(latents), atol=1e-5 if case == "generic:wan" else 1e-6, rtol=0)


def test_tiled_decoding_gives_nearly_the_same_pictures():
    size = {"height": 32, "width": 32}
    plain, tiled = adapter("sd3", **size), adapter("sd3", **size, memory={"vae_tiling": True})
    vae = tiled.pipeline.vae
    assert vae.use_tiling
    vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 16
    latents = torch.randn(1, *plain.latent_shape(), generator=torch.Generator().manual_seed(0))
    difference = (tiled.decode(latents) - plain.decode(latents)).abs()
    # Group norms see a tile instead of the picture; these are random weights on noise.
    assert 0 < difference.mean() < 0.1


def test_a_vae_without_the_switch_is_refused(monkeypatch):
    def missing(self: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr("diffusers.AutoencoderKL.enable_slicing", missing)
    with pytest.raises(ModelError, match=r"model\.memory\.vae_slicing=true: AutoencoderKL has no enable_slicing"):
        adapter("sd3", memory={"vae_slicing": True})


# ---- frozen weights in 8 bits, without scales


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["sd3", "generic:sana", "generic:sd", "generic:wan"])
def test_layerwise_casting_is_a_network_of_rounded_weights(case, checkpointing):
    """Predictions and every gradient are those of the same values stored in full, and the adapter is not touched."""
    options = {"lora": LORA, "gradient_checkpointing": checkpointing}
    cast = adapter(case, **options, memory={"layerwise_casting": "float8_e4m3fn"})
    plain = adapter(case, **options)
    weights, others = adapted(cast), adapted(plain)
    stored = {name for name, p in cast.network.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert stored
    assert not [name for name in stored if "lora_" in name or "norm" in name.rpartition(".")[0].rpartition(".")[2]]
    _, exact = gradients(plain, others)
    exact = {name: gradient.clone() for name, gradient in exact.items()}
    expected_plain = native.output(plain, 3.0)
    for name, p in plain.network.named_parameters():
        if name in stored:
            p.data = p.data.to(torch.float8_e4m3fn).float()
    for p in others.parameters.values():
        p.grad = None
    (mine, found), (rounded, expected) = gradients(cast, weights), gradients(plain, others)
    assert torch.equal(mine, rounded)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    # Near the plain network too: fp8 rounds by up to 1/16.
    assert (mine - expected_plain).norm() < 0.1 * expected_plain.norm()
    flat = [torch.cat([given[name].flatten() for name in sorted(found)]) for given in (found, exact)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.95


@pytest.mark.parametrize("case", ["sd3", "generic:flux"])
def test_layerwise_casting_replays_exactly_in_bfloat16(case):
    model = adapter(case, dtype="bfloat16", lora=LORA, memory={"layerwise_casting": "float8_e4m3fn"})
    weights = adapted(model)
    assert native.backward(model, weights, 3.0) == 0
    modules = {name.partition(".lora_")[0] for name in weights.parameters}
    assert native.trained(weights, "lora_B") == modules - set(model.dead_lora_modules())


def test_the_reference_is_the_cast_network_without_its_adapter():
    model = adapter("sd3", lora=LORA, memory={"layerwise_casting": "float8_e4m3fn"})
    weights = native.lora(model)  # B is zero
    savings.cast_frozen(weights.components.values(), model.config)
    policy = native.output(model, 3.0)
    with weights.using("reference"):
        assert_close(native.output(model, 3.0), policy, atol=1e-6, rtol=0)


# ---- what belongs to LoRA, and what excludes what


@pytest.mark.parametrize("name", ["layerwise_casting", "quantize"])
@pytest.mark.parametrize("family", ["sd3", "flux", "qwen_image", "wan", "generic"])
def test_few_bits_and_full_fine_tuning_are_refused(family, name):
    from flowrl.core import registry

    value = {"layerwise_casting": "float8_e4m3fn", "quantize": "int8"}[name]
    with pytest.raises(ConfigError, match=rf"memory\.{name}={value} needs lora"):
        validate(registry.load("models", family).Config, {"path": "x", "memory": {name: value}}, "model")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"layerwise_casting": "float8_e5m2", "quantize": "int8"}, "both store the same"),
        ({"group_offload": ["transformer"]}, "the backward pass and the optimizer still need them"),
        ({"group_offload": ["vea"]}, "there are: text_encoders, vae"),
        ({"quantize": "int4"}, "quantize = 'int4'"),
        ({"tiling": True}, "unknown key"),
    ],
)
def test_contradictions_and_unknown_values_are_refused(memory, message):
    with pytest.raises(ConfigError, match=message):
        config(lora=LORA, memory=memory)


# ---- quantised weights


def test_a_single_file_cannot_be_quantised():
    with pytest.raises(ModelError, match="needs a pipeline folder or a hub id"):
        savings.quantization(None, "x.safetensors", config(lora=LORA, memory={"quantize": "int8"}))


@pytest.mark.parametrize("family", [sd3, generic])
def test_int8_weights_train_a_lora(tmp_path, family):
    pytest.importorskip("torchao", reason="int8 weights need the extra 'quant'")
    tiny_sd3.save(tmp_path)
    options: dict[str, Any] = {"path": str(tmp_path), "lora": LORA, "gradient_checkpointing": True}
    options |= {"max_sequence_length": tiny.TOKENS} if family is sd3 else {"call": {"max_sequence_length": 8}}
    models = [
        family.build(validate(family.Config, options | {"memory": {"quantize": quantize}}, "model"))
        for quantize in (None, "int8")
    ]
    both = [native.lora(model, noise=0.1) for model in models]
    models[1].to(CPU)
    assert {p.dtype for p in both[1].parameters.values()} == {torch.float32}
    (plain, expected), (mine, found) = (gradients(*pair) for pair in zip(models, both, strict=True))
    assert (mine - plain).norm() < 0.02 * plain.norm()
    flat = [torch.cat([given[name].flatten() for name in sorted(found)]) for given in (found, expected)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.999
    assert native.backward(models[1], both[1], 3.0) == 0
    both[1].save(tmp_path / "lora", type(models[1].pipeline))
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()


# ---- attention


def test_a_backend_that_agrees_changes_nothing_but_itself():
    """The processors of the denoiser have it, diffusers' own default stays: the VAE keeps its attention."""
    plain, other = adapter("generic:flux"), adapter("generic:flux", attention="_native_math")
    assert_close(native.output(other, 3.0), native.output(plain, 3.0), atol=1e-5, rtol=1e-4)
    backends = {m.processor._attention_backend for m in other.network.modules() if hasattr(m, "processor")}
    assert backends == {"_native_math"}
    assert attention_dispatch._AttentionBackendRegistry.get_active_backend()[0] == "native"
    other.to(CPU)


@pytest.mark.parametrize(
    ("options", "installed", "message"),
    [
        ({"memory": {"quantize": "int8"}}, False, r"quantize=int8 needs torchao; run pip install 'flowrl\[quant\]'"),
        ({"memory": {"quantize": "nf4"}}, False, r"quantize=nf4 needs bitsandbytes; run pip install 'flowrl\[quant\]'"),
        ({"memory": {"quantize": "nf4"}}, True, "quantize=nf4 needs a GPU"),
        ({"attention": "flsh"}, False, "is not a backend of diffusers; there are: flash, "),
        ({"attention": "flash"}, False, "pip install flash-attn"),
        ({"attention": "xformers"}, False, r"pip install 'flowrl\[xformers\]'"),
        ({"attention": "sage"}, False, "SageAttention has no backward pass"),
        ({"attention": "flash_hub"}, False, "a compiled kernel from the hub"),
    ],
)
def test_an_option_without_its_package_gpu_or_backward_pass_is_refused_before_loading(
    monkeypatch, options, installed, message
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ModelError, match=message):
        savings.check_available(config(lora=LORA, **options))


@pytest.mark.parametrize("case", ["sd3", "generic:sd"])
def test_a_network_that_would_not_use_the_backend_is_refused(case):
    with pytest.raises(ModelError, match=r"would change nothing; try model\.attention=null"):
        adapter(case, attention="_native_math")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda query, key, value: query.detach(), "with gradients"),
        (lambda query, key, value: query * 1.0 + 0 * (key + value), "differs from torch's own attention"),
    ],
)
def test_a_backend_is_tried_before_it_is_used(monkeypatch, attention, message):
    registry, name = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName.FLEX
    monkeypatch.setitem(registry._backends, name, attention)
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
    with pytest.raises(ModelError, match=message):
        savings.probe_attention("flex", CPU, torch.float32)


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_backend_is_tried_under_the_arithmetic_of_the_run(monkeypatch, autocasts):
    """On tensors of one type, under autocast where the network is."""
    registry, name = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName.FLEX
    seen = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), query.dtype, key.dtype, value.dtype))
        raise RuntimeError("no kernel")

    monkeypatch.setitem(registry._backends, name, attention)
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
    with pytest.raises(ModelError, match="with gradients under autocast" if autocasts else r"with gradients \(Runtime"):
        savings.probe_attention("flex", CPU, torch.bfloat16, autocasts=autocasts)
    assert seen == [(autocasts, *[torch.bfloat16] * 3)]


# ---- parts that visit the device


def test_offloaded_parts_give_what_they_gave():
    plain, other = adapter("sd3"), adapter("sd3", memory={"group_offload": ["text_encoders", "vae"]})
    names = ["text_encoder", "text_encoder_2", "text_encoder_3", "vae"]
    assert savings.offloaded(other.pipeline, other.config) == names
    for name in names:
        savings.offload(getattr(other.pipeline, name), CPU)
    ours, theirs = other.encode(tiny.PROMPTS), plain.encode(tiny.PROMPTS)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.tensors)
    latents = torch.randn(2, *plain.latent_shape(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(other.decode(latents), plain.decode(latents))


def test_offloading_on_the_cpu_is_refused():
    model = adapter("sd3", memory={"group_offload": ["vae"]})
    with pytest.raises(ModelError, match="this run is on the CPU"):
        model.to(CPU)


def test_only_the_offloaded_parts_stay_behind(monkeypatch):
    """On a stand-in for a GPU: the meta device."""
    model, visiting = adapter("generic:flux", memory={"group_offload": ["vae"]}), []
    monkeypatch.setattr(savings, "offload", lambda part, device: visiting.append(part))
    model.to(torch.device("meta"))
    assert visiting == [model.pipeline.vae]
    where = {name: next(part.parameters()).device.type for name, part in parts(model).items()}
    assert where.pop("vae") == "cpu"
    assert set(where.values()) == {"meta"}


@pytest.mark.parametrize(
    ("device", "same", "calls"), [("cpu", False, []), ("cuda", True, []), ("cuda", False, [False])]
)
def test_cudnns_attention_stays_where_it_is_the_same_with_and_without_gradients(monkeypatch, device, same, calls):
    """Here no part goes to a device."""
    chosen: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    monkeypatch.setattr(savings, "same_with_gradients", lambda where, dtype: same)
    pipeline = SimpleNamespace(components={}, to=lambda where: None)
    savings.place(pipeline, adapter("sd3").config, torch.device(device))
    assert chosen == calls


def test_another_kernel_for_forwards_with_gradients_is_found(monkeypatch):
    cpu, attend = torch.device("cpu"), nn.functional.scaled_dot_product_attention
    before = torch.get_rng_state()
    assert savings.same_with_gradients(cpu, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v) + (1e-7 if torch.is_grad_enabled() else 0.0)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", other)
    assert not savings.same_with_gradients(cpu, torch.float32)


def parts(model: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in model.pipeline.components.items() if isinstance(part, nn.Module)}


# ---- types that a card does not have


class _Without8Bits:
    """A tensor of a device without 8-bit floats."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float8_e4m3fn:
            raise TypeError("Trying to convert Float8_e4m3fn to the MPS backend but it does not have support")
        return torch.zeros(16, 16, dtype=dtype)


def test_types_that_a_card_lacks_are_refused_before_loading(monkeypatch):
    card = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: emulated)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ModelError, match=r"model\.dtype=bfloat16: Tesla T4 has no bfloat16 .*; try model.dtype=float16"
    ):
        savings.check_available(config(dtype="bfloat16", lora=LORA))
    monkeypatch.setattr(torch, "ones", lambda *size: _Without8Bits())
    savings.check_available(config(dtype="float16", lora=LORA))
    with pytest.raises(
        ModelError,
        match=r"layerwise_casting=float8_e4m3fn does not work on cuda .*; try model.memory.layerwise_casting=null",
    ):
        savings.check_available(config(lora=LORA, memory={"layerwise_casting": "float8_e4m3fn"}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_that_a_cpu_has_are_taken(dtype):
    casting = {"layerwise_casting": "float8_e5m2"}
    savings.require_types(config(dtype=dtype, lora=LORA, memory=casting), CPU)


# ---- whole runs


def test_two_iterations_with_every_option_that_a_cpu_has(tmp_path: Path):
    memory = {"vae_slicing": True, "vae_tiling": True, "layerwise_casting": "float8_e4m3fn"}
    options = {"memory": memory, "attention": "native", "gradient_checkpointing": True}
    summary = native.two_iterations(tmp_path, "flux", tiny.make("flux"), (16, 16), **options)
    assert summary["status"] == "finished"
