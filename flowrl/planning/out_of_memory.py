"""The message of a lack of memory: the peak, the estimate of `flowrl plan`, and the options that lower it."""

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from flowrl.config.load import resolve
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core.errors import Fault, OutOfMemory, Remedy
from flowrl.core.strict import overridden, validate
from flowrl.display.phases import lacking, out_of_memory
from flowrl.display.units import size
from flowrl.evaluation.held_out import run_prompts
from flowrl.planning.memory import Estimate, estimate, skeleton
from flowrl.training.world import World

# Phase of a run -> phase of the estimate.
_ESTIMATED = {"text": "encode", "loading": "encode", "explore": "rollout"}
_ESTIMATED |= {name: name for name in ("rollout", "decode", "images", "update", "evaluation")}

_RESUMED = (
    "Other batches, gradient_checkpointing, vae_slicing and group_offload go on with --resume; other options need a "
    "new run"
)


def explained(error: BaseException, resolved: Resolved, world: World) -> BaseException:
    """The same failure or, for a lack of memory, one with its remedy."""
    if not isinstance(error, OutOfMemory):
        if not out_of_memory(error):
            return error
        error = lacking(error, "run")
    if not error.advice:
        facts = [_peak(world.device), _estimated(error.phases, resolved, world)]
        error.remedies = tuple(each for each in _remedies(error.phases, resolved, world) if _is_valid(each, resolved))
        ways = [*map(str, error.remedies)]  # and what is no option with a value
        if error.phases[0].startswith("reward"):
            ways.append("the reward's own options (flowrl list rewards NAME), or serving it elsewhere (flowrl serve)")
        ways += ["more processes with model.shard=true"] if world.size == 1 else []
        ways.append("smaller model.height and model.width")
        error.advice = f". {'; '.join(facts)}. What lowers it: {', '.join(ways)}. {_RESUMED}"
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

    Raises UnknownModel, ModelError, ValueError: the model or the plan cannot be estimated.
    """
    run, adapter, method = resolved.run, skeleton(resolved), resolved.method
    plan = method.plan(adapter.schedule(run.rollout.num_inference_steps), resolved.sampler.build(), 1, run.seed)
    prompts = run_prompts(run, resolved.training.own_prompts)
    texts = {(p.text, p.images) for p in (*prompts.train, *prompts.evaluated)}
    return estimate(resolved, adapter, plan, prompts=len(texts), processes=processes)


def _remedies(phases: Sequence[str], resolved: Resolved, world: World) -> Iterator[Remedy]:
    """Options that lower the memory of the phases; some are of no use to the model or the method."""
    there, config, memory = set(phases), resolved.model.config, resolved.model.config.memory
    visits = world.device.type == "cuda"  # parts in host memory visit a GPU
    batch = _batch(there, resolved)
    if batch is not None:
        yield batch
    if there & {"decode", "images", "evaluation"}:
        if not memory.vae_slicing:
            yield Remedy({"model.memory.vae_slicing": True})
        if not memory.vae_tiling:
            yield Remedy({"model.memory.vae_tiling": True})
        if visits and "vae" not in memory.group_offload:
            yield Remedy({"model.memory.group_offload": [*memory.group_offload, "vae"]})
    if "update" in there:
        if config.gradient_checkpointing is not True:
            yield Remedy({"model.gradient_checkpointing": True})
        if config.lora is None:
            yield Remedy({"model.lora": {}})
    if visits and there & {"loading", "text"} and "text_encoders" not in memory.group_offload:
        yield Remedy({"model.memory.group_offload": [*memory.group_offload, "text_encoders"]})
    if config.dtype == "float32":
        yield Remedy({"model.dtype": "bfloat16"})
    if config.lora is not None and not memory.few_bits:
        yield Remedy({"model.memory.quantize": "int8"})
    if world.size > 1 and not config.shard:
        yield Remedy({"model.shard": True})


def _batch(phases: set[str], resolved: Resolved) -> Remedy | None:
    """Half the batch of the phases; None: they have none, or one row."""
    run, key = resolved.run, ""
    if "evaluation" in phases:
        key, size = "eval.batch_size", run.eval.batch_size
    elif "update" in phases:
        key, size = "optim.batch_size", run.optim.batch_size
    elif "explore" in phases and run.rollout.exploration is not None:
        key, size = "rollout.exploration.batch_size", run.rollout.exploration.batch_size
    elif phases & {"rollout", "decode", "images", "maps", "iteration"}:
        key, size = "rollout.batch_size", run.rollout.batch_size
    else:
        return None
    size = size or run.rollout.batch_size
    return Remedy({key: size // 2}) if size > 1 else None


def _is_valid(remedy: Remedy, resolved: Resolved) -> bool:
    """Whether the configuration with a remedy is valid: a forward may need whole groups, a model its own way."""
    try:
        tree = overridden(
            to_tree(resolved.run), [f"{key}={json.dumps(value)}" for key, value in remedy.settings.items()]
        )
        resolve(validate(RunConfig, tree, ""), offline=True)
    except Fault:
        return False
    return True
