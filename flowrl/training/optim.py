"""The optimizer step and its options: the optimizer, learning-rate schedule, gradient clipping, loss scaling, EMA."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import OptionError, Remedy
from flowrl.core.strict import require_positive
from flowrl.models.weights.roles import Weights
from flowrl.training import optimizers
from flowrl.training.world import ALONE, World


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    decay: float = 0.9
    """Weight of the old average at each of its updates, in [0, 1)."""
    every: int = 1
    """Optimizer steps between its updates."""
    first: int | None = None
    """Optimizer steps before its first update; null: `every`."""
    repeats: int = 1
    """Times that each update is made, which takes its decay to this power: flow_grpo makes one for each batch of its
    gradient accumulation."""
    warmup: bool = True
    """Cap the decay at (a + n) / (b + n) after n optimizer steps."""
    warmup_terms: list[float] = field(default_factory=lambda: [1.0, 10.0])
    """a and b of the cap."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be in [0, 1)")
        require_positive(every=self.every, first=self.first, repeats=self.repeats)
        if len(self.warmup_terms) != 2 or not 0 <= self.warmup_terms[0] <= self.warmup_terms[1]:
            raise ValueError(f"warmup_terms={self.warmup_terms} must be two numbers a <= b from 0 on")

    @property
    def start(self) -> int:
        """Optimizer steps before the first update."""
        return self.every if self.first is None else self.first

    def weight(self, updates: int) -> float:
        """Weight of the old average after so many optimizer steps; 1 where it is not updated then.

        >>> flow_grpo = EmaConfig(decay=0.9, every=8, first=7, repeats=2)
        >>> [round(flow_grpo.weight(n), 4) for n in (7, 8, 15)]
        [0.2215, 1.0, 0.4096]
        """
        if updates < self.start or (updates - self.start) % self.every:
            return 1.0
        (a, b), n = self.warmup_terms, updates
        return (min(self.decay, (a + n) / (b + n)) if self.warmup else self.decay) ** self.repeats


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: optimizers.Name = "adamw"
    """`adamw`; `adamw_8bit`, `paged_adamw`, `paged_adamw_8bit` (bitsandbytes: 8-bit moments, moments
    that leave a full GPU, both); `adafactor`, second moments of rows and columns alone (docs/configuration.md)."""
    learning_rate: float = 3e-4
    """Largest learning rate, the one after the warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decays of AdamW's averages of the gradient and of its square, each in [0, 1); adafactor has none."""
    eps: float = 1e-8
    """Addend of AdamW's denominator, against a division by 0; adafactor has its own, 1e-30 to the squared gradient."""
    weight_decay: float = 1e-4
    """Weight decay: share of the learning rate by which a weight shrinks at an update; 0: none."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly, from 1 / warmup_updates of it: one update ahead of the
    schedules of diffusers, whose first update has the rate 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine would be 0 at the update after the last one."""
    max_grad_norm: float | None = 1.0
    """Largest gradient norm, to which larger ones are clipped; null: no clipping."""
    updates_per_iteration: int = 2
    """Optimizer steps per rollout; each uses an equal share of its samples."""
    batch_size: int = 8
    """Edges per training forward and process."""
    ema: EmaConfig | None = None
    """Averaged weights, used for evaluation and the saved result; null: no average."""

    def __post_init__(self) -> None:
        require_positive(
            learning_rate=self.learning_rate,
            eps=self.eps,
            max_grad_norm=self.max_grad_norm,
            updates_per_iteration=self.updates_per_iteration,
            batch_size=self.batch_size,
        )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in [0, 1)")
        if self.weight_decay < 0 or self.warmup_updates < 0:
            raise ValueError("weight_decay and warmup_updates must not be negative")
        if self.name == "adafactor" and (list(self.betas) != [0.9, 0.999] or self.eps != 1e-8):
            raise OptionError(
                f"name=adafactor takes neither betas={self.betas} nor eps={self.eps:g}: its decay and its addend are "
                "fixed (docs/configuration.md)",
                remedies=[Remedy({"name": "adamw"})],
            )

    def rate(self, updates: int, total: int) -> float:
        """Learning rate of the update after so many of `total` ones."""
        base, warmup = self.learning_rate, self.warmup_updates
        if updates < warmup:
            return base * (updates + 1) / warmup
        progress = min((updates - warmup) / max(total - warmup, 1), 1.0)
        if self.schedule == "linear":
            return base * (1 - progress)
        if self.schedule == "cosine":
            return base * 0.5 * (1 + math.cos(math.pi * progress))
        return base

    @property
    def settings(self) -> optimizers.Settings:
        """The options of the optimizer itself."""
        betas = (self.betas[0], self.betas[1])
        return optimizers.Settings(self.learning_rate, betas, self.eps, self.weight_decay)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of an update. `skipped`: the gradient was not finite, and no weight moved."""

    grad_norm: float
    learning_rate: float
    skipped: bool


class Optimizer:
    """The optimizer over the trainable weights.

    Args:
        weights: the trained weights; the optimizer keeps their "ema" role if `config.ema` is set.
        config: the run's `optim`.
        total_updates: of the whole run, for the learning-rate schedule.
        loss_scaling: float16 training; the scale starts at 2^16, is halved on overflow and doubled after 2000 updates.
        world: the processes that split weights are spread over; each moves its own rows.
    """

    def __init__(
        self,
        weights: Weights,
        config: OptimConfig,
        total_updates: int,
        *,
        loss_scaling: bool = False,
        world: World = ALONE,
    ) -> None:
        self.weights, self.config, self.total_updates = weights, config, max(total_updates, 1)
        self.world = world
        self.updates = 0
        self.skipped = 0
        self.scale = 2.0**16 if loss_scaling else 1.0
        self.dynamic_scale = loss_scaling
        self._good_steps = 0
        self.parameters = list(weights.values.values())
        self.adam = optimizers.make(config.name, self.parameters, config.settings)
        if config.ema is not None and "ema" not in weights.copies:
            weights.snapshot("ema")

    @property
    def role(self) -> str:
        """Role of the weights for evaluation and the saved result."""
        return "ema" if self.config.ema is not None else "policy"

    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.config.rate(self.updates, self.total_updates)

    def zero_grad(self) -> None:
        for p in (*self.parameters, *self.weights.parameters.values()):
            p.grad = None

    def gradients(self) -> list[Tensor]:
        """Gradient of each parameter, not a copy; of split weights this process's rows; a missing one is zeros."""
        pairs = zip(self.weights.gradients(), self.parameters, strict=True)
        return [torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """A gradient of all parameters in one vector as views, one for each."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _norm(self, gradients: list[Tensor]) -> float:
        """Norm of the whole gradient, the same on every process."""
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(self.world.all_reduce_sum(norm.square()).sqrt() if self.weights.split else norm)

    def step(self, gradients: list[Tensor], divisor: Tensor | None = None) -> StepReport:
        """Divide the gradients by a scalar and clip them, in place, then move the weights and their average."""
        rate = self.learning_rate()
        if divisor is not None:
            torch.ops.aten._foreach_div_.Tensor(gradients, divisor)
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            self.skipped += 1
            self._grow(False)
            self.zero_grad()
            return StepReport(grad_norm=norm, learning_rate=rate, skipped=True)
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            torch.ops.aten._foreach_mul_.Scalar(gradients, self.config.max_grad_norm / norm)
        self._give(gradients)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        self.zero_grad()
        self.updates += 1
        self._grow(True)
        self._average()
        return StepReport(grad_norm=norm, learning_rate=rate, skipped=False)

    def _give(self, gradients: list[Tensor]) -> None:
        """Give each parameter its own; sparse weights whose gradient is 0 get none, so that AdamW leaves them alone."""
        moved = [True] * len(gradients)
        if self.weights.sparse:
            moved = torch.stack([gradient.any() for gradient in gradients]).tolist()
        for p, gradient, moves in zip(self.parameters, gradients, moved, strict=True):
            p.grad = _like(gradient, p) if moves else None

    def _grow(self, finite: bool) -> None:
        """Dynamic loss scale: halve on overflow, double after 2000 good steps."""
        if not self.dynamic_scale:
            return
        if not finite:
            self.scale, self._good_steps = max(self.scale / 2, 1.0), 0
        else:
            self._good_steps += 1
            if self._good_steps % 2000 == 0:
                self.scale = min(self.scale * 2, 2.0**24)

    def _average(self) -> None:
        ema = self.config.ema
        if ema is not None and (weight := ema.weight(self.updates)) < 1:
            self.weights.follow("ema", weight)

    def state(self) -> tuple[dict[str, Tensor], dict]:
        """(moments as flat names, counters)."""
        tensors: dict[str, Tensor] = {}
        kept: set[int] = set()
        for name, p in self.weights.values.items():
            for key, value in self.adam.state.get(p, {}).items():
                value = torch.as_tensor(value)
                # bitsandbytes has one table for all parameters, and a file takes no tensor twice.
                value = value.clone() if value.untyped_storage().data_ptr() in kept else value
                kept.add(value.untyped_storage().data_ptr())
                tensors[f"{name}/{key}"] = value
        counters = {"updates": self.updates, "skipped": self.skipped, "scale": self.scale, "good": self._good_steps}
        return tensors, counters

    def load_state(self, tensors: dict[str, Tensor], counters: dict) -> None:
        """Inverse of `state`."""
        self.adam.state.clear()
        for flat, value in tensors.items():
            name, _, key = flat.rpartition("/")
            p = self.weights.values.get(name)
            if p is not None:
                if self.config.name != optimizers.PLAIN:
                    self.adam.state[p][key] = optimizers.restored(key, value, p)
                    continue
                # The fused step keeps its counter next to the moments; older checkpoints have it too.
                self.adam.state[p][key] = value.to(p.device).clone() if key == "step" else _like(value, p, copy=True)
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.scale, self._good_steps = counters["scale"], counters["good"]


def _like(values: Tensor, parameter: Tensor, *, copy: bool = False) -> Tensor:
    """The values on the device and in the order of memory of the parameter: the fused step takes no other."""
    if not copy and values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, requires_grad=False).copy_(values)
