"""The message of a lack of memory: the peak, the estimate of `flowrl plan`, and the options that lower it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowrl.config.resolved import Resolved
from flowrl.core.errors import OutOfMemory
from flowrl.core.phases import lacking, out_of_memory
from flowrl.core.units import size
from flowrl.evaluation.held_out import run_prompts
from flowrl.planning.memory import Estimate, estimate, skeleton
from flowrl.training.world import World

# Phase of a run -> phase of the estimate.
_ESTIMATED = {
    "text": "encode",
    "loading": "encode",
    "explore": "rollout",
    "rollout": "rollout",
    "decode": "decode",
    "pictures": "pictures",
    "update": "update",
    "evaluation": "evaluation",
}


def explained(error: BaseException, resolved: Resolved, world: World) -> BaseException:
    """The same failure or, for a lack of memory, one with its remedy."""
    if not isinstance(error, OutOfMemory):
        if not out_of_memory(error):
            return error
        error = lacking(error, "run")
    if not error.advice:
        facts = [_peak(world.device), _estimated(error.phases, resolved, world)]
        error.advice = f". {'; '.join(facts)}. {_remedy(error.phases, resolved, world)}"
    return error


@contextmanager
def explaining(resolved: Resolved, world: World) -> Iterator[None]:
    """`explained` for any failure inside the block."""
    try:
        yield
    except Exception as error:
        result = explained(error, resolved, world)
        if result is error:
            raise
        raise result from error


def peak_resident() -> int:
    """Peak of this process's resident memory, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # A process inherits ru_maxrss from the one that started it, and not this.
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    # Bytes on macOS, kilobytes elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _peak(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Peak of this process: {size(peak_resident())}"
    total = torch.cuda.get_device_properties(device).total_memory
    return f"Peak {size(torch.cuda.max_memory_allocated(device))} of {size(total)} on {device}"


def _estimated(phases: Sequence[str], resolved: Resolved, world: World) -> str:
    if phases[0].startswith("reward"):
        return "flowrl plan leaves reward models out of its estimates"
    try:
        result = planned(resolved, world.size)
    except Exception as error:  # the lack of memory is reported with or without an estimate
        return f"flowrl plan has no estimate of it ({(str(error).splitlines() or [type(error).__name__])[0]})"
    wanted = next((_ESTIMATED[name] for name in phases if name in _ESTIMATED), None)
    peaks = {phase.name: phase.peak for phase in result.phases}
    words = [f"{name} {size(peaks[name])}" for name in peaks if name == wanted]
    if result.peak is not None and result.peak.name != wanted:
        words.append(f"at most {size(result.peak.peak)} ({result.peak.name})")
    text = ", ".join(words) or "not known"
    return f"flowrl plan estimates: {text}, without reward models, the CUDA context and fragmentation (10 to 20 %)"


def planned(resolved: Resolved, processes: int) -> Estimate:
    """The estimate of `flowrl plan` for a run.

    Raises:
        UnknownModel, ModelError, ValueError: the model or the plan cannot be estimated.
    """
    run, adapter, method = resolved.run, skeleton(resolved), resolved.method
    plan = method.plan(adapter.schedule(run.rollout.num_inference_steps), resolved.sampler.build(), 1, run.seed)
    prompts = run_prompts(run, resolved.training.own_prompts)
    texts = {(p.text, p.images) for p in (*prompts.train, *prompts.evaluated)}
    return estimate(resolved, adapter, plan, prompts=len(texts), processes=processes)


def _remedy(phases: Sequence[str], resolved: Resolved, world: World) -> str:
    """The options that lower the memory, with their values."""
    inner, ways = phases[0], list[str]()
    for options in (_batches, _decoding, _training, _weights):
        ways += options(set(phases), resolved)
    if inner.startswith("reward"):
        ways.insert(0, "the reward's own options (flowrl list rewards NAME), or serve it elsewhere (flowrl serve)")
    if world.size > 1 and not resolved.model.config.shard:
        ways.append("model.shard=true")
    if world.size == 1:
        ways.append("more processes with model.shard=true")
    return (
        f"What lowers it: {', '.join(ways)}. Other batches, gradient_checkpointing, vae_slicing and group_offload go "
        "on with --resume; other options need a new run"
    )


def _batches(phases: set[str], resolved: Resolved) -> list[str]:
    run = resolved.run
    result: dict[str, Any] = {}
    if "evaluation" in phases:
        result["eval.batch_size"] = run.eval.batch_size
    elif "update" in phases:
        result["optim.batch_size"] = run.optim.batch_size
    elif "explore" in phases and run.rollout.exploration is not None:
        result["rollout.exploration.batch_size"] = run.rollout.exploration.batch_size
    elif phases & {"rollout", "decode", "pictures", "maps", "iteration"}:
        result["rollout.batch_size"] = run.rollout.batch_size
    return [f"a lower {key} (it is {value})" for key, value in result.items() if value is None or value > 1]


def _decoding(phases: set[str], resolved: Resolved) -> list[str]:
    memory = resolved.model.config.memory
    if not phases & {"decode", "pictures", "evaluation"}:
        return []
    result = [] if memory.vae_slicing else ["model.memory.vae_slicing=true"]
    result += [] if memory.vae_tiling else ["model.memory.vae_tiling=true"]
    return result + ([] if "vae" in memory.group_offload else ["model.memory.group_offload=[vae]"])


def _training(phases: set[str], resolved: Resolved) -> list[str]:
    config = resolved.model.config
    if "update" not in phases:
        return []
    result = [] if config.gradient_checkpointing is True else ["model.gradient_checkpointing=true"]
    return result + (["model.lora (all weights are trained now)"] if config.lora is None else [])


def _weights(phases: set[str], resolved: Resolved) -> list[str]:
    """Smaller weights or images, which help in every phase."""
    config, result = resolved.model.config, list[str]()
    if phases & {"loading", "text"} and "text_encoders" not in config.memory.group_offload:
        result.append("model.memory.group_offload=[text_encoders]")
    if config.dtype == "float32":
        result.append("model.dtype=bfloat16")
    if config.lora is not None and config.memory.quantize is None and config.memory.layerwise_casting is None:
        result.append("model.memory.quantize=nf4 or int8")
    return [*result, "smaller model.height and model.width"]
