"""The answer of `flowrl plan`: whether a run fits, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flowrl.config.resolved import Resolved
from flowrl.display.units import size
from flowrl.planning.checkpointing import MARGIN, available, threshold, update_bytes
from flowrl.planning.hours import LEFT_OUT, seconds, table
from flowrl.planning.memory import Estimate

CARDS_GB = (8, 12, 16, 24, 32, 48, 80, 141)
"""Common sizes of a card's memory."""


def here() -> tuple[str, int]:
    """(name of this machine's device, its memory in bytes)."""
    import torch

    cuda = torch.cuda.is_available()
    return torch.cuda.get_device_name() if cuda else "its CPU", available(torch.device("cuda" if cuda else "cpu"))


def reward_bytes(resolved: Resolved) -> float:
    """Weights of the reward models, as their cards say."""
    plans = (*resolved.rewards, *resolved.eval_rewards)
    return 2**30 * sum(plan.card.memory_gib for plan in plans if plan.card is not None)


def needed(resolved: Resolved, result: Estimate) -> int | None:
    """Bytes of a run on a device, with reward models and a margin; None: not known."""
    peak = None if result.peak is None else result.peak.peak
    return None if peak is None else math.ceil(peak * MARGIN + reward_bytes(resolved))


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
    for card, gib in table()["cards"].items():
        recomputes = auto and (update is None or update * MARGIN > gib * 2**30)
        on = seconds(card, resolved, adapter, result, own, recomputes=recomputes)
        known = known or on.rollout is not None
        large = on.rollout is not None and wanted is not None and wanted > gib * 2**30 and not recomputes
        yield f"{card}: {_time(on, resolved.run.iterations)}{', but the run does not fit it' if large else ''}"
    if known:
        yield f"not in these times: {LEFT_OUT}"


def _time(on: Any, iterations: int) -> str:
    parts = [
        f"{name} {value:.1f}" for name, value in (("rollout", on.rollout), ("updates", on.update)) if value is not None
    ]
    if on.whole is None:
        return f"{on.note}{f'; of the updates no measurement, {parts[0]} s an iteration' if parts else ''}"
    return f"{on.whole:.1f} s an iteration ({', '.join(parts)}), {hours(on.whole, iterations)}; {on.note}"


def hours(seconds: float, iterations: int) -> str:
    """Hours of all iterations.

    >>> hours(90, 100)
    '2.5 hours for 100 iterations'
    """
    return f"{seconds * iterations / 3600:.1f} hours for {iterations} iterations"


def measured(resolved: Resolved) -> str:
    """The time of the second of two iterations on this machine, without a run folder; the first one warms up.

    Raises:
        ConfigError, ModelError, RewardError: as of `flowrl train`.
    """
    from flowrl.run.session import Session

    with Session(replace(resolved.run, iterations=max(resolved.run.iterations, 2))) as session:
        session.step(1)
        row = session.step(2)
    parts = ", ".join(f"{name} {row[f'time/{name}_s']:.2f}" for name in ("rollout", "decode", "reward", "update")
                      if f"time/{name}_s" in row)  # fmt: skip
    whole = row["time/iteration_s"]
    return (
        f"this machine ({here()[0]}), measured: {whole:.2f} s an iteration ({parts}), "
        f"{hours(whole, resolved.run.iterations)}; not in it: evaluations and checkpoints"
    )
