"""The answer of `flowrl plan`: whether a run fits, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowrl.display.units import size

if TYPE_CHECKING:
    from flowrl.commands._plan_data import Data
    from flowrl.config.resolved import Resolved
    from flowrl.diffusion.plan import StepPlan
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


@dataclass(frozen=True, slots=True)
class Estimates:
    """The estimate of a run, and of one that recomputes; the same twice, unless the device decides (`auto`)."""

    resolved: Resolved
    plain: Estimate
    recomputing: Estimate

    @property
    def decides(self) -> bool:
        """True if the device decides."""
        return self.plain is not self.recomputing

    def on(self, memory: int) -> tuple[Estimate, bool]:
        """(the estimate on a device of so many bytes, whether `auto` recomputes there)."""
        from flowrl.planning.checkpointing import MARGIN, update_bytes

        if not self.decides:
            return self.plain, False
        update = update_bytes(self.plain, self.resolved, 1)
        again = update is None or update * MARGIN > memory
        return (self.recomputing if again else self.plain), again

    def fits(self, memory: int) -> bool:
        """Whether a device of so many bytes holds the run."""
        wanted = needed(self.resolved, self.on(memory)[0])
        return wanted is not None and wanted <= memory


def estimates(resolved: Resolved, adapter: Any, plan: StepPlan, data: Data) -> tuple[dict[str, Any], Estimates]:
    """(`hours.setting` of a run, its estimates). The adapter, a fresh one, is changed."""
    from flowrl.planning.checkpointing import with_checkpointing
    from flowrl.planning.hours import setting
    from flowrl.planning.memory import estimate, skeleton

    own, texts = setting(resolved, adapter), data.counted(resolved.slots)
    plain = again = estimate(resolved, adapter, plan, prompts=texts)
    if resolved.model.config.gradient_checkpointing == "auto":
        other = with_checkpointing(resolved, on=True)
        again = estimate(other, skeleton(other), plan, prompts=texts)
    return own, Estimates(resolved, plain, again)


def answer(resolved: Resolved, adapter: Any, plan: StepPlan, data: Data) -> tuple[Estimate, list[str]]:
    """(estimate, sentences on memory and time). The adapter, a fresh one, is changed."""
    own, both = estimates(resolved, adapter, plan, data)
    return both.plain, [*memory_lines(both), *time_lines(both, adapter, own)]


def needed(resolved: Resolved, result: Estimate) -> int | None:
    """Bytes that a run needs on a device, with its reward models and a margin; None: not known."""
    from flowrl.planning.checkpointing import MARGIN

    if result.peak is None or result.peak.peak is None:
        return None
    rewards = (plan.card.memory_gib for plan in (*resolved.rewards, *resolved.eval_rewards) if plan.card is not None)
    return math.ceil(result.peak.peak * MARGIN + sum(rewards) * 2**30)


def memory_lines(both: Estimates) -> Iterator[str]:
    """Whether the run fits, on one process."""
    for result, how in ((both.plain, ""), (both.recomputing, "recomputing in updates (auto), "))[: 1 + both.decides]:
        wanted, peak = needed(both.resolved, result), result.peak
        if wanted is None or peak is None:
            yield f"memory: not known, since {'; '.join(result.unknown.values())}"
            return
        cards = [gb for gb in CARDS_GB if gb * 2**30 >= wanted]
        yield (
            f"memory: {how}{size(wanted)}, which are {size(peak.peak)} ({peak.name}), a margin of 10 % and the reward "
            f"models; fits {f'a card of {cards[0]} GB' if cards else 'no single card'}"
        )
    name, there = here()
    yield f"this machine ({name}, {size(there)}): {'fits' if both.fits(there) else 'does not fit'}"


def time_lines(both: Estimates, adapter: Any, own: dict[str, Any]) -> Iterator[str]:
    """Seconds of an iteration and hours of the run on each measured card."""
    from flowrl.planning.hours import LEFT_OUT, cards, seconds

    known = False
    for card, memory in cards().items():
        result, recomputes = both.on(memory)
        on = seconds(card, both.resolved, adapter, result, own, recomputes=recomputes)
        known = known or on.rollout is not None
        large = on.rollout is not None and not both.fits(memory)
        yield f"{card}: {_time(on, both.resolved.run.iterations)}{', but the run does not fit it' if large else ''}"
    if known:
        yield f"not in these times: {LEFT_OUT}"


def _time(on: Seconds, iterations: int) -> str:
    parts = {"rollout": on.rollout, "updates": on.update}
    said = ", ".join(f"{name} {'not measured' if value is None else brief(value)}" for name, value in parts.items())
    if on.rollout is None:
        return on.note
    if on.whole is None:
        return f"no measurement of its updates ({said} s an iteration; {on.note})"
    return f"{brief(on.whole)} s an iteration ({said}), {hours(on.whole, iterations)}; {on.note}"


def brief(number: float) -> str:
    """Three digits, and all before the point.

    >>> brief(1032.4), brief(0.07812)
    ('1032', '0.0781')
    """
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def hours(seconds: float, iterations: int) -> str:
    """Hours of all iterations.

    >>> hours(90, 100)
    '2.5 hours for 100 iterations'
    """
    return f"{brief(seconds * iterations / 3600)} hours for {iterations} iterations"


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
    parts = ", ".join(f"{name} {brief(value)}" for name, value in took.items())
    return (
        f"this machine ({here()[0]}), measured: {brief(whole)} s an iteration ({parts}), "
        f"{hours(whole, resolved.run.iterations)}; not in it: evaluations and checkpoints"
    )
