"""What an iteration on trees computes and keeps, counted on the shape of the tree alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.config.resolved import Resolved
from flowrl.diffusion.plan import StepPlan
from flowrl.rollout.trajectories import Trajectories


@dataclass(frozen=True, slots=True)
class TreeWork:
    """Counts of one tree, by step where they are tuples; where no group is dead and no reward is masked."""

    leaves: int
    nodes: tuple[int, ...]
    """Network evaluations of a rollout."""
    edges: tuple[float, ...]
    """Edges that are trained, on average over the trees of a prompt: those that are credited and not pruned."""
    parents: tuple[float, ...]
    """Nodes that they start from, so evaluations of the updates: the children of a node share its forward."""
    kept: int
    """Latents that the rollout keeps."""

    def rollout_rows(self, samples: int) -> int:
        """Network evaluations of a rollout of so many samples."""
        return samples // self.leaves * sum(self.nodes)

    def update_rows(self, samples: int) -> int:
        """Network evaluations of a pass over them, with gradient."""
        return round(samples // self.leaves * sum(self.parents))

    def rollout_forwards(self, samples: int, batch_size: int) -> int:
        """Forwards of a rollout: one for all nodes of a step of the trees that a batch holds, or several."""
        together = max(1, batch_size // self.leaves)
        whole, rest = divmod(samples // self.leaves, together)
        return sum(
            whole * math.ceil(together * nodes / batch_size) + math.ceil(rest * nodes / batch_size)
            for nodes in self.nodes
        )

    def update_forwards(self, samples: int, batch_size: int, updates: int) -> int:
        """Forwards of a pass, whose updates have as many trees each, but for the remainder."""
        trees, parents = samples // self.leaves, sum(self.parents)
        share, more = divmod(trees, updates)
        of_each = [math.ceil(round(count * parents, 6) / batch_size) for count in (share, share + 1)]
        return (updates - more) * of_each[0] + more * of_each[1]

    def latents(self, samples: int) -> int:
        """Latents that a rollout keeps for the updates."""
        return samples // self.leaves * self.kept


def tree_work(resolved: Resolved, plan: StepPlan, iteration: int = 1) -> TreeWork:
    """Counts of the plan's tree, pruned as the method prunes it for rewards that all differ."""
    tree = plan.tree
    assert tree is not None
    live = _live(resolved, plan, iteration)  # [T, L, K]
    edges, parents, kept = [0.0] * len(plan), [0.0] * len(plan), set()
    for k in plan.train:
        child = tree.noisy_children(k)
        parent = tree.node[k, child]
        kept |= {(k, int(node)) for node in parent} | {(tree.end(k), int(node)) for node in child}
        taken = live[:, child, k]
        edges[k] = float(taken.sum()) / len(live)
        parents[k] = sum(len(parent[own].unique()) for own in taken) / len(live)
    nodes = tuple(len(tree.at(k)) for k in range(len(plan)))
    return TreeWork(tree.leaves, nodes, tuple(edges), tuple(parents), len(kept))


def _live(resolved: Resolved, plan: StepPlan, iteration: int) -> Tensor:
    """Which steps of each leaf's way are trained, [T, L, K] bool, of the T trees of a prompt."""
    algorithm: Any = resolved.algorithm.build()
    rewards, weights = torch.rand(1, 1, resolved.group_size, generator=torch.Generator().manual_seed(0)), torch.ones(1)
    known = (("", ()),)
    rollout = Trajectories.none(plan).scored(rewards, prompts=known)
    credit = algorithm.on_tree(algorithm.advantages(rewards, weights, known), rollout, weights, iteration)
    return ~credit.pruned[0].unflatten(0, (-1, plan.leaves))
