"""The generic adapter without weights: its shapes, operations and bytes are those with them; the rest is said."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException  # there is no public name

from flowrl.commands.plan import command, step_plan
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ModelError
from flowrl.core.strict import validate
from flowrl.models import generic
from flowrl.models.generic.images import blank
from flowrl.models.generic.outline import FullMasks, Outline, Unmeasurable
from flowrl.models.generic.stand_ins import LONGEST, Encoded, Tokens
from flowrl.models.memory.meter import faked, measured
from flowrl.planning import memory
from flowrl.planning.memory import Estimate, skeleton
from tests import tiny_pipelines as tiny
from tests import tiny_sd3
from tests.planning import test_memory

FLUX = "black-forest-labs/FLUX.1-dev"
CONFIGS = tiny_sd3.ROOT / "configs"


def resolved(path: str, model: dict, reward: str = "shapes") -> Resolved:
    """A run with 2 x 3 samples and CFG, of the generic adapter unless `model` says otherwise."""
    sizes = {"prompts_per_iteration": 2, "group_size": 3, "batch_size": 2, "num_inference_steps": 4}
    model = {"name": "generic", "lora": {"rank": 4}} | model
    return test_memory.resolved(path, model, rollout=sizes | {"guidance_scale": 3.0}, rewards=[{"name": reward}])


def planned(run: Resolved) -> Estimate:
    adapter = skeleton(run)
    return memory.estimate(run, adapter, step_plan(run, adapter), prompts=7)


def both(case: str, folder: Path) -> tuple[generic.Generic, Outline]:
    """(adapter with weights, without) of a tiny pipeline."""
    pipe, kind = tiny.make(case), (tiny.CASES | tiny.IMAGED)[case]
    pipe.save_pretrained(folder)
    options = {"path": str(folder), "height": kind.sizes[0][0], "width": kind.sizes[0][1], "call": dict(kind.call)}
    config = validate(generic.Config, options, "model")
    return generic.Generic(pipe, config), Outline(config, folder)


def modules(adapter: Any) -> list[nn.Module]:
    return [part for part in adapter.pipeline.components.values() if isinstance(part, nn.Module)]


IMAGED = ("wan_image", "wan_2_2_frame", "ltx_image")
"""With an image that an encoder sees, or that takes a part of the video."""


@pytest.mark.parametrize("case", ["sd", "sd3", "flux", "ltx", "wan", *IMAGED])
def test_an_outline_has_the_shapes_operations_and_bytes_of_the_real_thing(tmp_path, case):
    real, outline = both(case, tmp_path)
    assert outline.latent_shape() == real.latent_shape()
    assert outline.lora_targets == real.lora_targets
    images = [[blank(tiny.IMAGED[case].sizes[0][::-1])]] * len(tiny.PROMPTS) if case in IMAGED else None
    cond = real.encode(tiny.PROMPTS, images)
    assert outline.condition_shapes() == {name: tuple(value[0].shape) for name, value in cond.tensors.items()}
    assert torch.equal(outline.schedule(4).sigmas, real.schedule(4).sigmas)
    assert memory.count(outline.network) == memory.count(real.network)
    x = torch.randn(2, *real.latent_shape(), generator=torch.Generator().manual_seed(0))
    middle = torch.full((2,), float(real.schedule(4).timesteps[1]))
    predicted = measured(lambda: real.predict(x, middle, cond, 3.0), grad=False)
    decoded = measured(lambda: real.decode(x, cond), grad=False)
    with faked(*modules(outline)):
        empty, texts = torch.empty(x.shape), outline.blank_condition(2)
        works = (lambda: outline.predict(empty, middle, texts, 3.0), lambda: outline.decode(empty))
        for work, (peak, operations) in zip(works, (predicted, decoded), strict=True):
            found = measured(work, grad=False)
            assert found[1] == operations
            # Tables that are kept from the first call to the second are made anew here.
            assert peak <= found[0] < 1.15 * peak


def test_generic_and_native_are_planned_alike(tmp_path):
    tiny_sd3.save(tmp_path)
    own = planned(resolved(str(tmp_path), {"name": "sd3", "max_sequence_length": tiny.TOKENS}))
    other = planned(resolved(str(tmp_path), {"call": {"max_sequence_length": tiny.TOKENS}}))
    same = ("parameters", "stored", "trained", "lora_modules", "saved", "moments", "latents", "images")
    assert {name: getattr(own, name) for name in same} == {name: getattr(other, name) for name in same}
    assert not other.unknown
    assert (own.rollout_flop, own.update_flop) == (other.rollout_flop, other.update_flop)
    for native, entered in zip(own.phases, other.phases, strict=True):
        assert entered.peak == pytest.approx(native.peak, rel=0.1)


def test_what_fake_tensors_cannot_do_is_said_and_the_rest_is_known(tmp_path, capsys, monkeypatch):
    """A network that asks its input for a number."""
    forward = WanTransformer3DModel.forward

    @functools.wraps(forward)
    def asking(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states * float(hidden_states.max()), *args, **kwargs)

    monkeypatch.setattr(WanTransformer3DModel, "forward", asking)
    _, outline = both("wan", tmp_path)
    with faked(*modules(outline)), pytest.raises(Unmeasurable, match="WanPipeline on tensors without values"):
        outline.predict(torch.empty(1, *outline.latent_shape()), torch.zeros(1), outline.blank_condition(1), 1.0)
    run = resolved(str(tmp_path), {"height": 16, "width": 16, "call": dict(tiny.CASES["wan"].call)}, "motion")
    result = planned(run)
    assert set(result.unknown) == {"rollout", "update"}
    assert result.peak is None
    assert result.rollout_flop is None
    known = {phase.name for phase in result.phases if phase.transient is not None}
    assert known == {"encode", "decode"}
    assert result.images == 6 * 9 * 3 * 16 * 16
    file = tmp_path / "run.yaml"
    call = "call: {num_frames: 9, max_sequence_length: 8}"
    file.write_text(
        f"model: {{name: generic, path: {tmp_path}, height: 16, width: 16, lora: {{rank: 4}}, {call}}}\n"
        "data: {prompts: 'shapes:train'}\nrewards: [{name: motion}]\nname: x\niterations: 1\n"
    )
    command(str(file), [])
    text = " ".join(capsys.readouterr().out.split())
    assert "rollout cannot be measured without weights: WanPipeline on tensors without values" in text
    assert "largest: not known" in text


def test_an_encoding_of_images_that_cannot_stand_in_is_said(tmp_path, monkeypatch):
    tiny.make("ltx_image").save_pretrained(tmp_path)
    monkeypatch.setattr(Encoded, "encode", lambda self, images: images.missing)
    kind = tiny.IMAGED["ltx_image"]
    config = generic.Config(path=str(tmp_path), height=kind.sizes[0][0], width=kind.sizes[0][1], call=dict(kind.call))
    with pytest.raises(ModelError, match="cannot be used as configured: AttributeError"):
        Outline(config, tmp_path)


@pytest.mark.parametrize("valid", [1, 5])
def test_a_network_that_sorts_tokens_by_their_mask_does_the_same_work_without_values(valid):
    network: Any = tiny.make("hunyuan_video_1_5").transformer
    given = {
        "hidden_states": torch.zeros(1, 9, 3, 4, 4),
        "timestep": torch.ones(1),
        "encoder_hidden_states": torch.zeros(1, 5, 16),
        "encoder_attention_mask": (torch.arange(5) < valid)[None],
        "encoder_hidden_states_2": torch.zeros(1, 5, 32),
        "encoder_attention_mask_2": torch.zeros(1, 5, dtype=torch.bool),
        "image_embeds": torch.zeros(1, 5, 12),
    }
    peak, operations = measured(lambda: network(**given), grad=False)
    with faked(network):
        fakes = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in given.items()}
        with pytest.raises(DataDependentOutputException):
            network(**fakes)
        with FullMasks():
            found = measured(lambda: network(**fakes), grad=False)
            assert network(**fakes, return_dict=False)[0].shape == (1, 4, 3, 4, 4)
    assert found[1] == operations
    assert found[0] == pytest.approx(peak, rel=0.15)


def test_a_real_model_without_tokenizers_has_the_native_adapters_shapes():
    sizes = {"height": 512, "width": 512, "dtype": "bfloat16"}
    entered = skeleton(resolved(FLUX, sizes | {"call": {"max_sequence_length": 128}}))
    native = skeleton(resolved(FLUX, sizes | {"name": "flux", "max_sequence_length": 128}))
    assert entered.latent_shape() == native.latent_shape() == (1024, 64)
    assert sorted(entered.condition_shapes().values()) == sorted(native.condition_shapes().values())
    assert entered.text_tokens == {"text_encoder": 77, "text_encoder_2": 128}
    assert memory.count(entered.network) == memory.count(native.network) == 11_901_408_320


def test_a_pipeline_with_code_of_its_own_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "MyPipeline"}')
    with pytest.raises(ModelError, match="no class 'MyPipeline': this pipeline brings its own code"):
        skeleton(resolved(str(tmp_path), {}))


def test_the_stand_in_tokenizer_pads_and_cuts_as_it_is_asked():
    words = Tokens(LONGEST)
    ids = words(["a red circle", "a"], padding="max_length", max_length=8, truncation=True)
    assert ids.input_ids.shape == (2, 8)
    assert ids.attention_mask.sum(1).tolist() == [5, 2]
    assert words(["a " * 20], max_length=8, truncation=True).input_ids.shape == (1, 8)
    assert words("a red circle", padding="longest")[0].shape == (1, 5)


# ---- every recipe for a real model

RECIPES = sorted(
    str(file.relative_to(CONFIGS))
    for file in CONFIGS.glob("*/*.yaml")
    if file.parent.name not in ("lab", "proxy", "judge", "frozen", "tiny")
)


@functools.cache
def real(family: str, path: str, dtype: str) -> Any:
    """The first recipe's adapter of a model; others are made around its pipeline."""
    name = next(r for r in RECIPES if (c := recipe(r)).model.name == family and c.model.config.path == path)
    return skeleton(recipe(name))


@functools.cache
def recipe(name: str) -> Resolved:
    return resolve(load_config(CONFIGS / name))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_its_model(name):
    """Its size is one the model has, its LoRA targets bind, its steps can be taken: before anything is downloaded."""
    run = recipe(name)
    config = run.model.config
    made = real(run.model.name, config.path, config.dtype)
    family = vars(run.model.module).get("FAMILY")
    # The generic adapter has none; of its models there is one recipe each.
    adapter = made if family is None else family.adapter(made.pipeline, config)
    names = [module for module, part in adapter.network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    if config.lora is not None:
        for target in config.lora.targets or adapter.lora_targets:
            assert any(module == target or module.endswith(f".{target}") for module in names), target
    assert min(adapter.latent_shape()) > 0
    plan = step_plan(run, adapter)
    assert any(plan.stochastic) == run.training.takes_sampler
    assert len(plan.schedule.timesteps) == len(plan)
