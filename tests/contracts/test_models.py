"""The contract of adapters over every tiny pipeline: the laws, and parity with the pipeline's own call."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.contracts.laws import Law
from flowrl.contracts.models import LAWS
from flowrl.core.errors import ModelError
from flowrl.credit.saliency import SpatialConfig
from flowrl.data.text_cache import Texts
from flowrl.models.base import packed_grid
from flowrl.models.generic.adapter import Generic
from flowrl.models.generic.families import FAMILIES
from flowrl.models.weights.roles import Weights
from flowrl.rollout.library import Model
from flowrl.rollout.saliency_maps import mapper
from flowrl.samplers.base import StepDistribution
from tests import native
from tests import tiny_pipelines as tiny
from tests.native import drawn, lora
from tests.native import entered as adapter

EVERY = [pytest.param(name, marks=() if case.fast else pytest.mark.slow) for name, case in tiny.CASES.items()]
WITH_LORA = [case for case in EVERY if case.values[0] != "pixart_sigma"]
GUIDED = 3.0


def own_call(
    pipe: Any, name: str, size: tuple[int, int], noise: Tensor, batch: int, guidance_scale: float, steps: int
) -> tuple[Tensor, Tensor]:
    """(latents that leave the loop, pictures) of the pipeline's own call from the same noise."""
    call = tiny.CASES[name].own_call(pipe, size, guidance_scale, steps, batch)
    with tiny.stepped(pipe, lambda latents: noise) as left:
        pictures = pipe(prompt=tiny.PROMPTS[:batch], **call)[0]
    return left[-1], pictures


