"""Credit for sets of which the best sample is taken: what a sample adds to the best of k."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.strict import require_positive
from flowrl.core.tensors import ints


@dataclass(frozen=True, kw_only=True)
class BestOfConfig:
    """The number of samples of which the rule `best_of` rewards the best."""

    k: int = 4
    """Samples of a prompt whose best is to rise; 1: each for itself."""
    end: int | None = None
    """k at the end of `iterations`, on a line from `k`; null: it stays."""
    iterations: int = 100
    """Iterations after which k is `end`."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "k", "end", "iterations")

    def at(self, iteration: int) -> "BestOfConfig":
        """These options with the k of an iteration, counted from 0, that stays.

        >>> [BestOfConfig(k=8, end=1, iterations=7).at(iteration).k for iteration in (0, 1, 6, 7, 50)]
        [8, 7, 2, 1, 1]
        """
        end = self.k if self.end is None else self.end
        return BestOfConfig(k=round(self.k + (end - self.k) * min(iteration / self.iterations, 1.0)))


def added_to_best(filled: Tensor, valid: Tensor, k: int) -> Tensor:
    """n times the weight of each of n valid samples in the unbiased gradient of E[max of k draws], [P, G] float64.

    With the best of the other k - 1 as baseline: n sum over x_j < x_a of C(j, k-2) (x_a - x_j) / C(n, k), j from 0 in
    ascending order. Never negative for k > 1, and 0 for the k - 1 lowest; with k = 1 the reward less the mean of the
    others, n / (n - 1) times the rule `group`. A group of fewer than k valid samples has the best of all of them.
    `filled` [P, G] is finite; what stands where `valid` [P, G] is False means nothing.

    >>> added_to_best(torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool), 2)
    tensor([[0., 5., 1.]], dtype=torch.float64)
    """
    order = torch.where(valid, filled, torch.inf).argsort(dim=1, stable=True)
    ranked, size = filled.gather(1, order), filled.shape[1]
    shares = [_shares(n, min(k, n), size) for n in ints(valid.sum(dim=1))]
    gaps = (ranked[:, :, None] - ranked[:, None, :]) * torch.tensor(shares, dtype=torch.float64)[:, None, :]
    # The best of one compares with all others, the best of more with those below.
    gaps = gaps.tril(-1) if k > 1 else gaps
    return torch.zeros_like(filled).scatter(1, order, gaps.sum(dim=2))


def _shares(n: int, k: int, size: int) -> list[float]:
    """Weight of a difference to the j-th of n samples in the best of k: n C(j, k-2) / C(n, k) for j < n, then 0."""
    if k < 2:
        return [1 / max(n - 1, 1)] * n + [0.0] * (size - n)
    return [n * math.comb(j, k - 2) / math.comb(n, k) for j in range(n)] + [0.0] * (size - n)
