"""The first half of an iteration: prompts, samples, pictures, scores, and a look at a larger pool where asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.advantages import aggregate
from flowrl.assembly import Parts
from flowrl.distributed import largest_shard, shard
from flowrl.exploration import choose, fidelity
from flowrl.initials import numbers_of
from flowrl.metrics import Progress, Sums, Timer, log
from flowrl.models.base import decoded
from flowrl.overlap import Ahead
from flowrl.plan import StepPlan
from flowrl.preview import Preview
from flowrl.prompts import Prompt, identity
from flowrl.reward import Scores
from flowrl.rollout import Noise, run
from flowrl.schedules import Schedule
from flowrl.types import Condition, Edges, Rollout, SampleId, Samples


class Abandoned(Exception):
    """A signal came in the middle of a rollout, on this process or on another."""


@dataclass(frozen=True, slots=True)
class Draw:
    """This process's part of a group of samples for every prompt."""

    ids: list[SampleId]
    samples: Samples
    edges: Edges
    cond: Condition
    rows: Tensor
    """Row of `cond` of each sample, [B]."""
    images: Tensor
    scores: Scores


class Collector:
    """Makes the rollouts of a run.

    Args:
        parts: of the run.
        signalled: whether to leave off here, asked after every batch.
        training: False leaves out what only rollouts need.

    Raises:
        ModelError: exploration wants a copy of the network that cannot be made.
    """

    def __init__(self, parts: Parts, signalled: Callable[[], bool], *, training: bool = True) -> None:
        self.parts, self.signalled = parts, signalled
        self.config, self.world = parts.resolved.run, parts.world
        self.evaluations = parts.learner.evaluations
        self.weights = torch.tensor([e.weight for e in parts.scorer.entries])
        self.options = self.config.rollout.exploration
        self.explores, self.fidelity = self.options is not None, None
        if self.options is not None and training:
            self.preview = Preview(parts.adapter, self.options.network, self.evaluations.watch)

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        """The rollout of an iteration; prompts that the method is done with are drawn no more.

        Raises:
            Abandoned: on all processes; what was drawn is lost.
        """
        parts, config = self.parts, self.config
        numbers = parts.source.draw(iteration)
        prompts = [parts.source.prompts[k] for k in numbers]
        plan = parts.algorithm.plan(parts.schedule, parts.sampler, iteration, config.seed)
        noise = self.noise(iteration)
        found, maps, laws, before = None, None, None, self.evaluations.rows
        looked: tuple[Tensor, Tensor] | None = None
        try:
            with parts.weights.using(parts.algorithm.behaviour):
                if parts.learned is not None:
                    laws = numbers_of(parts.learned, prompts)
                    noise = dataclasses.replace(noise, laws=parts.learned.drawn_from(laws))
                if self.explores:
                    looked = self._explore(iteration, prompts, noise, timer)
                    noise = dataclasses.replace(noise, chosen=looked[0])
                    sums.add("nfe/explore", self.evaluations.rows - before, self._own(len(prompts)))
                    before = self.evaluations.rows
                text = f"iteration {iteration}: sampling"
                found = self._draw(text, prompts, config.rollout.group_size, plan, noise, timer, self._recorded())
            if parts.maps is not None:
                with timer.phase("maps"):
                    maps = parts.maps(found.images)
        except Abandoned:
            pass
        if self.world.any(found is None or self.signalled()):
            raise Abandoned
        assert found is not None
        sums.add("nfe/rollout", self.evaluations.rows - before, len(found.rows))
        rewards, raw = self._gather(found, len(prompts), config.rollout.group_size)
        if looked is not None:
            self._report(*looked, aggregate(rewards, self.weights), sums)
        gone = parts.algorithm.retired(rewards, self.weights)
        parts.source.retire(iteration, [k for k, done in zip(numbers, gone.tolist(), strict=True) if done])
        spread = _group_spread(found.images, found.rows)
        initial = None if laws is None else noise.initial(found.ids)
        drawn = (found.samples, found.edges, found.cond, found.rows)
        return Rollout(plan, *drawn, rewards, raw, spread, maps, initial, laws, tuple(identity(p) for p in prompts))

    def noise(self, iteration: int) -> Noise:
        """Of an iteration's rollout."""
        shape, rollout = self.parts.adapter.latent_shape(), self.config.rollout
        return Noise(self.config.seed, "rollout", iteration, shape, rollout.shared_noise)

    def _own(self, prompts: int) -> int:
        return len(shard(prompts, self.config.rollout.group_size, self.world.rank, self.world.size))

    def _recorded(self) -> dict[str, Any]:
        """What a rollout keeps of its steps, for a method on them."""
        algorithm: Any = self.parts.algorithm
        if algorithm.needs != "edges":
            return {}
        return {"form": algorithm.log_prob_form(self.parts.sampler), "columns": algorithm.columns}

    # ---- one draw

    def _draw(
        self,
        text: str,
        prompts: Sequence[Prompt],
        group: int,
        plan: StepPlan,
        noise: Noise,
        timer: Timer,
        recorded: dict[str, Any],
        batch_size: int | None = None,
    ) -> Draw:
        """`group` samples of each prompt, decoded and scored; this process's share of them."""
        parts, world, size = self.parts, self.world, batch_size or self.config.rollout.batch_size
        own = [SampleId(*pair) for pair in shard(len(prompts), group, world.rank, world.size)]
        slots = sorted({i.slot for i in own})
        rows = torch.tensor([slots.index(i.slot) for i in own], dtype=torch.int64)
        bar = Progress(len(own), text, show=world.main)
        options = {"batch_size": size, "device": world.device}
        asked = [prompts[i.slot] for i in own]
        ahead, pictures = Ahead(parts.scorer, [p.text for p in asked], [p.metadata for p in asked]), list[Tensor]()

        def decode(start: int, x0: Tensor) -> None:
            with timer.phase("decode"):
                pictures.append(decoded(parts.adapter, x0.to(world.device), cond, rows[start : start + len(x0)]).cpu())
            ahead.add(pictures[-1])

        try:
            with timer.phase("text"):
                cond = parts.texts.lookup([prompts[slot] for slot in slots])
            with timer.phase("rollout"):
                watched: dict[str, Any] = {"progress": lambda count: self._watch(bar, count)}
                # Without a reward that scores beside sampling, the VAE waits for the end.
                watched |= {"finished": decode} if ahead else {}
                samples, edges = run(parts.policy, plan, noise, own, cond, rows, **options, **watched, **recorded)
                for _ in range(self._elsewhere(len(prompts), group, len(own), size)):
                    with self.evaluations.uncounted():
                        run(parts.policy, plan, noise, own[:1], cond, rows[:1], **options)
                    self._watch(bar, 0)
            if not ahead:
                for start in range(0, len(own), size):
                    decode(start, samples.x0[start : start + size])
            with timer.phase("reward"):
                images = torch.cat(pictures)
                scores = ahead.scores(images)
        finally:
            ahead.close()
            bar.close()
        return Draw(own, samples, edges, cond, rows, images, scores)

    def _watch(self, bar: Progress, count: int) -> None:
        bar.update(count)
        if self.signalled():
            raise Abandoned

    def _elsewhere(self, prompts: int, group: int, own: int, size: int) -> int:
        """Batches that other processes make and this one, with `own` samples, does not; 0 if it may."""
        if not self.parts.sharded:
            return 0
        return math.ceil(largest_shard(prompts, group, self.world.size) / size) - math.ceil(own / size)

    def _gather(self, found: Draw, prompts: int, group: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Everybody's scores by identity: [R, P, G] and name -> [P, G]."""
        rewards = torch.full((len(found.scores.values), prompts, group), torch.nan)
        table = {name: torch.full((prompts, group), torch.nan) for name in found.scores.raw}
        for ids, part, named in self.world.gather((found.ids, found.scores.values, found.scores.raw)):
            slot, sample = torch.tensor([i.slot for i in ids]), torch.tensor([i.sample for i in ids])
            rewards[:, slot, sample] = part
            for name, value in named.items():
                table[name][slot, sample] = value
        return rewards, table

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
        found = self._draw(text, prompts, pool, plan, noise, Timer(), {}, batch_size)
        return aggregate(self._gather(found, len(prompts), pool)[0], self.weights)

    def _check(self, iteration: int, prompts: Sequence[Prompt], noise: Noise, scores: Tensor) -> None:
        """Draw the whole pool of some prompts in full: does the first look rank it alike?"""
        options = self.options
        assert options is not None
        truth = self.truth(iteration, prompts, noise)
        found = fidelity(scores[: len(prompts)], truth, self.config.rollout.group_size)
        self.fidelity = dataclasses.asdict(found)
        log.info("exploration: %s", found)
        if found.prompts and not found.hit_rate >= options.least_hit_rate:
            self.explores = False
            log.warning(
                "exploration finds %.0f %% of the best and worst candidates, less than the %.0f %% of "
                "rollout.exploration.least_hit_rate: the run goes on without it; give the first look more steps",
                100 * found.hit_rate,
                100 * options.least_hit_rate,
            )

    def _report(self, chosen: Tensor, looked: Tensor, drawn: Tensor, sums: Sums) -> None:
        """How the scores of the chosen agree, which is less than over the pool: they are extremes."""
        if not self.world.main:
            return
        found = fidelity(looked.gather(1, chosen), drawn, chosen.shape[1])
        if found.prompts:
            sums.add("exploration/rank_correlation", found.spearman)
        sums.add("exploration/first_look", float(looked.nanmean()))

    def state_dict(self) -> dict[str, Any]:
        return {"explores": self.explores, "fidelity": self.fidelity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.explores, self.fidelity = state["explores"] and self.options is not None, state["fidelity"]


def _group_spread(images: Tensor, rows: Tensor) -> float:
    """Mean over prompts of the std of pixels over the group's samples; near 0 means collapse."""
    spreads = [images[rows == row].std(dim=0, correction=0).mean() for row in rows.unique()]
    return float(torch.stack(spreads).mean())
