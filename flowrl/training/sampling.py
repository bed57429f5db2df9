"""Drawing samples with the parts of a run: conditions, the denoising loop, decoding, scores, tables by identity."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned, Diverged, ModelError
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.display.display import Progress
from flowrl.media.eight_bits import Album, EightBitImages
from flowrl.models.base import ModelAdapter, decoded
from flowrl.models.weights.whole import spoiled_weights
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.loop import RunOptions, Slope, batches, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Asked, Trajectories
from flowrl.samplers.base import Sampler, density_scale
from flowrl.scoring.asking import NOBODY, Asking
from flowrl.scoring.overlap import Ahead
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.scoring.surroundings import Latents
from flowrl.training.determinism import strict
from flowrl.training.divergence import Health
from flowrl.training.metrics import Timer
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World, largest_shard, shard


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

        Raises ModelError: most are not, nothing was trained, and the model's own weights are not finite.
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

        Raises Abandoned: as `stop` says.
        """
        decoding = Decoding(self, len(drawn.rows), health or Health())
        for b in torch.arange(len(drawn.rows)).split(batch_size):
            if stop.here():
                raise Abandoned
            decoding.add(drawn.samples.x0[b], drawn.cond, drawn.rows[b])
        return decoding.whole()


class Decoding:
    """Images of `count` samples of this process, decoded and rounded to 8 bits batch by batch: one tensor on the CPU.

    `health` counts the samples that are not finite; `blind`: nobody looks at the images, so they have no pixels.
    """

    def __init__(self, sampling: Sampling, count: int, health: Health, *, blind: bool = False) -> None:
        self.sampling, self.health, self.album, self.blind = sampling, health, Album(count), blind

    def add(self, x0: Tensor, cond: Condition, rows: Tensor) -> EightBitImages:
        """Images of the next clean latents [b, ...], whose rows in `cond` are `rows` [b]."""
        x0 = x0.to(self.sampling.world.device)
        images = x0.new_zeros(len(x0), 3, 0, 0) if self.blind else decoded(self.sampling.adapter, x0, cond, rows)
        return self.album.add(images, self.health.check(x0, images))

    def whole(self) -> EightBitImages:
        """The images of all samples, once each was added."""
        return self.album.whole()


