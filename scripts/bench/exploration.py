"""`scripts.bench exploration`: agreement of the first look's ranking with the full rollout's, and its cost."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from torch import Tensor


def report(resolved: Any, prompts: int, rounds: int) -> str:
    """The result as Markdown.

    Args:
        resolved: a run with rollout.exploration.
        prompts: number of prompts whose pools are sampled in full.
        rounds: timed pairs of rollouts, with and without exploration.
    """
    import torch

    from flowrl.rollout.exploration import fidelity

    collector = _collector(resolved, prompts)
    config, exploring, options = collector.config, collector.exploring, collector.exploring.options
    numbers = collector.source.draw(1)
    asked = [collector.source.prompts[k] for k in numbers]
    noise = collector.noise(1)
    first, full = exploring.look(1, asked, noise), exploring.truth(1, asked, noise)
    group = config.rollout.group_size
    sizes = sorted({max(2, group // 4 * 2), group, min(2 * group, options.pool)})
    lines = [
        f"{len(asked)} prompts x {options.pool} candidates: {options.num_inference_steps or 'all'} of "
        f"{config.rollout.num_inference_steps} steps, network {options.network}; reward "
        f"{', '.join(plan.name for plan in resolved.rewards)}",
        "",
        "| kept | Kendall | Spearman | hit rate | true rank of its best | of its worst, from below | perfect |",
        "|---|---|---|---|---|---|---|",
    ]
    for keep in sizes:
        result = fidelity(first, full, keep)
        lines.append(
            f"| {keep} | {result.kendall:.3f} | {result.spearman:.3f} | {result.hit_rate:.3f} | "
            f"{result.top_rank:.1f} | {result.bottom_rank:.1f} | {(keep // 2 + 1) / 2:g} |"
        )
    stds = _std(full), _std(full.gather(1, _chosen(collector, first, group)))
    plain, explored = _timed(collector, rounds)
    ratio = [b / a for a, b in zip(plain, explored, strict=True)]
    lines += [
        "",
        f"std of the rewards of a prompt: {stds[0]:.3f} over the pool, {stds[1]:.3f} over the {group} chosen",
        f"rollout with exploration over the plain one: {statistics.median(ratio):.2f} times "
        f"({min(ratio):.2f} to {max(ratio):.2f}; {rounds} pairs, {torch.get_num_threads()} thread(s))",
    ]
    return "\n".join(lines)


def _collector(resolved: Any, prompts: int) -> Any:
    from flowrl.core.errors import ConfigError, Remedy
    from flowrl.run.session import Session

    if resolved.run.rollout.exploration is None:
        raise ConfigError(
            "rollout.exploration=null: there is nothing to measure",
            remedies=[Remedy({"rollout.exploration.pool": 2 * resolved.group_size})],
        )
    rollout = dataclasses.replace(resolved.run.rollout, prompts_per_iteration=prompts)
    run = dataclasses.replace(resolved.run, rollout=rollout)
    return Session(dataclasses.replace(resolved, run=run)).collector


def _chosen(collector: Any, scores: Tensor, group: int) -> Tensor:
    from flowrl.rollout.exploration import choose

    return choose(scores, group, collector.exploring.options.select, (collector.config.seed, 1))


def _std(rewards: Tensor) -> float:
    return float(rewards.double().std(dim=1, correction=0).nanmean())


def _timed(collector: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of plain and of exploring rollouts, which take turns on the same prompts after a warm-up pair."""
    from flowrl.training.metrics import Sums, Timer

    collector.exploring.fidelity = {}  # the check is not timed

    def once(iteration: int, explores: bool) -> float:
        collector.exploring.on = explores
        started = time.perf_counter()
        collector.collect(iteration, Timer(), Sums())
        return time.perf_counter() - started

    both: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for explores in (True, False) if number % 2 else (False, True):
            both[explores].append(once(number + 1, explores))
    return both[0][1:], both[1][1:]
