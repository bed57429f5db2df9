"""The only denoising loop, and the policy it shares with training.

Rollout and training call the same `Policy.predict` and `Policy.distribution` on the very latents of the rollout, so the
first ratio is 1 by construction.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import tee

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.tensors import in_order, ints, sent
from flowrl.core.types import Condition, Edges, Kept, Prediction, SampleId, Samples, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import expand
from flowrl.diffusion.solver_base import Node
from flowrl.diffusion.solvers import SOLVERS
from flowrl.models.base import ModelAdapter
from flowrl.rollout.ahead import Ahead, pinned
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.recorder import Recorder, Recording, join
from flowrl.rollout.routes import Move, Routes
from flowrl.rollout.trajectories import Asked

Slope = Callable[[Tensor, Tensor, Condition], Tensor]
"""Gradient [N, ...] of a judge of latents x [N, ...] at noise levels sigma [N], under conditions of N rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Recording, device and callbacks of a rollout; none but `slope` changes its samples."""

    recording: Recording = field(default_factory=Recording)
    device: torch.device | str = "cpu"
    """Device of the forwards."""
    progress: Callable[[int], None] = lambda count: None
    """Called with the number of newly finished samples."""
    finished: Callable[[int, Tensor], None] = lambda start, x0: None
    """Called before `progress` with the place of the first of them and their latents [b, ...], on the CPU."""
    stop: Callable[[], bool] = lambda: False
    """Called before every forward; True ends the rollout."""
    slope: Slope | None = None
    """Where the plan has a tilt."""


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
        batch_size: samples per network forward; a tree is drawn whole, a larger one in several forwards per step.
        options: recording, device and callbacks.

    Returns:
        Samples in the order of `asked`, and the trained edges ordered by (sample, step), on the CPU.

    Raises Abandoned: `options.stop` returned True.
    """
    latents, parts, kept, nodes_before = [], [], [], 0
    spans = batches(policy.adapter, plan, asked.cond, asked.rows, batch_size)
    ours, same = tee(_Batch.of(plan, noise, asked.ids[rows]) for rows in spans)
    with Ahead((draw for batch in same for draw in batch.draws()), options.device) as drawn:
        for rows, batch in zip(spans, ours, strict=True):
            part, start = asked[rows], rows.start
            recorder = Recorder(options.recording, policy.adapter.channel_axis)
            x0, edges = _Walk(policy, batch, drawn, part, recorder, options)(batch_size)
            parts.append((edges, nodes_before, start))
            nodes_before += len(edges.nodes)
            kept.append(recorder.kept_on_cpu())
            latents.append(x0)
            options.finished(start, x0)
            options.progress(len(part.ids))
    return Samples(x0=torch.cat(latents), ids=tuple(asked.ids), kept=Kept.join(kept)), join(parts)


def batches(adapter: ModelAdapter, plan: StepPlan, cond: Condition, rows: Tensor, batch_size: int) -> list[slice]:
    """Samples that are drawn together: as many whole trees as a batch holds, next to each other and, where the adapter
    wants that, with texts of one length. `rows` [B] are the rows of `cond` of the samples.
    """
    count, size, lengths = len(rows), plan.drawn_together(batch_size), adapter.text_lengths(cond)
    ends = [count] if count else []
    if lengths is not None:
        own = lengths[rows]
        ends = [*((own[1:] != own[:-1]).nonzero().flatten() + 1).tolist(), *ends]
    spans = zip([0, *ends], ends, strict=False)
    return [slice(start, min(start + size, high)) for low, high in spans for start in range(low, high, size)]


