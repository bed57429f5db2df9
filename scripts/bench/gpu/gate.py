"""What a replay of the rollout changes before the weights move: the largest |log ratio|, with and without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod
from flowrl.core.errors import ConfigError
from flowrl.models.base import torch_dtype
from flowrl.training.base import Iteration
from flowrl.training.edge_batches import EdgeBatches
from flowrl.training.metrics import Sums
from flowrl.training.replay_gate import deviation, first_drawn, full_and_partial, tolerance
from scripts.bench.gpu.records import Row
from scripts.bench.gpu.session import Bench


def measure(bench: Bench, repeats: int) -> Row:
    """Largest |log ratio| at three compositions of the batch, with and without gradient.

    same: the first batch of the rollout at its first trained step; other: the first microbatch of the update, which
    mixes prompts and steps; partial: half of it.

    Raises:
        ConfigError: a method without log-probs.
    """
    method = bench.session.method
    if not isinstance(method, EdgeMethod):
        raise ConfigError(f"algorithm.name={bench.session.resolved.algorithm.name}: it has no log-probs to replay")
    own, credit = bench.scored(bench.draw(bench.ids()))
    work = EdgeBatches(bench.context, Iteration(1, own, credit, Sums()))
    edges, (mixed, _) = work.rollout.edges, full_and_partial(work)
    orders = {"same": first_drawn(work), "other": mixed, "partial": mixed[: max(len(mixed) // 2, 1)]}
    result: Row = {"edges": len(edges.step)}
    for name, order in orders.items():
        for grad in (False, True):
            result[f"{name}_{'grad' if grad else 'no_grad'}"] = float(f"{_worst(work, order, grad):.3g}")
    dtype = torch_dtype(bench.session.resolved.model.config.dtype)
    return result | {"allowed": tolerance(method, bench.session.parts.sampling.sampler, dtype)}


def _worst(work: EdgeBatches, order: Tensor, grad: bool) -> float:
    """Largest |log ratio| of the edges `order`."""
    with torch.set_grad_enabled(grad):
        return deviation(work, order)[0]
