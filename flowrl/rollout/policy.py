"""The policy: adapter, sampler and guidance bound together; and a count of its network forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from flowrl.core.types import Condition, Prediction, Step
from flowrl.models.base import ModelAdapter
from flowrl.samplers.base import Sampler, StepDistribution


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
        """The network's belief at x [B, ...]; the one forward of a step."""
        raw = self.adapter.predict(x, step.timestep, cond, self.guidance_scale)
        return self.adapter.process.predict(raw, x, step.sigma, self.adapter.prediction_type, step.alpha)

    def distribution(self, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        """The sampler's law on that belief."""
        law = self.sampler.transition(self.adapter.process, prediction, x, step)
        std = law.std if step.std_scale is None else step.std_scale * law.std
        return replace(law, std=std, channel_axis=self.adapter.channel_axis)


class Evaluations:
    """Counts the samples that go through a network: `rows` grows by the batch of every forward, doubled by CFG.

    A hook on the network itself, of several experts on each, so that every adapter is counted as it works: one doubled
    batch, two calls, or none where guidance is embedded. A forward that gradient checkpointing repeats block by block
    counts once.
    """

    def __init__(self, network: nn.Module) -> None:
        self.rows = 0
        self.watch(network)

    def watch(self, network: nn.Module) -> None:
        """Count this network's samples too."""
        for part in network.values() if isinstance(network, nn.ModuleDict) else (network,):
            part.register_forward_pre_hook(self._count, with_kwargs=True)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forwards inside the block are made for nothing."""
        before = self.rows
        try:
            yield
        finally:
            self.rows = before

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument of a denoiser is its latents: a tensor, or a list of samples.
        self.rows += len(args[0] if args else next(iter(kwargs.values())))
