"""The only denoising loop, and the policy it shares with training.

Rollout and training go through the same `Policy.predict` and `Policy.distribution`, and latents are kept
exactly as they were fed onward, so the first ratio is 1 by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.types import Condition, Edges, Prediction, SampleId, Samples, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.solver_base import Node
from flowrl.diffusion.solvers import SOLVERS
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.recorder import Recorder, Recording, join
from flowrl.rollout.routes import Move, Routes
from flowrl.rollout.trajectories import Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What a rollout keeps, where it runs and who watches it; its samples do not depend on any of this."""

    recording: Recording = field(default_factory=Recording)
    device: torch.device | str = "cpu"
    """Where the forwards run."""
    progress: Callable[[int], None] = lambda count: None
    """Called with the number of samples just finished."""
    finished: Callable[[int, Tensor], None] = lambda start, x0: None
    """Called before that with the place of the first of them and their latents [b, ...], on the CPU."""
    stop: Callable[[], bool] = lambda: False
    """Asked before every forward whether to leave off."""


_PLAIN = RunOptions()


@torch.no_grad()
def run(
    policy: Policy, plan: StepPlan, noise: Noise, asked: Asked, *, batch_size: int, options: RunOptions = _PLAIN
) -> tuple[Samples, Edges]:
    """Denoise B samples along the plan; those of a tree share its nodes, all nodes of a step one forward.

    Args:
        policy: adapter, sampler and guidance.
        plan: the denoising steps.
        noise: keyed noise.
        asked: the samples.
        batch_size: samples per network forward; a tree is drawn whole, larger ones in several forwards a step.
        options: what is kept of trained steps, the device, and callbacks.

    Returns:
        Samples in the order that was asked for, and the trained edges ordered by (sample, step), on the CPU.

    Raises:
        Abandoned: `options.stop` said so.
    """
    latents, parts, nodes_before, size = [], [], 0, plan.drawn_together(batch_size)
    for start in range(0, len(asked.ids), size):
        part = asked[start : start + size]
        recorder = Recorder(options.recording, policy.adapter.channel_axis)
        x0, edges = _Walk(policy, plan, noise, part, recorder, options)(batch_size)
        parts.append((edges, nodes_before, start))
        nodes_before += len(edges.nodes)
        latents.append(x0)
        options.finished(start, x0)
        options.progress(len(part.ids))
    return Samples(x0=torch.cat(latents), ids=tuple(asked.ids)), join(parts)


@dataclass(slots=True)
class _Front:
    """What is at one place of the grid: a row for every node there."""

    leads: Tensor
    """First sample of each node, [N] ascending."""
    x: Tensor
    before: Node | None
    """The node that each row has left; None at the start, and in trees, whose solver needs none."""
    stored: Tensor
    """Numbers among the recorded nodes, [N]; -1 where a row is not one."""

    @staticmethod
    def join(parts: Sequence[_Front]) -> _Front:
        """Rows that came by different steps, in order."""
        if len(parts) == 1:
            return parts[0]
        leads, order = torch.cat([part.leads for part in parts]).sort()
        x = torch.cat([part.x for part in parts])
        return _Front(leads, x[order.to(x.device)], None, torch.cat([part.stored for part in parts])[order])


