"""The update half of an iteration: shares of the samples, the parity gate, one reduction per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.advantages import Advantages
from flowrl.algorithms.base import Algorithm, Networks
from flowrl.buffer import microbatches, update_chunks
from flowrl.config import RunConfig
from flowrl.distributed import World
from flowrl.metrics import Sums, log
from flowrl.optim import Optimizer
from flowrl.plan import StepPlan
from flowrl.rng import permutation
from flowrl.rollout import Evaluations
from flowrl.spatial import spread
from flowrl.types import Condition, Edges, Microbatch, Samples

_MAX_BAD_UPDATES = 5


class ParityError(RuntimeError):
    """The replayed log-probs differ from the rollout's by more than the gate allows."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One iteration's data: this rank's samples and edges, everybody's rewards."""

    plan: StepPlan
    samples: Samples
    edges: Edges
    cond: Condition
    rows: Tensor
    """Row of `cond` of each of this rank's samples, [B]."""
    rewards: Tensor
    """Training values of the whole iteration, [R, P, G]."""
    raw: dict[str, Tensor]
    """Raw outputs of the whole iteration, name -> [P, G]."""
    spread: float
    """Mean over prompts of the pixel std inside a group (this rank's), a diversity indicator."""
    maps: Tensor | None = None
    """Where in its picture each of this rank's samples counts, [B, *pos]; only for a method with `spatial`."""


