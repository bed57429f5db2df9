"""Exploration at work (rollout/exploration.py): the first look at a pool, the check of its ranking, the choice."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.credit.advantages import aggregate
from flowrl.data.prompts import Prompt
from flowrl.diffusion.schedules import Schedule
from flowrl.display.console import log
from flowrl.rollout.exploration import choose, fidelity
from flowrl.rollout.noise import Noise
from flowrl.rollout.preview import Preview
from flowrl.run.assembly.parts import Parts
from flowrl.scoring.scorer import Scorer
from flowrl.training.metrics import Sums, Timer
from flowrl.training.sampling import Drawing, groups_of
from flowrl.training.signals import Stop
from flowrl.training.world import shard


class Exploring:
    """Chooses the samples of each iteration from a larger pool of candidates, until a check ends it.

    Raises ModelError: the first look needs a copy of the network that cannot be made.
    """

    def __init__(self, parts: Parts, scorer: Scorer, stop: Stop) -> None:
        run, self.scorer, self.stop = parts.resolved.run, scorer, stop
        self.sampling, self.world, self.method = parts.sampling, parts.sampling.world, parts.learner.method
        self.seed, self.rollout, options = run.seed, run.rollout, run.rollout.exploration
        assert options is not None
        self.options = options
        self.preview = Preview(self.sampling.adapter, options.network, self.sampling.counter.watch)
        self.on = True
        self.fidelity: dict[str, Any] | None = None
        """Result of the check; None: there was none yet."""

    def __call__(
        self, iteration: int, prompts: Sequence[Prompt], noise: Noise, timer: Timer, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        """(numbers of the candidates that are drawn in full [P, G], scores of all by the first look [P, N])."""
        options, group, before = self.options, self.rollout.group_size, self.sampling.counter.rows
        with timer.phase("explore"):
            scores = self.look(iteration, prompts, noise)
        if self.fidelity is None and options.check_prompts:
            self._check(iteration, prompts[: options.check_prompts], noise, scores)
        own = shard(len(prompts), group, self.world.rank, self.world.size)
        sums.add("nfe/explore", self.sampling.counter.rows - before, len(own))
        if not self.on:  # the check has just ended it
            return torch.arange(group).expand(len(prompts), group), scores
        return choose(scores, group, options.select, (self.seed, iteration)), scores

    def look(self, iteration: int, prompts: Sequence[Prompt], noise: Noise) -> Tensor:
        """Scores of every candidate by the first look, [P, N]."""
        options, rollout = self.options, self.rollout
        grid = self.sampling.adapter.schedule(options.num_inference_steps or rollout.num_inference_steps)
        self.preview.follow()
        with self.preview.using():
            return self._pool(grid, iteration, prompts, noise, options.batch_size or rollout.batch_size)

    def truth(self, iteration: int, prompts: Sequence[Prompt], noise: Noise) -> Tensor:
        """Scores of every candidate drawn in full, [P, N]."""
        return self._pool(self.sampling.schedule, iteration, prompts, noise, self.rollout.batch_size)

    def _pool(self, grid: Schedule, iteration: int, prompts: Sequence[Prompt], noise: Noise, batch_size: int) -> Tensor:
        pool, plan = self.options.pool, self.method.plan(grid, self.sampling.sampler, iteration, self.seed)
        wanted = groups_of(self.world, iteration, prompts, pool, plan, noise, batch_size)
        wanted = replace(wanted, work="exploring", shown=False)
        result = Drawing(self.sampling, self.scorer, wanted, Timer(), self.stop)()
        return aggregate(result.gathered(self.world, len(prompts), pool)[0], result.scores.weights)

    def _check(self, iteration: int, prompts: Sequence[Prompt], noise: Noise, scores: Tensor) -> None:
        """Draw the whole pool of some prompts in full, and stop exploring where the first look ranks it otherwise."""
        truth = self.truth(iteration, prompts, noise)
        result = fidelity(scores[: len(prompts)], truth, self.rollout.group_size)
        self.fidelity = asdict(result)
        log.info("exploration: %s", result)
        if result.prompts and not result.hit_rate >= self.options.least_hit_rate:
            self.on = False
            log.warning(
                "exploration finds %.0f %% of the best and worst candidates, less than the %.0f %% of "
                "rollout.exploration.least_hit_rate: the run goes on without it; give the first look more steps",
                100 * result.hit_rate,
                100 * self.options.least_hit_rate,
            )

    def report(self, chosen: Tensor, looked: Tensor, drawn: Tensor, sums: Sums) -> None:
        """Metrics of how the scores of the chosen agree, which is less than over the pool: they are extremes."""
        if not self.world.main:
            return
        result = fidelity(looked.gather(1, chosen), drawn, chosen.shape[1])
        if result.prompts:
            sums.add("exploration/rank_correlation", result.spearman)
        sums.add("exploration/first_look", float(looked.nanmean()))

    def state_dict(self) -> dict[str, Any]:
        return {"explores": self.on, "fidelity": self.fidelity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.on, self.fidelity = state["explores"], state["fidelity"]
