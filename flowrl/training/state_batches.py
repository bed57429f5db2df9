"""The training data of a method on the states of its rollout: kept latents, each forward of one domain."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.algorithms.base import StateMethod
from flowrl.core.errors import ConfigError
from flowrl.core.tensors import sent
from flowrl.core.types import Identity, SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import StepPlan
from flowrl.losses.batches import StateBatch
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.weights.roles import Weights
from flowrl.models.weights.teachers import with_teachers
from flowrl.training.base import Demand, Iteration, Setting, Training, UpdateContext, Work
from flowrl.training.microbatches import batch_keys, with_lengths
from flowrl.training.sharding import longest


class StateTraining(Training[StateMethod]):
    """Kept latents of a rollout, and teachers that are read before it."""

    rows_are = "steps"
    takes_sampler = True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.rollout.shared_noise and setting.sampler.default_noise_level() == 0:
            raise ConfigError(
                f"rollout.shared_noise=true: without noise in the steps it gives equal samples ({setting.name})",
                {"rollout.shared_noise": False},
            )
        for key, path in self.method.teaching.paths.values():
            if not Path(path).exists():
                raise ConfigError(f"{key}={path!r}: there is no such file or folder; give a LoRA, or a run's folder")

    def check_prompts(self, train: Sequence[Prompt], evaluated: Sequence[Prompt]) -> None:
        for number, prompt in enumerate(train, 1):
            try:
                self.method.teaching.number(prompt.metadata)
            except ValueError as error:
                raise ConfigError.about(error, f"data.prompts: prompt {number}, {prompt.text[:60]!r}, ") from None

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        rows = self.method.steps([SampleId(0, 0)], plan, 1, setting.seed).numel()
        return Demand(rows=rows, share=1.0, latents=2 * len(plan.keep))

    def weights(
        self,
        adapter: ModelAdapter,
        options: ModelConfig,
        prompts: Sequence[Identity],
        seed: int,
        device: torch.device | str,
    ) -> Weights:
        weights, self.method.teaching.digests = with_teachers(adapter, options, seed, self.method.teaching.paths)
        return weights

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        return StateBatches(context, iteration)


class StateBatches(Work):
    """This rank's kept latents of an iteration, in shares of one update each."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        self.rollout = rollout = iteration.rollout
        method, ids, kept = context.method, rollout.samples.ids, iteration.credit.kept
        steps = method.steps(ids, rollout.plan, iteration.number, context.seed)
        self.step, self.sample = steps.flatten(), torch.arange(len(ids)).repeat_interleave(steps.shape[1])
        domains = [method.teaching.number(rollout.prompts[i.slot].metadata) for i in ids]
        self.domain = torch.tensor(domains, dtype=torch.int64)[self.sample]
        for number, chunk in enumerate(self.chunks(kept.flatten().nonzero().squeeze(1), kept.shape[1])):
            rows = torch.isin(rollout.identity[self.sample], chunk).nonzero().squeeze(1)
            self.shares.append(rows[self.order(len(rows), "states", number)])

    def batches(self, number: int) -> Iterator[tuple[StateBatch, bool]]:
        """Forwards of a share; of a sharded network every process makes the same ones of each domain and batch key."""
        own = list(self._forwards(self.shares[number]))
        most = Counter(key for key, _ in own)
        if self.context.sharded:
            most = longest(self.context.world.gather(most))
        for key, count in most.items():
            mine = [rows for each, rows in own if each == key]
            yield from ((self._batch(key, self.sample[rows], self.step[rows]), True) for rows in mine)
            for _ in range(count - len(mine)):
                with self.context.counter.uncounted():
                    yield self._batch(key, *self._spare(key)), False

    def _forwards(self, order: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(domain and batch key as one number, rows) of each forward."""
        adapter, rollout = self.context.networks.policy.adapter, self.rollout
        keys = self.domain[order] * len(rollout.plan) + batch_keys(adapter, self.step[order])
        apart = with_lengths(keys, adapter, rollout.cond, rollout.rows[self.sample[order]])
        for each in apart.unique():
            rows = order[apart == each]
            yield from ((int(keys[apart == each][0]), part) for part in rows.split(self.context.optim.batch_size))

    def _spare(self, key: int) -> tuple[Tensor, Tensor]:
        """(sample, step) of one row of that batch key, of whatever domain."""
        keep = torch.tensor(self.rollout.plan.keep)
        alike = batch_keys(self.context.networks.policy.adapter, keep) == key % len(self.rollout.plan)
        return torch.zeros(1, dtype=torch.int64), keep[alike][:1]

    def _batch(self, key: int, sample: Tensor, step: Tensor) -> StateBatch:
        context, rollout = self.context, self.rollout
        kept = rollout.samples.kept
        latents = torch.stack([kept[k].x[b] for k, b in zip(step.tolist(), sample.tolist(), strict=True)])
        return StateBatch(
            latents=sent(latents, context.world.device),
            step=rollout.plan.steps(step, context.networks.policy.adapter.process, context.world.device),
            cond=rollout.cond.index(rollout.rows[sample]),
            domain=key // len(rollout.plan),
        )
