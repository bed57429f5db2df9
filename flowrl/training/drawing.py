"""Samples that are drawn, decoded and scored together, some rewards beside the sampling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import StepPlan
from flowrl.display.display import Progress
from flowrl.media.eight_bits import EightBitImages
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Trajectories
from flowrl.scoring.asking import NOBODY, Asking
from flowrl.scoring.overlap import Ahead
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.training.determinism import strict
from flowrl.training.divergence import Health
from flowrl.training.metrics import Timer
from flowrl.training.sampling import Decoding, Sampling, by_identity
from flowrl.training.signals import Stop
from flowrl.training.world import World, largest_shard, shard


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
class Wanted:
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


def groups_of(
    world: World, iteration: int, prompts: Sequence[Prompt], group: int, plan: StepPlan, noise: Noise, batch_size: int
) -> Wanted:
    """This process's share of a group of samples for every prompt of an iteration."""
    own = shard(len(prompts), group, world.rank, world.size, plan.leaves)
    return Wanted(
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

    def __init__(self, sampling: Sampling, scorer: Scorer, wanted: Wanted, timer: Timer, stop: Stop) -> None:
        self.sampling, self.wanted, self.timer, self.stop = sampling, wanted, timer, stop
        self.health = Health()
        self.decoding = Decoding(sampling, len(wanted.ids), self.health)
        self.bar = Progress(len(wanted.ids), f"{wanted.when}: {wanted.work}", show=sampling.world.main)
        prompts = [wanted.prompts[i.slot] for i in wanted.ids]
        self.ahead = Ahead(scorer, [p.text for p in prompts], [p.metadata for p in prompts], sampling.world.device)

    def __call__(self) -> Draw:
        """The samples.

        Raises:
            Abandoned, Diverged, RewardError: on all processes.
            Elsewhere: another process failed otherwise.
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
        wanted = self.wanted
        with self.timer.phase("text"):
            asked = self.sampling.asked(wanted.prompts, wanted.ids)
        options = RunOptions(recording=wanted.recording, progress=self.bar.update, stop=self.stop.in_step)
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
            return Draw(drawn, images, self.ahead.scores(images))
