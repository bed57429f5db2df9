"""What a rollout keeps of its trained steps: every latent once, as a node, and the edges between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.types import Edges
from flowrl.samplers.base import LogProbForm, StepDistribution

COLUMNS = ("mean_old", "velocity_old")
"""Extras of an edge: the mean it was drawn from, and the velocity at its start."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What is kept of each trained step.

    Raises:
        ValueError: a column is unknown.
    """

    form: LogProbForm = "mean"
    """Of the stored log-probs."""
    columns: tuple[str, ...] = ()
    """Extras per edge, of `COLUMNS`."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"rollout column {unknown[0]!r} is unknown; there are: {', '.join(COLUMNS)}")


class Recorder:
    """The trained steps of one batch, whose latents have their channels at `axis`."""

    def __init__(self, recording: Recording, axis: int) -> None:
        self.form, self.columns, self.axis = recording.form, recording.columns, axis
        self.nodes: list[Tensor] = []
        self.records: list[dict[str, Tensor]] = []

    def add(
        self,
        k: int,
        x: Tensor,
        stored: Tensor,
        parent: Tensor,
        x_next: Tensor,
        samples: Tensor,
        distribution: StepDistribution,
        velocity: Tensor,
    ) -> Tensor:
        """Step k from rows `parent` [M] of x [N, ...] to x_next [M, ...].

        Args:
            k: the step.
            x: where it starts.
            stored: numbers of the rows of x among the nodes, [N], -1 where not yet there; filled in.
            parent: row of x that each child comes from.
            x_next: the children.
            samples: first sample that each child leads to, [M].
            distribution: what the children were drawn from, M of them.
            velocity: of the network at x, [N, ...].

        Returns:
            Numbers of the children among the nodes, [M].
        """
        new = parent.unique()
        new = new[stored[new] < 0]
        if len(new):
            stored[new] = self._store(x[new.to(x.device)])
        child = self._store(x_next)
        extras = {"mean_old": distribution.mean, "velocity_old": velocity[parent.to(x.device)]}
        self.records.append(
            {
                "parent": stored[parent],
                "child": child,
                "step": torch.full((len(x_next),), k),
                "sample": samples,
                "old_log_prob": distribution.log_prob(x_next, self.form).cpu(),
            }
            | {name: extras[name].cpu() for name in self.columns}
        )
        return child

    def _store(self, x: Tensor) -> Tensor:
        """Keep latents [n, ...] as nodes; their numbers [n]."""
        before = sum(len(part) for part in self.nodes)
        self.nodes.append(x.cpu())
        return before + torch.arange(len(x))

    def edges(self, x: Tensor) -> Edges:
        """Ordered by (sample, step); `x` gives the shape where there are none."""
        if not self.records:
            none = torch.zeros(0, dtype=torch.int64)
            position = x.shape[1 : self.axis] + x.shape[self.axis + 1 :]
            return Edges(
                nodes=x.new_zeros((0, *x.shape[1:])).cpu(),
                parent=none,
                child=none,
                step=none,
                sample=none,
                old_log_prob=torch.zeros(0, *(position if self.form == "position" else ())),
            )
        table = {name: torch.cat([r[name] for r in self.records]) for name in self.records[0]}
        order = table["sample"].argsort(stable=True)  # the records come by step
        table = {name: value[order] for name, value in table.items()}
        fixed = {name: table.pop(name) for name in ("parent", "child", "step", "sample", "old_log_prob")}
        return Edges(nodes=torch.cat(self.nodes), columns=table, **fixed)


def join(parts: Sequence[tuple[Edges, int, int]]) -> Edges:
    """Edges of several batches as one table; rows of nodes and samples are moved along.

    A part is (edges, nodes before it, samples before it).
    """
    names = parts[0][0].columns
    return Edges(
        nodes=torch.cat([e.nodes for e, _, _ in parts]),
        parent=torch.cat([e.parent + before for e, before, _ in parts]),
        child=torch.cat([e.child + before for e, before, _ in parts]),
        step=torch.cat([e.step for e, _, _ in parts]),
        sample=torch.cat([e.sample + start for e, _, start in parts]),
        old_log_prob=torch.cat([e.old_log_prob for e, _, _ in parts]),
        columns={name: torch.cat([e.columns[name] for e, _, _ in parts]) for name in names},
    )
