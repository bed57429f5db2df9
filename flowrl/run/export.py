"""A run's trained weights in the layouts that other programs read.

diffusers   pytorch_lora_weights.safetensors with its alpha: `pipe.load_lora_weights(DIR)`
kohya       `lora_unet_` names, `lora_down`, `lora_up`, `alpha` per module of the original network: sd-scripts, ComfyUI
comfyui     `diffusion_model.` names of the original network, with `alpha`: ComfyUI
merged      a whole pipeline folder with the update added to its weights, in `model.dtype`: `from_pretrained(DIR)`
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from flowrl.algorithms.base import NoiseMethod
from flowrl.config.components import Component, component
from flowrl.config.load import run_tree
from flowrl.core.errors import ConfigError, ModelError, Remedy
from flowrl.core.files import damaged, fsync_all, out_folder, writing
from flowrl.models.base import torch_dtype
from flowrl.models.generic.options import rate_of
from flowrl.models.lora_formats.families import BY_PIPELINE, Family
from flowrl.models.lora_formats.reading import read_finite
from flowrl.models.lora_formats.writing import Layout, renamed
from flowrl.models.pipelines.classes import pipeline_class
from flowrl.models.weights.lora_kinds import LABELS
from flowrl.models.weights.roles import component_names, lora_file, lora_places, order_header, read_lora
from flowrl.models.weights.whole import whole_weights
from flowrl.rollout.learned_noise import FILE, LearnedNoise
from flowrl.run.handover import outdated, renew

_PART = ".unfinished"
"""Folder inside that of an export, while it is written."""
Format = Literal["diffusers", "kohya", "comfyui", "merged"]


def export(run: Path, layout: Format, out: Path) -> Path:
    """Write a run's weights to the folder `out`; returns the file or folder to load.

    Raises:
        ConfigError: not a run, no trained weights yet, weights that cannot be read, full weights as a LoRA, or
            original names of a family that has no table; nothing is written.
        WriteError: the disk is full or not writable.
    """
    if learned_noise(run) is not None:
        raise ConfigError(
            f"{str(run)!r} learned the initial noise of its prompts and no weights, so there is nothing to export: "
            f"flowrl sample draws with it, and {run / 'adapter' / FILE} holds its means and stds"
        )
    saved, model = _trained(run), _model(run)
    file = lora_file(saved)
    if out.is_file():
        raise ConfigError(f"--out {str(out)!r}: it is a file; give a folder, new or empty")
    _require_empty(out)
    if layout == "merged":
        pipeline = _with_update(model, saved, merge=True).pipeline
        with _whole(out) as part:
            pipeline.save_pretrained(part)
            _settle(part)
        return out
    if not file.is_file():
        raise ConfigError(f"{str(run)!r} trained full weights: there is no LoRA to export; use --format merged")
    lora = model.config.lora
    if layout != "diffusers" and lora is not None and lora.kind in ("dora", "lokr"):
        raise ConfigError(
            f"--format {layout}: {str(run)!r} trained a {LABELS[lora.kind]}, and this format is written for a plain "
            "LoRA; use --format merged for a whole pipeline, or diffusers"
        )
    family = None if layout == "diffusers" else _family(run, model, layout)
    second = lora_file(saved / "transformer_2")
    experts = {"_high_noise": file, "_low_noise": second} if second.is_file() else {"": file}
    with _reading(file):
        loras = {name: read_lora(each, _component(family)) for name, each in experts.items()}
    if layout == "diffusers":
        with _whole(out) as part:
            for each in experts.values():
                (part / each.relative_to(saved)).parent.mkdir(exist_ok=True)
                shutil.copy(each, part / each.relative_to(saved))
        return out / file.name
    assert family is not None
    return _write_original(loras, family, layout, out / run.resolve().name)


def _require_empty(out: Path) -> None:
    if out.exists() and any(entry.name != _PART for entry in out.iterdir()):
        raise ConfigError(f"--out {str(out)!r} is not empty; name a new folder")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder inside a new or empty one, whose files move up when all of them are written.

    What was not written to its end, or was killed, leaves nothing that looks like a model, and the same command goes.
    """
    # Again: a model was loaded meanwhile, and what another has put there is not to be removed.
    _require_empty(out)
    part = out_folder(out) / _PART
    try:
        with writing(out, "the run is as it was"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            yield part
            fsync_all(part)
            for each in sorted(part.iterdir(), key=lambda entry: entry.name == "model_index.json"):
                os.replace(each, out / each.name)
            part.rmdir()
    except BaseException:
        for each in out.iterdir():
            shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)
        raise


