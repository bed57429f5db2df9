"""From edges to training forwards: shuffled microbatches, moved to the device one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.rng import permutation
from flowrl.core.tensors import in_order, sent
from flowrl.core.types import Condition
from flowrl.losses.batches import Microbatch
from flowrl.models.base import ModelAdapter
from flowrl.rollout.trajectories import Trajectories


def update_chunks(numbers: Tensor, updates: int, seed: int, iteration: int, *, stratum: int) -> list[Tensor]:
    """Deal global numbers [n] at random to `updates` disjoint sets, equal but for the remainder.

    Each stratum of the numbers (0 .. stratum - 1, and so on) is dealt evenly, in the order of the strata. So any run of
    whole strata, such as the samples of the prompts that a process holds, is in each set with the same count or one
    more. The same on every rank and for every number of ranks; every number is equally likely in every set. The
    numbers are those of samples, trees or slots that are trained, `stratum` those of a prompt; for slots, all of them.
    """
    numbers = numbers.sort().values
    count, of = len(numbers), numbers // stratum
    inside = torch.arange(count) - torch.searchsorted(of, of)
    # Shuffled among `updates` neighbours alone: a prompt that several processes share is dealt evenly to each.
    place = (of * stratum + inside // updates) * count + permutation(count, seed, "updates", iteration)
    dealt = numbers[place.argsort()]
    first = int(permutation(updates, seed, "updates/first", iteration)[0])
    return [dealt[(k - first) % updates :: updates] for k in range(updates)]


@dataclass(frozen=True, slots=True)
class Forward:
    """The edges of a training forward."""

    key: int
    """Batch key of their steps."""
    place: Tensor
    """Position of each edge in the requested order, [E] int64."""
    parent: Tensor
    """Number of the latents at which each edge starts, in the forward, [E] int64."""
    latents: int


def forwards(drawn: Trajectories, adapter: ModelAdapter, order: Tensor, batch_size: int) -> Iterator[Forward]:
    """Forwards of the edges `order` [n], of at most `batch_size` latents, by batch key, then by length of the text.

    The last of a key and length may be partial. Edges that start from the same latents share their forward.
    """
    edges = drawn.edges
    steps = batch_keys(adapter, edges.step[order])
    keys = with_lengths(steps, adapter, drawn.cond, drawn.rows[edges.sample[order]])
    for key in keys.unique():
        members = (keys == key).nonzero().squeeze(1)
        number = _by_appearance(edges.parent[order[members]])
        for start in range(0, int(number.max()) + 1, batch_size):
            here = (number >= start) & (number < start + batch_size)
            parent = number[here] - start
            yield Forward(int(steps[members[0]]), members[here], parent, int(parent.max()) + 1)


def batch_keys(adapter: ModelAdapter, step: Tensor) -> Tensor:
    """Batch key of each denoising step [n], [n] int64: steps of one key may share a forward."""
    return torch.tensor([adapter.batch_key(int(k)) for k in step], dtype=torch.int64)


def with_lengths(keys: Tensor, adapter: ModelAdapter, cond: Condition, rows: Tensor) -> Tensor:
    """Keys [n], told apart by the length of the text too, of `rows` [n] in `cond`, where the adapter wants that."""
    lengths = adapter.text_lengths(cond)
    return keys if lengths is None else keys * (int(lengths.max()) + 1) + lengths[rows]


def microbatches(
    drawn: Trajectories,
    advantage: Tensor,
    adapter: ModelAdapter,
    *,
    batch_size: int,
    order: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Microbatch]:
    """The data of `forwards`, one at a time.

    The plan of the drawn samples gives each of E edges its step; `advantage` is [E, R, *pos]; the adapter decides which
    edges may share a forward, of `batch_size` latents. `order`: numbers of the edges, [n]; None: all of them.
    """
    plan = drawn.plan
    order = torch.arange(len(drawn.edges)) if order is None else order
    for forward in forwards(drawn, adapter, order, batch_size):
        chosen = order[forward.place]
        part, first = drawn.edges.select(chosen), _first_of_each(forward.parent)
        start = plan.steps(part.step[first], adapter.process, device)
        alone = in_order(forward.parent, len(first))
        yield Microbatch(
            latents=sent(part.nodes[part.parent[first]], device),
            start=start,
            cond=drawn.cond.index(drawn.rows[part.sample[first]]),
            parent=sent(forward.parent, device),
            next_latents=sent(part.nodes[part.child], device),
            step=start if alone else plan.steps(part.step, adapter.process, device),
            old_log_prob=sent(part.old_log_prob, device),
            advantage=sent(advantage[chosen], device),
            place=forward.place,
            plan=plan,
            columns={name: sent(value, device) for name, value in part.columns.items()},
            alone=alone,
        )


def _first_of_each(number: Tensor) -> Tensor:
    """Place of the first of each value 0..N - 1 in `number` [E], [N]."""
    first = torch.full((int(number.max()) + 1,), len(number))
    return first.scatter_reduce(0, number, torch.arange(len(number)), "amin")


def _by_appearance(values: Tensor) -> Tensor:
    """Values [E] numbered from 0 in the order in which they first appear.

    >>> _by_appearance(torch.tensor([7, 3, 7, 5])).tolist()
    [0, 1, 0, 2]
    """
    number = values.unique(return_inverse=True)[1]
    return _first_of_each(number).argsort().argsort()[number]
