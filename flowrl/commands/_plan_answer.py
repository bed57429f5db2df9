"""The answer of `flowrl plan`: whether a run fits, and how long it takes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flowrl.commands._plan_hours import LEFT_OUT, TABLE, seconds
from flowrl.config.resolved import Resolved
from flowrl.display.units import size
from flowrl.planning.checkpointing import MARGIN, available, threshold, update_bytes
from flowrl.planning.memory import Estimate

CARDS_GB = (8, 12, 16, 24, 32, 48, 80, 141)
"""Common sizes of a card's memory."""


def here() -> tuple[str, int]:
    """(name of this machine's device, its memory in bytes)."""
    cuda = torch.cuda.is_available()
    return torch.cuda.get_device_name() if cuda else "its CPU", available(torch.device("cuda" if cuda else "cpu"))


def needed(resolved: Resolved, result: Estimate) -> int | None:
    """Bytes of a run on a device, with a margin and the reward models that have a card; None: not known."""
    peak, plans = None if result.peak is None else result.peak.peak, (*resolved.rewards, *resolved.eval_rewards)
    rewards = sum(plan.card.memory_gib for plan in plans if plan.card is not None)
    return None if peak is None else math.ceil(peak * MARGIN + rewards * 2**30)


def answers(resolved: Resolved, adapter: Any, result: Estimate, own: dict[str, Any]) -> Iterator[str]:
    """Sentences: whether the run fits, seconds of an iteration and hours of the run on each measured card."""
    wanted, auto = needed(resolved, result), resolved.model.config.gradient_checkpointing == "auto"
    if wanted is None or result.peak is None:
        yield f"memory: not known, since {'; '.join(result.unknown.values())}"
    else:
        cards, (device, there) = [gb for gb in CARDS_GB if gb * 2**30 >= wanted], here()
        yield (
            f"memory: {size(wanted)}, which are {size(result.peak.peak)} ({result.peak.name}), a margin of 10 % and "
            f"the reward models; fits {f'a card of {cards[0]} GB' if cards else 'no single card'}"
        )
        yield f"this machine ({device}, {size(there)}): {'fits' if wanted <= there else 'does not fit'}"
    if auto:
        yield threshold(result, resolved)
    update, known = update_bytes(result, resolved, 1), False
    for card, gib in TABLE["cards"].items():
        recomputes = auto and (update is None or update * MARGIN > gib * 2**30)
        took = seconds(card, resolved, adapter, result, own, recomputes=recomputes)
        large = took is not None and wanted is not None and wanted > gib * 2**30 and not recomputes
        known = known or took is not None
        yield f"{card}: {_time(took, resolved.run.iterations)}{', but the run does not fit it' if large else ''}"
    if known:
        yield f"not in these times: {LEFT_OUT}"


def _time(took: tuple[float, float | None, str] | None, iterations: int) -> str:
    if took is None:
        return "no measurement of this model at this size and precision"
    rollout, update, note = took
    if update is None:
        return f"rollout {rollout:.1f} s an iteration, {note}; no measurement of its updates"
    return f"{hours(rollout + update, iterations)} (rollout {rollout:.1f} s, updates {update:.1f} s), {note}"


def hours(seconds: float, iterations: int) -> str:
    """Time of an iteration and of all.

    >>> hours(90, 100)
    '90.0 s an iteration, 2.5 hours for 100'
    """
    return f"{seconds:.1f} s an iteration, {seconds * iterations / 3600:.1f} hours for {iterations}"


def measured(resolved: Resolved) -> str:
    """The time of the second of two iterations on this machine, without a run folder; the first one warms up.

    Raises ConfigError, ModelError, RewardError: as of `flowrl train`.
    """
    from flowrl.run.session import Session

    with Session(replace(resolved.run, iterations=max(resolved.run.iterations, 2))) as session:
        session.step(1)
        row = session.step(2)
    parts = ", ".join(
        f"{key[5:-2]} {row[key]:.2f} s" for key in row if key.startswith("time/") and "iteration" not in key
    )
    whole = hours(row["time/iteration_s"], resolved.run.iterations)
    return f"this machine ({here()[0]}), measured: {whole} ({parts}); not in it: evaluations and checkpoints"
