"""The native adapters in one table: each is its pipeline's own call and the generic adapter's prediction.

That an adapter keeps the laws of `flowrl.contracts.models` (own timesteps, replay, gradients, cost of guidance) is
proven in tests/contracts/test_models.py; test_models_sd3.py and test_models_unet.py have what is their families' own.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.core import registry
from flowrl.core.errors import ModelError
from flowrl.core.types import SampleId
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.plan import window
from flowrl.diffusion.schedules import shifted_linspace
from flowrl.models import wan
from flowrl.models.base import LoraSettings, packed_grid
from flowrl.models.weights.roles import Weights
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.recorder import Recording
from flowrl.rollout.saliency_maps import mapper
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import flow_sde
from tests import native
from tests import tiny_pipelines as tiny
from tests.tables import table
from tests.tiny_sd3 import ROOT

KINDS = [name if kind.fast else pytest.param(name, marks=pytest.mark.slow) for name, kind in native.KINDS.items()]
TRAINED = [name for name, kind in native.KINDS.items() if kind.options.keys() <= {"num_frames"} and kind.fast]


def scale_of(name: str, guided: bool) -> float:
    return native.KINDS[name].scale if guided else 1.0


# ---- the adapter is the pipeline


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_euler_plan_reproduces_the_pipelines_own_call(name, guided):
    """At two sizes, alone and in a batch; with the arguments that the adapter itself has for the call."""
    for size, batch in zip(native.KINDS[name].sizes, (2, 1), strict=True):
        model, pipe = native.kind(name, size)
        call = model.own_call(4, scale_of(name, guided))
        native.compare(model, pipe, size, batch, scale_of(name, guided), **call)


def assert_alike(model: Any, other: Any, scale: float) -> None:
    """A native adapter and the generic one around the same pipeline."""
    assert model.latent_shape() == other.latent_shape()
    own, theirs = model.schedule(7), other.schedule(7)
    assert_close(own.timesteps, theirs.timesteps)
    assert_close(own.sigmas, theirs.sigmas, atol=1e-5, rtol=0)
    for each in (1.0, scale):
        assert_close(native.output(model, each), native.output(other, each), atol=1e-5, rtol=0)
    latents = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    # The latents are scaled by another formula, an ulp apart; a decoder of a few layers makes a dozen of it.
    assert_close(model.decode(latents), other.decode(latents), atol=1e-5, rtol=0)
    bare = {target.removeprefix("attn.") for target in model.lora_targets}
    assert {target.removeprefix("attn.") for target in other.lora_targets} <= bare
    assert set(other.dead_lora_modules()) <= set(model.dead_lora_modules())
    assert packed_grid(model) == packed_grid(other)


@pytest.mark.parametrize("name", KINDS)
def test_its_prediction_and_grid_are_the_generic_adapters(name):
    kind = native.KINDS[name]
    model, pipe = native.kind(name)
    assert_alike(model, native.beside(native.copied(pipe), kind.sizes[0], **kind.options), kind.scale)


def test_a_timestep_for_every_token_is_wans_own():
    pipe = tiny.make("wan")
    pipe.register_to_config(expand_timesteps=True)
    model = native.adapter("wan", pipe, (16, 16), num_frames=9)
    native.compare(model, pipe, (16, 16), 2, 4.0, **model.own_call(4, 4.0))


def test_wans_experts_have_their_own_steps_and_guidance():
    two, _ = native.kind("wan 2.2")
    times = two.schedule(4).timesteps
    assert (times >= two.boundary).any()
    assert (times < two.boundary).any()
    assert [two.batch_key(k) for k in (0, 3)] == [0, 3]
    assert [native.kind("wan")[0].batch_key(k) for k in (0, 3)] == [0, 0]
    assert not torch.allclose(native.output(two, 4.0), native.output(native.kind("wan 2.2 scales")[0], 4.0), atol=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_an_expert_that_only_another_process_needs_is_called_and_changes_nothing(first, monkeypatch):
    """Processes that share the weights gather an expert together; forward and backward are made by all of them."""
    two, _ = native.kind("wan 2.2")
    own, other = ("transformer", "transformer_2") if first else ("transformer_2", "transformer")
    x, _, cond = native.point(two)
    timestep = torch.full((len(x),), 900.0 if first else 100.0)

    def gradients() -> tuple[torch.Tensor, dict[str, list[Any]]]:
        two.network.zero_grad(set_to_none=True)
        output = two.predict(x, timestep, cond, 1.0)
        output.square().sum().backward()
        return output, {name: [p.grad for p in expert.parameters()] for name, expert in two.experts.items()}

    alone, expected = gradients()
    assert set(map(type, expected[other])) == {type(None)}
    monkeypatch.setattr(wan, "needed_anywhere", lambda needed, network: [True, True])
    together, found = gradients()
    assert torch.equal(together, alone)
    assert_close(found[own], expected[own], rtol=0, atol=0)
    # Its backward pass was made too, with zeros.
    passed = [gradient for gradient in found[other] if gradient is not None]
    assert passed
    assert not any(bool(gradient.any()) for gradient in passed)


def test_one_frame_is_an_image():
    model, _ = native.kind("wan image")
    assert model.decode(torch.zeros(2, *model.latent_shape())).shape == (2, 3, 16, 16)


def test_guidance_keeps_the_norm_of_every_token_of_qwen():
    model, _ = native.kind("qwen_image")
    plain, guided = native.output(model, 1.0), native.output(model, 4.0)
    assert not torch.allclose(plain, guided, atol=1e-3)
    assert_close(plain.norm(dim=-1), guided.norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_qwens_embeddings_are_as_long_as_their_prompts_whatever_the_batch():
    model, _ = native.kind("qwen_image")
    together = model.encode([*native.PROMPTS] * 5)["prompt_embeds"]
    alone = [model.encode([prompt])["prompt_embeds"][0] for prompt in native.PROMPTS]
    assert len({len(row) for row in alone}) == 2
    assert max(map(len, alone)) <= tiny.TOKENS
    for place, row in enumerate(together):
        assert_close(row, alone[place % 2], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux", "wan"])
def test_the_shapes_of_a_condition_are_known_without_encoding(name):
    model, _ = native.kind(name)
    cond = model.encode(native.PROMPTS)
    assert {key: tuple(value.shape[1:]) for key, value in cond.tensors.items()} == model.condition_shapes()


def test_encoding_out_of_order_says_what_to_do():
    model, _ = native.kind("flux true cfg")
    cond = native.kind("flux")[0].encode(["a red circle"])
    with pytest.raises(ModelError, match=r"call encode\(\) first"):
        model.predict(torch.zeros(1, *model.latent_shape()), torch.ones(1), cond, 3.5)
    model.free_text_encoders()
    with pytest.raises(ModelError, match="encoders were freed"):
        model.encode(["a red circle"])


@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan"])
def test_a_static_shift_replaces_the_schedulers(family):
    pipe, size = tiny.make(family), native.KINDS[family].sizes[0]
    own = native.adapter(family, pipe, size).schedule(7)
    fixed = native.adapter(family, pipe, size, shift=8.0).schedule(7)
    assert not torch.allclose(own.sigmas, fixed.sigmas, atol=1e-2)
    if family == "wan":  # whose scheduler has a shift of 3
        assert torch.equal(native.adapter(family, pipe, size, shift=3.0).schedule(7).sigmas, own.sigmas)
        assert bool((fixed.sigmas[1:-1] > own.sigmas[1:-1]).all())
    else:
        assert torch.equal(fixed.sigmas, shifted_linspace(7, 8.0))
        assert_close(fixed.timesteps, 1000 * fixed.sigmas[:-1])


# ---- LoRA


@pytest.mark.parametrize("name", KINDS)
def test_every_lora_target_binds_and_a_saved_lora_gives_the_same_latents_in_a_plain_pipeline(name, tmp_path):
    kind = native.KINDS[name]
    (model, _), (_, plain) = native.kind(name), native.kind(name)
    weights = native.lora(model, noise=0.3)
    adapted = {key.partition(".lora_")[0] for key in weights.parameters}
    assert all(any(key.endswith(target) for key in adapted) for target in model.lora_targets)
    weights.save(tmp_path, type(plain))
    noise, x0 = native.drawn(model, 2, kind.scale, 3)
    call = native.kind(name)[0].own_call(3, kind.scale)
    before, _ = native.own_call(plain, kind.sizes[0], noise, 3, **call)
    plain.load_lora_weights(tmp_path)
    if (tmp_path / "transformer_2").is_dir():
        plain.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    after, _ = native.own_call(plain, kind.sizes[0], noise, 3, **call)
    assert not torch.allclose(before, after, atol=1e-3)
    assert_close(x0, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*TRAINED, pytest.param("sdxl", marks=pytest.mark.slow)])
def test_it_trains_in_bfloat16(name):
    """LoRA weights are float32, the replay exact, gradients finite, the prediction the exact one up to rounding."""
    kind = native.KINDS[name]
    exact = native.output(native.kind(name)[0], kind.scale)
    pipe = native.halved(tiny.make(kind.case))
    model = native.adapter(kind.family, pipe, kind.sizes[0], dtype="bfloat16", **kind.options)
    weights = native.lora(model)
    assert {p.dtype for p in weights.parameters.values()} == {torch.float32}
    assert_close(native.output(model, kind.scale).float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0.05)
    assert native.backward(model, weights, kind.scale) == 0
    gradients = [p.grad for p in weights.parameters.values() if p.grad is not None]
    assert all(g.isfinite().all() for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) > 0


def real_encoder(pipe: Any) -> None:
    """A tiny language model of the real class: the stand-in of the tiny pipelines cannot be saved."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 512, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    pipe.register_modules(text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("flux", {}),
        # The real template's words come before a prompt's, and are cut off by number.
        ("qwen_image", {"max_sequence_length": 64}),
        # One frame, since the reward scores images.
        ("wan", {"num_frames": 1}),
    ],
)
def test_two_iterations_of_flow_grpo_on_a_saved_pipeline(family, options, tmp_path):
    pipe = tiny.make(family)
    if family == "qwen_image":
        real_encoder(pipe)
    summary = native.two_iterations(tmp_path, family, pipe, (16, 16), **options)
    assert (summary["status"], summary["iterations"]) == ("finished", 2)


