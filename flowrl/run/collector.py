"""The first half of an iteration: prompts, samples, images and scores; exploration of a larger pool of candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.types import Condition, SampleId
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.credit.shares import variance_shares
from flowrl.credit.tree_credit import log_probs_on_ways
from flowrl.data.prompts import Prompt, PromptSource, identity
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.display.console import log
from flowrl.display.display import Progress
from flowrl.media.eight_bits import EightBitImages
from flowrl.rollout.exploration import choose, fidelity
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.preview import Preview
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import NoiseDraws, Rollout, Trajectories
from flowrl.run.assembly import Parts
from flowrl.scoring.asking import NOBODY, Asking
from flowrl.scoring.overlap import Ahead
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.training.dead_groups import DeadGroups, largest, spread
from flowrl.training.determinism import strict
from flowrl.training.divergence import Health
from flowrl.training.image_std import group_image_std
from flowrl.training.metrics import Sums, Timer
from flowrl.training.noise_batches import numbers_of
from flowrl.training.sampling import Decoding, Sampling, by_identity
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import largest_shard, shard


@dataclass(frozen=True, slots=True)
class Draw:
    """This process's samples with their images and scores."""

    drawn: Trajectories
    images: EightBitImages
    scores: Scores


@dataclass(frozen=True, slots=True)
class Wanted:
    """Samples that are drawn, decoded and scored together."""

    when: str
    """The iteration or round, for the progress bar and messages: "iteration 3"."""
    work: str
    """The work, for the progress bar: "sampling"."""
    prompts: Sequence[Prompt]
    """By slot."""
    ids: Sequence[SampleId]
    """This process's samples."""
    plan: StepPlan
    noise: Noise
    batch_size: int
    """Samples per forward."""
    recording: Recording = field(default_factory=Recording)
    most: int | None = None
    """Samples of the process that has the most; None: all have the same number."""
    trained: bool = False
    """The weights have moved, for the advice of a failure."""
    asking: Asking = NOBODY
    """The part of the iteration in which people may judge."""


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