class _Walk:
    """One batch through all steps. What starts from one noise is one row until a stochastic step parts it."""

    def __init__(
        self,
        policy: Policy,
        plan: StepPlan,
        noise: Noise,
        asked: Asked,
        recorder: Recorder,
        options: RunOptions,
    ) -> None:
        self.policy, self.plan, self.noise, self.ids = policy, plan, noise, list(asked.ids)
        self.cond, self.stop = asked.cond.index(asked.rows), options.stop
        self.recorder, self.device, self.process = recorder, options.device, policy.adapter.process
        self.routes = Routes.of(plan, self.ids, shared_start=noise.shared_start)

    def __call__(self, batch_size: int) -> tuple[Tensor, Edges]:
        """(clean latents [B, ...] float32, the trained edges), on the CPU."""
        leads = self.routes.at(0)
        # Unscaled also where sigmas[0] < 1 (VP, sigma_max < 1): so do the pipelines, and so they were trained.
        start = self.noise.initial(self._ids(leads)).to(self.device)
        arrived = {0: [_Front(leads, start, None, torch.full((len(leads),), -1))]}
        for k in range(len(self.plan)):
            if k in arrived:
                for end, part in self._step(k, _Front.join(arrived.pop(k)), batch_size):
                    arrived.setdefault(end, []).append(part)
        last = _Front.join(arrived.pop(len(self.plan)))
        x0 = last.x[torch.searchsorted(last.leads, self.routes.node[-1]).to(last.x.device)]
        return x0.float().cpu(), self.recorder.edges(x0)

    def _step(self, k: int, front: _Front, batch_size: int) -> list[tuple[int, _Front]]:
        """What the rows of a place become, by where their steps end."""
        step = self.plan.steps(torch.full((len(front.x),), k), self.process, self.device)
        prediction = self._predict(front, step, batch_size)
        result = []
        for move in self.routes.moves(k, front.leads):
            rows = move.parent.to(front.x.device)
            if move.noisy:
                x_next, stored = self._draw(k, front, step, prediction, move)
                # Stochastic steps leave a node too: a solver that follows a window goes on from them.
                left = Node(front.x, prediction.x0_hat, step)
            else:
                x_next, left = self._solve(k, front, step, prediction, move.end)
                x_next, stored = x_next[rows], torch.full((len(rows),), -1)
            part = _Front(move.leads, x_next, None if self.plan.tree is not None else left.at(rows), stored)
            result.append((move.end, part))
        return result

    def _predict(self, front: _Front, step: Step, batch_size: int) -> Prediction:
        """The network at all rows; in several forwards where a tree is larger than a batch."""
        cond, size = self.cond, len(front.x)
        if size != len(cond):
            cond = cond.index(front.leads)
        if size <= batch_size:
            return self._forward(front.x, step, cond)
        parts = []
        for rows in torch.arange(size).split(batch_size):
            here = rows.to(front.x.device)
            parts.append(self._forward(front.x[here], step.at(here), cond.index(rows)))
        return Prediction(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Prediction)))

    def _forward(self, x: Tensor, step: Step, cond: Condition) -> Prediction:
        if self.stop():
            raise Abandoned
        return self.policy.predict(x, step, cond)

    def _draw(self, k: int, front: _Front, step: Step, prediction: Prediction, move: Move) -> tuple[Tensor, Tensor]:
        """Children [M, ...] by the law, and their numbers among the recorded nodes."""
        rows = move.parent.to(front.x.device)
        law = self.policy.distribution(prediction, front.x, step).at(rows)
        xi, plan = self.noise.step(self._ids(move.leads), k), self.plan
        if plan.sibling_noise is not None and plan.tree is not None and plan.tree.splits[k]:
            common = self.noise.common(self._ids(front.leads[move.parent]), k)
            xi = (common + plan.sibling_noise * xi) / math.sqrt(1 + plan.sibling_noise**2)
        x_next = law.sample(xi.to(self.device))
        if k not in plan.train:
            return x_next, torch.full((len(rows),), -1)
        latents = front.x, front.stored, move.parent, x_next
        return x_next, self.recorder.add(k, *latents, move.leads, law, prediction.velocity)

    def _solve(self, k: int, front: _Front, step: Step, prediction: Prediction, end: int) -> tuple[Tensor, Node]:
        """All rows one step on, without a law, and the nodes that they leave."""
        plan, solver, x, noise = self.plan, SOLVERS[self.plan.solver[k]], front.x, None
        if end != plan.end(k):
            step = plan.steps(step.index, self.process, self.device, torch.full((len(x),), end))
        if solver.stochastic:
            noisy = plan.noise_level[k] > 0
            noise = self.noise.step(self._ids(front.leads), k).to(self.device) if noisy else torch.zeros_like(x)
        here = Node(x, prediction.x0_hat, step, noise)
        return solver.step(prediction, here, front.before, last=end == len(plan))

    def _ids(self, samples: Tensor) -> list[SampleId]:
        return [self.ids[j] for j in samples.tolist()]
