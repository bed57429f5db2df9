"""A run's trained weights in the layouts that other programs read.

    diffusers   pytorch_lora_weights.safetensors with its alpha: `pipe.load_lora_weights(DIR)`
    kohya       one file with `lora_down`, `lora_up`, `alpha` per module of the original MMDiT: ComfyUI, sd-scripts
    merged      a whole pipeline folder with the update added to its weights: `from_pretrained(DIR)`

The original MMDiT keeps query, key and value in one matrix. Three updates of rank r become one of rank 3r,
down [A_q; A_k; A_v] and up block-diagonal (B_q, B_k, B_v), with three times the alpha: the same function.

Source: names as comfyanonymous/ComfyUI:comfy/lora.py (lora_unet_ + module path with underscores) and
kohya-ss/sd-scripts:networks/lora_sd3.py expect them; the same pairs of names as diffusers' SD3 converter.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from flowrl.config.components import Component, component
from flowrl.config.retired import run_tree
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.files import damaged, out_folder, writing
from flowrl.models import sd3
from flowrl.models.base import torch_dtype
from flowrl.models.classes import pipeline_class
from flowrl.models.paths import loading, null_components, resolve_path
from flowrl.models.weights import component_names, lora_file, lora_places, read_lora
from flowrl.rollout.learned_noise import FILE, LearnedNoise
from flowrl.run.handover import outdated, renew

Format = Literal["diffusers", "kohya", "merged"]

# diffusers' module in a block -> (original module, which third of its rows)
_FUSED = {
    f"{attention}.{ours}": (f"{block}.{attention}.qkv", third)
    for attention, block, names in (
        ("attn", "x_block", ("to_q", "to_k", "to_v")),
        ("attn", "context_block", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("attn2", "x_block", ("to_q", "to_k", "to_v")),
    )
    for third, ours in enumerate(names)
}
_PLAIN = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm1.linear": "x_block.adaLN_modulation.1",
}


def export(run: Path, layout: Format, out: Path) -> Path:
    """Write a run's weights to the folder `out`; returns the file or folder to load.

    Raises:
        ConfigError: not a run, no trained weights yet, weights that cannot be read, full weights as a LoRA, or kohya's
            layout for another family than SD3; nothing is written.
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
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {str(out)!r} is not empty; name a new folder")
    if layout == "merged":
        pipeline = _with_update(model, saved, merge=True).pipeline
        with writing(out_folder(out)):
            pipeline.save_pretrained(out)
        return out
    if not file.is_file():
        raise ConfigError(f"{str(run)!r} trained full weights: there is no LoRA to export; use --format merged")
    if layout == "kohya":
        _require_sd3(run, model)
    with _reading(file):
        tensors, settings = read_lora(file)
    if layout == "diffusers":
        with writing(out_folder(out)):
            return Path(shutil.copy(file, out / file.name))
    return _write_kohya(tensors, settings, out, run.resolve().name)


def _require_sd3(run: Path, model: Component) -> None:
    """Raise ConfigError for another family than SD3: its modules have other names, some of which look like SD3's."""
    config = model.config
    try:
        kind = getattr(model.module, "PIPELINE", None) or pipeline_class(config.path, config.revision)
    except ModelError:
        kind = f"pipeline of a class that is not known here (model.path={config.path!r})"
    if kind != sd3.PIPELINE:
        raise ConfigError(
            f"--format kohya: {str(run)!r} trained a {kind}, and names for kohya are known for {sd3.PIPELINE} only; "
            "use --format diffusers, or merged for a whole pipeline"
        )


def _write_kohya(tensors: dict[str, Tensor], settings: dict[str, Any], out: Path, name: str) -> Path:
    from safetensors.torch import save_file

    rank, alpha = settings["r"], settings["lora_alpha"]
    about = {"ss_network_module": "networks.lora_sd3", "ss_network_dim": str(rank), "ss_network_alpha": str(alpha)}
    renamed, target = to_kohya(tensors, alpha / rank), out / f"{name}.safetensors"
    with writing(out_folder(out)):
        save_file(renamed, target, metadata={"format": "pt", **about})
    return target


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
            "the run's checkpoints are files of their own: delete it, and train with --resume and one more iteration "
            "(iterations=N), which writes it again",
        ) from error


