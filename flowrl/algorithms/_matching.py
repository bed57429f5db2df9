"""Parts of the methods on finished samples: roles that follow the policy, pulls to other networks.

1. sample with the behaviour policy by any solver; keep x0 alone
2. rewards -> advantages A
3. for every sample T times sigma, each with fresh eps: x = alpha x0 + sigma eps
4. a loss on what the networks output at (x, sigma)
5. after the iteration the lagging roles follow the policy
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._options import Options
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.credit.advantages import Advantages
from flowrl.losses.batches import LossOutput
from flowrl.losses.matching import elbo_weight
from flowrl.rollout.outputs import Outputs, Quantity


@dataclass(frozen=True, kw_only=True)
class LagConfig:
    """A role that follows the policy after every iteration: role <- d role + (1 - d) policy.

    d is `start` for the first `flat` optimizer steps, then min(start + slope (steps - flat), limit).
    """

    flat: int = 0
    """Optimizer steps for which d is `start`."""
    start: float = 0.0
    """d at the start."""
    slope: float = 0.001
    """Rise of d with an optimizer step."""
    limit: float = 0.5
    """Largest d."""

    def __post_init__(self) -> None:
        if self.flat < 0 or self.slope < 0:
            raise ValueError(f"flat={self.flat} and slope={self.slope} must not be negative")
        for name, value in (("start", self.start), ("limit", self.limit)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be in [0, 1]")
        if self.start > self.limit:
            raise ValueError(f"start={self.start} is above limit={self.limit}")

    def decay(self, updates: int) -> float:
        """d after so many optimizer steps.

        >>> LagConfig().decay(600), LagConfig(flat=75, slope=0.0075, limit=0.999).decay(209)
        (0.5, 0.999)
        """
        if updates < self.flat:
            return self.start
        return min(self.start + self.slope * (updates - self.flat), self.limit)


@dataclass(frozen=True, kw_only=True)
class AnchorConfig:
    """A pull to another network: coef * mean over dims of the squared difference of the outputs."""

    coef: float
    """Its weight in the loss; 0 evaluates no other network."""
    weight: Literal["uniform", "elbo"] = "uniform"
    """`elbo` divides by 2 s^2 with the Flow-SDE's std rate s, which favours clean times."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"coef={self.coef} must not be negative")

    def of(self, distance: Tensor, sigma: Tensor) -> Tensor:
        """Its part of the loss for mean squares `distance` [M] float64 at noise levels `sigma` [M]."""
        result = self.coef * distance
        return result if self.weight == "uniform" else result * elbo_weight(sigma).to(distance)


@dataclass(frozen=True, kw_only=True)
class PullOptions(Options):
    """A pull to the network before training, off unless it is asked for."""

    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=0.0))
    """Pull to the untouched network."""


@dataclass(frozen=True, kw_only=True)
class NormGuardConfig:
    """A penalty on outputs that outgrow the untouched network's, q being the ratio of their norms (NormGuard).

    coef relu(q - 1 - margin)^power. Coefficient, power and margin of arXiv 2606.27771 are not known to us: these are
    ours, with the norm over all dims of a sample.
    """

    coef: float = 1.0
    """Its weight in the loss."""
    power: Literal[1, 2] = 2
    """Power of what q is too large by; 2 has a gradient that begins at 0."""
    margin: float = 0.0
    """Growth that is free."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "coef")
        require_not_negative(vars(self), "margin")

    def of(self, outputs: Outputs) -> Tensor:
        """The penalty of each term, [M] float64."""
        above = (outputs.norm_ratio("reference", torch.float64) - 1 - self.margin).relu()
        return self.coef * above**self.power


@dataclass(frozen=True, kw_only=True)
class NormOptions(Options):
    """A bound on the size of the network's outputs."""

    norm_guard: NormGuardConfig | None = None
    """Penalty on outputs of a larger norm than the untouched network's (NormGuard); null: none."""

    def guarded(self, loss: LossOutput, outputs: Outputs) -> LossOutput:
        """The loss of an update with the penalty, if there is one."""
        if self.norm_guard is None:
            return loss
        penalty = self.norm_guard.of(outputs).sum()
        return replace(loss, loss=loss.loss + penalty, metrics=loss.metrics | {"policy/norm_guard": penalty.detach()})


@dataclass(frozen=True, kw_only=True)
class BoundOptions(Options):
    """Signed weights of samples, by their bound."""

    advantage_max: float = 1.0
    """The clipped advantages are rescaled to this bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "advantage_max")
        rule = self.credit_rule()
        if rule is not None and rule.clip is None:
            raise OptionError(
                "advantages.clip=null: the clipped advantages are rescaled to advantage_max", {"advantages.clip": 5.0}
            )

    def rescaled(self, credit: Advantages) -> Advantages:
        """The same credit, the advantages within +-clip brought within +-advantage_max."""
        rule = self.credit_rule()
        assert rule is not None
        assert rule.clip is not None
        return replace(credit, values=credit.values * (self.advantage_max / rule.clip))


def pull(anchor: AnchorConfig, outputs: Outputs, role: str, space: Quantity = "output") -> Tensor | float:
    """coef * weight(sigma) * mean over dims of (policy - role)^2, [M] float64; 0 without a coefficient."""
    return anchor.of(outputs.apart(role, space=space), outputs.batch.sigma) if anchor.coef else 0.0


def pulling(guard: NormGuardConfig | None = None, **anchors: AnchorConfig) -> tuple[str, ...]:
    """The roles, named by keyword, whose pull has a coefficient, and the untouched network for a `guard`."""
    pulls = (role for role, anchor in anchors.items() if anchor.coef > 0)
    return tuple(dict.fromkeys((*pulls, *(() if guard is None else ("reference",)))))