class Learner:
    """Turns a rollout with its credit into optimizer steps."""

    def __init__(
        self, config: RunConfig, algorithm: Algorithm, networks: Networks, optimizer: Optimizer, world: World
    ) -> None:
        self.config, self.algorithm, self.networks = config, algorithm, networks
        self.optimizer, self.world = optimizer, world
        self.adapter = networks.policy.adapter
        self.evaluations = Evaluations(self.adapter.network)
        self.recompute = getattr(algorithm.config, "old_log_prob", "rollout") == "recompute"
        self.bad_updates = 0

    def update(
        self, iteration: int, rollout: Rollout, credit: Advantages, sums: Sums, *, gate: torch.dtype | None = None
    ) -> None:
        """Optimizer steps on disjoint shares of the samples that take part.

        Args:
            iteration: keys the shares and the order inside them.
            rollout: this rank's edges.
            credit: advantages of all samples of the iteration.
            sums: receives the metrics.
            gate: dtype of the network if the parity gate is to be passed first, else None.
        """
        config, group = self.config, self.config.rollout.group_size
        useful = credit.kept.flatten().nonzero().squeeze(1)
        chunks = update_chunks(useful, config.optim.updates_per_iteration, config.seed, iteration)
        identity = torch.tensor([i.slot * group + i.sample for i in rollout.samples.ids])
        sample_of_edge = identity[rollout.edges.sample]
        kept = self.algorithm.kept_edges(rollout.samples.ids, rollout.plan, iteration, config.seed)
        advantage = self._advantages(rollout, credit, identity, sums)[rollout.edges.sample]  # [E, R', *pos]
        shares = []
        for number, chunk in enumerate(chunks):
            inside = torch.isin(sample_of_edge, chunk)
            rows = (inside if kept is None else inside & kept).nonzero().squeeze(1)
            shares.append(rows[permutation(len(rows), config.seed, "edges", iteration, number, self.world.rank)])
        if gate is not None:
            self._parity_gate(rollout, advantage, torch.cat(shares)[: config.optim.batch_size], gate)
        before = self.evaluations.rows  # counted behind the gate, which only the first iteration of a start passes
        if self.recompute:
            rollout = self._recomputed(rollout, advantage, shares)
        for share in shares:
            self._one_update(rollout, advantage, share, sums)
        sums.add("nfe/train", self.evaluations.rows - before, len(identity))

    def _advantages(self, rollout: Rollout, credit: Advantages, identity: Tensor, sums: Sums) -> Tensor:
        """Of this rank's samples, [B, R', *pos]: by position where the method asks for it."""
        own, maps, options = credit.values.flatten(0, 1)[identity], rollout.maps, self.algorithm.spatial
        if options is None:
            return own
        assert maps is not None
        sums.add("spatial/map_mean", float(maps.flatten(1).mean(dim=1).sum()), len(maps))
        sums.add("spatial/flat_share", float((maps == 1).flatten(1).all(dim=1).sum()), len(maps))
        return spread(own, maps, options.ratio, credit.bound)

    def _batches(self, rollout: Rollout, advantage: Tensor, order: Tensor) -> Iterator[Microbatch]:
        return microbatches(
            rollout.edges,
            advantage,
            rollout.plan,
            self.adapter,
            rollout.cond,
            rollout.rows,
            batch_size=self.config.optim.batch_size,
            order=order,
            device=self.world.device,
        )

    def _one_update(self, rollout: Rollout, advantage: Tensor, share: Tensor, sums: Sums) -> None:
        scale, names = self.optimizer.scale, self.algorithm.feedback
        tail = torch.zeros(len(names) + 1, device=self.world.device)
        tail[-1] = len(share)
        for batch in self._batches(rollout, advantage, share):
            output = self.algorithm.loss(batch, self.networks)
            (output.loss * scale).backward()
            sums.add_loss(output, batch.step.index.cpu())
            for place, name in enumerate(names):
                tail[place] += output.metrics[name]
        # One reduction per update: the gradient of the summed loss, what the method wants to hear of, the edges behind.
        flat = self.world.all_reduce_sum(torch.cat([self.optimizer.flat_gradient(), tail]))
        gradient, heard, count = flat[: -len(tail)], flat[-len(tail) : -1], flat[-1]
        if count == 0:
            self.optimizer.zero_grad()
            return
        report = self.optimizer.step(gradient / (count * scale))
        if not report.skipped:
            means = dict(zip(names, (heard / count).tolist(), strict=True))
            self.algorithm.after_update(self.optimizer.updates, self.networks.weights, means)
        if report.grad_norm == 0 and self.optimizer.updates == 1:
            raise RuntimeError("no trainable parameter got a gradient: the loss does not reach the weights")
        self.bad_updates = self.bad_updates + 1 if report.skipped else 0
        if self.bad_updates >= _MAX_BAD_UPDATES and scale == 1.0:
            raise RuntimeError(
                f"{self.bad_updates} updates in a row had a gradient that is not finite; "
                f"lower optim.learning_rate (now {self.config.optim.learning_rate})"
            )
        sums.add("grad/norm", report.grad_norm if math.isfinite(report.grad_norm) else 0.0)
        sums.add("optim/learning_rate", report.learning_rate)
        sums.add("optim/skipped", float(report.skipped))

    def _parity_gate(self, rollout: Rollout, advantage: Tensor, order: Tensor, dtype: torch.dtype) -> None:
        """Replay one microbatch before the first update; stop where it does not repeat the rollout.

        The second number is the same at the rollout's own batch composition, where it must be 0.
        """
        worst, step = self._deviation(rollout, advantage, order)
        # The first rollout batch at its first trained step, in the rollout's order.
        edges, first = rollout.edges, min(rollout.plan.train)
        same = ((edges.step == first) & (edges.sample < self.config.rollout.batch_size)).nonzero().squeeze(1)
        exact, _ = self._deviation(rollout, advantage, same[: self.config.optim.batch_size])
        worst, step, exact = max(self.world.gather((worst, step, exact)))
        tolerance = self.algorithm.parity_tolerance(self.networks.policy.sampler, dtype)
        log.info(
            "parity: replayed log ratios are at most %.2e (allowed %.2e); %.2e at the rollout's own batches",
            worst,
            tolerance,
            exact,
        )
        # Written so that a NaN does not pass.
        if not worst <= tolerance and not self.recompute:
            raise ParityError(
                f"replaying the rollout changes the log ratio by {worst:.2e} at step {step}, more than {tolerance:.2e} "
                "(a tenth of the clip range): set algorithm.old_log_prob=recompute, or equal rollout.batch_size and "
                "optim.batch_size"
            )

    @torch.no_grad()
    def _deviation(self, rollout: Rollout, advantage: Tensor, order: Tensor) -> tuple[float, int]:
        """Largest |log ratio| of a replay at training geometry, and its step."""
        if not len(order):
            return 0.0, -1
        change, sampler = torch.zeros(len(order)), self.networks.policy.sampler
        for batch in self._batches(rollout, advantage, order):
            log_ratio = self.algorithm.log_ratio(self.networks.transition(batch), batch, sampler)
            # Microbatches come by batch key, so an edge's place in `order` is not its place in the batches.
            change[batch.place] = log_ratio.abs().reshape(len(batch), -1).amax(dim=1).cpu()
        return float(change.max()), int(rollout.edges.step[order][change.argmax()])

    @torch.no_grad()
    def _recomputed(self, rollout: Rollout, advantage: Tensor, shares: list[Tensor]) -> Rollout:
        """Old log-probs, and old means where the method keeps them, at the very batches of the updates."""
        old, form = rollout.edges.old_log_prob.clone(), self.algorithm.log_prob_form(self.networks.policy.sampler)
        columns = {name: value.clone() for name, value in rollout.edges.columns.items()}
        for share in shares:
            for batch in self._batches(rollout, advantage, share):
                policy, rows = self.networks.transition(batch), share[batch.place]
                old[rows] = policy.log_prob(batch.next_latents, form).cpu()
                if "mean_old" in columns:
                    columns["mean_old"][rows] = policy.mean.cpu()
        return replace(rollout, edges=replace(rollout.edges, old_log_prob=old, columns=columns))
