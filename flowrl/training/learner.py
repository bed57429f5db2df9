"""The update half of an iteration: shares of the data, one reduction per optimizer step."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.core.errors import Overshot
from flowrl.core.tensors import floats
from flowrl.credit.advantages import Advantages
from flowrl.display.display import Progress
from flowrl.rollout.trajectories import Rollout
from flowrl.training.base import Iteration, Training, UpdateContext, Work
from flowrl.training.determinism import strict
from flowrl.training.metrics import Sums
from flowrl.training.optim import Optimizer

_MAX_BAD_UPDATES = 5
_LOST = 1e-20
"""Loss whose gradient float32 may not hold: its smallest number is 1e-45, and a gradient's value is a small part of
the loss."""


class Learner:
    """Turns a rollout with its credit into optimizer steps."""

    def __init__(self, training: Training, context: UpdateContext, optimizer: Optimizer) -> None:
        self.training, self.context, self.optimizer = training, context, optimizer
        self.method, self.networks, self.world = context.method, context.networks, context.world
        self.bad_updates = 0
        self.grad_norm: float | None = None
        """Gradient norm of the last update; None: there was none."""
        self.before_update: Callable[[Work, int], None] | None = None
        """Called with the data of an iteration and the number of the share that the next update is about to train."""
        self.add_gradient: Callable[[int, int], None] | None = None
        """Adds a gradient to that of the loss, called with the number of the update in the iteration and its rows."""

    def update(
        self, iteration: int, rollout: Rollout, credit: Advantages, sums: Sums, *, gate: torch.dtype | None = None
    ) -> None:
        """Optimizer steps on disjoint shares of the trained samples, once per pass of the method.

        `iteration` keys the shares and the order inside them; the rollout is this rank's, the credit that of all
        samples; `sums` receives the metrics. `gate`: dtype of the network if the parity gate is to be passed first,
        else None.

        Raises ConfigError: in deterministic mode, naming an operation that is not; Diverged, ParityError: as their
        messages say.
        """
        with strict():
            self._updates(Iteration(iteration, rollout, credit, sums), gate)

    def _updates(self, iteration: Iteration, gate: torch.dtype | None) -> None:
        counter, sums = self.context.counter, iteration.sums
        before = counter.rows
        work = self.training.work(self.context, iteration)
        if gate is not None:
            # The gate is passed once per start and is no part of an iteration's cost.
            with counter.uncounted():
                self.training.pass_gate(work, gate)
        with counter.without_backward():
            work.prepare()
        count = self.method.passes * len(work.shares)
        bar = Progress(count, f"iteration {iteration.number}: updating", show=self.world.main)
        with bar:
            for update, number in enumerate(list(range(len(work.shares))) * self.method.passes):
                if self.before_update is not None:
                    self.before_update(work, number)
                self._one_update(work, number, sums, self._added(update, work.sizes[number]))
                bar.update(1)
        self.method.after_iteration(self.optimizer.updates, self.networks.weights)
        sums.add("nfe/train", counter.rows - before, len(iteration.rollout.rows))

    def _added(self, update: int, rows: int) -> Tensor | None:
        """Norm over all processes of what `add_gradient` adds in the first update of an iteration; None in others."""
        if self.add_gradient is None:
            return None
        self.add_gradient(update, rows)
        if update > 0:  # a norm costs another reduction
            return None
        gradients = self.optimizer.gradients()
        if self.world.size > 1 and not self.networks.weights.split:
            gradients = [self.world.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))]
        return self.optimizer.norm(gradients)

    def _one_update(self, work: Work, number: int, sums: Sums, added: Tensor | None) -> None:
        """One optimizer step on the share `number`, beside a gradient of norm `added`."""
        scale, names = self.optimizer.scale, self.method.feedback
        tail = torch.zeros(len(names) + 2, device=self.world.device)
        tail[-1] = work.sizes[number]
        for batch, counts in work.batches(number):
            output = self.method.loss(batch, self.networks)
            (output.loss * (scale if counts else 0.0)).backward()
            if not counts:
                continue
            sums.add_loss(output, len(batch), batch.steps)
            tail[-2] += output.loss.detach().abs()
            for place, name in enumerate(names):
                tail[place] += output.metrics[name]
        sums.fetch()
        gradients, tail = self._reduced(tail)
        count = tail[-1]
        *means, loss, rows = floats(torch.cat([tail[:-1] / count, tail[-1:]]))
        if rows == 0:
            self.optimizer.zero_grad()
            return
        report = self.optimizer.step(gradients, count * scale)
        if not report.skipped:
            means = dict(zip(names, means, strict=True))
            self.method.after_update(self.optimizer.updates, self.networks.weights, means)
        # Where all credit is exactly 0 (nodes of a tree that are all equal), so are the loss and its gradient. That of
        # a credit next to 0 is lost in float32, and `dead_groups` has told of the rewards' scale.
        if report.grad_norm == 0 and abs(loss) > _LOST and self.optimizer.updates == 1:
            raise RuntimeError("no trainable parameter got a gradient: the loss does not reach the weights")
        self.grad_norm = report.grad_norm
        self.bad_updates = self.bad_updates + 1 if report.skipped else 0
        if self.bad_updates >= _MAX_BAD_UPDATES and scale == 1.0:
            raise Overshot(
                f"{self.bad_updates} updates in a row had a gradient whose norm is {self.grad_norm}; "
                f"lower optim.learning_rate (now {self.context.optim.learning_rate:g}), from a state before that"
            )
        sums.add("grad/norm", report.grad_norm if math.isfinite(report.grad_norm) else 0.0)
        if added is not None and 0 < report.grad_norm < math.inf:
            sums.add("anchor/gradient_share", float(added) / (rows * scale * report.grad_norm))
        sums.add("optim/learning_rate", report.learning_rate)
        sums.add("optim/skipped", float(report.skipped))

    def _reduced(self, tail: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradients of the summed loss and the sums `tail`, over all processes: one reduction per update."""
        gradients = self.optimizer.gradients()
        if self.networks.weights.split:
            # The backward pass has summed them already, and left this process its rows.
            return gradients, self.world.all_reduce_sum(tail)
        if self.world.size == 1:
            return gradients, tail
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), tail])
        del gradients
        self.optimizer.zero_grad()  # their memory is free before it is needed
        flat = self.world.all_reduce_sum(flat)
        return self.optimizer.pieces(flat[: -len(tail)]), flat[-len(tail) :]
