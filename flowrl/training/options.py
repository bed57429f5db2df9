"""Options of `optim`: the optimizer, learning-rate schedule, gradient clipping, averaged weights."""

import math
from dataclasses import dataclass, field
from typing import Literal

from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive

WEIGHT_DECAY = 1e-4
"""Of a network's weights, where none is given."""
Name = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "muon"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of any of the optimizers; `betas` and `eps` are not adafactor's."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


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
        require_positive(vars(self), "every", "first", "repeats")
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
class ClipConfig:
    name: Literal["norm", "zscore", "mean"] = "norm"
    """`norm`: `max_grad_norm` alone. `zscore`, `mean`: that bound, and a norm whose z-score (its distance from the
    running mean M over the running std S) is above `limit` is clipped to M + limit S / (z / limit), or to M."""
    decay: float = 0.97
    """Weight of the old averages M and S^2 at each update, which the clipped norm enters; in [0, 1)."""
    limit: float = 2.5
    """Largest z-score."""
    warmup: int = 25
    """Updates of which M and S^2 are the plain mean and variance at first, and none is clipped by them."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "limit")
        if not 0 <= self.decay < 1 or self.warmup < 2:
            raise ValueError(f"clip: decay={self.decay} must be in [0, 1), warmup={self.warmup} at least 2")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Name = "adamw"
    """`adamw`; `adamw_8bit`, `paged_adamw`, `paged_adamw_8bit` (bitsandbytes: 8-bit moments, moments
    that leave a full GPU, both); `adafactor`, second moments of rows and columns alone; `muon`, steps of one length for
    matrices and AdamW for other weights (docs/configuration.md)."""
    learning_rate: float = 3e-4
    """Largest learning rate, the one after the warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decays of AdamW's averages of the gradient and of its square, each in [0, 1); adafactor has none."""
    eps: float = 1e-8
    """Addend of AdamW's denominator, against a division by 0; adafactor has its own, 1e-30 to the squared gradient."""
    weight_decay: float | None = None
    """Weight decay: share of the learning rate by which a weight shrinks at an update; 0: none; null: 1e-4, and none
    for a method that trains the initial noise."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly, from 1 / warmup_updates of it: one update ahead of the
    schedules of diffusers, whose first update has the rate 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine would be 0 at the update after the last one."""
    max_grad_norm: float | None = 1.0
    """Largest gradient norm, to which larger ones are clipped; null: no clipping."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Clipping of gradients whose norm stands out from those of earlier updates (ZClip)."""
    least_grad_norm: float | None = None
    """Gradient norm below which an update moves nothing; null: 1e-6 for muon, whose step is as long for the rounding
    errors of nearly dead groups as for any gradient, else 0."""
    updates_per_iteration: int = 2
    """Optimizer steps per rollout; each uses an equal share of its samples."""
    batch_size: int = 8
    """Edges per training forward and process."""
    ema: EmaConfig | None = None
    """Averaged weights, used for evaluation and the saved result; null: no average."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "learning_rate", "eps", "max_grad_norm", "updates_per_iteration", "batch_size")
        if self.eps > 1:
            raise ValueError(f"eps={self.eps} must be at most 1: next to it a gradient would count for nothing")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in [0, 1)")
        require_not_negative(vars(self), "weight_decay", "warmup_updates", "least_grad_norm")
        if self.name == "adafactor" and (list(self.betas) != [0.9, 0.999] or self.eps != 1e-8):
            raise OptionError(
                f"name=adafactor takes neither betas={self.betas} nor eps={self.eps:g}: its decay and its addend are "
                "fixed (docs/configuration.md)",
                {"name": "adamw"},
            )

    @property
    def floor(self) -> float:
        """Gradient norm below which an update moves nothing."""
        return self.least_grad_norm if self.least_grad_norm is not None else 1e-6 * (self.name == "muon")

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
    def settings(self) -> Settings:
        """The options of the optimizer itself."""
        betas = (self.betas[0], self.betas[1])
        decay = WEIGHT_DECAY if self.weight_decay is None else self.weight_decay
        return Settings(self.learning_rate, betas, self.eps, decay)
