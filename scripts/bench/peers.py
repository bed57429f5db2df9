"""`scripts.bench peers`: flowrl next to plain diffusers loops that do the same work on the same modules."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan, noisy_steps, solver_plan, window
from flowrl.rollout.loop import RunOptions, batches
from flowrl.rollout.noise import Noise
from flowrl.rollout.recorder import Recording
from flowrl.run.session import Session
from flowrl.training.determinism import strict
from scripts.bench.floors import BareLoop, PlainCalls, Watch, recorded
from scripts.bench.timing import median_interval, paired

CONFIG = "lab/flow_grpo"
ROLLOUT_TARGET, UPDATE_TARGET = 0.95, 0.90
"""Least time of the floor over flowrl's."""
WARMUPS = 2
"""Pairs before the measured ones."""
REWARD = "scripts.bench.gpu.reward"
"""A reward that takes no time: scores are drawn here."""
_TIMES = "times: {name: subset, count: 2, fraction: 0.84}, kl: {coef: 0.0}"
METHODS: Mapping[str, tuple[str, ...]] = {
    "flow_grpo": ("algorithm={name: flow_grpo, clip_range: 1.0e-3, sde_steps: [0, 1]}",),
    "diffusion_nft": (f"algorithm={{name: diffusion_nft, {_TIMES}}}", "rollout.sampler=null"),
    "awm": (f"algorithm={{name: awm, {_TIMES}}}", "rollout.sampler=null"),
}
"""Compared methods with their overrides: two transitions or two training times a sample, no KL to a reference."""


@dataclass(frozen=True)
class Row:
    """One comparison: what is timed in turn, with the network forwards of each side."""

    name: str
    target: float | None
    """Least floor over flowrl; None: there is none."""
    pairs: list[tuple[float, float]]
    """(floor, flowrl) in milliseconds."""
    work: tuple[Counter[int], Counter[int]]
    """Rows of a forward -> number of forwards, of each side."""

    @property
    def ratios(self) -> list[float]:
        return [floor / own for floor, own in self.pairs]


def measure(
    config: str, overrides: Sequence[str], pairs: int, methods: Mapping[str, tuple[str, ...]] = METHODS
) -> tuple[list[Row], str]:
    """(comparisons, setting in words) of a recipe; the first method's session draws the rollouts.

    Raises:
        AssertionError: the two sides of a comparison give their networks different numbers of rows.
        ConfigError, ModelError: something the user can mend.
    """
    rows, setting = list[Row](), ""
    with _one_thread():
        for number, (name, words) in enumerate(methods.items()):
            with _opened(config, [*overrides, *words]) as session:
                watch = Watch(session)
                if not number:
                    setting = _setting(session)
                    rows += _rollouts(session, watch, pairs)
                rows += _updates(session, watch, pairs, name, plain=not number)
    return rows, setting


def _opened(config: str, words: Sequence[str]) -> Session:
    """A session that draws every sample from noise of its own, so that each step is a forward of whole batches.

    Raises:
        ConfigError: the recipe has pairs, or an option is wrong.
    """
    given = load_config(config, list(words))
    if given.data.pairs is not None:
        raise ConfigError(
            f"data.pairs: {config} trains on given images, and what is measured here are samples that the network "
            "draws; name a recipe with data.prompts"
        )
    fixed = (
        f"data.max_prompts={given.rollout.prompts_per_iteration}",
        "data.max_eval_prompts=1",
        "data.eval_share=0",
        f"rewards=[{{name: {REWARD}}}]",
        "eval.rewards=[]",
        "rollout.shared_noise=false",
        "rollout.exploration=null",
        "optim.schedule=constant",
    )
    return Session(resolve(load_config(config, [*words, *fixed])))


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch, so that CPU seconds are those of one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compared(
    name: str, target: float | None, sides: tuple[Callable[[], Any], Callable[[], Any]], watch: Watch, pairs: int
) -> Row:
    """The comparison of two pieces of work, whose forwards are counted in every pair."""
    work: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    def counted(k: int) -> None:
        watch.take()
        sides[k]()
        work[k].clear()
        work[k].update(watch.take())

    def second() -> None:
        counted(1)

    spent = paired(lambda: counted(0), second, pairs, warmups=WARMUPS, clock=_clock())
    rows = [sum(size * number for size, number in side.items()) for side in work]
    assert rows[0] == rows[1] > 0, f"{name}: the floor gives its network {rows[0]} rows, flowrl {rows[1]}"
    return Row(name, target, spent, work)


def _clock() -> Callable[[], float]:
    """Seconds: CPU seconds of the process, next to a GPU those of the wall, after its work."""
    if not torch.cuda.is_available():
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


# ---- the rollout


