"""Whatever can be sampled and judged, as one diffusers pipeline: runs, model folders, hub ids, single files, LoRAs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.core.errors import ConfigError, ModelError, Remedy
from flowrl.core.files import file_sha256, known_object
from flowrl.models.generic.options import few_steps_call
from flowrl.models.pipelines.declared import of_pipeline
from flowrl.models.pipelines.distilled import Distilled
from flowrl.models.pipelines.loading import without_bars
from flowrl.models.pipelines.paths import loading, null_components, require_folder, resolve_path
from flowrl.models.weights.roles import lora_file
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.run import single_file
from flowrl.run.dial import Dial, load_dialled
from flowrl.run.foreign_lora import LoraFile, attach
from flowrl.run.origin import origin
from flowrl.run.trained import learned_noise, load_run_model


@dataclass(frozen=True, slots=True)
class Judged:
    """A model to sample from, with its provenance."""

    target: str
    """As it was given: run folder, model folder, hub id, asset or single file."""
    pipeline: Any
    """diffusers pipeline on the CPU, in bfloat16 where there is a GPU (a run: in its own type)."""
    call: dict[str, Any]
    """Arguments of the pipeline's call: a run's evaluation settings; of other models those that few steps need."""
    noise: LearnedNoise | None
    """Learned initial noise of a run of FIND: its own prompts alone can be sampled from it. None for all others."""
    facts: dict[str, Any]
    """Plain data beyond `origin`'s: `base`, `lora`, `file_sha256`, `revision`, those of a dial, where there is one."""
    distilled: Distilled | None = None
    """How it was distilled to few steps; None: it was not."""

    def origin(self, call: dict[str, Any] | None = None, guidance: float | None = None) -> dict[str, Any]:
        """Plain provenance of what is sampled with a call (None: its own), as of `flowrl.run.origin.origin`."""
        made = origin(self.target, self.pipeline, self.call if call is None else call, guidance)
        return made | ({"adapter": None} if self.facts.get("base") else {}) | self.facts


def load(
    target: str,
    *,
    base: bool = False,
    loras: Sequence[str] = (),
    config: str | None = None,
    revision: str | None = None,
    dial: Dial | None = None,
) -> Judged:
    """Any model that diffusers can load, ready to be sampled.

    Args:
        target: run folder, pipeline folder, embedded asset, hub id, or a .safetensors checkpoint.
        base: the model that a run began with, without its trained weights.
        loras: FILE or FILE:SCALE of LoRAs to add, in diffusers' layout or one that diffusers or flowrl converts.
        config: for a single file, a pipeline folder or hub id of its family, with tokenizers and configurations and
            with the weights that the file does not hold; None: that which diffusers knows for the file's keys.
        revision: of a hub id; None: its main branch.
        dial: of the run; None: it is as it was trained.

    Raises ConfigError: options that do not belong together, or a run without trained weights. ModelError: a model or
    LoRA that cannot be loaded, or does not fit; the message has the remedy.
    """
    without_bars()
    added = [LoraFile.parse(word) for word in loras]
    folder, facts = Path(target), dict[str, Any]()
    is_run, is_file = (folder / "config.yaml").is_file(), folder.suffix == ".safetensors"
    if base and not is_run:
        raise ConfigError(
            f"--base: {target!r} is no run folder, so it has no other base than itself", Remedy(without="--base")
        )
    if config is not None and not is_file:
        raise ConfigError(
            f"--config {config}: it belongs to a single .safetensors file, and {target!r} is none",
            Remedy(without="--config"),
        )
    if revision is not None and (is_run or is_file or folder.exists()):
        raise ConfigError(
            f"--revision {revision}: it belongs to a hub id, and {target!r} is on this disk",
            Remedy(without="--revision"),
        )
    _require_alone(dial, base=base, loras=loras)
    noise = None if base or not is_run else learned_noise(folder)
    if is_run:
        adapter, call = load_run_model(folder, base=base) if dial is None else load_dialled(dial)
        pipeline, known = adapter.pipeline, adapter.distilled
        facts |= ({"base": True} if base else {}) | ({} if dial is None else dial.facts)
    elif is_file:
        path = Path(resolve_path(target))
        pipeline = single_file.load(path, config, _dtype())
        facts |= {"file_sha256": file_sha256(path)} | ({} if config is None else {"config": config})
    else:
        pipeline = _plain(target, revision)
        commit = _commit(target, revision)
        facts |= {} if commit is None else {"revision": commit}
    if not is_run:
        known = of_pipeline(pipeline, revision=revision)
        call = {} if known is None else few_steps_call(pipeline, known)
    bound = [attach(pipeline, lora, f"lora_{number}") for number, lora in enumerate(added)]
    return Judged(target, pipeline, call, noise, facts | ({"lora": bound} if bound else {}), known)


def _require_alone(dial: Dial | None, *, base: bool, loras: Sequence[str]) -> None:
    if dial is not None and (base or loras):
        other = "--base" if base else "--lora"
        raise ConfigError(f"{dial.flags} with {other}: the dial lies between a run and its base", Remedy(without=other))


def require_model(target: str) -> None:
    """Raise ModelError for a local folder or file that cannot be a model, before anything else is loaded.

    A run folder, an asset's name and a hub id pass; what is in them is seen when they are loaded.
    """
    path = Path(resolve_path(target))
    if path.is_dir() and not (path / "config.yaml").is_file():
        _require_pipeline(path)
        require_folder(target)


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _plain(target: str, revision: str | None) -> Any:
    """The pipeline of a folder, an asset or a hub id."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    path = resolve_path(target)
    require_model(target)
    with loading("model", target):
        return DiffusionPipeline.from_pretrained(path, revision=revision, dtype=_dtype(), **null_components(path))


def _require_pipeline(folder: Path) -> None:
    """Raise ModelError for a folder without model_index.json that is something else, with what to give instead."""
    if (folder / "model_index.json").is_file():
        return
    what = "it has no model_index.json"
    remedy = "give the folder that save_pretrained() of a pipeline wrote, a run folder, a .safetensors or a hub id"
    if (folder.parent / "config.yaml").is_file():
        remedy = f"it is inside a run folder: give {folder.parent}"
    elif lora_file(folder).is_file():
        remedy = f"it holds a LoRA: give its base model, with --lora {folder}"
    elif (folder / "config.json").is_file():
        values = known_object(folder / "config.json")
        name = values.get("_class_name") or ", ".join(values.get("architectures") or [])
        kind = f" ({name})" if name else ""
        whole = (folder.parent / "model_index.json").is_file()
        remedy = f"it holds one network{kind}: give " + (str(folder.parent) if whole else "a whole pipeline")
    raise ModelError(f"{str(folder)!r} is not a diffusers pipeline: {what}; {remedy}")


def _commit(target: str, revision: str | None) -> str | None:
    """Commit of the loaded snapshot of a hub id; None for what is not from the hub."""
    from huggingface_hub import try_to_load_from_cache

    path = resolve_path(target)
    if os.path.exists(path):
        return None
    file = try_to_load_from_cache(path, "model_index.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None
