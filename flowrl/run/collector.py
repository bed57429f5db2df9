"""The first half of an iteration: prompts, samples, pictures, scores, and a look at a larger pool where asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.core.console import Progress, log
from flowrl.core.errors import Abandoned
from flowrl.core.types import Edges, SampleId, Samples
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.credit.tree_credit import log_probs_on_ways
from flowrl.data.prompts import Prompt, PromptSource, identity
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.models.base import decoded
from flowrl.rollout.exploration import choose, fidelity
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.preview import Preview
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Asked, NoiseDraws, Rollout, Trajectories
from flowrl.run.assembly import Parts
from flowrl.scoring.overlap import Ahead
from flowrl.scoring.scorer import Scores
from flowrl.training.dead_groups import DeadGroups
from flowrl.training.divergence import Health
from flowrl.training.metrics import Sums, Timer
from flowrl.training.noise_batches import numbers_of
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World, largest_shard, shard


@dataclass(frozen=True, slots=True)
class Draw:
    """This process's part of a group of samples for every prompt."""

    drawn: Trajectories
    images: Tensor
    scores: Scores


@dataclass(frozen=True, slots=True)
class Wanted:
    """A group of samples for every prompt, over all processes."""

    text: str
    """Of the progress bar."""
    prompts: Sequence[Prompt]
    group: int
    plan: StepPlan
    noise: Noise
    recording: Recording = field(default_factory=Recording)
    batch_size: int | None = None
    """Samples per forward; None: the rollout's."""


class Drawing:
    """One draw of this process's part: sampled, decoded and scored.

    Args:
        parts: of the run.
        wanted: the samples.
        timer: takes the seconds of each phase.
        stop: whether to leave off.
    """

    def __init__(self, parts: Parts, wanted: Wanted, timer: Timer, stop: Stop) -> None:
        self.parts, self.wanted, self.timer, self.stop, self.world = parts, wanted, timer, stop, parts.world
        self.size = wanted.batch_size or parts.resolved.run.rollout.batch_size
        own = shard(len(wanted.prompts), wanted.group, self.world.rank, self.world.size, wanted.plan.leaves)
        self.ids = [SampleId(*pair) for pair in own]
        self.bar, self.health = Progress(len(self.ids), wanted.text, show=self.world.main), Health()
        asked = [wanted.prompts[i.slot] for i in self.ids]
        assert parts.scorer is not None
        self.ahead = Ahead(parts.scorer, [p.text for p in asked], [p.metadata for p in asked])
        self.images: list[Tensor] = []

    def __call__(self) -> Draw:
        """The samples.

        Raises:
            Abandoned, Diverged, RewardError: on all processes.
            Elsewhere: another process failed otherwise.
        """
        slots, rows = slots_and_rows(self.ids)
        try:
            with self.timer.phase("text"):
                cond = self.parts.texts.lookup([self.wanted.prompts[slot] for slot in slots])
            self.asked = Asked(self.ids, cond, rows)
            # The forwards of a network that is split are no work of one process alone.
            drawn = self._sample() if self.parts.sharded else None
            return self.world.in_step(lambda: self._scored(drawn or self._sample()))
        finally:
            self.ahead.close()
            self.bar.close()

    def _sample(self) -> tuple[Samples, Edges]:
        wanted = self.wanted
        options = RunOptions(recording=wanted.recording, progress=self.bar.update, stop=self.stop.in_step)
        if self.ahead:  # without a reward that scores beside sampling, the VAE waits for the end
            options = replace(options, finished=self._decode)
        with self.timer.phase("rollout"):
            whole = (len(wanted.prompts), wanted.group)
            return drawn_in_step(self.parts, wanted.plan, wanted.noise, self.asked, whole, options, self.size)

    def _decode(self, start: int, x0: Tensor) -> None:
        with self.timer.phase("decode"):
            cond, rows = self.asked.cond, self.asked.rows[start : start + len(x0)]
            made = decoded(self.parts.adapter, x0.to(self.world.device), cond, rows).cpu()
            self.images.append(self.health.seen(x0, made))
        # Of a sharded network every forward needs all processes: what a reward raises must wait.
        self.ahead.add(self.images[-1], early=not self.parts.sharded)

    def _scored(self, drawn: tuple[Samples, Edges]) -> Draw:
        samples, edges = drawn
        if not self.ahead:
            for start in range(0, len(self.ids), self.size):
                if self.stop.here():
                    raise Abandoned
                self._decode(start, samples.x0[start : start + self.size])
        self._require_finite()
        with self.timer.phase("reward"):
            images = torch.cat(self.images)
            self.images.clear()  # a reward gets a copy: there are never three
            trajectories = Trajectories(self.wanted.plan, samples, edges, self.asked.cond, self.asked.rows)
            return Draw(trajectories, images, self.ahead.scores(images))

    def _require_finite(self) -> None:
        """Raise Diverged where most samples are not finite; a few are told of, and have no score."""
        health, iteration = self.health, self.wanted.noise.iteration or 0
        if health.diverged:
            why = self.parts.evaluator.remedy(trained=iteration > 1, in_decoder=health.in_decoder)
            raise health.error(f"since iteration {iteration}", why)
        if health.spoiled:
            log.warning("%s; they have no score", health.message(f"in iteration {iteration}"))