def _rollouts(session: Session, watch: Watch, pairs: int) -> list[Row]:
    """A rollout with decoding, by flowrl's steps of the ODE and by its stochastic ones, next to the pipeline's call."""
    sampling, rollout = session.parts.sampling, session.config.rollout
    level = sampling.sampler.default_noise_level()
    plans = {"ODE": solver_plan(sampling.schedule)}
    plans[sampling.sampler.name] = window(sampling.schedule, level, noisy_steps(sampling.schedule))
    prompts = session.parts.data.prompts.train[: rollout.prompts_per_iteration]
    ids = [SampleId(slot, k) for slot in range(len(prompts)) for k in range(rollout.group_size)]
    asked = sampling.asked(prompts, ids)
    noise = Noise(session.config.seed, "rollout", 1, sampling.adapter.latent_shape())
    spans = batches(sampling.adapter, plans["ODE"], asked.cond, asked.rows, rollout.batch_size)
    calls = PlainCalls(session, [[prompts[i.slot].text for i in ids[span]] for span in spans])

    def plain() -> None:
        with strict():
            calls()

    def own(plan: StepPlan) -> None:
        with strict():
            options = RunOptions(recording=Recording(sampling.sampler.log_prob_form))
            given = sampling.asked(prompts, ids)
            drawn = sampling.draw(plan, noise, given, batch_size=rollout.batch_size, options=options)
        sampling.images(drawn, rollout.batch_size)

    return [
        _compared(f"rollout, {name}", ROLLOUT_TARGET, (plain, lambda plan=plan: own(plan)), watch, pairs)
        for name, plan in plans.items()
    ]


# ---- the updates


def _updates(session: Session, watch: Watch, pairs: int, name: str, *, plain: bool) -> list[Row]:
    """The updates of an iteration next to a bare loop; with `plain` also the bare loop with and without determinism."""
    drawn = session.roll_out(1)
    # As many different scores as samples, so that no group is left out.
    scores = torch.rand(drawn.rewards.shape, generator=torch.Generator().manual_seed(0))
    rollout = replace(drawn, rewards=scores)
    credit = session.credit(rollout)
    session.update(rollout, credit)  # with the parity gate, which is passed once
    with recorded(session) as calls:
        session.update(rollout, credit)
    loop = BareLoop(session, calls)

    def bare() -> None:
        with strict():
            loop()

    def free() -> None:
        torch.use_deterministic_algorithms(False)
        try:
            loop()
        finally:
            torch.use_deterministic_algorithms(session.config.deterministic, warn_only=True)

    own = _compared(f"updates, {name}", UPDATE_TARGET, (bare, lambda: session.update(rollout, credit)), watch, pairs)
    if not (plain and session.config.deterministic):
        return [own]
    title = "the bare loop of these updates, free and deterministic"
    return [own, _compared(title, None, (free, bare), watch, pairs)]


# ---- the result


def _setting(session: Session) -> str:
    rollout, optim, config = session.config.rollout, session.config.optim, session.config
    samples = rollout.prompts_per_iteration * rollout.group_size
    weights = f"{session.weights.description}, {session.resolved.model.config.dtype}"
    return (
        f"{session.resolved.model.config.path} ({weights}), {samples} samples in batches of {rollout.batch_size}, "
        f"{rollout.num_inference_steps} steps, guidance {rollout.guidance_scale:g}, {optim.updates_per_iteration} "
        f"updates of microbatches of {optim.batch_size}, deterministic mode {'on' if config.deterministic else 'off'}"
    )


def report(rows: Sequence[Row], setting: str, cpu: str) -> str:
    """The result as Markdown."""
    lines = [
        "| work | forwards of each side | floor, s | flowrl, s | floor / flowrl (95 % of the median) | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        floor, own = (statistics.median(pair[k] for pair in row.pairs) / 1000 for k in (0, 1))
        middle, low, high = median_interval(row.ratios)
        lines.append(
            f"| {row.name} | {_forwards(row.work)} | {floor:.3f} | {own:.3f} | {middle:.3f} ({low:.3f} to {high:.3f}) "
            f"| {_verdict(row)} |"
        )
    kind = "wall-clock seconds next to a GPU" if torch.cuda.is_available() else "CPU seconds of one thread"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines += [
        "",
        f"Medians of {len(rows[0].pairs)} pairs in turn, {kind}; {setting}; {cpu}, torch {torch.__version__}, load "
        f"average of the last 1, 5 and 15 minutes {load}.",
    ]
    return "\n".join(lines)


def _forwards(work: tuple[Counter[int], Counter[int]]) -> str:
    """Forwards of each side, once where they are the same.

    >>> _forwards((Counter({64: 12}), Counter({64: 12}))), _forwards((Counter({8: 2}), Counter({16: 1})))
    ('12 x 64 rows', '2 x 8 rows; 1 x 16 rows')
    """
    words = [", ".join(f"{number} x {size}" for size, number in sorted(side.items())) + " rows" for side in work]
    return "; ".join(dict.fromkeys(words))


def _verdict(row: Row) -> str:
    """Whether the interval of the median is at or above the target."""
    if row.target is None:
        return "none"
    _, low, high = median_interval(row.ratios)
    if low >= row.target:
        return f"{row.target:g}: met"
    return f"{row.target:g}: {'missed' if high < row.target else 'not settled by this run'}"
