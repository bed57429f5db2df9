"""The rows of the denoising loop at each place of the grid: chains, common starts and trees alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Move:
    """Children of the rows of a place: all with the same end, all stochastic or all deterministic."""

    end: int
    noisy: bool
    leads: Tensor
    """First sample of each child, [M] ascending."""
    parent: Tensor
    """Row of each child's parent, [M]."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The way of B samples over the K + 1 places of a grid."""

    node: Tensor
    """First sample of each sample's node, [K + 1, B] int64; -1: no node at this place."""
    ends: Tensor
    """End of its step from there, [K, B]; -1: no node at this place."""
    noisy: Tensor
    """Whether that step is stochastic, [K, B]."""

    @classmethod
    def of(cls, plan: StepPlan, ids: Sequence[SampleId], *, shared_start: bool) -> "Routes":
        """The routes of a batch; raises ValueError unless it holds whole trees."""
        if plan.tree is not None:
            return cls._of_trees(plan, ids)
        steps, each, slots = len(plan), torch.arange(len(ids)), [i.slot for i in ids]
        node, noisy = each.repeat(steps + 1, 1), torch.tensor(plan.stochastic)[:, None].repeat(1, len(ids))
        if plan.own:
            noisy &= torch.arange(steps)[:, None] == torch.tensor([plan.own[slot % len(plan.own)] for slot in slots])
        if shared_start:
            together = torch.cat([torch.zeros(1, len(ids)), noisy.cumsum(0)]) == 0
            node = torch.where(together, torch.tensor([slots.index(slot) for slot in slots]), node)
        return Routes(node=node, ends=(1 + torch.arange(steps))[:, None].repeat(1, len(ids)), noisy=noisy)

    @staticmethod
    def _of_trees(plan: StepPlan, ids: Sequence[SampleId]) -> "Routes":
        tree, size = plan.tree, plan.leaves
        assert tree is not None
        place = torch.tensor([i.sample % size for i in ids])
        whole = [SampleId(i.slot, i.sample - i.sample % size + leaf) for i in ids[::size] for leaf in range(size)]
        if list(ids) != whole:
            raise ValueError(f"a batch must hold whole trees of {size} neighbouring samples")
        first = torch.arange(len(ids)) - place
        node = tree.node[:, place]
        return Routes(
            node=torch.where(node >= 0, first + node, -1), ends=tree.ends[:, place], noisy=tree.noisy[:, place]
        )

    def at(self, k: int) -> Tensor:
        """First sample of each row at a place, [N] ascending."""
        return self.node[k][self.node[k] >= 0].unique()

    def moves(self, k: int, leads: Tensor) -> list[Move]:
        """The steps of the rows `leads` [N] of a place."""
        here = (self.node[k] >= 0).nonzero().squeeze(1)
        child = self.node[self.ends[k, here], here].unique()
        ends, noisy, parent = self.ends[k, child], self.noisy[k, child], self.node[k, child]
        result = []
        for end, drawn in torch.stack([ends, noisy.long()], dim=1).unique(dim=0).tolist():
            chosen = (ends == end) & (noisy == bool(drawn))
            result.append(Move(end, bool(drawn), child[chosen], torch.searchsorted(leads, parent[chosen])))
        return result