class Collector:
    """Makes the rollouts of a run.

    Args:
        parts: of the run.
        stop: whether to leave off.
        training: False leaves out what only rollouts need.

    Raises:
        ModelError: exploration wants a copy of the network that cannot be made.
    """

    def __init__(self, parts: Parts, stop: Stop = NEVER, *, training: bool = True) -> None:
        self.parts, self.stop = parts, stop
        self.config, self.world = parts.resolved.run, parts.world
        self.evaluations = parts.learner.context.counter
        assert parts.scorer is not None
        assert isinstance(parts.source, PromptSource)
        self.scorer, self.source = parts.scorer, parts.source
        self.weights = torch.tensor([e.weight for e in self.scorer.entries])
        self.dead_groups = DeadGroups(self.scorer.entries)
        self.options = self.config.rollout.exploration
        self.explores, self.fidelity = self.options is not None, None
        if self.options is not None and training:
            self.preview = Preview(parts.adapter, self.options.network, self.evaluations.watch)

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        """The rollout of an iteration; prompts that the method is done with are drawn no more.

        Raises:
            Abandoned, Diverged, RewardError: on all processes; what was drawn is lost.
            Elsewhere: another process failed otherwise.
        """
        parts, config = self.parts, self.config
        numbers = self.source.draw(iteration)
        prompts = [self.source.prompts[k] for k in numbers]
        plan = parts.algorithm.plan(parts.schedule, parts.sampler, iteration, config.seed)
        noise = self.noise(iteration)
        maps, learned, before = None, None, self.evaluations.rows
        looked: tuple[Tensor, Tensor] | None = None
        with parts.weights.using(parts.algorithm.behaviour):
            if parts.learned is not None:
                learned = numbers_of(parts.learned, prompts)
                noise = replace(noise, distributions=parts.learned.drawn_from(learned))
            if self.explores:
                looked = self._explore(iteration, prompts, noise, timer)
                noise = replace(noise, chosen=looked[0])
                sums.add("nfe/explore", self.evaluations.rows - before, self._own(len(prompts)))
                before = self.evaluations.rows
            text, recording = f"iteration {iteration}: sampling", parts.learner.training.recording(parts.sampler)
            wanted = Wanted(text, prompts, config.rollout.group_size, plan, noise, recording)
            result = Drawing(parts, wanted, timer, self.stop)()
        if parts.maps is not None:
            with timer.phase("maps"):
                maps = parts.maps(result.images)
        sums.add("nfe/rollout", self.evaluations.rows - before, len(result.drawn.rows))
        rewards, raw = self._gather(result, len(prompts), config.rollout.group_size)
        if looked is not None:
            self._report(*looked, aggregate(rewards, self.weights), sums)
        gone = parts.algorithm.retired(rewards, self.weights)
        self.source.retire(iteration, [k for k, done in zip(numbers, gone.tolist(), strict=True) if done])
        return result.drawn.scored(
            rewards,
            raw=raw,
            prompts=tuple(identity(p) for p in prompts),
            image_std=_group_image_std(result.images, result.drawn.rows),
            maps=maps,
            noise=None if learned is None else NoiseDraws(noise.initial(result.drawn.samples.ids), learned),
            paths=self._paths(result.drawn, rewards),
        )

    def _paths(self, drawn: Trajectories, rewards: Tensor) -> Tensor | None:
        """Everybody's log-probs along the ways of a tree, [P, G, K], where credit asks for them."""
        if drawn.plan.tree is None or not self.parts.algorithm.weighs_paths:
            return None
        own = log_probs_on_ways(drawn.edges, drawn.samples.ids, drawn.plan)
        return by_identity(self.world, drawn.samples.ids, own, *rewards.shape[1:]).permute(1, 2, 0)

    def noise(self, iteration: int) -> Noise:
        """Of an iteration's rollout."""
        shape, rollout = self.parts.adapter.latent_shape(), self.config.rollout
        return Noise(self.config.seed, "rollout", iteration, shape, rollout.shared_noise)

    def _own(self, prompts: int) -> int:
        return len(shard(prompts, self.config.rollout.group_size, self.world.rank, self.world.size))

    def _gather(self, found: Draw, prompts: int, group: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Everybody's scores by identity: [R, P, G] and name -> [P, G]."""
        names, count = list(found.scores.raw), len(found.scores.values)
        values = torch.cat([found.scores.values, *(found.scores.raw[name][None] for name in names)])
        table = by_identity(self.world, found.drawn.samples.ids, values, prompts, group)
        return table[:count], dict(zip(names, table[count:], strict=True))

    def metrics_row(self, rollout: Rollout, credit: Advantages) -> dict[str, Any]:
        """What an iteration's row says of its samples."""
        total = rollout.rewards.nan_to_num().mul(self.weights[:, None, None]).sum(0)
        row: dict[str, Any] = {"reward/total_mean": float(total[credit.valid].mean())}
        for name, table in rollout.raw.items():
            scored = table[table.isfinite()]
            row[f"reward/{name}_mean"] = float(scored.mean()) if len(scored) else math.nan
        row["reward/group_std"] = float(total.std(dim=1, correction=0).mean())
        row["reward/masked"] = int((~credit.valid).sum())
        counted = self.world.gather(self.scorer.take_counts())
        row |= {f"reward/{name}": sum(part[name] for part in counted) for name in counted[0]}
        row["advantage/dead_group_share"] = float(credit.dead.float().mean())
        text = self.dead_groups.look(rollout, credit)
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
        """(chosen candidates [P, G], scores of the first look [P, N])."""
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
        options, parts = self.options, self.parts
        assert options is not None
        grid = parts.adapter.schedule(options.num_inference_steps or self.config.rollout.num_inference_steps)
        self.preview.follow()
        with self.preview.using():
            return self._pool(grid, iteration, prompts, noise, options.batch_size)

    def truth(self, iteration: int, prompts: Sequence[Prompt], noise: Noise) -> Tensor:
        """Scores of every candidate drawn in full, [P, N]."""
        return self._pool(self.parts.schedule, iteration, prompts, noise, None)

    def _pool(
        self, grid: Schedule, iteration: int, prompts: Sequence[Prompt], noise: Noise, batch_size: int | None
    ) -> Tensor:
        assert self.options is not None
        plan = self.parts.algorithm.plan(grid, self.parts.sampler, iteration, self.config.seed)
        pool, text = self.options.pool, f"iteration {iteration}: exploring"
        wanted = Wanted(text, prompts, pool, plan, noise, batch_size=batch_size)
        result = Drawing(self.parts, wanted, Timer(), self.stop)()
        return aggregate(self._gather(result, len(prompts), pool)[0], self.weights)

    def _check(self, iteration: int, prompts: Sequence[Prompt], noise: Noise, scores: Tensor) -> None:
        """Draw the whole pool of some prompts in full: does the first look rank it alike?"""
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
        """How the scores of the chosen agree, which is less than over the pool: they are extremes."""
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


def _group_image_std(images: Tensor, rows: Tensor) -> float:
    """Mean over prompts of the std of pixels over the group's samples; near 0 means collapse."""
    spreads = [images[rows == row].std(dim=0, correction=0).mean() for row in rows.unique()]
    return float(torch.stack(spreads).mean())


def slots_and_rows(ids: Sequence[SampleId]) -> tuple[list[int], Tensor]:
    """(slots of B samples, ascending; row of its slot among them for each sample [B])."""
    slots = sorted({i.slot for i in ids})
    return slots, torch.tensor([slots.index(i.slot) for i in ids], dtype=torch.int64)


def by_identity(world: World, ids: Sequence[SampleId], values: Tensor, prompts: int, group: int) -> Tensor:
    """Everybody's numbers [K, B] of their own samples as one table [K, P, G]; NaN where nobody has the sample."""
    table = torch.full((len(values), prompts, group), torch.nan)
    for own, part in world.gather((list(ids), values)):
        slot, sample = torch.tensor([[i.slot, i.sample] for i in own], dtype=torch.int64).reshape(-1, 2).T
        table[:, slot, sample] = part
    return table


def drawn_in_step(
    parts: Parts,
    plan: StepPlan,
    noise: Noise,
    asked: Asked,
    whole: tuple[int, int],
    options: RunOptions,
    batch_size: int,
) -> tuple[Samples, Edges]:
    """A rollout on the run's device, and of a sharded network as many batches as the longest share of the processes.

    Args:
        parts: of the run.
        plan: the denoising steps.
        noise: keyed noise.
        asked: this process's samples.
        whole: prompts and samples of each, over all processes.
        options: of `rollout.loop.run`.
        batch_size: samples per network forward.
    """
    options = replace(options, device=parts.world.device)
    result = run(parts.policy, plan, noise, asked, batch_size=batch_size, options=options)
    together, most = plan.drawn_together(batch_size), largest_shard(*whole, parts.world.size, plan.leaves)
    idle = math.ceil(most / together) - math.ceil(len(asked.ids) / together)
    spare = RunOptions(device=options.device, stop=options.stop)
    for _ in range(idle if parts.sharded else 0):
        with parts.learner.context.counter.uncounted():
            run(parts.policy, plan, noise, asked[: plan.leaves], batch_size=batch_size, options=spare)
    return result
