"""Keyed noise of one rollout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.rng import normal
from flowrl.core.types import Gaussians, SampleId


@dataclass(frozen=True, slots=True)
class Noise:
    """Keyed noise of one rollout, independent of batches, order and processes.

    `iteration` None is evaluation. `shared_start` gives all samples of a prompt one initial noise. `chosen` [P, G] is
    the candidate of a pool whose noise each sample has; None: sample k is candidate k. `distributions` has a Gaussian
    of the initial noise for each slot; None: N(0, 1). `names` has a number for each slot that keys its noise; None: the
    slot's own.
    """

    seed: int
    purpose: str
    iteration: int | None
    shape: tuple[int, ...]
    shared_start: bool = False
    chosen: Tensor | None = None
    distributions: Gaussians | None = None
    names: tuple[int, ...] | None = None

    def _key(self, sample: SampleId) -> tuple[int, ...]:
        head = () if self.iteration is None else (self.iteration,)
        candidate = sample.sample if self.chosen is None else int(self.chosen[sample.slot, sample.sample])
        return (*head, sample.slot if self.names is None else self.names[sample.slot], candidate)

    def initial(self, ids: Sequence[SampleId]) -> Tensor:
        """Starting noise, [B, ...] float32."""
        keys = [self._key(SampleId(i.slot, 0) if self.shared_start else i) for i in ids]
        eps = normal(self.shape, self.seed, f"{self.purpose}/initial", keys)
        if self.distributions is None:
            return eps
        return self.distributions.at(torch.tensor([i.slot for i in ids])).sample(eps)

    def step(self, ids: Sequence[SampleId], index: int) -> Tensor:
        """Noise of step `index`, [B, ...] float32; a node of a tree uses that of its first leaf."""
        return normal(self.shape, self.seed, f"{self.purpose}/step", [(*self._key(i), index, 0) for i in ids])

    def common(self, ids: Sequence[SampleId], index: int) -> Tensor:
        """Shared part of the children's noise of step `index`, [B, ...]; `ids` are the first leaves of the parents."""
        return normal(self.shape, self.seed, f"{self.purpose}/step", [(*self._key(i), index, 1) for i in ids])
