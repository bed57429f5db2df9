"""The answer of `flowrl plan`: whether a run fits, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.display.units import size

if TYPE_CHECKING:
    from flowrl.config.resolved import Resolved
    from flowrl.planning.hours import Seconds
    from flowrl.planning.memory import Estimate

CARDS_GB = (8, 12, 16, 24, 32, 48, 80, 141)
"""Common sizes of a card's memory."""


def here() -> tuple[str, int]:
    """(name of this machine's device, its memory in bytes)."""
    import torch

    from flowrl.planning.checkpointing import available

    cuda = torch.cuda.is_available()
    return torch.cuda.get_device_name() if cuda else "its CPU", available(torch.device("cuda" if cuda else "cpu"))


def needed(resolved: Resolved, result: Estimate) -> int | None:
    """Bytes that a run needs on a device, with its reward models and a margin; None: not known."""
    from flowrl.planning.checkpointing import MARGIN

    if result.peak is None or result.peak.peak is None:
        return None
    rewards = sum(plan.card.memory_gib for plan in (*resolved.rewards, *resolved.eval_rewards) if plan.card is not None)
    return math.ceil(result.peak.peak * MARGIN + rewards * 2**30)


def memory_lines(resolved: Resolved, result: Estimate) -> Iterator[str]:
    """Whether the run fits, on one process."""
    wanted = needed(resolved, result)
    if wanted is None or result.peak is None:
        yield f"memory: not known, since {'; '.join(result.unknown.values())}"
        return
    cards = [gb for gb in CARDS_GB if gb * 2**30 >= wanted]
    auto = resolved.model.config.gradient_checkpointing == "auto" and result.peak.name == "update"
    yield (
        f"memory: {size(wanted)}, which are {size(result.peak.peak)} ({result.peak.name}), a margin of 10 % and the "
        f"reward models; fits {f'a card of {cards[0]} GB' if cards else 'no single card'}"
        + (", and smaller ones where recomputing is enough" if auto else "")
    )
    name, there = here()
    yield f"this machine ({name}, {size(there)}): {'fits' if wanted <= there else 'does not fit'}"


def time_lines(resolved: Resolved, adapter: Any, result: Estimate, own: dict[str, Any]) -> Iterator[str]:
    """Seconds of an iteration and hours of the run on each measured card."""
    from flowrl.planning.hours import LEFT_OUT, seconds

    wanted, known = needed(resolved, result), False
    for on in seconds(resolved, adapter, result, own):
        known = known or on.rollout is not None
        yield f"{on.card}: {_time(on, resolved.run.iterations)}" + (
            ", but the run does not fit it" if wanted is not None and wanted > on.memory and on.rollout else ""
        )
    if known:
        yield f"not in these times: {LEFT_OUT}"


def _time(on: Seconds, iterations: int) -> str:
    parts = {"rollout": on.rollout, "updates": on.update}
    said = ", ".join(f"{name} {'not measured' if value is None else f'{value:.3g}'}" for name, value in parts.items())
    if on.rollout is None:
        return on.note
    if on.whole is None:
        return f"no measurement of its updates ({said} s an iteration; {on.note})"
    return f"{on.whole:.3g} s an iteration ({said}), {hours(on.whole, iterations)}; {on.note}"


def hours(seconds: float, iterations: int) -> str:
    """Hours of all iterations.

    >>> hours(90, 100)
    '2.5 hours for 100 iterations'
    """
    return f"{seconds * iterations / 3600:.3g} hours for {iterations} iterations"


def measured(resolved: Resolved) -> str:
    """The time of the second of two iterations on this machine, without a run folder; the first one warms up.

    Raises:
        ConfigError, ModelError, RewardError: as of `flowrl train`.
    """
    from flowrl.run.session import Session

    run = replace(resolved.run, iterations=max(resolved.run.iterations, 2))
    with Session(run) as session:
        session.step(1)
        row = session.step(2)
    took = {key[5:-2]: value for key, value in row.items() if key.startswith("time/") and key.endswith("_s")}
    whole = took.pop("iteration")
    parts = ", ".join(f"{name} {value:.3g}" for name, value in took.items())
    return (
        f"this machine ({here()[0]}), measured: {whole:.3g} s an iteration ({parts}), "
        f"{hours(whole, resolved.run.iterations)}; not in it: evaluations and checkpoints"
    )