Draw = Callable[[], list[Tensor | None]]
"""The noise of each move of a place, on the CPU; None: it takes none."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Samples that are denoised together: their routes, and the noise on the way."""

    plan: StepPlan
    noise: Noise
    ids: Sequence[SampleId]
    routes: Routes
    moves: list[list[Move]]
    """Steps from each place but the last; empty where there is no node."""

    @classmethod
    def of(cls, plan: StepPlan, noise: Noise, ids: Sequence[SampleId]) -> "_Batch":
        routes = Routes.of(plan, ids, shared_start=noise.shared_start)
        places = [routes.at(k) for k in range(len(plan))]
        moves = [routes.moves(k, leads) if len(leads) else [] for k, leads in enumerate(places)]
        return cls(plan, noise, ids, routes, moves)

    def draws(self) -> Iterator[Draw]:
        """The draws in the order in which a walk takes them: the initial noise, and that of every place with nodes."""
        yield lambda: [pinned(self.noise.initial(self._of(self.routes.at(0))))]
        for k, moves in enumerate(self.moves):
            if moves:
                yield partial(self._at, k)

    def _at(self, k: int) -> list[Tensor | None]:
        """The noise of each move from place k."""
        leads, solver = self.routes.at(k), SOLVERS[self.plan.solver[k]]
        result: list[Tensor | None] = []
        for move in self.moves[k]:
            if move.noisy:
                result.append(pinned(self._of_children(k, leads, move)))
            elif solver.stochastic and self.plan.noise_level[k] > 0:
                result.append(pinned(self.noise.step(self._of(leads), k)))
            else:
                result.append(None)
        return result

    def _of_children(self, k: int, leads: Tensor, move: Move) -> Tensor:
        """The noise of the children [M, ...] of the nodes `leads`."""
        plan, xi = self.plan, self.noise.step(self._of(move.leads), k)
        if plan.sibling_noise is None or plan.tree is None or not plan.tree.splits[k]:
            return xi
        common = self.noise.common(self._of(leads[move.parent]), k)
        return (common + plan.sibling_noise * xi) / math.sqrt(1 + plan.sibling_noise**2)

    def _of(self, samples: Tensor) -> list[SampleId]:
        return [self.ids[j] for j in ints(samples)]


@dataclass(slots=True)
class _Front:
    """The nodes at one place of the grid, one row each."""

    leads: Tensor
    """First sample of each node, [N] ascending."""
    x: Tensor
    before: Node | None
    """The previous node of each row; None at the start, and in trees, whose solver needs none."""
    stored: Tensor
    """Numbers among the recorded nodes, [N]; -1: not recorded."""

    @staticmethod
    def join(parts: "Sequence[_Front]") -> "_Front":
        """Rows of several steps, in order."""
        if len(parts) == 1:
            return parts[0]
        leads, order = torch.cat([part.leads for part in parts]).sort()
        x = torch.cat([part.x for part in parts])
        return _Front(leads, x[sent(order, x.device)], None, torch.cat([part.stored for part in parts])[order])


