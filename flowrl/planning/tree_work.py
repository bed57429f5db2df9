"""Forwards and latents of an iteration on trees, counted on the shape of the tree alone."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from flowrl.config.resolved import Resolved
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class TreeWork:
    """Counts of one tree, tuples by step, without dead groups and masked rewards."""

    leaves: int
    nodes: tuple[int, ...]
    """Network evaluations of a rollout."""
    edges: tuple[float, ...]
    """Trained edges, credited and not pruned, on average over the trees of a prompt."""
    parents: tuple[float, ...]
    """Nodes from which they start, which are the evaluations of the updates: children of a node share its forward."""
    kept: int
    """Latents that the rollout keeps."""

    def rollout_rows(self, samples: int) -> int:
        """Network evaluations of a rollout of `samples` samples."""
        return samples // self.leaves * sum(self.nodes)

    def update_rows(self, samples: int) -> int:
        """Network evaluations of a pass over `samples` samples, with gradient."""
        return round(samples // self.leaves * sum(self.parents))

    def rollout_forwards(self, samples: int, batch_size: int) -> int:
        """Forwards of a rollout: all nodes of a step of a batch's trees, in as many forwards as their number needs."""
        together = max(1, batch_size // self.leaves)
        whole, rest = divmod(samples // self.leaves, together)
        return sum(
            whole * math.ceil(together * nodes / batch_size) + math.ceil(rest * nodes / batch_size)
            for nodes in self.nodes
        )

    def update_forwards(self, samples: int, batch_size: int, updates: int) -> int:
        """Forwards of a pass, whose updates have equal numbers of trees but for the remainder."""
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
    algorithm: Any = resolved.algorithm.build()
    rewards, weights = torch.rand(1, 1, resolved.group_size, generator=torch.Generator().manual_seed(0)), torch.ones(1)
    credit = algorithm.on_tree(
        algorithm.advantages(rewards, weights, (("", ()),)), LeafRewards(tree, rewards, weights), iteration
    )
    live = ~credit.pruned[0].unflatten(0, (-1, plan.leaves))  # [T, L, K]: trained steps on the path of each leaf
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
