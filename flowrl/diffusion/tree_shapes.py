"""The shape of a tree of rollouts: the places at which the paths of its leaves part, and their steps.

A grid of K steps has places 0..K. A node is where some leaves are at a place, named by the first of them; a step leads
from a node to its children, by a transition of the sampler (noisy) or by the solver. The trees:

    splits       K-ary: every node of a split step has several noisy children            BranchGRPO, TreeGRPO
    offshoots    a deterministic trunk that noisy children leave at some of its steps      TempFlow, G2RPO, E-GRPO
    completions  a noisy trunk, and from each of its nodes the deterministic path to the end           TP-GRPO

Leaves are counted so that those of a node are neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.tensors import distinct, ints


@dataclass(frozen=True, slots=True)
class Branching:
    """A tree of L leaves on a grid of K steps."""

    node: Tensor
    """First leaf of the node that each leaf is in at each place, [K + 1, L] int64; -1 where a longer step passes by."""
    ends: Tensor
    """Place where each leaf's step from a place ends, [K, L] int64; -1 where it passes by."""
    noisy: Tensor
    """Whether that step is a transition of the sampler, [K, L] bool."""

    def __post_init__(self) -> None:
        places, leaves = self.node.shape
        if self.ends.shape != (places - 1, leaves) or self.noisy.shape != self.ends.shape:
            raise ValueError(f"a tree of {leaves} leaves and {places - 1} steps needs ends and noisy of that shape")
        if self.node[0].any() or not torch.equal(self.node[-1], torch.arange(leaves)):
            raise ValueError("a tree starts in one node and ends with each leaf alone")
        for k in range(places - 1):
            self._check_step(k)

    def _check_step(self, k: int) -> None:
        """Refuse noisy steps of several lengths, and two deterministic steps from one node to one place."""
        here = (self.node[k] >= 0).nonzero().squeeze(1)
        ends, noisy = self.ends[k, here], self.noisy[k, here]
        if len(distinct(ends[noisy])) > 1:
            raise ValueError(f"the noisy steps from place {k} end at places {ints(distinct(ends[noisy]))}: make it one")
        child = self.node[ends, here]
        # (node, end) and (node, end, child), each as one number: all are below K + L.
        size = self.node.numel()
        step = (self.node[k, here] * size + ends)[~noisy]
        if len(distinct(step * size + child[~noisy])) > len(distinct(step)):
            raise ValueError(
                f"the tree splits at step {k}, which is deterministic: its children would be the same; "
                "split where a step is stochastic"
            )

    @property
    def leaves(self) -> int:
        return self.node.shape[1]

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    def at(self, k: int) -> Tensor:
        """The nodes at a place, [N] ascending."""
        return distinct(self.node[k][self.node[k] >= 0])

    def children(self, k: int) -> Tensor:
        """The nodes that the steps from a place lead to, [M] ascending."""
        here = (self.node[k] >= 0).nonzero().squeeze(1)
        return distinct(self.node[self.ends[k, here], here])

    def noisy_children(self, k: int) -> Tensor:
        """Those of them that noisy steps lead to, [M] ascending."""
        result = self.children(k)
        return result[self.noisy[k, result]]

    def child(self, k: int) -> Tensor:
        """The node that each leaf's step from a place leads to, [L]; -1 where it passes by."""
        ends = self.ends[k]
        return torch.where(ends >= 0, self.node[ends.clamp(min=0), torch.arange(self.leaves)], -1)

    def end(self, k: int) -> int:
        """The place at which the noisy steps from a place end; the next place where there are none."""
        result = self.ends[k][self.noisy[k]]
        return int(result[0]) if len(result) else k + 1

    @property
    def splits(self) -> tuple[bool, ...]:
        """Steps at which a node has several noisy children."""
        return tuple(
            len(result) > len(distinct(self.node[k, result]))
            for k, result in ((k, self.noisy_children(k)) for k in range(self.num_steps))
        )

    @property
    def stochastic(self) -> tuple[bool, ...]:
        """Steps that are noisy for some leaf."""
        return tuple(bool(row.any()) for row in self.noisy)

    @property
    def forwards(self) -> int:
        """Network evaluations of a rollout: one for each node but the leaves.

        >>> tree = splits(20, {0: 2, 3: 2, 6: 2, 9: 2}, range(20))
        >>> tree.leaves, tree.forwards, tree.edges
        (16, 203, 218)
        """
        return sum(len(self.at(k)) for k in range(self.num_steps))

    @property
    def chain_forwards(self) -> int:
        """Network evaluations of its leaves if each had a path of its own.

        >>> splits(20, {0: 2}, range(20)).chain_forwards, offshoots(8, [1], 1, strides=(1, 3), merge=2).chain_forwards
        (40, 11)
        """
        return int((self.node[:-1] >= 0).sum())

    @property
    def edges(self) -> int:
        """Steps from node to node."""
        return sum(len(self.children(k)) for k in range(self.num_steps))


