"""`flowrl bench trees`: what trees cost beside chains of as many samples, with the same network, reward and updates."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEAVES, STEPS = 16, 20
ROLLOUT_TARGET, MIX_TARGET = 0.65, 0.40
"""Evaluations of a dense tree's rollout over those of chains; time of an iteration with Mix over full DanceGRPO's."""
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
    # Of one size for no two pictures, so that no group is dead and every method trains all that it draws.
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
"""What is compared, each with its overrides; times are told over those of the first."""
FULL, CHAINS, DENSE, MIX = (list(METHODS)[k] for k in (0, 1, 4, 7))


@dataclass
class Cost:
    """Of a method, an entry for each round."""

    rollout: list[float] = field(default_factory=list)
    """Network evaluations of a rollout, by sample."""
    train: list[float] = field(default_factory=list)
    """Of the updates, with gradient, by sample."""
    dead: list[float] = field(default_factory=list)
    """Share of the groups without spread, which are not trained."""
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of this process: what other jobs on the machine hardly change."""
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
    """Iterations of all methods in turn, one of each a round; what a first iteration costs once is not counted."""
    sessions = {name: _session([*words, *overrides]) for name, words in methods.items()}
    costs, names = {name: Cost() for name in sessions}, list(sessions)
    for number in range(rounds + 1):
        # A round starts with another method each time, so that what slows the machine down slows them all.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started, worked = time.perf_counter(), time.process_time()
            row = sessions[name].step(number + 1)
            if number:
                costs[name].add(row, time.perf_counter() - started, time.process_time() - worked)
    return costs


def _session(overrides: list[str]) -> Any:
    from flowrl.config.schema import RunConfig
    from flowrl.core.strict import apply_override, validate
    from flowrl.run.session import Session

    tree = copy.deepcopy(BASE)
    for word in overrides:
        apply_override(tree, word)
    return Session(validate(RunConfig, tree, ""))


def ratios(cost: list[float], of: list[float]) -> list[float]:
    """Seconds over those of another method in the same round."""
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
