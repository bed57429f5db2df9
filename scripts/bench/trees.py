"""`scripts.bench trees`: cost of trees and of chains with as many samples, the same network, reward and updates."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEAVES, STEPS = 16, 20
ROLLOUT_TARGET, MIX_TARGET = 0.65, 0.40
"""Targets: network evaluations of a dense tree over those of chains; seconds of a Mix iteration over DanceGRPO's."""
BASE = {
    "name": "bench-trees",
    "iterations": 1,
    "model": {"name": "sd3", "path": "tiny-sd3", "lora": None, "max_sequence_length": 9},
    "data": {"prompts": "shapes:train", "max_eval_prompts": 1, "eval_share": 0},
    "rollout": {
        "sampler": {"name": "dance_sde", "eta": 0.3},
        "num_inference_steps": STEPS,
        "prompts_per_iteration": 4,
        "group_size": LEAVES,
        "batch_size": 64,
    },
    # File sizes differ between images, so no group is dead and every method trains on all its samples.
    "rewards": [{"name": "jpeg"}],
    "optim": {"learning_rate": 1e-5, "batch_size": 64, "updates_per_iteration": 2},
}
SHARED = "rollout.shared_noise=true"
DANCE = "algorithm={name: dance_grpo, clip_range: 1e-3, timestep_fraction: 1.0}"
BRANCH = "algorithm={name: branch_grpo, clip_range: 1e-3}"
METHODS = {
    "DanceGRPO": (DANCE, SHARED),
    "DanceGRPO, every chain from its own noise": (DANCE,),
    "DanceGRPO, 0.6 of the steps": (DANCE, SHARED, "algorithm.timestep_fraction=0.6"),
    "MixGRPO, window of 4": ("algorithm={name: mix_grpo, clip_range: 1e-3}", SHARED),
    "BranchGRPO, dense": (BRANCH,),
    "BranchGRPO, width-pruned (`prune: parent_top1`)": (BRANCH, "algorithm.prune=parent_top1"),
    "BranchGRPO, depth-pruned (`depth: {}`)": (BRANCH, "algorithm.depth={}"),
    "BranchGRPO, mix (`mix: {strategy: frozen}`)": (BRANCH, "algorithm.mix={strategy: frozen}"),
}
"""Compared methods with their overrides; times are ratios to those of the first."""
FULL, CHAINS, DENSE, MIX = (list(METHODS)[k] for k in (0, 1, 4, 7))


@dataclass
class Cost:
    """Cost of a method, an entry for each round."""

    rollout: list[float] = field(default_factory=list)
    """Network evaluations of a rollout, per sample."""
    train: list[float] = field(default_factory=list)
    """Network evaluations of the updates, with gradient, per sample."""
    dead: list[float] = field(default_factory=list)
    """Share of the groups with equal rewards, which are not trained."""
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of this process, which other jobs on the machine hardly change."""
    rollout_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)

    def add(self, row: dict[str, Any], seconds: float, cpu_s: float) -> None:
        self.rollout.append(row["nfe/rollout"])
        self.train.append(row["nfe/train"])
        self.dead.append(row["advantage/dead_group_share"])
        self.seconds.append(seconds)
        self.cpu_s.append(cpu_s)
        self.rollout_s.append(row["time/rollout_s"])
        self.update_s.append(row["time/update_s"])


def measure(overrides: list[str], rounds: int, methods: Mapping[str, tuple[str, ...]] = METHODS) -> dict[str, Cost]:
    """Costs of all methods, which take turns, one iteration a round; the first round is a warm-up."""
    sessions = {name: _session([*words, *overrides]) for name, words in methods.items()}
    costs, names = {name: Cost() for name in sessions}, list(sessions)
    for number in range(rounds + 1):
        # Each round starts with another method, so that a slower machine slows them all.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started, worked = time.perf_counter(), time.process_time()
            row = sessions[name].step(number + 1)
            if number:
                costs[name].add(row, time.perf_counter() - started, time.process_time() - worked)
    return costs


def _session(overrides: list[str]) -> Any:
    from flowrl.config.schema import RunConfig
    from flowrl.core.strict import overridden, validate
    from flowrl.run.session import Session

    return Session(validate(RunConfig, overridden(copy.deepcopy(BASE), overrides), ""))


def ratios(cost: list[float], of: list[float]) -> list[float]:
    """Ratios to the seconds of another method in the same round."""
    return [a / b for a, b in zip(cost, of, strict=True)]


def _format_range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def report(costs: dict[str, Cost], cpu: str) -> str:
    """The result as Markdown."""
    import torch

    columns = ("method", "evaluations a leaf", "with gradient", "rollout, s", "updates, s", "iteration, s")
    lines = [f"| {' | '.join(columns)} | of the first | CPU of the first |", (len(columns) + 2) * "|---" + "|"]
    for name, cost in costs.items():
        middle, full = statistics.median, costs[FULL]
        lines.append(
            f"| {name} | {middle(cost.rollout):.2f} | {middle(cost.train):.2f} | {middle(cost.rollout_s):.2f} | "
            f"{middle(cost.update_s):.2f} | {middle(cost.seconds):.2f} | "
            f"{_format_range(ratios(cost.seconds, full.seconds))} | {_format_range(ratios(cost.cpu_s, full.cpu_s))} |"
        )
    rollout = statistics.median(costs[DENSE].rollout) / statistics.median(costs[CHAINS].rollout)
    mix = statistics.median(ratios(costs[MIX].seconds, costs[FULL].seconds))
    dead = max(share for cost in costs.values() for share in cost.dead)
    lines += [
        "",
        f"Medians of {len(costs[FULL].seconds)} rounds, in which all methods take turns; ratios are within a round, "
        f"with their range. {torch.get_num_threads()} thread(s), {cpu}, torch {torch.__version__}. Dead groups: at "
        f"most {dead:.0%}. Rollout of a dense tree over independent chains: {rollout:.3f}, target {ROLLOUT_TARGET:g}: "
        f"{_verdict(rollout, ROLLOUT_TARGET)}. Iteration with mix over full DanceGRPO: {mix:.3f}, target "
        f"{MIX_TARGET:g}: {_verdict(mix, MIX_TARGET)}.",
    ]
    return "\n".join(lines)


def _verdict(value: float, target: float) -> str:
    return "met" if value <= target else "missed"