def to_kohya(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """diffusers' LoRA tensors of an MMDiT (`<module>.lora_A.weight` [r, in], `lora_B` [out, r]) in kohya's layout.

    Args:
        tensors: by module, without the prefix `transformer.`.
        scale: alpha / r; each written alpha is scale times the written rank.

    Raises:
        ModelError: a module that the original network does not have under another name.
    """
    fused: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    result: dict[str, Tensor] = {}
    for name in sorted(k.removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight")):
        pair = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
        match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
        place = match.group(2) if match else name
        block = f"joint_blocks.{match.group(1)}." if match else ""
        if place in _FUSED:
            module, third = _FUSED[place]
            fused.setdefault(block + module, {})[third] = pair
        elif place in _PLAIN:
            result |= _entry(block + _PLAIN[place], *pair, scale)
        else:
            raise ModelError(
                f"{name} has no counterpart in kohya's layout; train other targets, or use --format merged"
            )
    for module, parts in fused.items():
        result |= _entry(module, *_join_thirds(parts), scale)
    return {name: value.contiguous() for name, value in result.items()}


def _join_thirds(parts: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(down [sum of r, in], up [3 out, sum of r]) of updates to thirds of a matrix; a missing third is not updated."""
    thirds = sorted(parts)
    down = torch.cat([parts[third][0] for third in thirds])
    width = len(parts[thirds[0]][1])
    up, column = torch.zeros(3 * width, len(down)), 0
    for third in thirds:
        piece = parts[third][1]
        up[third * width : (third + 1) * width, column : column + piece.shape[1]] = piece
        column += piece.shape[1]
    return down, up


def _entry(module: str, down: Tensor, up: Tensor, scale: float) -> dict[str, Tensor]:
    key = "lora_unet_" + module.replace(".", "_")
    alpha = torch.tensor(scale * len(down))
    return {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": alpha}


def load_run_pipeline(model: str) -> tuple[Any, dict[str, Any]]:
    """(pipeline, call options) of a run folder, with its trained weights, or of any model `model.path` takes.

    The options are the run's evaluation settings; none for a plain model.

    Raises:
        ConfigError: a run without trained weights.
        ModelError: a model that cannot be loaded.
    """
    folder = Path(model)
    if not (folder / "config.yaml").is_file():
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        path = resolve_path(model)
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        with loading("model", model):
            if path.endswith(".safetensors"):
                raise ModelError(f"{model!r} is a single file: its family is not known; give a folder or a hub id")
            return DiffusionPipeline.from_pretrained(path, dtype=dtype, **null_components(path)), {}
    drawn = [f"{part}.{key}" for part in ("rollout", "eval") for key in ("num_inference_steps", "guidance_scale")]
    tree = run_tree(folder, *drawn)
    saved = _trained(folder) if learned_noise(folder) is None else None
    adapter = _with_update(_model(folder), saved, merge=False)
    rollout, evaluation = tree["rollout"], tree["eval"]
    steps = evaluation["num_inference_steps"] or rollout["num_inference_steps"]
    guidance = evaluation["guidance_scale"]
    guidance = rollout["guidance_scale"] if guidance is None else guidance
    call = adapter.own_call(steps, guidance)
    return adapter.pipeline, call


def learned_noise(run: Path) -> LearnedNoise | None:
    """The noise distributions of a run that learned its initial noise; None for any other run or model."""
    file = run / "adapter" / FILE
    if not file.is_file():
        return None
    if outdated(run) is not None:
        raise ConfigError(f"{file} is older than the newest checkpoint: flowrl train {run} --resume writes it again")
    with _reading(file):
        return LearnedNoise.load(file)


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
            with _reading(saved / name):
                setattr(pipeline, name, type(network).from_pretrained(saved / name, dtype=dtype))
        return adapter
    # Not load_lora_weights: it warns that there is nothing for the text encoders, and not every pipeline has it.
    for name, network, place in lora_places(saved, components):
        assert isinstance(network, PeftAdapterMixin)
        with _reading(lora_file(place)):
            network.load_lora_adapter(place, prefix=name, weight_name=lora_file(place).name)
        if merge:
            network.fuse_lora()
            network.unload_lora()
    return adapter
