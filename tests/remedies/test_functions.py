"""Remedies of one function's arguments: of models, of a machine, of what a library cannot do."""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrl.core.errors import ModelError, Remedy
from flowrl.core.types import SampleId
from tests import native, tiny_pipelines, tiny_sd3
from tests.remedies import follows
from tests.remedies.following import each_ends, numbered, require_package, stand_in

CPU = torch.device("cpu")


def get(remedy: Remedy, key: str, given: Any) -> Any:
    """The value of an option that a remedy sets, else the given one."""
    return remedy.settings.get(key, given)


def options_of(**options: Any) -> Any:
    from flowrl.core.strict import validate
    from flowrl.models.sd3 import Config

    return validate(Config, {"path": "tiny-sd3", **options}, "model")


def autocasts(remedy: Remedy) -> None:
    from flowrl.models.weights.precision import autocasts

    options = stand_in(
        precision=get(remedy, "model.precision", "native"),
        dtype=get(remedy, "model.dtype", "bfloat16"),
        lora=get(remedy, "model.lora", None),
    )
    autocasts(options, trained=True)


def videos(remedy: Remedy) -> None:
    from flowrl.config.checks import _check_videos

    run = stand_in(eval=stand_in(videos=get(remedy, "eval.videos", "mp4")))
    _check_videos(stand_in(run=run), stand_in(num_frames=5, height=9, width=16))


def held_pairs(remedy: Remedy) -> None:
    """A method of a user that learns from pairs and compares no images."""
    from flowrl.config.checks import _check_source

    pairs = stand_in(eval=None if remedy.without == "data.pairs.eval" else "held")
    data, eval_ = stand_in(pairs=pairs, eval_prompts=None), stand_in(best_guidance=[], rewards=[])
    run, method = stand_in(data=data, rewards=[], eval=eval_), stand_in(prefers=False)
    resolved = {"run": run, "method": method, "members": ("chosen",), "algorithm": stand_in(name="mine")}
    _check_source(stand_in(**resolved))


def own_noise(remedy: Remedy, made: dict[str, Any], *, flip: bool = False) -> None:
    from flowrl.data.given_samples import require_own_noise
    from flowrl.data.options import PairsConfig

    if get(remedy, "algorithm.noise", "own") == "fresh":
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pairs.json").write_text(json.dumps(made))
        require_own_noise(PairsConfig(path=folder, flip=get(remedy, "data.pairs.flip", flip)), "data.pairs.path")


def vae(remedy: Remedy, option: str) -> None:
    from flowrl.models._vae import set_up_vae

    key = f"model.memory.{option}"
    names = ("vae_slicing", "vae_tiling", "vae_checkpointing", "vae_channels_last")
    memory = dict.fromkeys(names, False) | {option: get(remedy, key, True)}
    pipeline = stand_in(components={"vae": nn.Linear(2, 2)})
    set_up_vae(pipeline, stand_in(memory=stand_in(**memory), vae_precision=None))


def overflow(remedy: Remedy) -> None:
    from flowrl.models._vae import set_up_vae

    memory = stand_in(vae_slicing=False, vae_tiling=False, vae_checkpointing=False, vae_channels_last=False)
    part = stand_in(config={"force_upcast": True})
    pipeline = stand_in(components={"vae": part}, upcast_vae=None)
    set_up_vae(pipeline, stand_in(memory=memory, vae_precision=get(remedy, "model.vae_precision", "float16")))


