"""The interface of a solver: the steps that are no transitions of a sampler.

A solver keeps no memory of its own. Its step is given the node before, and the node that the step
has left is returned with the next latents: `x, before = solver.step(prediction, here, before, last=False)`, where
`before` is None at the first step.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flowrl.core.tensors import sent
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the path at which a step starts, a transition or a solver's: the state of a solver."""

    x: Tensor
    """Latents, [B, ...]."""
    x0_hat: Tensor
    """The network's belief there, [B, ...] float32."""
    step: Step
    """The step that starts there."""
    noise: Tensor | None = None
    """Standard normal noise of a stochastic solver's step, [B, ...]; None for other steps."""
    first: bool = False
    """Whether a stochastic solver began here: its step was of order 1 and stays as it is."""

    def at(self, rows: Tensor) -> "Node":
        """The nodes of `rows` [n], best on the CPU, where several chains come from one place."""
        here = sent(rows, self.x.device)
        noise = None if self.noise is None else self.noise[here]
        return Node(self.x[here], self.x0_hat[here], self.step.at(rows), noise, self.first)


def log_snr(alpha: Tensor, sigma: Tensor) -> Tensor:
    """lambda = ln alpha - ln sigma, [B] float64."""
    return alpha.double().log() - sigma.double().log()


def span(step: Step) -> Tensor:
    """H, the rise of lambda over a step, [B] float64."""
    return log_snr(step.alpha_next, step.sigma_next) - log_snr(step.alpha, step.sigma)


class Solver:
    """A solver of the path from noise to data."""

    stochastic: ClassVar[bool] = False
    """Whether a step adds noise by its noise level; it then has no density that could be trained."""
    least_steps: ClassVar[int] = 1
    """Steps that a grid must have."""

    @property
    def order(self) -> int:
        """The power of the step with which its error falls."""
        return 1

    def grid(self, schedule: Schedule) -> Schedule:
        """The grid that it walks in place of `schedule`.

        Raises ValueError: it cannot walk that one.
        """
        return schedule

    def noise_levels(self, schedule: Schedule, noise_level: float) -> tuple[float, ...]:
        """The noise level of every step of its grid; 0 adds none."""
        return (0.0,) * len(schedule)

    def step(
        self, prediction: Prediction, here: Node, before: Node | None, *, last: bool = False
    ) -> tuple[Tensor, Node]:
        """The latents at the end of the step that starts `here`, [B, ...] float32, and the node as it was left.

        `prediction` is the network's belief at `here.x`; `here` has noise where the solver is stochastic. `before`: the
        node before; None at the first step. `last`: whether the step ends the path.
        """
        raise NotImplementedError