class Collector:
    """Makes the rollouts of a run; `training` False leaves out what only rollouts need.

    Raises:
        ModelError: exploration needs a copy of the network that cannot be made.
    """

    def __init__(self, parts: Parts, stop: Stop = NEVER, *, training: bool = True) -> None:
        source, scorer = parts.data.source, parts.scorers.trained
        assert scorer is not None
        assert isinstance(source, PromptSource)
        self.scorer, self.source, self.stop = scorer, source, stop
        self.sampling, self.learner, self.maps = parts.sampling, parts.learner, parts.maps
        self.config, self.world, self.method = parts.resolved.run, parts.sampling.world, parts.learner.method
        self.evaluations = parts.sampling.counter
        self.weights = torch.tensor([e.weight for e in self.scorer.entries])
        self.dead_groups = DeadGroups(self.scorer.entries)
        self.options = self.config.rollout.exploration
        self.explores, self.fidelity = self.options is not None, None
        if self.options is not None and training:
            self.preview = Preview(self.sampling.adapter, self.options.network, self.evaluations.watch)

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        """The rollout of an iteration; prompts that the method retires are no longer drawn.

        Raises:
            Abandoned, Diverged, RewardError: on all processes; the samples are lost.
            Elsewhere: another process failed otherwise.
        """
        sampling, group = self.sampling, self.config.rollout.group_size
        numbers = self.source.draw(iteration)
        prompts, noise = [self.source.prompts[k] for k in numbers], self.noise(iteration)
        plan = self.method.plan(sampling.schedule, sampling.sampler, iteration, self.config.seed)
        maps, learned, before = None, None, self.evaluations.rows
        looked: tuple[Tensor, Tensor] | None = None
        with self.learner.networks.weights.using(self.method.behaviour):
            if sampling.learned is not None:
                learned = numbers_of(sampling.learned, prompts)
                noise = replace(noise, distributions=sampling.learned.drawn_from(learned))
            if self.explores:
                looked = self._explore(iteration, prompts, noise, timer)
                noise = replace(noise, chosen=looked[0])
                own = shard(len(prompts), group, self.world.rank, self.world.size)
                sums.add("nfe/explore", self.evaluations.rows - before, len(own))
                before = self.evaluations.rows
            wanted = self._wanted(iteration, "sampling", prompts, group, plan, noise)
            recording = self.learner.training.recording(sampling.sampler)
            wanted = replace(wanted, recording=recording, asking=self.scorer.asking(iteration))
            result = Drawing(sampling, self.scorer, wanted, timer, self.stop)()
        if self.maps is not None:
            with timer.phase("maps"):
                maps = self.maps(result.images.levels)
        sums.add("nfe/rollout", self.evaluations.rows - before, len(result.drawn.rows))
        rewards, raw = self._gather(result, len(prompts), group)
        if looked is not None:
            self._report(*looked, aggregate(rewards, self.weights), sums)
        gone = self.method.retired(rewards, self.weights)
        slots = torch.tensor([sample.slot for sample in result.drawn.samples.ids])
        self.source.retire(iteration, [k for k, done in zip(numbers, gone.tolist(), strict=True) if done])
        return result.drawn.scored(
            rewards,
            raw=raw,
            prompts=tuple(identity(p) for p in prompts),
            image_std=group_image_std(result.images, slots, self.world.device, self.world),
            maps=maps,
            noise=None if learned is None else NoiseDraws(noise.initial(result.drawn.samples.ids), learned),
            paths=self._paths(result.drawn, rewards),
        )

    def _wanted(
        self, iteration: int, work: str, prompts: Sequence[Prompt], group: int, plan: StepPlan, noise: Noise
    ) -> Wanted:
        """This process's share of a group of samples for every prompt."""
        own = shard(len(prompts), group, self.world.rank, self.world.size, plan.leaves)
        return Wanted(
            when=f"iteration {iteration}",
            work=work,
            prompts=prompts,
            ids=[SampleId(*pair) for pair in own],
            plan=plan,
            noise=noise,
            batch_size=self.config.rollout.batch_size,
            most=largest_shard(len(prompts), group, self.world.size, plan.leaves),
            trained=iteration > 1,
        )

    def _paths(self, drawn: Trajectories, rewards: Tensor) -> Tensor | None:
        """Log-probs of all samples along the paths of a tree, [P, G, K]; None where credit does not weigh them."""
        if drawn.plan.tree is None or not self.method.weighs_paths:
            return None
        own = log_probs_on_ways(drawn.edges, drawn.samples.ids, drawn.plan, self.sampling.path_scale(drawn.plan))
        return by_identity(self.world, drawn.samples.ids, own, *rewards.shape[1:]).permute(1, 2, 0)

    def noise(self, iteration: int) -> Noise:
        """Noise of an iteration's rollout."""
        shape, rollout = self.sampling.adapter.latent_shape(), self.config.rollout
        return Noise(self.config.seed, "rollout", iteration, shape, rollout.shared_noise)

    def _gather(self, own: Draw, prompts: int, group: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores of all processes by identity: training values [R, P, G] and raw outputs, name -> [P, G]."""
        names, count = list(own.scores.raw), len(own.scores.values)
        values = torch.cat([own.scores.values, *(own.scores.raw[name][None] for name in names)])
        table = by_identity(self.world, own.drawn.samples.ids, values, prompts, group)
        return table[:count], dict(zip(names, table[count:], strict=True))

    def metrics_row(self, rollout: Rollout, credit: Advantages) -> dict[str, Any]:
        """Metrics of an iteration's samples."""
        total = rollout.rewards.nan_to_num().mul(self.weights[:, None, None]).sum(0)
        row: dict[str, Any] = {"reward/total_mean": float(total[credit.valid].mean())}
        for name, table in rollout.raw.items():
            scored = table[table.isfinite()]
            row[f"reward/{name}_mean"] = float(scored.mean()) if len(scored) else math.nan
        row["reward/group_std"] = spread(total)
        row["reward/masked"] = int((~credit.valid).sum())
        counted = self.world.gather(self.scorer.take_counts())
        row |= {f"reward/{name}": sum(part[name] for part in counted) for name in counted[0]}
        row["advantage/dead_group_share"] = float(credit.dead.float().mean())
        row["advantage/largest"] = largest(credit)
        entries = self.dead_groups.entries
        shares = variance_shares(rollout.rewards, self.weights, credit.valid) if len(entries) > 1 else None
        for entry, share in zip(entries, shares or (), strict=False):
            row[f"advantage/{next(iter(entry.shares()))}_share"] = share
        text = self.dead_groups.warning(rollout, credit)
        if text is not None and self.world.main:
            log.warning("%s", text)
        row["sample/group_spread"] = rollout.image_std
        return row

    @property
    def exhausted(self) -> bool:
        """Every prompt is retired."""
        return self.source.exhausted

    # ---- exploration

    def _explore(self, iteration: int, prompts: Sequence[Prompt], noise: Noise, timer: Timer) -> tuple[Tensor, Tensor]:
        """(numbers of the chosen candidates [P, G], their scores by the first look [P, N])."""
        options, group, seed = self.options, self.config.rollout.group_size, self.config.seed
        assert options is not None
        with timer.phase("explore"):
            scores = self.look(iteration, prompts, noise)
        if self.fidelity is None and options.check_prompts:
            self._check(iteration, prompts[: options.check_prompts], noise, scores)
        if not self.explores:  # the check has just ended it
            return torch.arange(group).expand(len(prompts), group), scores
        return choose(scores, group, options.select, (seed, iteration)), scores

    def look(self, iteration: int, prompts: Sequence[Prompt], noise: Noise) -> Tensor:
        """Scores of every candidate by the first look, [P, N]."""
        options = self.options
        assert options is not None
        grid = self.sampling.adapter.schedule(options.num_inference_steps or self.config.rollout.num_inference_steps)
        self.preview.follow()
        with self.preview.using():
            return self._pool(grid, iteration, prompts, noise, options.batch_size)

    def truth(self, iteration: int, prompts: Sequence[Prompt], noise: Noise) -> Tensor:
        """Scores of every candidate drawn in full, [P, N]."""
        return self._pool(self.sampling.schedule, iteration, prompts, noise, None)

    def _pool(
        self, grid: Schedule, iteration: int, prompts: Sequence[Prompt], noise: Noise, batch_size: int | None
    ) -> Tensor:
        assert self.options is not None
        pool = self.options.pool
        plan = self.method.plan(grid, self.sampling.sampler, iteration, self.config.seed)
        wanted = self._wanted(iteration, "exploring", prompts, pool, plan, noise)
        wanted = replace(wanted, batch_size=batch_size or wanted.batch_size)
        result = Drawing(self.sampling, self.scorer, wanted, Timer(), self.stop)()
        return aggregate(self._gather(result, len(prompts), pool)[0], self.weights)

    def _check(self, iteration: int, prompts: Sequence[Prompt], noise: Noise, scores: Tensor) -> None:
        """Draw the whole pool of some prompts in full, and stop exploring where the first look ranks it otherwise."""
        options = self.options
        assert options is not None
        truth = self.truth(iteration, prompts, noise)
        result = fidelity(scores[: len(prompts)], truth, self.config.rollout.group_size)
        self.fidelity = asdict(result)
        log.info("exploration: %s", result)
        if result.prompts and not result.hit_rate >= options.least_hit_rate:
            self.explores = False
            log.warning(
                "exploration finds %.0f %% of the best and worst candidates, less than the %.0f %% of "
                "rollout.exploration.least_hit_rate: the run goes on without it; give the first look more steps",
                100 * result.hit_rate,
                100 * options.least_hit_rate,
            )

    def _report(self, chosen: Tensor, looked: Tensor, drawn: Tensor, sums: Sums) -> None:
        """Metrics of how the scores of the chosen agree, which is less than over the pool: they are extremes."""
        if not self.world.main:
            return
        result = fidelity(looked.gather(1, chosen), drawn, chosen.shape[1])
        if result.prompts:
            sums.add("exploration/rank_correlation", result.spearman)
        sums.add("exploration/first_look", float(looked.nanmean()))

    def state_dict(self) -> dict[str, Any]:
        return {"explores": self.explores, "fidelity": self.fidelity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.explores, self.fidelity = state["explores"] and self.options is not None, state["fidelity"]
