"""Drawing samples with the parts of a run: conditions, the denoising loop, decoding, tables by identity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned, Diverged, ModelError
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.media.eight_bits import Album, EightBitImages
from flowrl.models.base import ModelAdapter, decoded
from flowrl.models.weights.whole import spoiled_weights
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.loop import RunOptions, batches, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.trajectories import Asked, Trajectories
from flowrl.samplers.base import Sampler, density_scale
from flowrl.training.divergence import Health
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parts of a run that draw its samples."""

    policy: Policy
    schedule: Schedule
    """The model's own grid for the rollout's number of steps."""
    texts: Texts
    counter: Evaluations
    """Counts the network's evaluations."""
    world: World
    sharded: bool = False
    """The network is split over the processes, so every forward is a step of all of them together."""
    learned: LearnedNoise | None = None
    """Distributions that the initial noise is drawn from; None: the standard one."""
    remedy: Callable[..., tuple[type[Diverged], str]] = lambda **known: (Diverged, "lower optim.learning_rate")
    """`divergence.remedy` of the run, which lacks `trained` and `in_decoder`."""

    @property
    def adapter(self) -> ModelAdapter:
        return self.policy.adapter

    @property
    def sampler(self) -> Sampler:
        return self.policy.sampler

    def require_finite(self, health: Health, when: str, *, trained: bool) -> None:
        """Warn of a few samples that are not finite; errors as of `Health.require_finite`.

        Raises:
            ModelError: most are not, nothing was trained, and the model's own weights are not finite.
        """
        if health.diverged and not trained:
            pipeline = self.adapter.pipeline
            parts = {"network": self.adapter.network} if pipeline is None else pipeline.components
            if (spoiled := spoiled_weights(parts.items())) is not None:
                raise ModelError(f"{health.message(when)}: {spoiled}")
        health.require_finite(when, self.remedy, trained=trained)

    def path_scale(self, plan: StepPlan) -> Tensor:
        """`density_scale` of every step of a plan, [K]."""
        process = self.adapter.process
        return density_scale(self.sampler, process, plan.steps(torch.arange(len(plan)), process))

    def asked(self, prompts: Sequence[Prompt], ids: Sequence[SampleId]) -> Asked:
        """The samples `ids` with the conditions of their prompts, which are listed by slot."""
        slots, rows = slots_and_rows(ids)
        return Asked(ids, self.texts.lookup([prompts[slot] for slot in slots]), rows)

    def draw(
        self,
        plan: StepPlan,
        noise: Noise,
        asked: Asked,
        *,
        batch_size: int,
        options: RunOptions,
        most: int | None = None,
    ) -> Trajectories:
        """Denoise this process's samples on its device.

        `batch_size` is in samples per forward. `most` is the number of samples of the process that has the most: with a
        sharded network every process makes as many batches as that one. None: all have the same number.
        """
        options = replace(options, device=self.world.device)
        # Agreed on before the first forward: from then on every forward is one of all processes.
        missing = self._missing(plan, asked, batch_size, most) if self.sharded else 0
        samples, edges = run(self.policy, plan, noise, asked, batch_size=batch_size, options=options)
        spare = RunOptions(device=options.device, stop=options.stop)
        for _ in range(missing):
            with self.counter.uncounted():
                run(self.policy, plan, noise, asked[: plan.leaves], batch_size=batch_size, options=spare)
        return Trajectories(plan, samples, edges, asked.cond, asked.rows)

    def _missing(self, plan: StepPlan, asked: Asked, batch_size: int, most: int | None) -> int:
        """Batches that another process makes in addition to those of this one."""
        if self.adapter.text_lengths(asked.cond) is not None:
            own = len(batches(self.adapter, plan, asked.cond, asked.rows, batch_size))
            return max(self.world.gather(own)) - own
        together = plan.drawn_together(batch_size)
        return 0 if most is None else math.ceil(most / together) - math.ceil(len(asked.ids) / together)

    def images(
        self, drawn: Trajectories, batch_size: int, *, health: Health | None = None, stop: Stop = NEVER
    ) -> EightBitImages:
        """Images or videos of all samples of this process, `batch_size` of them decoded at once.

        `health` counts those that are not finite; None: nobody asks.

        Raises:
            Abandoned: as `stop` says.
        """
        decoding = Decoding(self, len(drawn.rows), health or Health())
        for b in torch.arange(len(drawn.rows)).split(batch_size):
            if stop.here():
                raise Abandoned
            decoding.add(drawn.samples.x0[b], drawn.cond, drawn.rows[b])
        return decoding.whole()


class Decoding:
    """Images of `count` samples of this process, decoded and rounded to 8 bits batch by batch: one tensor on the CPU.

    `health` counts the samples that are not finite.
    """

    def __init__(self, sampling: Sampling, count: int, health: Health) -> None:
        self.sampling, self.health, self.album = sampling, health, Album(count)

    def add(self, x0: Tensor, cond: Condition, rows: Tensor) -> EightBitImages:
        """Images of the next clean latents [b, ...], whose rows in `cond` are `rows` [b]."""
        images = decoded(self.sampling.adapter, x0.to(self.sampling.world.device), cond, rows)
        return self.album.add(images, self.health.check(x0, images))

    def whole(self) -> EightBitImages:
        """The images of all samples, once each was added."""
        return self.album.whole()


def slots_and_rows(ids: Sequence[SampleId]) -> tuple[list[int], Tensor]:
    """(slots of B samples, ascending; row of its slot among them for each sample [B])."""
    slots = sorted({i.slot for i in ids})
    return slots, torch.tensor([slots.index(i.slot) for i in ids], dtype=torch.int64)


def by_identity(world: World, ids: Sequence[SampleId], values: Tensor, prompts: int, group: int) -> Tensor:
    """Numbers [K, B] of each process's samples as one table [K, P, G]; NaN where no process has the sample."""
    table = torch.full((len(values), prompts, group), torch.nan)
    for own, part in world.gather((list(ids), values)):
        slot, sample = torch.tensor([[i.slot, i.sample] for i in own], dtype=torch.int64).reshape(-1, 2).T
        table[:, slot, sample] = part
    return table
