"""The update half of an iteration: shares of the data, one reduction per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flowrl.algorithms.base import Method, Networks
from flowrl.config.schema import RunConfig
from flowrl.core.errors import Diverged
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import Microbatch
from flowrl.rollout.policy import Evaluations
from flowrl.rollout.trajectories import Rollout
from flowrl.training.divergence import remedy
from flowrl.training.edge_batches import Replay
from flowrl.training.metrics import Sums
from flowrl.training.noise_batches import Initials
from flowrl.training.optim import Optimizer
from flowrl.training.sample_batches import Noising
from flowrl.training.transition_batches import Lookup, Recall
from flowrl.training.world import World

Work = Replay | Recall | Noising | Initials
"""An iteration's data in shares of one update each."""
_MAX_BAD_UPDATES = 5


class Learner:
    """Turns a rollout with its credit into optimizer steps.

    Args:
        config: of the run.
        algorithm: the method.
        networks: policy and roles.
        optimizer: moves the policy.
        world: the processes.
        schedule: the model's own grid for the run's number of steps.
        sharded: every forward is a step of all processes together.
        lookup: conditions of prompts, for methods that remember transitions.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Method,
        networks: Networks,
        optimizer: Optimizer,
        world: World,
        schedule: Schedule,
        *,
        sharded: bool = False,
        lookup: Lookup | None = None,
    ) -> None:
        self.config, self.algorithm, self.networks, self.lookup = config, algorithm, networks, lookup
        self.optimizer, self.world, self.schedule, self.sharded = optimizer, world, schedule, sharded
        self.evaluations = Evaluations(networks.policy.adapter.network)
        self.bad_updates = 0
        self.grad_norm: float | None = None
        """Of the last update."""
        self.before_update: Callable[[Work, int], None] | None = None
        """Called with the data of an iteration and the number of the share that the next update is about to train."""

    def remedy(self, *, trained: bool, in_decoder: bool) -> str:
        """What is known and what to change where the model makes what is not finite; see `divergence.remedy`."""
        return remedy(self.config, self.grad_norm, trained=trained, in_decoder=in_decoder)

    def update(
        self, iteration: int, rollout: Rollout, credit: Advantages, sums: Sums, *, gate: torch.dtype | None = None
    ) -> None:
        """Optimizer steps on disjoint shares of the samples that take part, as often as the method passes over them.

        Args:
            iteration: keys the shares and the order inside them.
            rollout: this rank's samples and edges.
            credit: advantages of all samples of the iteration.
            sums: receives the metrics.
            gate: dtype of the network if the parity gate is to be passed first, else None.
        """
        work: Work
        parts = (self.config, self.algorithm, self.networks, self.world, self.evaluations, rollout, credit, iteration)
        before = self.evaluations.rows
        if self.algorithm.needs == "edges":
            work = Replay(*parts, sums, sharded=self.sharded)
            if gate is not None:
                work.pass_gate(gate)
                before = self.evaluations.rows  # the gate is passed once a start: no cost of an iteration
            if self.algorithm.transitions is not None:
                assert self.lookup is not None
                remembered = (self.world, rollout, credit, iteration, sums, self.lookup)
                work = Recall(self.config, self.algorithm, self.networks, *remembered)
        elif self.algorithm.needs == "samples":
            work = Noising(*parts, self.schedule, sharded=self.sharded)
        else:
            work = Initials(self.config, self.algorithm, self.networks, self.world, rollout, credit, iteration, sums)
        work.prepare()
        for _ in range(self.algorithm.passes):
            for number in range(len(work.shares)):
                if self.before_update is not None:
                    self.before_update(work, number)
                self._one_update(work, number, sums)
        self.algorithm.after_iteration(self.optimizer.updates, self.networks.weights)
        sums.add("nfe/train", self.evaluations.rows - before, len(rollout.rows))

    def _one_update(self, work: Work, number: int, sums: Sums) -> None:
        """One optimizer step on the share `number`."""
        scale, names = self.optimizer.scale, self.algorithm.feedback
        tail = torch.zeros(len(names) + 1, device=self.world.device)
        tail[-1] = work.sizes[number]
        for batch, counts in work.batches(number):
            output = self.algorithm.loss(batch, self.networks)
            (output.loss * (scale if counts else 0.0)).backward()
            if not counts:
                continue
            sums.add_loss(output, len(batch), batch.step.index.cpu() if isinstance(batch, Microbatch) else None)
            for place, name in enumerate(names):
                tail[place] += output.metrics[name]
        # One reduction per update: the gradient of the summed loss, what the method wants to hear of, the edges behind.
        gradient = self.optimizer.flat_gradient()
        if self.networks.weights.split:
            # The backward pass has summed it already, and left this process its rows.
            tail = self.world.all_reduce_sum(tail)
        else:
            flat = self.world.all_reduce_sum(torch.cat([gradient, tail]))
            gradient, tail = flat[: -len(tail)], flat[-len(tail) :]
        heard, count = tail[:-1], tail[-1]
        if count == 0:
            self.optimizer.zero_grad()
            return
        report = self.optimizer.step(gradient / (count * scale))
        if not report.skipped:
            means = dict(zip(names, (heard / count).tolist(), strict=True))
            self.algorithm.after_update(self.optimizer.updates, self.networks.weights, means)
        if report.grad_norm == 0 and self.optimizer.updates == 1:
            raise RuntimeError("no trainable parameter got a gradient: the loss does not reach the weights")
        self.grad_norm = report.grad_norm
        self.bad_updates = self.bad_updates + 1 if report.skipped else 0
        if self.bad_updates >= _MAX_BAD_UPDATES and scale == 1.0:
            raise Diverged(
                f"{self.bad_updates} updates in a row had a gradient whose norm is {self.grad_norm}; "
                f"lower optim.learning_rate (now {self.config.optim.learning_rate:g})"
            )
        sums.add("grad/norm", report.grad_norm if math.isfinite(report.grad_norm) else 0.0)
        sums.add("optim/learning_rate", report.learning_rate)
        sums.add("optim/skipped", float(report.skipped))
