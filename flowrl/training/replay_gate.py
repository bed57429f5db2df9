"""The parity gate: before the first update some steps of the rollout are replayed, and must repeat their log-probs.

The policy is then still the one that drew the samples, so that every log ratio should be 0. It is not where a kernel
gives other values for another batch: updates mix prompts and steps, and run with gradients.

    1. measure the largest |log ratio|, that of the loss, at the batches of the first update: full ones and the smallest
    2. allow a tenth of the clip range, at most 1e-5 in float32 and 2e-3 in half precision
    3. stop the run above that, naming the step; with `old_log_prob: recompute` the old log-probs are evaluated once
       more at the batches of the updates, so that the run goes on
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.core.errors import ParityError
from flowrl.display.console import log
from flowrl.losses.batches import Microbatch
from flowrl.rollout.loop import batches
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler
from flowrl.training.base import UpdateContext
from flowrl.training.microbatches import Forward, forwards


class Replayed(Protocol):
    """The edges of an iteration, as `edge_batches.EdgeBatches` gives them to the updates."""

    context: UpdateContext
    rollout: Rollout
    shares: list[Tensor]

    def in_step(self, order: Tensor) -> Iterator[tuple[Microbatch, bool]]: ...


def pass_gate(work: Replayed, dtype: torch.dtype) -> None:
    """Replay some microbatches of an iteration, and stop if they do not repeat the rollout.

    The log has two further numbers, without gradients: of the full ones, and at the rollout's own batches, where it
    must be 0. `dtype` is that of the network.

    Raises ParityError: naming the step.
    """
    context = work.context
    full, partial = full_and_partial(work)
    drawn = first_drawn(work)[: context.optim.batch_size * work.rollout.plan.leaves]
    trained = [deviation(work, full), deviation(work, partial)]
    with torch.no_grad():
        plain = [deviation(work, full), deviation(work, drawn)]
    numbers = [max(each) for each in zip(*context.world.gather(trained + plain), strict=True)]
    allowed = tolerance(context.method, context.networks.policy.sampler, dtype)
    log.info(
        "parity: replayed log ratios are at most %.2e (allowed %.2e), %.2e in the smallest batch; %.2e without "
        "gradients, and %.2e at the rollout's own batches",
        numbers[0][0],
        allowed,
        *(number for number, _ in numbers[1:]),
    )
    worst, step = max(numbers[:2])
    if worst > allowed and not context.method.recompute:
        raise ParityError(
            f"replaying the rollout changes the log ratio by {worst:.2e} at step {step}, more than {allowed:.2e} "
            "(a tenth of the clip range); equal rollout.batch_size and optim.batch_size may do too",
            {"algorithm.old_log_prob": "recompute"},
        )


def tolerance(method: EdgeMethod, sampler: Sampler, dtype: torch.dtype) -> float:
    """Largest |log ratio| allowed: a tenth of the clip range, at most 1e-5 in float32 and 2e-3 in half precision."""
    return min(min(method.config.clip(sampler)) / 10, 1e-5 if dtype == torch.float32 else 2e-3)


# ---- what is replayed


def full_and_partial(work: Replayed) -> tuple[Tensor, Tensor]:
    """Edges of the first share: of the largest forward of each batch key, and of the smallest of all, both [n]."""
    order, context = work.shares[0], work.context
    largest: dict[int, Forward] = {}
    smallest: Forward | None = None
    for each in forwards(work.rollout, context.networks.policy.adapter, order, context.optim.batch_size):
        if each.key not in largest or each.latents > largest[each.key].latents:
            largest[each.key] = each
        if smallest is None or each.latents < smallest.latents:
            smallest = each
    if smallest is None:
        return order, order
    return order[torch.cat([each.place for each in largest.values()])], order[smallest.place]


def first_drawn(work: Replayed) -> Tensor:
    """Edges of the first rollout batch at its first trained step, in the rollout's order, [n]."""
    rollout, edges, size = work.rollout, work.rollout.edges, work.context.rollout_batch_size
    drawn = batches(work.context.networks.policy.adapter, rollout.plan, rollout.cond, rollout.rows, size)
    inside = edges.sample < drawn[0].stop
    return (inside & (edges.step == edges.step[inside].min())).nonzero().squeeze(1)


# ---- the measurement


def deviation(work: Replayed, order: Tensor) -> tuple[float, int]:
    """Largest |log ratio| of a replay of the edges `order` [n], and its step."""
    change = torch.zeros(len(order))
    for batch, counts in work.in_step(order):
        replayed = _log_ratios(batch, work.context.method, work.context.networks)
        if counts:
            # Microbatches come by batch key, so an edge's place in `order` is not its place in the batches.
            change[batch.place] = replayed
    if not len(order):
        return 0.0, -1
    return float(change.max()), int(work.rollout.edges.step[order][change.argmax()])


def _log_ratios(batch: Microbatch, method: EdgeMethod, networks: Networks) -> Tensor:
    """|log ratio| of each edge, [E] on the CPU; a graph ends with the call, so there are never two."""
    log_ratio = method.log_ratio(networks.transition(batch), batch, networks.policy.sampler)
    largest = log_ratio.detach().abs().reshape(len(batch), -1).amax(dim=1).cpu()
    return torch.where(largest.isnan(), torch.inf, largest)  # NaN passes no gate
