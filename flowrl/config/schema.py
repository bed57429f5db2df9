"""YAML to a typed, frozen, strict configuration.

An unknown key, a wrong type or a value out of range stops with the key, the value, the reason and the
nearest valid name, before any model is loaded. No value is ever changed silently.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from flowrl.core.paths import OUTPUT, ComponentOf
from flowrl.core.strict import Options, require_positive
from flowrl.data.options import DataConfig
from flowrl.rollout.options import RolloutConfig
from flowrl.training.optim import OptimConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Iterations between evaluations on the way; 0: only before and after training."""
    num_inference_steps: int | None = None
    """Null takes rollout's."""
    guidance_scale: float | None = None
    """Null takes rollout's."""
    samples_per_prompt: int = 1
    """Fixed seeds per prompt."""
    batch_size: int = 32
    best_guidance: list[float] = field(default_factory=list)
    """CFG scales tried on the base; the best one is reported beside base and tuned. Empty: not searched."""
    periodic_prompts: int | None = None
    """Prompts of the evaluations on the way; null: all."""
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """Further rewards, only looked at; training rewards are always evaluated."""
    save_images: int | None = 64
    """Prompts whose pictures are kept; null keeps all (the report then shows the worst regressions)."""

    def __post_init__(self) -> None:
        require_positive(
            num_inference_steps=self.num_inference_steps,
            samples_per_prompt=self.samples_per_prompt,
            batch_size=self.batch_size,
            periodic_prompts=self.periodic_prompts,
        )
        if self.every < 0:
            raise ValueError(f"every={self.every} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 20
    """Iterations between checkpoints; the last iteration is always saved."""
    keep: int = 3
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        require_positive(every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run. `model`, `algorithm`, `rollout.sampler` and `rewards` are the components' own options."""

    name: str
    """Run folder: <output>/<name>."""
    model: Annotated[Options, ComponentOf("models")]
    data: DataConfig
    iterations: int
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """What samples are credited by; none for a method that learns from pairs."""
    output: Annotated[str, OUTPUT] = "runs"
    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: Annotated[Options, ComponentOf("algorithms")] = field(default_factory=lambda: {"name": "flow_grpo"})
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deterministic: bool = True
    """Deterministic kernels, so that a resume is bitwise equal; slower on a GPU."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name) or self.name in (".", ".."):
            raise ValueError(f"name={self.name!r} may hold letters, digits, '.', '_' and '-': it names the run folder")
        if self.iterations < 0:
            raise ValueError(f"iterations={self.iterations} must not be negative")
        geometry(self)

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def samples_per_iteration(self) -> int:
        """Samples that are drawn, for a method that draws all of them."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size


def geometry(config: RunConfig) -> None:
    """Refuse numbers that do not divide, with the nearest that do: samples into updates, or pairs."""
    rollout, total, what = config.rollout, config.samples_per_iteration, "samples of an iteration"
    made_of = f"prompts_per_iteration={rollout.prompts_per_iteration} x group_size={rollout.group_size}"
    if config.data.pairs is not None:
        total, what = config.data.pairs.per_iteration, "pairs of an iteration"
        made_of = f"data.pairs.per_iteration={total}"
    updates = config.optim.updates_per_iteration
    if total % updates:
        valid = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(valid, key=lambda n: abs(n - updates))[:3]
        raise ValueError(
            f"optim.updates_per_iteration={updates} does not divide the {total} {what} ({made_of}); "
            f"nearest values that do: {', '.join(map(str, sorted(near)))}"
        )


def to_tree(config: Any) -> Options:
    """Plain data of a configuration, every default written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dump(config: RunConfig) -> str:
    """YAML of the resolved configuration."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)