def splits(num_steps: int, factors: Mapping[int, int], noisy: Iterable[int]) -> Branching:
    """Every node of step k has `factors[k]` children (1 where it is not named); the steps `noisy` are transitions.

    Raises ValueError: a step that is not there, a factor below 1, or a split without noise.
    """
    wrong = [k for k in factors if not 0 <= k < num_steps]
    if wrong:
        raise ValueError(f"the tree splits at step {wrong[0]}, but there are only steps 0..{num_steps - 1}")
    if any(factor < 1 for factor in factors.values()):
        raise ValueError(f"a node needs at least one child, the split factors are {dict(factors)}")
    width = torch.ones(num_steps + 1, dtype=torch.int64)
    for k in reversed(range(num_steps)):
        width[k] = width[k + 1] * factors.get(k, 1)
    leaf, taken = torch.arange(int(width[0])), set(noisy)
    return Branching(
        node=leaf - leaf % width[:, None],
        ends=(1 + torch.arange(num_steps))[:, None].repeat(1, len(leaf)),
        noisy=torch.tensor([k in taken for k in range(num_steps)])[:, None].repeat(1, len(leaf)),
    )


def offshoots(
    num_steps: int, steps: Sequence[int], children: int, strides: Sequence[int] = (1,), merge: int = 1
) -> Branching:
    """A deterministic trunk that `children` noisy children leave at each of `steps`.

    A child's step spans `merge` places, and from there it goes on deterministically once for each stride, in steps of
    so many places; the last of them ends with the grid. Leaves are counted by (step, child, stride).

    Raises ValueError: steps that do not fit the grid, or two strides that would take the same steps.
    """
    steps = sorted(set(steps))
    if not steps or steps[0] < 0 or steps[-1] + merge > num_steps or min(children, merge, *strides) < 1:
        raise ValueError(
            f"children cannot leave at steps {steps} with merge={merge}, children={children} and strides "
            f"{list(strides)}: there are {num_steps} steps, and each number must be at least 1"
        )
    if num_steps - steps[-1] - merge < steps_to_differ(strides):
        raise ValueError(
            f"after step {steps[-1]} a child has {num_steps - steps[-1] - merge} steps to go, so some of the strides "
            f"{list(strides)} would take the same steps; leave the trunk earlier, or use fewer strides"
        )
    size, count = children * len(strides), len(steps) * children * len(strides)
    node, ends = torch.full((num_steps + 1, count), -1), torch.full((num_steps, count), -1)
    noisy = torch.zeros(num_steps, count, dtype=torch.bool)
    for leaf in range(count):
        leaves_at, first = steps[leaf // size], leaf - leaf % len(strides)
        for k in range(leaves_at + 1):
            node[k, leaf] = size * next(number for number, step in enumerate(steps) if step >= k)
            ends[k, leaf] = k + 1
        here = leaves_at + merge
        ends[leaves_at, leaf], noisy[leaves_at, leaf], node[here, leaf] = here, True, first
        while here < num_steps:
            beyond = min(here + strides[leaf % len(strides)], num_steps)
            ends[here, leaf], node[beyond, leaf], here = beyond, leaf, beyond
    return Branching(node, ends, noisy)


def steps_to_differ(strides: Sequence[int]) -> int:
    """Steps that must be left so that strides differ: at most one of them may reach the end in one step.

    >>> steps_to_differ((1,)), steps_to_differ((1, 2, 3))
    (0, 3)
    """
    return sorted(strides)[-2] + 1 if len(strides) > 1 else 0


def completions(num_steps: int, steps: Sequence[int], finish: int | None = None) -> Branching:
    """A trunk that is noisy at neighbouring `steps`, and after t of them the deterministic path to the end: leaf t.

    `finish` is the number of steps of that path, as even as the places allow; None, or more: all that there are.

    Raises ValueError: steps that are not neighbours of the grid.
    """
    steps = list(steps)
    if (
        not steps
        or steps != list(range(steps[0], steps[0] + len(steps)))
        or not 0 <= steps[0] <= num_steps - len(steps)
    ):
        raise ValueError(f"a trunk needs neighbouring steps of 0..{num_steps - 1}, got {steps}")
    start, count = steps[0], len(steps) + 1
    leaf, places = torch.arange(count), torch.arange(num_steps + 1)[:, None]
    on_trunk = places <= start + leaf
    noisy = (places >= start) & (places < start + leaf)
    node = torch.where(on_trunk, (places - start).clamp(min=0), leaf)
    ends = (1 + torch.arange(num_steps))[:, None].repeat(1, count)
    most = num_steps if finish is None else finish
    for t, here in enumerate(range(start, start + count)):
        evenly = torch.linspace(here, num_steps, min(most, num_steps - here) + 1, dtype=torch.float64)
        stops = evenly.round().long()
        node[here + 1 :, t], ends[here:, t] = -1, -1
        node[stops[1:], t], ends[stops[:-1], t] = t, stops[1:]
    return Branching(node, ends, noisy[:-1])
