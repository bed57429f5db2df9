"""The optimizer step: learning-rate schedule, gradient clipping, loss scaling, EMA."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.models.weights.roles import Weights
from flowrl.training import optimizers
from flowrl.training.options import ClipConfig, OptimConfig
from flowrl.training.world import ALONE, World


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of an update. `skipped`: the gradient was not finite, and no weight moved."""

    grad_norm: float
    learning_rate: float
    skipped: bool


class Spikes:
    """Running mean and variance of the gradient norm, by which norms that stand out are clipped.

    A norm of 0, of an iteration whose groups are all dead, does not enter.

    Source: arXiv 2504.02507; bluorion-com/ZClip.
    """

    def __init__(self, config: ClipConfig) -> None:
        self.config = config
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def clipped(self, norm: float) -> float:
        """The norm to which an update is clipped, which is remembered.

        >>> spikes = Spikes(ClipConfig(name="mean", warmup=2))
        >>> [round(spikes.clipped(norm), 3) for norm in (1.0, 3.0, 4.0, 9.0)]
        [1.0, 3.0, 4.0, 2.06]
        """
        if self.config.name == "norm" or norm == 0:
            return norm
        limit, decay = self.config.limit, self.config.decay
        self.count += 1
        if self.count <= self.config.warmup:
            apart, decay = norm - self.mean, 1 - 1 / self.count
            self.mean += apart / self.count
            self.variance = decay * (self.variance + apart**2 / self.count)
            return norm
        std = self.variance**0.5
        score = (norm - self.mean) / (std + 1e-6 * self.mean)  # equal norms differ by rounding alone
        if score > limit:
            norm = self.mean + (limit**2 * std / score if self.config.name == "zscore" else 0.0)
        self.mean = decay * self.mean + (1 - decay) * norm
        self.variance = decay * self.variance + (1 - decay) * (norm - self.mean) ** 2
        return norm


class Optimizer:
    """The optimizer over the trainable weights. It keeps their "ema" role if `config.ema` is set. `total_updates`: of
    the whole run, for the learning-rate schedule. `loss_scaling`: float16 training; the scale starts at 2^16, is halved
    on overflow and doubled after 2000 updates. `world`: the processes that split weights are spread over; each moves
    its own rows.
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
        self.spikes = Spikes(config.clip)
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

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of a whole gradient, the same on every process; of split weights each gives its rows."""
        own = torch.nn.utils.get_total_norm(gradients)
        return self.world.all_reduce_sum(own.square()).sqrt() if self.weights.split else own

    def step(self, gradients: list[Tensor], divisor: Tensor | None = None) -> StepReport:
        """Divide the gradients by a scalar and clip them, in place, then move the weights and their average."""
        rate = self.learning_rate()
        if divisor is not None:
            torch.ops.aten._foreach_div_.Tensor(gradients, divisor)
        norm = float(self.norm(gradients))
        if not math.isfinite(norm):
            self.skipped += 1
            self._grow(False)
            self.zero_grad()
            return StepReport(grad_norm=norm, learning_rate=rate, skipped=True)
        if norm >= self.config.floor:
            most = self.spikes.clipped(norm)
            if self.config.max_grad_norm is not None:
                most = min(most, self.config.max_grad_norm)
            self._move(gradients, rate, most / norm if norm > most else 1.0)
        self.zero_grad()
        self.updates += 1
        self._grow(True)
        ema = self.config.ema
        if ema is not None and (weight := ema.weight(self.updates)) < 1:
            self.weights.follow("ema", weight)
        return StepReport(grad_norm=norm, learning_rate=rate, skipped=False)

    def _move(self, gradients: list[Tensor], rate: float, factor: float) -> None:
        """Move the weights by the gradients times a factor."""
        if factor < 1:
            torch.ops.aten._foreach_mul_.Scalar(gradients, factor)
        # Sparse weights whose gradient is 0 get none, so that AdamW leaves them alone.
        moved = [True] * len(gradients)
        if self.weights.sparse:
            moved = torch.stack([gradient.any() for gradient in gradients]).tolist()
        for p, gradient, moves in zip(self.parameters, gradients, moved, strict=True):
            p.grad = _like(gradient, p) if moves else None
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()

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
        counters: dict = {"updates": self.updates, "skipped": self.skipped}
        counters |= {"scale": self.scale, "good": self._good_steps}
        if self.spikes.count:
            counters["norms"] = [self.spikes.count, self.spikes.mean, self.spikes.variance]
        return tensors, counters

    def load_state(self, tensors: dict[str, Tensor], counters: dict) -> None:
        """Inverse of `state`."""
        self.adam.state.clear()
        for flat, value in tensors.items():
            name, _, key = flat.rpartition("/")
            p = self.weights.values.get(name)
            if p is not None:
                if self.config.name not in optimizers.OF_TORCH:
                    self.adam.state[p][key] = optimizers.restored(key, value, p)
                    continue
                # The fused step keeps its counter next to the moments.
                self.adam.state[p][key] = value.to(p.device).clone() if key == "step" else _like(value, p, copy=True)
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.scale, self._good_steps = counters["scale"], counters["good"]
        self.spikes.count, self.spikes.mean, self.spikes.variance = counters.get("norms", [0, 0.0, 0.0])


def _like(values: Tensor, parameter: Tensor, *, copy: bool = False) -> Tensor:
    """The values on the device and in the order of memory of the parameter: the fused step takes no other."""
    if not copy and values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, requires_grad=False).copy_(values)