class _Walk:
    """One batch through all steps. Samples of one initial noise are one row up to the first stochastic step."""

    def __init__(
        self,
        policy: Policy,
        batch: _Batch,
        drawn: Ahead[list[Tensor | None]],
        asked: Asked,
        recorder: Recorder,
        options: RunOptions,
    ) -> None:
        self.policy, self.plan, self.batch, self.drawn = policy, batch.plan, batch, drawn
        self.cond, self.stop, self.slope = asked.cond.index(asked.rows), options.stop, options.slope
        self.recorder, self.device, self.process = recorder, options.device, policy.adapter.process

    def __call__(self, batch_size: int) -> tuple[Tensor, Edges]:
        """(clean latents [B, ...] float32, the trained edges), on the CPU."""
        leads, (start,) = self.batch.routes.at(0), self.drawn.take()
        assert start is not None
        # Unscaled also if sigmas[0] < 1 (VP, sigma_max < 1), as in the pipelines and their training.
        first = _Front(leads, sent(start, self.device), None, torch.full((len(leads),), -1))
        arrived = {0: [first]}
        for k in range(len(self.plan)):
            if k in arrived:
                for end, part in self._step(k, _Front.join(arrived.pop(k)), batch_size):
                    arrived.setdefault(end, []).append(part)
        last = _Front.join(arrived.pop(len(self.plan)))
        x0 = _taken(last.x, self._of_samples(-1, last))
        return x0.float().cpu(), self.recorder.edges(x0)

    def _of_samples(self, place: int, front: _Front) -> Tensor | None:
        """Row of the nodes at a place for each sample, as `_rows`."""
        return _rows(torch.searchsorted(front.leads, self.batch.routes.node[place]), front.x)

    def _step(self, k: int, front: _Front, batch_size: int) -> list[tuple[int, _Front]]:
        """The next rows of those at a place, by the ends of their steps."""
        step = self.plan.steps(torch.full((len(front.x),), k), self.process, self.device)
        prediction = self._predict(front, step, batch_size)
        if k in self.plan.keep:
            rows = self._of_samples(k, front)
            self.recorder.kept[k] = Kept(_taken(front.x, rows), _taken(prediction.x0_hat, rows))
        result = []
        for move, xi in zip(self.batch.moves[k], self.drawn.take(), strict=True):
            rows = _rows(move.parent, front.x)
            if move.noisy:
                assert xi is not None
                x_next, stored = self._draw(k, front, step, prediction, move, sent(xi, self.device))
                # Stochastic steps leave a node too: a solver after a window continues from them.
                left = Node(front.x, prediction.x0_hat, step)
            else:
                x_next, left = self._solve(k, front, step, prediction, move.end, xi)
                x_next, stored = _taken(x_next, rows), torch.full((len(move.leads),), -1)
            before = None
            if self.plan.tree is None:
                before = left if rows is None else left.at(move.parent)
            result.append((move.end, _Front(move.leads, x_next, before, stored)))
        return result

    def _predict(self, front: _Front, step: Step, batch_size: int) -> Prediction:
        """The prediction at all rows, in several forwards if a tree is larger than a batch."""
        cond, size = self._cond(front), len(front.x)
        if size <= batch_size:
            return self._forward(front.x, step, cond)
        parts = []
        for rows in torch.arange(size).split(batch_size):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            parts.append(self._forward(front.x[here], step.at(rows), cond.index(rows)))
        return Prediction(
            torch.cat([part.x0_hat for part in parts]),
            torch.cat([part.eps_hat for part in parts]),
            torch.cat([part.velocity for part in parts]),
        )

    def _cond(self, front: _Front) -> Condition:
        return self.cond if len(front.x) == len(self.cond) else self.cond.index(front.leads)

    def _forward(self, x: Tensor, step: Step, cond: Condition) -> Prediction:
        if self.stop():
            raise Abandoned
        return self.policy.predict(x, step, cond)

    def _draw(
        self, k: int, front: _Front, step: Step, prediction: Prediction, move: Move, xi: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Children [M, ...] drawn from the transition by xi, and their numbers among the recorded nodes."""
        rows, transition = _rows(move.parent, front.x), self.policy.distribution(prediction, front.x, step)
        velocity, pull = prediction.velocity, None
        if self.slope is not None and self.plan.tilt and self.plan.tilt[k]:
            factor = expand(self.plan.tilt[k] * transition.std.square(), front.x)
            pull = factor * self.slope(front.x, step.sigma, self._cond(front))
            velocity = velocity + pull / expand(step.sigma_next - step.sigma, pull)
        if rows is not None:
            transition = transition.at(rows)
        x_next = transition.sample(xi)
        if pull is not None:  # the density does not know of it
            x_next = x_next + _taken(pull, rows)
        if k not in self.plan.train:
            return x_next, torch.full((len(x_next),), -1)
        return x_next, self.recorder.add(k, front.x, front.stored, move, x_next, transition, velocity)

    def _solve(
        self, k: int, front: _Front, step: Step, prediction: Prediction, end: int, xi: Tensor | None
    ) -> tuple[Tensor, Node]:
        """All rows after one deterministic step, and the nodes that they leave; xi is a stochastic solver's noise."""
        plan, solver, x, noise = self.plan, SOLVERS[self.plan.solver[k]], front.x, None
        if end != plan.end(k):
            place = torch.full((len(x),), k)
            step = plan.steps(place, self.process, self.device, torch.full_like(place, end))
        if solver.stochastic:
            noise = torch.zeros_like(x) if xi is None else sent(xi, self.device)
        here = Node(x, prediction.x0_hat, step, noise)
        return solver.step(prediction, here, front.before, last=end == len(plan))


def _rows(rows: Tensor, values: Tensor) -> Tensor | None:
    """`rows` [n] on the device of the values [N, ...]; None: they are all of these in order, which needs no copy."""
    return None if in_order(rows, len(values)) else sent(rows, values.device)


def _taken(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]