# ---- positions of packed latents


def test_log_probs_and_maps_by_position_go_by_tokens():
    size = (24, 16)
    model = native.adapter("flux", tiny.make("flux"), size)
    rows, columns = 6, 4
    assert packed_grid(model) == (rows, columns)
    assert model.latent_shape() == (24, 16)
    policy = Policy(model, flow_sde.build(flow_sde.Config()), 3.5)
    ids, plan = [SampleId(0, 0), SampleId(1, 0)], window(model.schedule(3), 0.7)
    noise, cond = Noise(0, "test", 1, model.latent_shape()), model.encode(native.PROMPTS)
    options = {"batch_size": 2, "options": RunOptions(recording=Recording("position"))}
    _, edges = run(policy, plan, noise, Asked(ids, cond, torch.arange(2)), **options)
    assert edges.old_log_prob.shape == (len(edges), rows * columns)
    _, plain = run(policy, plan, noise, Asked(ids, cond, torch.arange(2)), batch_size=2)
    assert_close(edges.old_log_prob.mean(dim=1), plain.old_log_prob)
    maps = mapper(SpatialConfig(), model.latent_shape(), grid=packed_grid(model))
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    unpacked = mapper(SpatialConfig(), (1, rows, columns))(images)
    assert torch.equal(maps(images), unpacked.reshape(2, -1))
    # Token by token, a position of the map is a 2 x 2 place of the latents.
    marked = torch.zeros(1, *model.latent_shape())
    marked[0, columns + 2] = 1
    latents = model.unpacked(marked)
    assert latents[0, 0, 2:4, 4:6].eq(1).all()
    assert latents.sum() == 16


