"""`model.gradient_checkpointing: auto`: on where the updates would not fit the device without it, by the estimate."""

import dataclasses
import math
import os
from dataclasses import dataclass

import torch

from flowrl.config.resolved import Resolved
from flowrl.display.console import log
from flowrl.display.units import size
from flowrl.models.generic.outline import Unmeasurable
from flowrl.models.pipelines.skeletons import UnknownModel
from flowrl.planning.memory import Estimate
from flowrl.planning.out_of_memory import planned
from flowrl.training.world import World

MARGIN = 1.1
"""Room for what the estimate leaves out: the context, workspaces, fragmentation."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether an update recomputes its activations, with the reason in words."""

    on: bool
    reason: str


def decided(resolved: Resolved, world: World) -> Resolved:
    """The run with `auto` decided, on all processes alike: on if one of them needs it.

    Raises ConfigError, ModelError: something the user can mend, which the estimate came upon.
    """
    if resolved.model.config.gradient_checkpointing != "auto":
        return resolved
    choices = world.agree(lambda: choice(resolved, available(world.device), world.size))
    taken = next((each for each in choices if each.on), choices[0])
    log.info("model.gradient_checkpointing=auto: %s, %s", str(taken.on).lower(), taken.reason)
    return with_checkpointing(resolved, on=taken.on)


def with_checkpointing(resolved: Resolved, *, on: bool) -> Resolved:
    """The same run with checkpointing of every block, or of none."""
    config = dataclasses.replace(resolved.model.config, gradient_checkpointing=on)
    return dataclasses.replace(resolved, model=dataclasses.replace(resolved.model, config=config))


def choice(resolved: Resolved, memory: int, processes: int) -> Choice:
    """The choice for a device of `memory` bytes for each process."""
    try:
        result = planned(with_checkpointing(resolved, on=False), processes)
    except (UnknownModel, Unmeasurable) as error:
        return Choice(True, f"since the memory of updates is not known: {error}")
    needed = update_bytes(result, resolved, processes)
    if needed is None:
        return Choice(True, f"since the memory of updates is not known: {result.unknown.get('update', 'no estimate')}")
    fits = needed * MARGIN <= memory
    return Choice(
        not fits,
        f"since updates without it take {size(needed)} by flowrl plan, {size(math.ceil(needed * MARGIN))} with a "
        f"margin, {'within' if fits else 'more than'} the device's {size(memory)}",
    )


def update_bytes(result: Estimate, resolved: Resolved, processes: int) -> int | None:
    """Bytes of the update's peak on a process; None: not known."""
    peak = next(phase.peak for phase in result.phases if phase.name == "update")
    config = resolved.model.config
    if peak is None or not config.shard or processes == 1:
        return peak
    return peak - result.spared(processes, full=config.lora is None)


def threshold(result: Estimate, resolved: Resolved) -> str:
    """From which size of device on one process would not recompute, in words."""
    needed = update_bytes(result, resolved, 1)
    if needed is None:
        return "model.gradient_checkpointing=auto: updates recompute, since their memory is not known"
    return (
        "model.gradient_checkpointing=auto: the update above recomputes nothing, for a device of at least "
        f"{size(math.ceil(needed * MARGIN))} (10 % more); on a smaller one it is that of true"
    )


def available(device: torch.device) -> int:
    """Bytes of a device, or of the machine for the CPU, for each process of this machine that uses it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        sharing = math.ceil(local / max(torch.cuda.device_count(), 1))
        return torch.cuda.mem_get_info(device)[1] // sharing
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
