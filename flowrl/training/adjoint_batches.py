"""The training data of Adjoint Matching: a rollout's trained steps, each with the lean adjoint after it.

With a_K = -strength dR/dx at the sample, and mu the mean of the untouched network's step, without CFG, in float32:

    a_k = (d mu(x_k) / dx_k)^T a_k+1        at the latents of the rollout

The exact a_k / a_K is the slope of E[x0 | x_k]: at most about half the largest std of the data, and 0 at pure noise.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.tensors import sent
from flowrl.models.base import ModelAdapter
from flowrl.rollout.outputs import training_guidance, unguided
from flowrl.samplers.base import step_std
from flowrl.training.base import Iteration, Setting, UpdateContext
from flowrl.training.edge_batches import EdgeBatches, EdgeTraining
from flowrl.training.gradient_batches import forwards, slope, transposed

STEEP = 0.6
"""Noise level above which an adjoint that grows is an error of the network's Jacobian."""


class AdjointTraining(EdgeTraining):
    climbs = True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.sampler.name != "ddim" or setting.sampler.default_noise_level() != 1:
            raise ConfigError(
                f"rollout.sampler={setting.rollout.sampler}: {setting.name} reaches its target only where the first "
                "noise says nothing of the sample, as with DDIM of eta 1",
                {"rollout.sampler": None},
            )

    def guidance(self, adapter: ModelAdapter, rollout: float) -> float:
        return training_guidance(adapter, rollout, None)

    def work(self, context: UpdateContext, iteration: Iteration) -> "AdjointBatches":
        return AdjointBatches(context, iteration)


class AdjointBatches(EdgeBatches):
    """This rank's edges of an iteration; `prepare` gives them the columns `adjoint` [E, ...] and `weight` [E]."""

    def prepare(self) -> None:
        plan, sums, config = self.rollout.plan, self.iteration.sums, self.context.method.config
        train, edges = torch.tensor(plan.train), self.rollout.edges
        adjoint, size = self._adjoints()
        every = torch.cat(self.context.world.gather(size))
        growth = every.mean(dim=0) / every[:, -1].mean().clamp(min=1e-30)
        for k in range(plan.train[0] + 1, len(plan)):
            sums.add(f"adjoint/growth/step{k:02d}", float(growth[k]))
        # What grows at one place is wrong at all before it.
        steep = (growth > (config.growth or torch.inf)) & (plan.schedule.sigmas > STEEP)
        least = int((steep * torch.arange(len(steep))).max())
        sums.add("adjoint/left_out", float((train < least).float().mean()))
        self.shares = [share[edges.step[share] >= least] for share in self.shares]
        process, sampler = self.adapter.process, self.context.networks.policy.sampler
        energy = (step_std(sampler, process, plan.steps(train, process)) * every[:, train + 1]).square().mean(dim=0)
        weight = torch.where(energy > 0, 1 / energy, 1.0) if config.normalise else torch.ones_like(energy)
        columns = {"adjoint": adjoint.flatten(0, 1), "weight": weight.repeat(len(size))}
        self.rollout = replace(self.rollout, edges=replace(edges, columns=columns))

    def _adjoints(self) -> tuple[Tensor, Tensor]:
        """(adjoint after each trained step [B, n, ...]; norms at all places of the grid [B, K + 1], 0 before those)."""
        context, rollout, train = self.context, self.rollout, self.rollout.plan.train
        x0, steps = rollout.samples.x0, len(rollout.plan)
        adjoint, size = x0.new_zeros(len(x0), len(train), *x0.shape[1:]), x0.new_zeros(len(x0), steps + 1)
        own = list(forwards(context, rollout, torch.arange(len(x0))))
        most = max(context.world.gather(len(own))) if context.sharded else len(own)
        # Every forward of a sharded network is one of all processes.
        for number, rows in enumerate([*own, *own[:1] * (most - len(own))]):
            gradient, metrics = slope(self, sent(x0[rows], context.world.device), rows)
            for name, value in metrics.items() if number < len(own) else ():
                self.iteration.sums.add(name, float(value.sum()), len(rows))
            a = -context.method.config.strength * gradient
            for k in reversed(range(train[0], steps)):
                size[rows, k + 1] = a.flatten(1).norm(dim=1).cpu()
                if k in train:
                    adjoint[rows, train.index(k)] = a.cpu()
                a = self._before(k, a, rows) if k > train[0] else a
        return adjoint, size

    def _before(self, k: int, a: Tensor, rows: Tensor) -> Tensor:
        """The adjoint of some samples before step k from that after it, [M, ...]."""
        rollout, edges, networks = self.rollout, self.rollout.edges, self.context.networks
        if k in rollout.plan.train:
            x = edges.nodes[edges.parent.reshape(len(rollout.rows), -1)[rows, rollout.plan.train.index(k)]]
        else:
            x = rollout.samples.kept[k].x[rows]
        step = rollout.plan.steps(torch.full((len(rows),), k), self.adapter.process, a.device)
        policy, cond = unguided(networks.policy), rollout.cond.index(rollout.rows[rows])
        with networks.weights.using("reference"):
            return transposed(lambda x: policy.transition(x, step, cond).mean, sent(x, a.device).float(), a)
