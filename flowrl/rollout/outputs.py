"""The shared evaluation of methods without log-probs: several networks on the same noised samples (x, sigma, eps)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.losses.batches import NoisedBatch
from flowrl.losses.matching import mean_square
from flowrl.models.base import ModelAdapter, branches, unguided
from flowrl.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Outputs:
    """What each network says of M noised samples, in the network's own terms (velocity, eps, v); all [M, ...] float32.

    Every role but "policy" is without gradient.
    """

    adapter: ModelAdapter
    batch: NoisedBatch
    noised: Tensor
    """x = alpha x0 + sigma eps."""
    target: Tensor
    """What a network should output there."""
    by_role: dict[str, Tensor]

    def error(self, role: str = "policy") -> Tensor:
        """Mean over dims of (output - target)^2, [M] float64."""
        return mean_square(self.by_role[role], self.target)

    def apart(self, role: str, other: str = "policy") -> Tensor:
        """Mean over dims of the squared difference of two networks, [M] float64."""
        return mean_square(self.by_role[other], self.by_role[role])

    def clean(self, role: str) -> Tensor:
        """x0 as this network sees it."""
        process, kind = self.adapter.process, self.adapter.prediction_type
        return process.predict(self.by_role[role], self.noised, self.batch.sigma, kind).x0_hat

    def eps_error(self, role: str) -> Tensor:
        """Mean over dims of the squared error of the noise that this network implies, [M] float64."""
        process, kind = self.adapter.process, self.adapter.prediction_type
        found = process.predict(self.by_role[role], self.noised, self.batch.sigma, kind).eps_hat
        return mean_square(found, self.batch.eps)

    def norm_ratio(self, role: str) -> Tensor:
        """Norm of the policy's output over that of another network's, [M]; growth is a sign of over-optimisation."""
        own, other = self.by_role["policy"].detach().flatten(1), self.by_role[role].flatten(1)
        return own.norm(dim=1) / other.norm(dim=1).clamp(min=1e-12)


def evaluate(adapter: ModelAdapter, weights: Weights, batch: NoisedBatch, guidance: Mapping[str, float]) -> Outputs:
    """Run several networks on one noised batch.

    Args:
        adapter: the model.
        weights: its roles.
        batch: M terms.
        guidance: role -> its guidance scale; "policy", what is in the network, is the one with gradients.
    """
    process = adapter.process
    x = process.add_noise(batch.clean, batch.eps, batch.sigma)
    target = process.target(batch.clean, batch.eps, batch.sigma, adapter.prediction_type)

    found: dict[str, Tensor] = {}
    for role, scale in guidance.items():
        with torch.set_grad_enabled(torch.is_grad_enabled() and role == "policy"), weights.using(role):
            found[role] = adapter.predict(x, batch.timestep, batch.cond, scale).float()
    return Outputs(adapter, batch, x, target, found)


def training_guidance(adapter: ModelAdapter, rollout: float, own: float | None) -> float:
    """Guidance of the forwards in training: the method's own, else none where guidance is CFG.

    A network that takes guidance as an input keeps the rollout's value: it knows no other.
    """
    if own is not None:
        return own
    return unguided(adapter) if is_cfg(adapter) else rollout


def is_cfg(adapter: ModelAdapter) -> bool:
    """Whether guidance costs another forward; else the network takes it as an input."""
    none = unguided(adapter)
    return branches(adapter, none + 1) > branches(adapter, none)


def regressed(outputs: Outputs, target: Tensor) -> Tensor:
    """Mean over dims of (policy - target)^2, [M] float64, for a target [M, ...] without gradient."""
    return mean_square(outputs.by_role["policy"], target.detach())
