"""The record of a rollout's trained steps: every latent once, as a node, and the edges between nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.tensors import in_order, sent
from flowrl.core.types import Edges, Kept
from flowrl.rollout.routes import Move
from flowrl.samplers.base import LogProbForm, StepDistribution

COLUMNS = ("mean_old", "velocity_old")
"""Optional values of an edge: the mean of its transition, and the velocity at its start, with what a tilt adds."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The values that are kept of each trained step; raises ValueError for an unknown column."""

    form: LogProbForm = "mean"
    """Form of the stored log-probs."""
    columns: tuple[str, ...] = ()
    """Further values of each edge, from `COLUMNS`."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"rollout column {unknown[0]!r} is unknown; there are: {', '.join(COLUMNS)}")


class Recorder:
    """The trained steps of one batch, whose latents have their channels at `axis`.

    All stays on the device until the batch has ended: a copy to the CPU at every step would wait for the network.
    """

    def __init__(self, recording: Recording, axis: int) -> None:
        self.recording, self.axis = recording, axis
        self.nodes: list[Tensor] = []
        self.records: list[dict[str, Tensor]] = []
        self.kept: dict[int, Kept] = {}

    def add(
        self,
        k: int,
        x: Tensor,
        stored: Tensor,
        move: Move,
        x_next: Tensor,
        transition: StepDistribution,
        velocity: Tensor,
    ) -> Tensor:
        """Record step k of M children.

        `x` are latents before the step, [N, ...]; `stored` numbers of its rows among the nodes, [N], -1 for new ones,
        filled in; `move` has parents and first samples of the children; `x_next` are the children, [M, ...], and
        `transition` their distributions; `velocity` is that at x, [N, ...]. Returns the numbers of the children among
        the nodes, [M].
        """
        parent = move.parent
        new = parent.unique()
        new = new[stored[new] < 0]
        if len(new):
            stored[new] = self._store(x if in_order(new, len(x)) else x[sent(new, x.device)])
        child = self._store(x_next)
        record = {
            "parent": stored[parent],
            "child": child,
            "step": torch.full((len(x_next),), k),
            "sample": move.leads,
            "old_log_prob": transition.log_prob(x_next, self.recording.form),
        }
        if "mean_old" in self.recording.columns:
            record["mean_old"] = transition.mean
        if "velocity_old" in self.recording.columns:
            record["velocity_old"] = velocity[sent(parent, x.device)]
        self.records.append(record)
        return child

    def kept_on_cpu(self) -> dict[int, Kept]:
        """What was kept of the batch, by step, on the CPU."""
        return {k: Kept(each.x.cpu(), each.x0_hat.cpu()) for k, each in self.kept.items()}

    def _store(self, x: Tensor) -> Tensor:
        """Keep latents [n, ...] as nodes; their numbers [n]."""
        before = sum(len(part) for part in self.nodes)
        self.nodes.append(x)
        return before + torch.arange(len(x))

    def edges(self, x: Tensor) -> Edges:
        """The edges ordered by (sample, step), on the CPU; `x` gives the shape if there are none."""
        if not self.records:
            none = torch.zeros(0, dtype=torch.int64)
            position = x.shape[1 : self.axis] + x.shape[self.axis + 1 :]
            return Edges(
                nodes=torch.zeros(0, *x.shape[1:], dtype=x.dtype),
                parent=none,
                child=none,
                step=none,
                sample=none,
                old_log_prob=torch.zeros(0, *(position if self.recording.form == "position" else ())),
            )
        table = {name: torch.cat([r[name] for r in self.records]).cpu() for name in self.records[0]}
        order = table["sample"].argsort(stable=True)  # the records come by step
        table = {name: value[order] for name, value in table.items()}
        fixed = {name: table.pop(name) for name in ("parent", "child", "step", "sample", "old_log_prob")}
        return Edges(nodes=torch.cat(self.nodes).cpu(), columns=table, **fixed)


def join(parts: Sequence[tuple[Edges, int, int]]) -> Edges:
    """Edges of several batches as one table, renumbered; a part is (edges, nodes before it, samples before it)."""
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
