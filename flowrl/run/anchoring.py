"""Given images beside the prompts of a run (`data.anchor`): a pull to the data in every optimizer step.

    1. per_update images (c, x0) for each optimizer step of an iteration, read before the first
    2. x = alpha x0 + sigma eps at the times of `sft`
    3. gradient of the step += coef * gradient of the mean over rows of mean_d (v - v*)^2

Source: arXiv 2512.04332 (DDRL); nvidia-cosmos/cosmos-rl:cosmos_rl/policy/trainer/wfm_trainer.py.
"""

from dataclasses import replace

import torch

from flowrl.core.errors import ConfigError, Remedy
from flowrl.run.assembly.parts import Parts
from flowrl.run.given_collector import PairCollector
from flowrl.training.base import Iteration, Work
from flowrl.training.kinds import training_of
from flowrl.training.metrics import Sums, Timer
from flowrl.training.signals import Stop


class Anchor:
    """Adds the gradient on given images, times `coef`, to that of each optimizer step.

    Raises ConfigError: fewer images than processes.
    """

    def __init__(self, parts: Parts, stop: Stop) -> None:
        given, options, own = parts.data.anchor, parts.resolved.run.data.anchor, parts.learner.context
        assert given is not None
        assert options is not None
        self.coef, self.optimizer, self.training = options.coef, parts.learner.optimizer, training_of(given.method)
        if given.options.per_iteration < own.world.size:
            raise ConfigError(
                f"data.anchor.per_update={options.per_update}: too few images for {own.world.size} processes",
                remedies=[Remedy({"data.anchor.per_update": own.world.size})],
            )
        optim = replace(own.optim, updates_per_iteration=own.optim.updates_per_iteration * own.method.passes)
        self.context = replace(own, method=given.method, optim=optim, seed=given.seed)
        self.collector = PairCollector(given, parts.sampling, self.context, stop)
        self.work: Work
        """The images of the iteration that was collected last."""
        parts.learner.add_gradient = self.add_gradient

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> None:
        """Read the images of an iteration. Raises as of `PairCollector.collect`."""
        rollout = self.collector.collect(iteration, timer, sums)
        credit = self.context.method.advantages(rollout.rewards, torch.ones(1))
        sums.add("anchor/unreadable", int(credit.dead.sum()))
        self.work = self.training.work(self.context, Iteration(iteration, rollout, credit, sums))

    def add_gradient(self, update: int, rows: int) -> None:
        """Add to the gradients that the weights have, as of the learner; their sum is divided by the global `rows`."""
        work, method = self.work, self.context.method
        whole, own = map(sum, zip(*self.context.world.gather((rows, work.sizes[update])), strict=True))
        weight = self.optimizer.scale * self.coef * whole / max(own, 1)
        for batch, counts in work.batches(update) if whole else ():
            output = method.loss(batch, self.context.networks)
            (output.loss * (weight if counts else 0.0)).backward()
            if counts:
                told = {"anchor/loss": output.metrics["policy/loss"]}
                work.iteration.sums.add_loss(replace(output, metrics=told), len(batch))