def counted(remedy: Remedy) -> None:
    from flowrl.models.memory.blocks import checkpoint_blocks

    class Calls(nn.Module):
        """A network that recomputes functions; its blocks are its two layers."""

        _repeated_blocks = ("Linear",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def enable_gradient_checkpointing(self, call: Callable[..., Any] | None = None) -> None:
            if call is not None:
                call(lambda x: x, torch.zeros(1))

    checkpoint_blocks(Calls(), get(remedy, "model.gradient_checkpointing", 2))


def checkpointing(remedy: Remedy) -> None:
    from flowrl.models.memory.blocks import checkpoint_blocks

    class Plain(nn.Linear):
        def enable_gradient_checkpointing(self) -> None:
            raise ValueError("Plain has none")

    checkpoint_blocks(Plain(2, 2), get(remedy, "model.gradient_checkpointing", True))


def packed(remedy: Remedy) -> None:
    from flowrl.models.base import packed_grid

    if get(remedy, "algorithm.spatial", {}) is not None:
        packed_grid(stand_in(grid=lambda: None, latent_shape=lambda: (16, 4)))


def sized(remedy: Remedy) -> None:
    from flowrl.models.generic.options import Size

    size = Size(get(remedy, "model.height", 40), get(remedy, "model.width", 32), 8)
    size.require(torch.zeros(1, 4, 4, 4), stand_in(vae_scale_factor=8))


def offloaded(remedy: Remedy) -> None:
    from flowrl.models.memory import savings

    pipeline = tiny_pipelines.make("sd3")
    savings.place(
        pipeline, options_of(memory={"group_offload": get(remedy, "model.memory.group_offload", ["vae"])}), CPU
    )


def attended(remedy: Remedy) -> None:
    tiny_sd3.adapter(attention=get(remedy, "model.attention", "_native_math")).to(CPU)


def targets(remedy: Remedy, given: list[str]) -> None:
    from flowrl.models.base import LoraSettings

    found = get(remedy, "model.lora.targets", given)
    settings = LoraSettings(rank=2, alpha=2.0, targets=None if found is None else found)
    tiny_sd3.lora(tiny_sd3.adapter(), settings)


def rank(remedy: Remedy) -> None:
    from flowrl.models.base import LoraSettings

    tiny_sd3.lora(tiny_sd3.adapter(), LoraSettings(rank=get(remedy, "model.lora.rank", 4096), alpha=2.0))


def no_lora(remedy: Remedy) -> None:
    from flowrl.models.base import LoraSettings
    from flowrl.models.weights.roles import Weights

    lora = get(remedy, "model.lora", LoraSettings(rank=2, alpha=2.0))
    Weights(nn.Linear(2, 2), lora, ("to_q",), seed=0)


def started(remedy: Remedy) -> None:
    from flowrl.models.base import LoraSettings
    from flowrl.models.weights.roles import Weights

    model, lora = tiny_sd3.adapter(), get(remedy, "model.lora", None)
    with tempfile.TemporaryDirectory() as folder:
        Weights(model.network, LoraSettings(), ("attn.to_q",), seed=0).save(Path(folder), type(model.pipeline))
        settings = None if lora is None else LoraSettings(**lora)
        weights = Weights(tiny_sd3.adapter().network, settings, ("attn.to_q",), seed=0)
        if get(remedy, "model.init_lora", folder) is not None:
            weights.load_lora(folder)


def optimizer(remedy: Remedy, name: str, device: str) -> None:
    from flowrl.training.optimizers import require

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        require(get(remedy, "optim.name", name), torch.device(device))


def of_a_convolution(remedy: Remedy) -> None:
    from flowrl.training.optimizers import make
    from flowrl.training.options import OptimConfig

    make(get(remedy, "optim.name", "muon"), [nn.Parameter(torch.ones(2, 2, 3, 3))], OptimConfig().settings)


def quantized_optimizer(remedy: Remedy) -> None:
    from flowrl.training.optimizers import require

    if remedy.command:
        return require_package(remedy, "bitsandbytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        require("adamw_8bit", CPU)


def backend(remedy: Remedy, given: str | None, cards: int) -> None:
    from flowrl.training.world import BACKEND, require_devices

    words = remedy.flag.split()
    value = None if remedy.without == "--backend" else words[1] if words[:1] == ["--backend"] else given
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BACKEND, raising=False)
        if value is not None:
            patch.setitem(os.environ, BACKEND, value)
        patch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        patch.setattr(torch.cuda, "device_count", lambda: cards)
        require_devices(int(words[1]) if words[:1] == ["--processes"] else 4)


def split(remedy: Remedy) -> None:
    from flowrl.training.sharding import _blocks

    if get(remedy, "model.shard", True):
        _blocks(nn.Linear(2, 2))


def evaluated(remedy: Remedy) -> None:
    from flowrl.data.prompts import Prompt
    from flowrl.training.noise_batches import NoiseTraining

    own = [Prompt("a red circle")]
    other = get(remedy, "data.eval_prompts", [Prompt("a blue cross")])
    NoiseTraining(stand_in()).check_prompts(own, own if other is None else other)


def preview(remedy: Remedy, adapter: Any) -> None:
    from flowrl.rollout.preview import Preview

    Preview(adapter, get(remedy, "rollout.exploration.network", "bfloat16"))


def previewed(remedy: Remedy, kind: str, missing: bool) -> None:
    from flowrl.rollout.preview import _require

    if remedy.command:
        return require_package(remedy, "torchao")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None if missing else stand_in())
        _require(get(remedy, "rollout.exploration.network", kind))


