"""The shared evaluation of methods without log-probs: several networks on the same noised samples (x, sigma, eps)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.losses.batches import NoisedBatch
from flowrl.losses.matching import mean_distance, mean_square
from flowrl.models.base import ModelAdapter
from flowrl.models.weights.roles import Weights
from flowrl.rollout.policy import Policy

Space = Literal["output", "eps"]
"""Quantity of an error: the network's output, or the noise that it implies."""
Quantity = Space | Literal["clean"]
"""The same, or the clean latents that it implies."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of each network on M noised samples, as it predicts (velocity, eps, v); all [M, ...] float32.

    Every role but "policy" is without gradient.
    """

    adapter: ModelAdapter
    batch: NoisedBatch
    noised: Tensor
    """x = alpha x0 + sigma eps."""
    target: Tensor
    """The output of a perfect network at x."""
    by_role: dict[str, Tensor]

    def error(self, role: str = "policy", space: Quantity = "output") -> Tensor:
        """Mean over dims of (output - target)^2, [M] float64, or of what the output implies in another space.

        On a flow eps_hat - eps = (1 - sigma) (v - v*) and x0_hat - x0 = -sigma (v - v*), so `eps` is `output` times
        (1 - sigma)^2 and `clean` times sigma^2.
        """
        return mean_square(self.of(role, space), self.truth(space))

    def distance(self, role: str = "policy", space: Quantity = "output") -> Tensor:
        """Mean over dims of |output - target| in a space, [M] float64, at least 1e-5, without gradient."""
        return mean_distance(self.of(role, space), self.truth(space))

    def apart(self, role: str, other: str = "policy", space: Quantity = "output") -> Tensor:
        """Mean over dims of the squared difference of two networks, [M] float64."""
        return mean_square(self.of(other, space), self.of(role, space))

    def clean(self, role: str) -> Tensor:
        """x0 as predicted by this network, [M, ...]."""
        return self.of(role, "clean")

    def of(self, role: str, space: Quantity) -> Tensor:
        """What a network says in a space, [M, ...]."""
        if space == "output":
            return self.by_role[role]
        process, kind = self.adapter.process, self.adapter.prediction_type
        implied = process.predict(self.by_role[role], self.noised, self.batch.sigma, kind)
        return implied.eps_hat if space == "eps" else implied.x0_hat

    def truth(self, space: Quantity) -> Tensor:
        """What a perfect network would say there, [M, ...]."""
        return {"output": self.target, "eps": self.batch.eps, "clean": self.batch.clean}[space]

    def norm_ratio(self, role: str, dtype: torch.dtype | None = None) -> Tensor:
        """Norm of the policy's output over that of another network's, [M]; growth is a sign of over-optimisation."""
        own, other = (
            torch.linalg.vector_norm(self.by_role[name].flatten(1), dim=1, dtype=dtype) for name in ("policy", role)
        )
        return own / other.clamp(min=1e-12)

    def metrics(self) -> dict[str, Tensor]:
        """The metrics of every method on samples: errors of the networks and their distances, name -> [M]."""
        result = {"matching/error": self.error()}
        if "reference" in self.by_role:
            result["matching/error_reference"] = self.error("reference")
            result["matching/norm_ratio"] = self.norm_ratio("reference")
        for role in self.by_role:
            if role != "policy":
                result[f"matching/to_{role}"] = self.apart(role)
        return result | {"matching/clean_square": self.batch.clean.square().flatten(1).mean(dim=1)}


def evaluate(adapter: ModelAdapter, weights: Weights, batch: NoisedBatch, guidance: Mapping[str, float]) -> Outputs:
    """Run the roles of `guidance` (role -> scale) on M noised terms; "policy", the present weights, has gradients."""
    process = adapter.process
    x = process.add_noise(batch.clean, batch.eps, batch.sigma)
    target = process.target(batch.clean, batch.eps, batch.sigma, adapter.prediction_type)

    result: dict[str, Tensor] = {}
    for role, scale in guidance.items():
        with torch.set_grad_enabled(torch.is_grad_enabled() and role == "policy"), weights.using(role):
            result[role] = adapter.predict(x, batch.timestep, batch.cond, scale).float()
    return Outputs(adapter, batch, x, target, result)


def training_guidance(adapter: ModelAdapter, rollout: float, own: float | None) -> float:
    """Guidance of the forwards in training: the method's own; by default none for CFG.

    A network with guidance as an input keeps the rollout's value.
    """
    if own is not None:
        return own
    return adapter.unguided if is_cfg(adapter) else rollout


def unguided(policy: Policy) -> Policy:
    """The policy of the forwards in training, by `training_guidance`."""
    return replace(policy, guidance_scale=training_guidance(policy.adapter, policy.guidance_scale, None))


def is_cfg(adapter: ModelAdapter) -> bool:
    """Whether guidance costs another forward, instead of being an input of the network."""
    none = adapter.unguided
    return adapter.branches(none + 1) > adapter.branches(none)
