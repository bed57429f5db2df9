"""A run's trained weights in the pipeline of its model, with the settings of its evaluations."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flowrl.algorithms.base import NoiseMethod
from flowrl.config.components import Component, component
from flowrl.config.load import run_tree
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import damaged
from flowrl.models.base import ModelAdapter, torch_dtype
from flowrl.models.generic.options import rate_of
from flowrl.models.lora_formats.reading import read_finite
from flowrl.models.weights.roles import component_names, lora_file, lora_places
from flowrl.models.weights.whole import whole_weights
from flowrl.rollout.learned_noise import FILE, LearnedNoise
from flowrl.run.handover import outdated, renew


@contextmanager
def reading(saved: Path) -> Iterator[None]:
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


def load_run_model(folder: Path, *, base: bool = False) -> tuple[ModelAdapter, dict[str, Any]]:
    """(adapter, call options) of a run folder, with its trained weights, or with `base` those it began with.

    The options are the run's evaluation settings.

    Raises ConfigError: a run without trained weights; ModelError: a model that cannot be loaded.
    """
    drawn = [f"{part}.{key}" for part in ("rollout", "eval") for key in ("num_inference_steps", "guidance_scale")]
    tree = run_tree(folder, *drawn)
    saved = None if base or learned_noise(folder) is not None else trained_folder(folder)
    adapter = with_update(model_of(folder), saved, merge=False)
    rollout, evaluation = tree["rollout"], tree["eval"]
    steps = evaluation["num_inference_steps"] or rollout["num_inference_steps"]
    guidance = evaluation["guidance_scale"]
    guidance = rollout["guidance_scale"] if guidance is None else guidance
    return adapter, adapter.own_call(steps, guidance)


def frame_rate(model: str, pipeline: Any, call: Mapping[str, Any]) -> float:
    """Frames a second of the videos of a call: `model.fps` of a run folder, else what `rate_of` finds.

    Raises ConfigError: the call is told a rate that is not above 0.
    """
    run = Path(model)
    own = run_tree(run)["model"].get("fps") if (run / "config.yaml").is_file() else None
    return float(own) if own is not None else rate_of(call, signature(type(pipeline).__call__).parameters, "--set ")


def learned_noise(run: Path) -> LearnedNoise | None:
    """The noise distributions of a run that learned its initial noise; None for any other run or model."""
    file = run / "adapter" / FILE
    if not file.is_file():
        if outdated(run) is None:
            return None
        method = component("algorithms", run_tree(run, "algorithm")["algorithm"], "algorithm").build()
        if not isinstance(method, NoiseMethod):
            return None
    if outdated(run) is not None:
        raise ConfigError(
            f"{file} is not that of the newest checkpoint, and a resumed run writes it again",
            Remedy(command=f"flowrl train {shlex.quote(str(run))} --resume"),
        )
    with reading(file):
        return LearnedNoise.load(file)


def model_of(run: Path) -> Component:
    """The run's model component."""
    return component("models", run_tree(run)["model"], "model")


def trained_folder(run: Path) -> Path:
    """Folder of the run's saved weights, which are those of its newest checkpoint."""
    saved, iteration = run / "adapter", outdated(run)
    if iteration is not None:
        model = model_of(run)
        renew(run, iteration, run_tree(run, "optim.ema"), model.module.build(model.config), model.config)
    full = any((saved / name / "config.json").is_file() for name in ("transformer", "unet"))
    if not lora_file(saved).is_file() and not full:
        raise ConfigError(f"{str(run)!r} holds no trained weights yet (no {saved}): train it first")
    return saved


def with_update(model: Any, saved: Path | None, *, merge: bool) -> Any:
    """The run's adapter in one dtype, with its trained weights as a LoRA or merged; `saved` None: without any."""
    from diffusers.loaders.peft import PeftAdapterMixin

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
            setattr(pipeline, name, whole_network(network, saved / name, dtype))
        return adapter
    add_lora(components, saved)
    for network in components.values() if merge else ():
        assert isinstance(network, PeftAdapterMixin)
        network.fuse_lora()
        network.unload_lora()
    return adapter


def whole_network(network: Any, saved: Path, dtype: torch.dtype) -> Any:
    """Another network of this one's class, from a folder of whole weights."""
    with reading(saved), whole_weights():
        return type(network).from_pretrained(saved, dtype=dtype)


def add_lora(networks: dict[str, Any], saved: Path, adapter: str | None = None) -> None:
    """Load the LoRA of a folder into the networks of a pipeline; `adapter`: its name there, None: peft's own."""
    # Not load_lora_weights: it warns that there is nothing for the text encoders, and not every pipeline has it.
    for name, _, place in lora_places(saved, networks):
        file = lora_file(place)
        with reading(file):
            networks[name].load_lora_adapter(place, prefix=name, weight_name=file.name, adapter_name=adapter)
        read_finite(file, f"the LoRA {file}")
