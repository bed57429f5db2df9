"""The SD3 adapter against its pipeline, its LoRA, and the shape of the real SD3.5 Medium."""

import json

import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.models import sd3
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights, lora_file, read_lora, trainable
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from tests import native
from tests import tiny_sd3 as tiny

# ---- the adapter is the pipeline


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("sd35", [False, True])
@pytest.mark.parametrize("shift", [1.0, 3.0, "dynamic"])
def test_the_euler_plan_reproduces_the_pipelines_own_call(guidance_scale, sd35, shift):
    scheduler = {"use_dynamic_shifting": True} if shift == "dynamic" else {"shift": shift}
    pipe = tiny.pipeline(sd35=sd35, **scheduler)
    native.compare(tiny.adapter(pipe), pipe, (32, 32), 2, guidance_scale, guidance_scale=guidance_scale)


# ---- LoRA and full weights


@pytest.mark.parametrize("sd35", [False, True])
def test_lora_binds_to_the_joint_attention_of_every_block(sd35):
    model = tiny.adapter(tiny.pipeline(sd35=sd35))
    weights = tiny.lora(model)
    adapted = {name.partition(".lora_")[0] for name in weights.parameters}
    blocks = range(len(model.pipeline.transformer.transformer_blocks))
    expected = {f"transformer_blocks.{b}.{target}" for b in blocks for target in sd3.LORA_TARGETS}
    expected.remove(f"transformer_blocks.{blocks[-1]}.attn.to_add_out")  # the last block has none
    assert adapted == expected
    assert set(model.dead_lora_modules()) <= adapted
    assert len(weights.parameters) == 2 * len(adapted)
    assert all(p.dtype == torch.float32 for p in weights.parameters.values())


@pytest.mark.parametrize("sd35", [False, True])
def test_every_lora_matrix_but_the_dead_ones_is_trained(sd35):
    model = tiny.adapter(tiny.pipeline(sd35=sd35))
    weights = tiny.lora(model)
    optimizer = Optimizer(weights, OptimConfig(learning_rate=1e-2), 10)
    living = {name.partition(".lora_")[0] for name in weights.parameters} - set(model.dead_lora_modules())
    tiny.backward(model, weights)
    assert native.trained(weights, "lora_B") == living
    assert native.trained(weights, "lora_A") == set()  # B is still zero
    optimizer.step(optimizer.gradients())
    tiny.backward(model, weights)
    assert native.trained(weights, "lora_A") == living


@pytest.mark.parametrize("sd35", [False, True])
def test_full_fine_tuning_moves_every_weight_but_those_declared_dead(sd35):
    model = tiny.adapter(tiny.pipeline(sd35=sd35))
    weights = Weights(model.network, None, model.lora_targets, seed=0)
    assert weights.count == sum(p.numel() for p in model.network.parameters())
    tiny.backward(model, weights)
    still = {name for name, p in weights.parameters.items() if p.grad is None or p.grad.abs().max() == 0}
    (dead,) = model.dead_lora_modules()
    expected = {f"{dead}.weight", f"{dead}.bias"}
    expected |= {dead.replace("add_q_proj", "norm_added_q.weight")} if sd35 else set()
    assert still == expected


@pytest.mark.parametrize("full", [False, True])
def test_the_reference_is_the_base_model(full):
    """Of a LoRA the network without it, of full weights a copy."""
    model = tiny.adapter()
    base = tiny.output(model, 4.0)
    weights = Weights(model.network, None, (), seed=0) if full else tiny.lora(model, noise=0.1)
    weights.snapshot("reference")
    if full:
        for p in weights.parameters.values():
            p.data.mul_(1.1)
    moved = tiny.output(model, 4.0)
    assert not torch.allclose(moved, base, atol=1e-3)
    with weights.using("reference"):
        assert torch.equal(tiny.output(model, 4.0), base)
    assert torch.equal(tiny.output(model, 4.0), moved)