@dataclass(frozen=True, slots=True)
class Draw:
    """This process's samples with their images and scores."""

    drawn: Trajectories
    images: EightBitImages
    scores: Scores

    def gathered(self, world: World, prompts: int, group: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores of all processes by identity: training values [R, P, G] and raw outputs, name -> [P, G]."""
        names, count = list(self.scores.raw), len(self.scores.values)
        values = torch.cat([self.scores.values, *(self.scores.raw[name][None] for name in names)])
        table = by_identity(world, self.drawn.samples.ids, values, prompts, group)
        return table[:count], dict(zip(names, table[count:], strict=True))


@dataclass(frozen=True, slots=True)
class Share:
    """Samples that are drawn, decoded and scored together."""

    when: str
    """The iteration or round, for the progress bar and messages: "iteration 3"."""
    prompts: Sequence[Prompt]
    """By slot."""
    ids: Sequence[SampleId]
    """This process's samples."""
    plan: StepPlan
    noise: Noise
    batch_size: int
    """Samples per forward."""
    work: str = "sampling"
    """For the progress bar."""
    recording: Recording = field(default_factory=Recording)
    most: int | None = None
    """Samples of the process that has the most; None: all have the same number."""
    trained: bool = False
    """The weights have moved, for the advice of a failure."""
    asking: Asking = NOBODY
    """The part of the iteration in which people may judge."""
    slope: Slope | None = None
    """Of the judge that a tilt of the plan follows."""
    shown: bool = True
    """False: rewards alone look at the images, so that none are decoded for those on latents."""


def groups_of(
    world: World, iteration: int, prompts: Sequence[Prompt], group: int, plan: StepPlan, noise: Noise, batch_size: int
) -> Share:
    """This process's share of a group of samples for every prompt of an iteration."""
    own = shard(len(prompts), group, world.rank, world.size, plan.leaves)
    return Share(
        when=f"iteration {iteration}",
        prompts=prompts,
        ids=[SampleId(*pair) for pair in own],
        plan=plan,
        noise=noise,
        batch_size=batch_size,
        most=largest_shard(len(prompts), group, world.size, plan.leaves),
        trained=iteration > 1,
    )


class Drawing:
    """One draw of this process's samples: denoised, decoded and scored. `timer` receives the seconds of each phase."""

    def __init__(self, sampling: Sampling, scorer: Scorer, wanted: Share, timer: Timer, stop: Stop) -> None:
        self.sampling, self.wanted, self.timer, self.stop = sampling, wanted, timer, stop
        self.health = Health()
        blind = not (wanted.shown or scorer.sees_images)
        self.decoding = Decoding(sampling, len(wanted.ids), self.health, blind=blind)
        self.bar = Progress(len(wanted.ids), f"{wanted.when}: {wanted.work}", show=sampling.world.main)
        prompts = [wanted.prompts[i.slot] for i in wanted.ids]
        self.ahead = Ahead(scorer, [p.text for p in prompts], [p.metadata for p in prompts], sampling.world.device)

    def __call__(self) -> Draw:
        """The samples.

        Raises Abandoned, Diverged, RewardError: on all processes; Elsewhere: another process failed otherwise.
        """
        try:
            # The forwards of a network that is split are no work of one process alone.
            drawn = self._sample() if self.sampling.sharded else None

            def scored() -> Draw:
                with self.wanted.asking:
                    return self._scored(drawn or self._sample())

            return self.sampling.world.in_step(scored)
        finally:
            self.ahead.close()
            self.bar.close()

    def _sample(self) -> Trajectories:
        wanted, stop = self.wanted, self.stop.in_step
        with self.timer.phase("text"):
            asked = self.sampling.asked(wanted.prompts, wanted.ids)
        options = RunOptions(recording=wanted.recording, progress=self.bar.update, stop=stop, slope=wanted.slope)
        if self.ahead:  # without a reward that scores during sampling, the VAE waits for the end
            options = replace(options, finished=lambda start, x0: self._decode(x0, asked.cond, asked.rows[start:]))
        # A setting of the process: a reward at work in a thread must not meet the strict one.
        with self.timer.phase("rollout"), nullcontext() if self.ahead else strict():
            size, most = wanted.batch_size, wanted.most
            return self.sampling.draw(wanted.plan, wanted.noise, asked, batch_size=size, options=options, most=most)

    def _decode(self, x0: Tensor, cond: Condition, rows: Tensor) -> None:
        """Decode the next samples [b, ...], whose rows come first in `rows`, for the rewards that overlap."""
        self.ahead.quiet()
        with self.timer.phase("decode"):
            images = self.decoding.add(x0, cond, rows[: len(x0)])
        # Of a sharded network every forward needs all processes: what a reward raises must wait.
        self.ahead.add(images, early=not self.sampling.sharded)

    def _scored(self, drawn: Trajectories) -> Draw:
        if not self.ahead:
            for start in range(0, len(drawn.rows), self.wanted.batch_size):
                if self.stop.here():
                    raise Abandoned
                part = drawn.samples.x0[start : start + self.wanted.batch_size]
                self._decode(part, drawn.cond, drawn.rows[start:])
        self.sampling.require_finite(self.health, f"in {self.wanted.when}", trained=self.wanted.trained)
        with self.timer.phase("reward"):
            images = self.decoding.whole()
            finite = zip(self.wanted.ids, images.finite.tolist(), strict=True)
            self.wanted.asking.begin([one for one, good in finite if good], self.sampling.adapter.fps)
            return Draw(drawn, images, self.ahead.scores(images, latents_of(drawn)))


def latents_of(drawn: Trajectories) -> Latents:
    """The finished latents of samples, for rewards that judge those."""
    return Latents(drawn.samples.x0, drawn.cond, drawn.rows)


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