def noise_like(model: Generic, batch: int = 2) -> Tensor:
    return torch.randn(batch, *model.latent_shape(), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_adapter_keeps_the_law(name: str, law: Law[Model]):
    own = adapter(name)
    weights = Weights(own.network, None, (), seed=0) if name == "pixart_sigma" else lora(own)
    law.hold(Model(own, weights, torch.device("cpu"), Texts(own, (), cache=False)))


@pytest.mark.parametrize(
    "name", [name if kind.fast else pytest.param(name, marks=pytest.mark.slow) for name, kind in native.KINDS.items()]
)
def test_a_native_adapter_keeps_every_law(name: str):
    own, _ = native.kind(name)
    model = Model(own, lora(own), torch.device("cpu"), Texts(own, (), cache=False))
    for law in LAWS:
        law.hold(model)


@pytest.mark.parametrize("name", EVERY)
def test_steps_may_share_a_forward_where_one_network_makes_them_all(name):
    model = adapter(name)
    assert model.batch_key(2) == (0 if len(model.networks) == 1 else 2)


# ---- the adapter is the pipeline


@pytest.mark.slow
def test_there_is_a_tiny_pipeline_for_every_class_of_the_table():
    cases = (tiny.CASES | tiny.IMAGED).values()
    assert not set(FAMILIES) - {type(case.build()).__name__ for case in cases}


def agree(name: str, size: tuple[int, int], batch: int, scale: float, steps: int) -> None:
    """The Euler plan's latents and pictures are those of the pipeline's own call."""
    model, case = adapter(name, size), tiny.CASES[name]
    noise, x0 = drawn(model, batch, scale, steps)
    latents, pictures = own_call(model.pipeline, name, size, noise, batch, scale, steps)
    assert not torch.allclose(x0, noise, atol=0.1)
    assert_close(x0, latents.float(), atol=1e-4, rtol=0)
    found = model.decode(x0)
    assert found.dtype == torch.float32
    assert found.shape[-3:] == (3, *size)
    assert found.ndim == (5 if {"num_frames", "frames"} & set(case.call) else 4)
    assert pictures.std() > 0.01
    if pictures.shape[-3] == 4:  # Qwen-Image 2.1's have a transparency
        pictures = pictures[:, :3] * pictures[:, 3:] + (1 - pictures[:, 3:])
    assert_close(found, pictures.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_the_euler_plan_reproduces_the_pipelines_own_call(name, guided):
    case = tiny.CASES[name]
    for size, batch in zip(case.sizes, (case.batches[0], case.batches[-1]), strict=True):
        agree(name, size, batch, GUIDED if guided else case.free, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CASES)
def test_the_whole_matrix_of_sizes_and_batches_agrees(name):
    case = tiny.CASES[name]
    for size, batch, scale in itertools.product(case.sizes, case.batches, (case.free, GUIDED)):
        agree(name, size, batch, scale, 5)


@pytest.mark.parametrize("name", EVERY)
def test_a_replay_is_bitwise_the_rollout_also_without_text_encoders(name):
    model = adapter(name)
    x, cond, scale = noise_like(model), model.encode(tiny.PROMPTS), GUIDED
    t = model.schedule(4).timesteps[1].repeat(2)
    with torch.no_grad():
        recorded = model.predict(x, t, cond, scale)
    model.free_text_encoders()
    replayed = model.predict(x, t, cond, scale)
    assert replayed.requires_grad
    assert torch.equal(replayed, recorded)
    assert model.decode(x).isfinite().all()
    with pytest.raises(ModelError, match="encoders were freed"):
        model.encode(tiny.PROMPTS)


# ---- what is trained


@pytest.mark.parametrize("name", WITH_LORA)
def test_the_saved_lora_gives_the_same_picture_in_a_plain_pipeline(name, tmp_path):
    size = tiny.CASES[name].sizes[0]
    model = adapter(name)
    noise, plain = drawn(model, 1, GUIDED, 2)
    weights = lora(model, noise=0.3)
    _, tuned = drawn(model, 1, GUIDED, 2)
    assert not torch.allclose(plain, tuned, atol=1e-3)
    weights.save(tmp_path, type(model.pipeline))
    other = tiny.make(name)
    if hasattr(other, "load_lora_weights"):
        other.load_lora_weights(tmp_path)
        if len(model.networks) > 1:
            other.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    else:
        other.transformer.load_lora_adapter(
            tmp_path, prefix="transformer", weight_name="pytorch_lora_weights.safetensors"
        )
    other.scheduler = model.pipeline.scheduler
    latents, _ = own_call(other, name, size, noise, 1, GUIDED, 2)
    assert_close(tuned, latents.float(), atol=1e-4, rtol=0)


def test_a_network_that_takes_no_lora_is_refused_and_trains_its_full_weights():
    model = adapter("pixart_sigma")
    with pytest.raises(ModelError, match=r"PixArtTransformer2DModel takes no LoRA in diffusers; .*model\.lora=null"):
        lora(model)
    weights = Weights(model.network, None, (), seed=0)
    timestep, cond = model.schedule(4).timesteps[1].repeat(2), model.encode(tiny.PROMPTS)
    model.predict(noise_like(model), timestep, cond, GUIDED).square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in weights.parameters.values())


# ---- where a position of the latents lies


CHANNELS_LAST = (
    *("flux", "qwen_image", "ltx", "chroma", "flux_2", "flux_2_klein", "cogvideox"),
    *("krea_2", "ovis_image"),
)


@pytest.mark.parametrize("name", [case for case in EVERY if case.values[0] in CHANNELS_LAST])
def test_a_position_of_the_latents_is_the_place_of_the_picture_that_it_moves(name):
    model = adapter(name, tiny.CASES[name].sizes[1])
    assert model.channel_axis == 2
    places = packed_grid(model) or tuple(n for axis, n in enumerate(model.latent_shape(), 1) if axis != 2)
    clean = torch.zeros(1, *model.latent_shape()).movedim(2, -1)
    before = model.decode(clean.movedim(-1, 2))[0]
    maps = mapper(SpatialConfig(), model.latent_shape(), grid=packed_grid(model), channel_axis=2)(before[None])
    law = StepDistribution(torch.zeros(1, *model.latent_shape()), torch.ones(1), channel_axis=2)
    assert law.log_prob(torch.ones_like(law.mean), "position").shape == maps.shape
    for cell in (tuple(0 for _ in places), tuple(n - 1 for n in places), (0, *(n - 1 for n in places[1:]))):
        moved = clean.reshape(*places, -1).clone()
        moved[cell] = 3.0
        after = model.decode(moved.reshape(clean.shape).movedim(-1, 2))[0]
        change = (after - before).abs().mean(dim=-3).reshape(-1, *before.shape[-2:]).mean(dim=0)
        rows = torch.nn.functional.adaptive_avg_pool2d(change[None], (places[-2], places[-1]))[0]
        found = divmod(int(rows.argmax()), places[-1])
        # A random decoder smears by a cell.
        assert max(abs(a - b) for a, b in zip(found, cell[-2:], strict=True)) <= 1, (cell, found)


def test_a_class_that_is_not_known_keeps_no_map_of_its_tokens(monkeypatch):
    # A copy: put back into the table itself, the class would come last, and docs/models.md has its order.
    others = {kind: family for kind, family in FAMILIES.items() if kind != "ChromaPipeline"}
    for module in ("families", "adapter"):
        monkeypatch.setattr(f"flowrl.models.generic.{module}.FAMILIES", others)
    with pytest.raises(
        ModelError, match=r"algorithm\.spatial: this model's latents are packed .*try algorithm.spatial=null"
    ):
        packed_grid(adapter("chroma"))


def test_pictures_of_a_model_of_clips_have_maps_of_one_frame():
    maps = mapper(SpatialConfig(), (4, 1, 8, 8))(torch.rand(2, 3, 32, 32))
    assert maps.shape == (2, 1, 8, 8)