@pytest.mark.parametrize("full", [False, True])
def test_gradient_checkpointing_changes_no_gradient(full):
    gradients = []
    for checkpointing in (False, True):
        model = tiny.adapter(gradient_checkpointing=checkpointing)
        assert model.network.gradient_checkpointing is checkpointing
        weights = Weights(model.network, None, (), seed=0) if full else tiny.lora(model, noise=0.1)
        tiny.backward(model, weights, guidance_scale=2.0)
        gradients.append([p.grad for p in weights.parameters.values() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for plain, recomputed in zip(*gradients, strict=True):
        assert_close(plain, recomputed, atol=1e-6, rtol=1e-4)


def test_bfloat16_trains_full_weights_in_float32(folder):
    model = sd3.build(sd3.Config(path=str(folder), dtype="bfloat16", max_sequence_length=tiny.TOKENS))
    weights = trainable(model, model.config, seed=0)
    tiny.backward(model, weights, guidance_scale=2.0)
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}
    gradients = [p.grad for p in weights.parameters.values() if p.grad is not None]
    assert all(g.isfinite().all() for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) > 0
    exact = tiny.output(sd3.build(sd3.Config(path=str(folder), max_sequence_length=tiny.TOKENS)))
    rounded = tiny.output(model).float()
    assert not torch.equal(rounded, exact)
    assert_close(rounded, exact, atol=0.1, rtol=0.1)  # 8 bits of mantissa through five blocks


def test_a_lora_target_that_binds_to_nothing_is_named_among_others():
    with pytest.raises(ModelError, match=r"'attn\.to_qq' binds to no module"):
        tiny.lora(tiny.adapter(), LoraSettings(rank=2, alpha=2, targets=["attn.to_q", "attn.to_qq"]))


# ---- starting from a LoRA


def test_init_lora_restores_the_saved_function(tmp_path):
    model = tiny.adapter()
    tiny.lora(model, noise=0.1).save(tmp_path, StableDiffusion3Pipeline)
    other = tiny.adapter()
    weights = tiny.lora(other)
    assert not torch.allclose(tiny.output(other), tiny.output(model), atol=1e-3)
    weights.load_lora(str(tmp_path))
    assert torch.equal(tiny.output(other), tiny.output(model))
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoraSettings(rank=2, alpha=10), r"it has rank 4, and model\.lora\.rank is 2; .*; try model\.lora\.rank=4$"),
        (LoraSettings(rank=4, alpha=4), r"the scale 2\.5 .*, and model\.lora has 1 .*; try model\.lora\.alpha=10$"),
        (LoraSettings(rank=4, alpha=10, targets=["attn.to_q"]), "it has 5 of the 5 modules .* is no target here"),
        (LoraSettings(rank=4, alpha=10, targets=[*sd3.LORA_TARGETS, "ff.net.2"]), "it has 39 of the 44 modules"),
    ],
)
def test_init_lora_of_another_shape_is_refused(tmp_path, settings, message):
    tiny.lora(tiny.adapter(), noise=0.1).save(tmp_path, StableDiffusion3Pipeline)
    with pytest.raises(ModelError, match=message):
        tiny.lora(tiny.adapter(), settings).load_lora(str(tmp_path))


def test_equal_weights_are_equal_files_and_load_as_before(tmp_path):
    """The library writes a header's metadata in the order of a hash map, and peft keeps module names as a set."""
    weights = tiny.lora(tiny.adapter(), noise=0.1)
    for number in range(6):
        weights.save(tmp_path / str(number), StableDiffusion3Pipeline)
    contents = {lora_file(tmp_path / str(number)).read_bytes() for number in range(6)}
    assert len(contents) == 1
    tensors, settings = read_lora(lora_file(tmp_path / "0"))
    assert settings["target_modules"] == sorted(settings["target_modules"])
    (content,) = contents
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == ["format", "lora_adapter_metadata"]
    assert len(tensors) == len(weights.parameters)


def test_init_lora_that_is_no_lora_is_refused(tmp_path):
    weights = tiny.lora(tiny.adapter())
    with pytest.raises(ModelError, match=r"there is no .*pytorch_lora_weights"):
        weights.load_lora(str(tmp_path))
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelError, match=r"init_lora=.* is damaged"):
        weights.load_lora(str(tmp_path / "broken.safetensors"))
    weights.save(tmp_path / "adapter", StableDiffusion3Pipeline)
    with pytest.raises(ModelError, match=r"is a folder of a run, .*; try model\.init_lora=.*adapter"):
        weights.load_lora(str(tmp_path))
    with pytest.raises(ModelError, match=r"needs model\.lora"):
        Weights(tiny.adapter().network, None, (), seed=0).load_lora(str(tmp_path))


# ---- sizes and parts


def test_latents_have_the_size_asked_for():
    assert tiny.adapter().latent_shape() == (4, 8, 8)
    assert tiny.adapter(height=64, width=16).latent_shape() == (4, 16, 4)


def test_another_vae_is_used(folder, tmp_path):
    tiny.pipeline(seed=5).vae.save_pretrained(tmp_path)
    options = {"max_sequence_length": tiny.TOKENS, "path": str(folder)}
    own, other = sd3.build(sd3.Config(**options)), sd3.build(sd3.Config(**options, vae=str(tmp_path)))
    torch.manual_seed(0)
    latents = torch.randn(1, *own.latent_shape())
    assert not torch.allclose(own.decode(latents), other.decode(latents), atol=1e-3)
    assert torch.equal(*(model.network.get_parameter("proj_out.weight") for model in (own, other)))


# ---- without T5


def test_a_folder_without_t5_loads_and_pads_with_zeros(folder, tmp_path):
    pipe = tiny.pipeline()
    pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
    absent = sd3.build(sd3.Config(path=str(tiny.save(tmp_path, pipe)), max_sequence_length=tiny.TOKENS))
    switched_off = sd3.build(sd3.Config(path=str(folder), max_sequence_length=tiny.TOKENS, load_t5=False))
    full = sd3.build(sd3.Config(path=str(folder), max_sequence_length=tiny.TOKENS))
    tokens = [model.encode(["a red circle"])["prompt_embeds"] for model in (absent, switched_off, full)]
    assert torch.equal(tokens[0], tokens[1])
    clip = tokens[2].shape[1] - tiny.TOKENS
    assert torch.equal(tokens[0][:, :clip], tokens[2][:, :clip])
    assert not tokens[0][:, clip:].any()
    assert tokens[2][:, clip:].any()