# ---- sizes and options


@pytest.mark.parametrize(
    ("family", "option", "value", "message"),
    table(__file__, "refused_sizes"),
)
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_does(family, option, value, message):
    module, pipe = registry.load("models", family), tiny.make(family)
    options = native.tokens(pipe) | {"height": 16, "width": 16, option: value}
    with pytest.raises(ModelError, match=rf"model\.{option}={value} must be .*{message}$"):
        module.FAMILY.adapter(pipe, module.Config(path="tiny", **options))


@pytest.mark.parametrize(
    ("family", "option", "message"),
    [
        ("flux", {"max_sequence_length": 513}, r"max_sequence_length=513 must be in 1\.\.512"),
        ("flux", {"shift": 0.0}, "shift=0.0 must be positive"),
        ("flux", {"true_cfg_scale": 0.5}, "true_cfg_scale=0.5 must be at least 1"),
        ("qwen_image", {"max_sequence_length": 1025}, r"must be in 1\.\.1024"),
        ("wan", {"num_frames": 0}, "num_frames=0 must be at least 1; 1 makes images"),
        ("wan", {"guidance_scale_2": 0.5}, r"guidance_scale_2=0\.5 must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(family, option, message):
    with pytest.raises(ValueError, match=message):
        registry.load("models", family).Config(path="x", **option)


def test_a_wan_that_does_not_fit_its_options_is_refused():
    with pytest.raises(ModelError, match=r"guidance_scale_2=2\.0: this model has no second expert"):
        native.adapter("wan", tiny.make("wan"), (16, 16), guidance_scale_2=2.0)
    pipe = tiny.make("wan")
    pipe.transformer.register_to_config(in_channels=36)
    with pytest.raises(ModelError, match="takes 36 channels, not the 16 of its latents"):
        native.adapter("wan", pipe, (16, 16))
    model, pipe = native.kind("wan")
    pipe.scheduler.register_to_config(use_flow_sigmas=False, prediction_type="epsilon")
    with pytest.raises(ModelError, match="set use_flow_sigmas"):
        model.schedule(4)


# ---- the real shapes


@dataclass(frozen=True)
class Real:
    """A published model: its embedded configuration and the facts that are public of it."""

    folder: str
    options: dict[str, Any]
    parameters: dict[str, int]
    latents: list[int]
    condition: dict[str, list[int]]
    adapted: int
    """Tensors of its LoRA."""
    dead: int = 0
    sigmas: list[float] = field(default_factory=list)
    values: int | None = None
    """Of the denoiser's file, which holds the table of positions too; None: not published."""
    second: float | None = None
    """The second of twenty sigmas."""


REAL = {name: Real(**given) for name, given in table(__file__, "real_models").items()}
"""Family and what tells its models apart -> the model."""


@pytest.mark.parametrize("name", REAL)
def test_the_real_shape_is_the_published_one(name):
    real, module = REAL[name], registry.load("models", name.partition(" ")[0])
    config = module.Config(path="any", dtype="bfloat16", **real.options)
    model = module.skeleton(config, ROOT / "assets" / "model_configs" / real.folder)
    parts = {name: part for name, part in model.pipeline.components.items() if isinstance(part, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()} == real.parameters
    assert list(model.latent_shape()) == real.latents
    assert {part: list(shape) for part, shape in model.condition_shapes().items()} == real.condition
    assert len(model.dead_lora_modules()) == real.dead
    assert set(model.dead_lora_modules()) <= {name for name, _ in model.network.named_modules()}
    assert {(p.device.type, p.dtype) for p in model.network.parameters()} == {("meta", torch.bfloat16)}
    held = torch.bfloat16 if config.vae_precision == "bfloat16" else torch.float32
    assert next(model.pipeline.vae.parameters()).dtype == held
    if real.values is not None:
        assert sum(value.numel() for value in model.network.state_dict().values()) == real.values
    if real.second is not None:
        assert float(model.schedule(20).sigmas[1]) == pytest.approx(real.second, abs=1e-4)
    if real.sigmas:  # the pipeline's own grid
        assert_close(model.schedule(len(real.sigmas) - 1).sigmas, torch.tensor(real.sigmas), atol=1e-5, rtol=0)
    with torch.device("meta"):
        weights = Weights(model.network, LoraSettings(rank=64, alpha=128), model.lora_targets, seed=0)
    assert len(weights.parameters) == real.adapted


def test_each_has_the_scale_of_its_own_guidance():
    """The guider is a component like the others; without one the scale would have no place."""
    folder = ROOT / "assets" / "model_configs" / "hunyuan-video-1.5-720p-t2v"
    module = registry.load("models", "generic")
    model = module.skeleton(module.Config(path="any", height=64, width=64, call={"num_frames": 5}), folder)
    assert model.pipeline.guider.config.guidance_scale == 6.0
    assert model.branches(6.0) == 2