def compiled(remedy: Remedy, act: Callable[[], object]) -> None:
    if get(remedy, "model.compile", "blocks") is not None:
        act()


def compile_disabled() -> None:
    from torch._dynamo import config

    from flowrl.models.memory.compiled import require_compiler

    with config.patch(disable=True):
        require_compiler(CPU)


def compile_without_cpp() -> None:
    from torch._inductor import cpp_builder

    from flowrl.models.memory.compiled import require_compiler

    def none() -> None:
        raise RuntimeError("no compiler")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_builder, "get_cpp_compiler", none)
        require_compiler(CPU)


def compile_without_triton() -> None:
    from torch.utils import _triton

    from flowrl.models.memory.compiled import require_compiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_triton, "has_triton", lambda: False)
        require_compiler(torch.device("cuda"))


def compile_fails(kind: str) -> None:
    from torch._dynamo import exc

    from flowrl.models.memory.compiled import explained

    with explained("a block"):
        raise vars(exc)[kind]("no")


def compile_nothing() -> None:
    from flowrl.models.memory.compiled import compile_blocks

    compile_blocks(nn.Linear(2, 2))


def types(remedy: Remedy, option: str, dtype: str) -> None:
    """A device that does not compute in one type."""
    from flowrl.models.memory import savings

    real, refused = torch.ones, {"float16": torch.float16, "float8_e5m2": torch.float8_e5m2}[dtype]

    class Ones:
        def to(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
            if dtype == refused:
                raise NotImplementedError(f"no kernel for {dtype}")
            return real(16, 16).to(device, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", lambda *shape: Ones())
        value = get(remedy, f"model.{option}", dtype)
        options = {"dtype": value} if option == "dtype" else {"lora": {}, "memory": {"layerwise_casting": value}}
        savings.require_types(options_of(**options), CPU)


def saved(remedy: Remedy, name: str) -> None:
    """A LoRA whose tensors have no names in kohya's layout."""
    from flowrl.apps.publish.export import renamed
    from flowrl.models.lora_formats.families import BY_PIPELINE

    if remedy.flag:  # the formats that rename nothing
        assert remedy.flag in ("--format merged", "--format diffusers")
        return
    pair = {f"{name}.lora_{half}.weight": torch.zeros(2, 2) for half in "AB"}
    family = BY_PIPELINE["StableDiffusion3Pipeline"]
    renamed(pair if name else {"alpha": torch.ones(1)}, 1.0, family, "kohya")


def fused(remedy: Remedy) -> None:
    from flowrl.apps.publish.export import fuse

    if remedy.flag:
        assert remedy.flag == "--format merged"
        return
    ranks = {slot: (torch.zeros(slot + 1, 4), torch.zeros(4, slot + 1)) for slot in range(2)}
    fuse(ranks, (1, 1))


def unguided(remedy: Remedy) -> None:
    from flowrl.apps.command_line import call_of
    from flowrl.models.generic import options

    class Plain:
        def __call__(self, prompt: str) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        for name, result in {"guidance_of": "none", "find_networks": {"unet": None}, "family_of": None}.items():
            patch.setattr(options, name, lambda *given, result=result: result)
        call_of(Plain(), {}, None, None if remedy.without == "--guidance" else 2.0, [])


def gate(remedy: Remedy) -> None:
    from flowrl.training import replay_gate

    method = stand_in(recompute=get(remedy, "algorithm.old_log_prob", "rollout") == "recompute")
    context = stand_in(
        method=method, optim=stand_in(batch_size=1), world=stand_in(gather=lambda value: [value]),
        networks=stand_in(policy=stand_in(sampler=None)),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_gate, "full_and_partial", lambda work: (torch.zeros(1), torch.zeros(1)))
        patch.setattr(replay_gate, "first_drawn", lambda work: torch.zeros(1))
        patch.setattr(replay_gate, "deviation", lambda work, order: (1.0, 0))
        patch.setattr(replay_gate, "tolerance", lambda method, sampler, dtype: 1e-6)
        replay_gate.pass_gate(stand_in(context=context, rollout=stand_in(plan=stand_in(leaves=1))), torch.float32)


def saliency(remedy: Remedy) -> None:
    from flowrl.rollout.saliency_maps import mapper

    settings = stand_in(backbone=get(remedy, "algorithm.spatial.backbone", "/nowhere"))
    mapper(settings, (16, 4, 4), CPU, grid=None, channel_axis=1)


def foreign(remedy: Remedy, kind: str) -> None:
    """A VAE with a mean of its own, or a flow's scheduler, in a pipeline of a family of noise."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    family = "sdxl" if kind == "vae" else "sd"
    pipe = tiny_pipelines.make(family)
    if kind == "vae":
        pipe.vae.register_to_config(latents_mean=[0.0] * 4)
    else:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    make = native.beside if get(remedy, "model.name", family) == "generic" else partial(native.adapter, family)
    make(pipe, (16, 16))


def encoded(remedy: Remedy) -> None:
    from flowrl.models import wan

    model = wan.build(wan.Config(path="tiny-wan", height=32, width=32, num_frames=9, max_sequence_length=12))
    model.num_frames = get(remedy, "model.num_frames", 7)
    model.encode_images(torch.rand(1, model.num_frames, 3, model.height, model.width))


def of_class(remedy: Remedy) -> None:
    from flowrl.core.assets import asset_folder
    from flowrl.models.pipelines.paths import require_folder

    folder = str(asset_folder("tiny-sd3", "model_index.json"))
    require_folder(folder, None if remedy.without == "model.name" else "FluxPipeline")


def quantized(remedy: Remedy, kind: str, here: bool) -> None:
    from flowrl.models.memory import savings

    if remedy.command:
        return require_package(remedy, "torchao", "bitsandbytes")
    memory = {"quantize": get(remedy, "model.memory.quantize", kind)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object() if here else None)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        savings.check_available(options_of(memory=memory, lora={}))


def probed(remedy: Remedy, attention: Callable[..., Any]) -> None:
    from diffusers.models import attention_dispatch

    from flowrl.models.memory import savings

    registry, name = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName.FLEX
    if get(remedy, "model.attention", "flex") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, name, attention)
        patch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
        savings.probe_attention("flex", CPU, torch.float32)


def half(remedy: Remedy) -> None:
    from flowrl.models.memory import savings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: False)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
        dtype = get(remedy, "model.dtype", "bfloat16")
        past = (AssertionError, RuntimeError, ModelError) if dtype == "float16" else ()  # there a GPU computes
        with suppress(*past):
            savings.require_types(options_of(dtype=dtype), torch.device("cuda"))


def drawn(remedy: Remedy) -> None:
    from flowrl.diffusion.schedules import Schedule
    from flowrl.diffusion.training_times import TimesConfig, draw

    grid = Schedule(torch.linspace(1, 0, 7), torch.tensor([999.0, 900, 700, 500, 300, 100]))
    config = TimesConfig(name=get(remedy, "times.name", "logit_normal"), count=2)
    draw(config, grid, [SampleId(0, 0)], (0, 1, 0))


ONE = stand_in(own_network=False, network=nn.Linear(2, 2))
EXPERTS = stand_in(own_network=True, network=nn.ModuleDict())
CASES: list[tuple[str, Callable[[Remedy], object]]] = [
    ("models/weights/precision.py:autocasts 1 2 3", autocasts),
    ("config/checks.py:_check_videos", videos),
    ("config/checks.py:_check_source 5", held_pairs),
    ("data/given_samples.py:require_own_noise 1", lambda remedy: own_noise(remedy, {})),
    (
        "data/given_samples.py:require_own_noise 2",
        lambda remedy: own_noise(remedy, {"made_with": {"sampler": {"name": "cps"}}}),
    ),
    (
        "data/given_samples.py:require_own_noise 3",
        lambda remedy: own_noise(remedy, {"made_with": {"sampler": None}}, flip=True),
    ),
    ("models/_unet.py:UNet.__init__ 1", lambda remedy: foreign(remedy, "vae")),
    ("models/_unet.py:UNet.__init__ 2", lambda remedy: foreign(remedy, "flow")),
    ("models/wan.py:Wan.encode_images", encoded),
    ("models/pipelines/paths.py:require_folder", of_class),
    ("models/memory/savings.py:check_available 1", lambda remedy: quantized(remedy, "int8", here=False)),
    ("models/memory/savings.py:check_available 2", lambda remedy: quantized(remedy, "nf4", here=True)),
    (
        "models/memory/savings.py:probe_attention 1",
        lambda remedy: probed(remedy, lambda query, key, value: query.detach()),
    ),
    (
        "models/memory/savings.py:probe_attention 2",
        lambda remedy: probed(remedy, lambda query, key, value: query + 0 * (key + value)),
    ),
    ("models/memory/savings.py:require_types 1", half),
    ("diffusion/training_times.py:draw", drawn),
    ("models/_vae.py:set_up_vae 1", lambda remedy: vae(remedy, "vae_tiling")),
    ("models/_vae.py:set_up_vae 3 4", overflow),
    ("models/memory/blocks.py:_every.call 1 2", counted),
    ("models/memory/blocks.py:checkpoint_blocks 3", checkpointing),
    ("models/base.py:packed_grid", packed),
    ("models/generic/options.py:Size.require", sized),
    ("models/generic/options.py:guidance_arguments", unguided),
    ("models/memory/savings.py:place", offloaded),
    ("models/memory/savings.py:_set_attention", attended),
    ("models/memory/savings.py:require_types 2", lambda remedy: types(remedy, "dtype", "float16")),
    (
        "models/memory/savings.py:require_types 2",
        lambda remedy: types(remedy, "memory.layerwise_casting", "float8_e5m2"),
    ),
    ("models/weights/roles.py:Weights._attach 1", no_lora),
    ("models/weights/roles.py:Weights._attach 2", lambda remedy: targets(remedy, ["nowhere"])),
    ("models/weights/roles.py:Weights._attach 3", lambda remedy: targets(remedy, ["attn.to_q", "attn.to_qq"])),
    ("models/weights/roles.py:Weights._refuse_rank", rank),
    ("models/weights/roles.py:Weights.load_lora 1 2", started),
    ("models/memory/compiled.py:require_compiler 1", lambda remedy: compiled(remedy, compile_disabled)),
    ("models/memory/compiled.py:require_compiler 2", lambda remedy: compiled(remedy, compile_without_cpp)),
    ("models/memory/compiled.py:require_compiler 3", lambda remedy: compiled(remedy, compile_without_triton)),
    (
        "models/memory/compiled.py:explained 1",
        lambda remedy: compiled(remedy, lambda: compile_fails("FailOnRecompileLimitHit")),
    ),
    (
        "models/memory/compiled.py:explained 2",
        lambda remedy: compiled(remedy, lambda: compile_fails("TorchDynamoException")),
    ),
    ("models/memory/compiled.py:compile_blocks", lambda remedy: compiled(remedy, compile_nothing)),
    ("apps/publish/export.py:renamed 1", lambda remedy: saved(remedy, "")),
    ("apps/publish/export.py:renamed 2 3", lambda remedy: saved(remedy, "nowhere.to_q")),
    ("apps/publish/export.py:fuse", fused),
    ("rollout/preview.py:Preview.__init__ 1", lambda remedy: preview(remedy, ONE)),
    ("rollout/preview.py:Preview.__init__ 2", lambda remedy: preview(remedy, EXPERTS)),
    ("rollout/preview.py:_require 1 2", lambda remedy: previewed(remedy, "int8", missing=True)),
    ("rollout/preview.py:_require 3", lambda remedy: previewed(remedy, "float8", missing=False)),
    ("rollout/saliency_maps.py:_dinov2", saliency),
    ("training/noise_batches.py:NoiseTraining.check_prompts", evaluated),
    ("training/optimizers.py:require 1", lambda remedy: optimizer(remedy, "paged_adamw", "cpu")),
    ("training/optimizers.py:require 4", quantized_optimizer),
    ("training/optimizers.py:_Muon.__init__", of_a_convolution),
    ("training/optimizers.py:require 2 3", lambda remedy: optimizer(remedy, "adamw_8bit", "mps")),
    ("training/replay_gate.py:pass_gate", gate),
    ("training/sharding.py:_blocks", split),
    ("training/world.py:require_devices 1 2", lambda remedy: backend(remedy, "nccl", 0)),
    ("training/world.py:require_devices 3 4", lambda remedy: backend(remedy, None, 2)),
]


@pytest.mark.parametrize(("place", "act"), CASES, ids=[place for place, _ in CASES])
@follows(*dict.fromkeys(place for case in CASES for place in numbered(case[0])))
def test_a_function_does_its_work_with_each_remedy(place, act):
    each_ends(act, place)


def test_a_remedy_that_does_not_help_is_seen():
    with pytest.raises(ModelError):
        each_ends(lambda remedy: packed(Remedy()), "models/base.py:packed_grid")
