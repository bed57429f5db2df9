"""V, a small network that expects a reward: the baseline of methods without a group."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from flowrl.core.types import Condition

_WIDTHS = (256, 256, 256)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Options of V."""

    learning_rate: float = 1e-4
    """Learning rate of the critic."""
    steps: int = 5
    """Steps per iteration."""

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and self.steps > 0):
            raise ValueError(f"learning_rate={self.learning_rate} and steps={self.steps} must be positive")


class Perceptron(nn.Module):
    """256-256-256-1 with ReLU; with `num_steps` each hidden unit has a gain of its own for every denoising step.

    Source of the gains: google-research/google-research:dpok/reward_model.py.
    """

    def __init__(self, inputs: int, num_steps: int | None = None) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((inputs, *_WIDTHS)))
        self.out = nn.Linear(_WIDTHS[-1], 1)
        gains = () if num_steps is None else (nn.Parameter(torch.rand(num_steps, width)) for width in _WIDTHS)
        self.gains = nn.ParameterList(gains)

    def forward(self, features: Tensor, step: Tensor | None = None) -> Tensor:
        """Expected rewards [M] of features [M, F] at steps [M]."""
        for k, layer in enumerate(self.hidden):
            features = layer(features)
            if step is not None:
                features = self.gains[k][step] * features
            features = features.relu()
        return self.out(features).squeeze(1)


class Critic:
    """A perceptron with an AdamW of its own. It reads rows of `inputs` features; `seed` is that of the initial weights.
    `num_steps`: denoising steps that have gains of their own; None: no step has.
    """

    def __init__(
        self,
        inputs: int,
        seed: int,
        learning_rate: float,
        device: torch.device | str = "cpu",
        num_steps: int | None = None,
    ) -> None:
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            self.network = Perceptron(inputs, num_steps).to(device)
        finally:
            torch.set_rng_state(state)
        self.adam: torch.optim.Optimizer = torch.optim.AdamW(self.network.parameters(), lr=learning_rate)

    def __call__(self, features: Tensor, step: Tensor | None = None) -> Tensor:
        """Expected rewards of features [M, F], at steps [M] where steps have gains; [M]."""
        return self.network(features, step)

    def descend(self, error: Tensor) -> None:
        """One step on the mean of error^2, any shape, with the graph that led to it."""
        self.adam.zero_grad()
        torch.autograd.backward(error.square().mean())
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments as flat names."""
        result: dict[str, Tensor] = {}
        for name, p in self.network.named_parameters():
            moments = {f"{name}.{key}": torch.as_tensor(value) for key, value in self.adam.state.get(p, {}).items()}
            result |= {name: p.detach()} | moments
        return result

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`."""
        self.adam.state.clear()
        for name, p in self.network.named_parameters():
            p.data.copy_(tensors[name])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors.get(f"{name}.{key}")
                if value is not None:
                    self.adam.state[p][key] = value.clone() if key == "step" else value.to(p.device).clone()


def text_features(cond: Condition) -> Tensor:
    """A vector for each prompt, [P, F] float32: its condition's floats, averaged over all but the last axis."""
    parts: list[Tensor] = []
    for entry in cond.tensors.values():
        rows = [row.float().reshape(-1, row.shape[-1]).mean(dim=0) for row in entry if row.is_floating_point()]
        parts += [torch.stack(rows)] if rows else []
    return torch.cat(parts, dim=1)
