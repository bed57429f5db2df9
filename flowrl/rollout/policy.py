"""The policy: adapter, sampler and guidance bound together, with its weights' roles; the count of network forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.types import Condition, Prediction, Step
from flowrl.losses.batches import Microbatch
from flowrl.models.base import ModelAdapter
from flowrl.models.weights.roles import Weights
from flowrl.samplers.base import Sampler, StepDistribution, step_std


@dataclass(frozen=True, slots=True)
class Policy:
    """Adapter, sampler and guidance bound together."""

    adapter: ModelAdapter
    sampler: Sampler
    guidance_scale: float

    def transition(self, x: Tensor, step: Step, cond: Condition) -> StepDistribution:
        """Distribution of the next latents from x [B, ...]; one network forward (two halves under CFG)."""
        return self.distribution(self.predict(x, step, cond), x, step)

    def predict(self, x: Tensor, step: Step, cond: Condition) -> Prediction:
        """The network's prediction at x [B, ...]; the one forward of a step."""
        raw, kind = self.output(x, step, cond), self.adapter.prediction_type
        return self.adapter.process.predict(raw, x, step.sigma, kind, step.alpha)

    def output(self, x: Tensor, step: Step, cond: Condition) -> Tensor:
        """The network's output itself, [B, ...]."""
        return self.adapter.predict(x, step.timestep, cond, self.guidance_scale)

    def distribution(self, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        """The sampler's transition for that prediction."""
        process = self.adapter.process
        result = self.sampler.transition(process, prediction, x, step)
        std = result.std if step.std_scale is None else step.std_scale * result.std
        # On a GPU the std is known from the steps on the CPU, so that no density has to wait for it.
        noisy = None if step.host is None else bool((step_std(self.sampler, process, step.host) != 0).all())
        return replace(result, std=std, channel_axis=self.adapter.channel_axis, noisy=noisy)


@dataclass(frozen=True, slots=True)
class Networks:
    """The policy with its weights' roles, as a loss sees them."""

    policy: Policy
    weights: Weights

    def transition(self, batch: Microbatch) -> StepDistribution:
        """The policy's distribution for each of the E edges, with gradients: one forward per place they start from."""
        return by_edge(self.policy.transition(batch.latents, batch.start, batch.cond), batch)

    def frozen(self, role: str, batch: Microbatch) -> StepDistribution:
        """The distributions under another role's weights, without gradients."""
        with torch.no_grad(), self.weights.using(role):
            return self.transition(batch)


def by_edge(transition: StepDistribution, batch: Microbatch) -> StepDistribution:
    """The distributions of the latents of a batch for each of its edges."""
    return transition if batch.alone else transition.at(batch.parent)


class Evaluations:
    """The number of samples through a network: `rows` grows by the batch of every forward, doubled by CFG.

    By a hook on the network, or on each of several experts, so guidance counts as the adapter makes it: one doubled
    batch, two calls, or none if it is embedded. A forward that gradient checkpointing repeats counts once. `trained`
    counts those with gradients alone.
    """

    def __init__(self, network: nn.Module) -> None:
        self.rows = self.trained = 0
        self.watch(network)

    def watch(self, network: nn.Module) -> None:
        """Count the samples of this network too."""
        for part in network.values() if isinstance(network, nn.ModuleDict) else (network,):
            part.register_forward_pre_hook(self._count, with_kwargs=True)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forwards inside the block do not count."""
        before = self.rows, self.trained
        try:
            yield
        finally:
            self.rows, self.trained = before

    @contextmanager
    def without_backward(self) -> Iterator[None]:
        """Forwards inside the block have no backward pass, though they may run with gradients."""
        before = self.trained
        try:
            yield
        finally:
            self.trained = before

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument of a denoiser is its latents: a tensor, or a list of samples.
        count = len(args[0] if args else next(iter(kwargs.values())))
        self.rows += count
        self.trained += count if torch.is_grad_enabled() else 0