def _settle(folder: Path) -> None:
    """Take the folders that parts were loaded from out of a pipeline's JSON files; a hub id stays.

    And let a plain `from_pretrained` load every part in float32: transformers follows the type in its configuration,
    diffusers does not, and text encoders in half precision do not fit a denoiser in float32.
    """
    for file in folder.rglob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            continue
        settled = _in_float32(values)
        if os.path.isabs(str(values.get("_name_or_path", ""))):
            settled["_name_or_path"] = ""
        if settled != values:
            file.write_text(json.dumps(settled, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _in_float32(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with float32 for a type in half precision, those of parts too."""
    result = {key: _in_float32(value) if isinstance(value, dict) else value for key, value in values.items()}
    named = {key for key in ("dtype", "torch_dtype") if result.get(key) in ("bfloat16", "float16")}
    return result | dict.fromkeys(named, "float32")


def _component(family: Family | None) -> str:
    return "unet" if family is not None and "UNet" in family.network else "transformer"


def _family(run: Path, model: Component, layout: Layout) -> Family:
    """The table of the run's family; ConfigError for one without: names of another one may look alike."""
    config = model.config
    try:
        kind = getattr(model.module, "PIPELINE", None) or pipeline_class(config.path, config.revision)
    except ModelError:
        kind = f"pipeline of a class that is not known here (model.path={config.path!r})"
    if kind not in BY_PIPELINE:
        raise ConfigError(
            f"--format {layout}: {str(run)!r} trained a {kind}, and original names are known for "
            f"{', '.join(BY_PIPELINE)}; use --format diffusers, or merged for a whole pipeline"
        )
    return BY_PIPELINE[kind]


def _write_original(
    loras: dict[str, tuple[dict[str, Tensor], dict[str, Any]]], family: Family, layout: Layout, stem: Path
) -> Path:
    """One file for each expert, under the stem and its suffix; the file, or the folder of several."""
    from safetensors.torch import save_file

    made: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}
    for suffix, (tensors, settings) in loras.items():
        rank, alpha = settings["r"], settings["lora_alpha"]
        if settings.get("use_rslora"):  # readers divide by the rank, not by its root
            alpha = alpha * rank**0.5
        about = {"ss_network_module": family.module, "ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
        name = f"{stem.name}{suffix}.safetensors"
        made[name] = renamed(tensors, alpha / rank, family, layout), {"format": "pt", **about}
    with _whole(stem.parent) as part:
        for name, (tensors, about) in made.items():
            save_file(tensors, part / name, metadata=about)
            order_header(part / name)
    return stem.parent if len(made) > 1 else stem.parent / next(iter(made))


@contextmanager
def _reading(saved: Path) -> Iterator[None]:
    """Raise one error for all that truncated weights may raise."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError that has nothing to do with the file
        raise
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, SafetensorError) as error:
        raise damaged(
            saved,
            error,
            "the run's checkpoints are files of their own: delete the run's folder adapter, and the same command "
            "writes it again",
        ) from error


def load_run_pipeline(folder: Path, *, base: bool = False) -> tuple[Any, dict[str, Any]]:
    """(pipeline, call options) of a run folder, with its trained weights, or with `base` those it began with.

    The options are the run's evaluation settings.

    Raises:
        ConfigError: a run without trained weights.
        ModelError: a model that cannot be loaded.
    """
    drawn = [f"{part}.{key}" for part in ("rollout", "eval") for key in ("num_inference_steps", "guidance_scale")]
    tree = run_tree(folder, *drawn)
    saved = None if base or learned_noise(folder) is not None else _trained(folder)
    adapter = _with_update(_model(folder), saved, merge=False)
    rollout, evaluation = tree["rollout"], tree["eval"]
    steps = evaluation["num_inference_steps"] or rollout["num_inference_steps"]
    guidance = evaluation["guidance_scale"]
    guidance = rollout["guidance_scale"] if guidance is None else guidance
    call = adapter.own_call(steps, guidance)
    return adapter.pipeline, call


def frame_rate(model: str, pipeline: Any, call: Mapping[str, Any]) -> float:
    """Frames a second of the videos of a call: `model.fps` of a run folder, else what `rate_of` finds.

    Raises:
        ConfigError: the call is told a rate that is not above 0.
    """
    run = Path(model)
    own = run_tree(run)["model"].get("fps") if (run / "config.yaml").is_file() else None
    return float(own) if own is not None else rate_of(call, signature(type(pipeline).__call__).parameters, "--set ")


def learned_noise(run: Path) -> LearnedNoise | None:
    """The noise distributions of a run that learned its initial noise; None for any other run or model."""
    file = run / "adapter" / FILE
    if not file.is_file() and (outdated(run) is None or not _trains_noise(run)):
        return None
    if outdated(run) is not None:
        raise ConfigError(
            f"{file} is not that of the newest checkpoint, and a resumed run writes it again",
            remedies=[Remedy(command=f"flowrl train {shlex.quote(str(run))} --resume")],
        )
    with _reading(file):
        return LearnedNoise.load(file)


def _trains_noise(run: Path) -> bool:
    """Whether the run's method learns the initial noise."""
    method = component("algorithms", run_tree(run, "algorithm")["algorithm"], "algorithm").build()
    return isinstance(method, NoiseMethod)


def _model(run: Path) -> Component:
    """The run's model component."""
    return component("models", run_tree(run)["model"], "model")


def _trained(run: Path) -> Path:
    """Folder of the run's saved weights, which are those of its newest checkpoint."""
    saved, iteration = run / "adapter", outdated(run)
    if iteration is not None:
        model = _model(run)
        renew(run, iteration, run_tree(run, "optim.ema"), model.module.build(model.config), model.config)
    full = any((saved / name / "config.json").is_file() for name in ("transformer", "unet"))
    if not lora_file(saved).is_file() and not full:
        raise ConfigError(f"{str(run)!r} holds no trained weights yet (no {saved}): train it first")
    return saved


def _with_update(model: Any, saved: Path | None, *, merge: bool) -> Any:
    """The run's adapter in one dtype, with its trained weights as a LoRA or merged; `saved` None: without any."""
    from diffusers.loaders.peft import PeftAdapterMixin
    from diffusers.models.modeling_utils import ModelMixin

    config = model.config
    if merge and hasattr(config, "load_t5"):
        # A folder without T5 does not load unless told so; `text_encoder_3=None` leaves it out as in training.
        config = dataclasses.replace(config, load_t5=True)
    config = dataclasses.replace(config, gradient_checkpointing=False)
    adapter, dtype = model.module.build(config), torch_dtype(config.dtype)
    pipeline = adapter.pipeline
    torch.nn.Module.to(pipeline.vae, dtype)
    components = component_names(adapter.network)
    if saved is None:
        return adapter
    if not lora_file(saved).is_file():
        for name, network in components.items():
            assert isinstance(network, ModelMixin)
            with _reading(saved / name), whole_weights():
                setattr(pipeline, name, type(network).from_pretrained(saved / name, dtype=dtype))
        return adapter
    # Not load_lora_weights: it warns that there is nothing for the text encoders, and not every pipeline has it.
    for name, network, place in lora_places(saved, components):
        assert isinstance(network, PeftAdapterMixin)
        with _reading(lora_file(place)):
            network.load_lora_adapter(place, prefix=name, weight_name=lora_file(place).name)
        read_finite(lora_file(place), f"the LoRA {lora_file(place)}")
        if merge:
            network.fuse_lora()
            network.unload_lora()
    return adapter
