"""A run's trained weights in the layouts that other programs read.

diffusers   pytorch_lora_weights.safetensors with its alpha: `pipe.load_lora_weights(DIR)`
kohya       `lora_unet_` names, `lora_down`, `lora_up`, `alpha` per module of the original network: sd-scripts, ComfyUI
comfyui     `diffusion_model.` names of the original network, with `alpha`: ComfyUI
merged      a whole pipeline folder with the update added to its weights, in `model.dtype`: `from_pretrained(DIR)`
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.config.components import Component
from flowrl.core.errors import ConfigError, ModelError, Remedy
from flowrl.core.files import fsync_all, out_folder, writing
from flowrl.models.lora_formats.families import BY_PIPELINE, Family, Place
from flowrl.models.pipelines.classes import pipeline_class
from flowrl.models.pipelines.declared import declared
from flowrl.models.weights.lora_kinds import LABELS
from flowrl.models.weights.roles import lora_file, order_header, read_lora
from flowrl.rollout.learned_noise import FILE
from flowrl.run.handover import STAMP
from flowrl.run.trained import learned_noise, model_of, reading, trained_folder, with_update

Layout = Literal["kohya", "comfyui"]


def renamed(tensors: dict[str, Tensor], scale: float, family: Family, layout: Layout) -> dict[str, Tensor]:
    """diffusers' LoRA tensors (`<module>.lora_A.weight` [r, in], `lora_B` [out, r]) under the original names.

    Slots of one matrix are fused: n updates of rank r become one of rank n * r, A stacked and B block-diagonal, with n
    times the alpha: the same function. A slot that was not trained has zero rows and columns, since readers divide the
    rank by n. The tensors are by module, without the component's prefix; `scale` is alpha / r: each written alpha is
    scale times the written rank. Layouts: kohya: `lora_unet_` and underscores; comfyui: `diffusion_model.` and dots.

    Raises ModelError: a module without a place in the table, a convolution, or tensors that are no plain LoRA.
    """
    modules = sorted(k.removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight"))
    known = {f"{name}.lora_{half}.weight" for name in modules for half in "AB"}
    if set(tensors) != known:
        odd = sorted(set(tensors) ^ known)[0]
        raise ModelError(f"{odd}: only a plain LoRA has names in the layout {layout}", Remedy(flag="--format merged"))
    groups: dict[str, tuple[Place, dict[int, tuple[Tensor, Tensor]]]] = {}
    for name in modules:
        pair = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
        place = family.place(name)
        if place is None or pair[0].ndim != 2:
            raise ModelError(
                f"{name} is not in the table of {family.name} for the layout {layout}",
                [Remedy(flag="--format diffusers"), Remedy(flag="--format merged")],
            )
        groups.setdefault(place.dotted, (place, {}))[1][place.slot] = pair
    result: dict[str, Tensor] = {}
    for place, parts in groups.values():
        down, up = parts[0] if place.widths == (1,) else fuse(parts, place.widths)
        key, halves = place.underscored, ("lora_down", "lora_up")
        if layout == "comfyui":
            key, halves = f"diffusion_model.{place.dotted}", family.halves
        result[f"{key}.{halves[0]}.weight"] = down.contiguous()
        result[f"{key}.{halves[1]}.weight"] = up.contiguous()
        result[f"{key}.alpha"] = torch.tensor(scale * len(down))
    return result


def fuse(parts: dict[int, tuple[Tensor, Tensor]], widths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(A [n r, in], B [out, n r]) of some of n slots; others are not updated. Raises ModelError: several ranks."""
    first = next(iter(parts.values()))[0]
    rank, into = first.shape
    if {len(down) for down, _ in parts.values()} != {rank}:
        raise ModelError(
            "modules that share a matrix of the original network have several ranks", Remedy(flag="--format merged")
        )
    down, up = torch.zeros(len(widths) * rank, into), torch.zeros(sum(widths) * into, len(widths) * rank)
    row = 0
    for slot, width in enumerate(widths):
        if slot in parts:
            columns = slice(slot * rank, (slot + 1) * rank)
            down[columns], up[row : row + width * into, columns] = parts[slot]
        row += width * into
    return down, up


_PART = ".unfinished"
"""Folder inside that of an export, while it is written."""
Format = Literal["diffusers", "kohya", "comfyui", "merged"]


def export(run: Path, layout: Format, out: Path) -> Path:
    """Write a run's weights to the folder `out`; returns the file or folder to load.

    Raises ConfigError: not a run, no trained weights yet, weights that cannot be read, full weights as a LoRA, or
    original names of a family that has no table; nothing is written. WriteError: the disk is full or not writable.
    """
    if learned_noise(run) is not None:
        raise ConfigError(
            f"{str(run)!r} learned the initial noise of its prompts and no weights, so there is nothing to export: "
            f"flowrl sample draws with it, and {run / 'adapter' / FILE} holds its means and stds"
        )
    saved, model = trained_folder(run), model_of(run)
    file = lora_file(saved)
    if out.is_file():
        raise ConfigError(f"--out {str(out)!r}: it is a file; give a folder, new or empty")
    _require_empty(out)
    if layout == "merged":
        adapter = with_update(model, saved, merge=True)
        with _whole(out) as part:
            adapter.pipeline.save_pretrained(part)
            _settle(part)
            if adapter.distilled is not None:
                adapter.distilled.write(part)
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
    with reading(file):
        component = "unet" if family is not None and "UNet" in family.network else "transformer"
        loras = {name: read_lora(each, component) for name, each in experts.items()}
    if layout == "diffusers":
        with _whole(out) as part:
            for each in experts.values():
                (part / each.relative_to(saved)).parent.mkdir(exist_ok=True)
                shutil.copy(each, part / each.relative_to(saved))
            config = model.config
            if (known := declared(config.path, config.revision, config.distilled)) is not None:
                # Of the base, which a reader of the LoRA alone does not see.
                (part / STAMP).write_text(json.dumps(known.entries) + "\n", encoding="utf-8")
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
