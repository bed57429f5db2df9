"""The first half of an iteration: prompts, exploration (rollout/exploration.py), samples, images and scores."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages, aggregate
from flowrl.credit.step_values import StepValues
from flowrl.credit.tree_credit import log_probs_on_paths
from flowrl.data.prompts import Prompt, PromptSource
from flowrl.diffusion.schedules import Schedule
from flowrl.display.console import log
from flowrl.rollout.exploration import choose, fidelity
from flowrl.rollout.noise import Noise
from flowrl.rollout.preview import Preview
from flowrl.rollout.trajectories import NoiseDraws, Rollout, Trajectories
from flowrl.run.assembly.parts import Parts
from flowrl.scoring.gradient import slope_of
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch, Latents
from flowrl.training.dead_groups import DeadGroups
from flowrl.training.image_std import group_image_std
from flowrl.training.metrics import Sums, Timer, sample_metrics
from flowrl.training.noise_batches import numbers_of
from flowrl.training.sampling import Drawing, by_identity, groups_of
from flowrl.training.signals import NEVER, Stop
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


class Collector:
    """Makes the rollouts of a run; `training` False leaves out what only rollouts need.

    Raises ModelError: exploration needs a copy of the network that cannot be made.
    """

    def __init__(self, parts: Parts, stop: Stop = NEVER, *, training: bool = True) -> None:
        source, scorer = parts.data.source, parts.scorers.trained or Scorer(())
        assert isinstance(source, PromptSource)
        self.scorer, self.source, self.stop = scorer, source, stop
        self.sampling, self.learner, self.maps = parts.sampling, parts.learner, parts.maps
        self.config, self.world, self.method = parts.resolved.run, parts.sampling.world, parts.learner.method
        self.evaluations = parts.sampling.counter
        self.weights = torch.tensor([e.weight for e in self.scorer.entries] or [1.0])
        self.dead_groups = DeadGroups(self.scorer.entries)
        explores = training and self.config.rollout.exploration is not None
        self.exploring = Exploring(parts, scorer, stop) if explores else None

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        """The rollout of an iteration; prompts that the method retires are no longer drawn.

        Raises Abandoned, Diverged, RewardError: on all processes; the samples are lost. Elsewhere: another process
        failed otherwise.
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
            if self.exploring is not None and self.exploring.on:
                looked = self.exploring(iteration, prompts, noise, timer, sums)
                noise, before = replace(noise, chosen=looked[0]), self.evaluations.rows
            wanted = groups_of(self.world, iteration, prompts, group, plan, noise, self.config.rollout.batch_size)
            recording = self.learner.training.recording(sampling.sampler)
            asking, shown = self.scorer.asking(iteration), self.maps is not None
            tilt = vars(self.method.config).get("tilt")
            slope = None if tilt is None else slope_of(self.scorer, tilt.output)
            wanted = replace(wanted, recording=recording, asking=asking, shown=shown, slope=slope)
            result = Drawing(sampling, self.scorer, wanted, timer, self.stop)()
        if self.maps is not None:
            with timer.phase("maps"):
                maps = self.maps(result.images.levels)
        sums.add("nfe/rollout", self.evaluations.rows - before, len(result.drawn.rows))
        rewards, raw = result.gathered(self.world, len(prompts), group)
        if self.exploring is not None and looked is not None:
            self.exploring.report(*looked, aggregate(rewards, self.weights), sums)
        gone = self.method.retired(rewards, self.weights)
        slots = torch.tensor([sample.slot for sample in result.drawn.samples.ids])
        self.source.retire(iteration, [k for k, done in zip(numbers, gone.tolist(), strict=True) if done])
        return result.drawn.scored(
            rewards,
            raw=raw,
            prompts=tuple(prompts),
            image_std=group_image_std(result.images, slots, self.world.device, self.world),
            maps=maps,
            gains=self._gains(result.drawn, rewards),
            noise=None if learned is None else NoiseDraws(noise.initial(result.drawn.samples.ids), learned),
            paths=self._paths(result.drawn, rewards),
        )

    def _paths(self, drawn: Trajectories, rewards: Tensor) -> Tensor | None:
        """Log-probs of all samples along the paths of a tree, [P, G, K]; None where credit does not weigh them."""
        if drawn.plan.tree is None or not self.method.weighs_paths:
            return None
        own = log_probs_on_paths(drawn.edges, drawn.samples.ids, drawn.plan, self.sampling.path_scale(drawn.plan))
        return by_identity(self.world, drawn.samples.ids, own, *rewards.shape[1:]).permute(1, 2, 0)

    def _gains(self, drawn: Trajectories, rewards: Tensor) -> Tensor | None:
        """What each trained step adds to the value of its latents, [P, G, K]; None where credit does not need it."""
        wanted = vars(self.method.config).get("step_values")
        if wanted is None:
            return None
        own = self.world.in_step(lambda: self._own_gains(drawn, wanted))
        return by_identity(self.world, drawn.samples.ids, own, *rewards.shape[1:]).permute(1, 2, 0)

    def _own_gains(self, drawn: Trajectories, wanted: StepValues) -> Tensor:
        """Those of this process's samples, [K, B]."""
        entry = next(e for e in self.scorer.distinct if wanted.output in e.reward.card.outputs)
        edges, steps = drawn.edges, drawn.plan.steps(drawn.edges.step, self.sampling.adapter.process)
        sigma, sample = torch.zeros(len(edges.nodes)), torch.zeros(len(edges.nodes), dtype=torch.int64)
        for ends, level in ((edges.parent, steps.sigma), (edges.child, steps.sigma_next)):
            sigma[ends], sample[ends] = level.cpu(), edges.sample
        latents = Latents(edges.nodes, drawn.cond, drawn.rows[sample], sigma)
        none = [""] * len(sigma)
        value = self.scorer.raw(entry, Batch(edges.nodes, none, [{} for _ in none], latents), [])[wanted.output]
        own = torch.full((len(drawn.plan), len(drawn.rows)), torch.nan)
        before = value[edges.parent]
        own[edges.step, edges.sample] = before if wanted.of == "value" else value[edges.child] - before
        return own

    def noise(self, iteration: int) -> Noise:
        """Noise of an iteration's rollout."""
        shape, rollout = self.sampling.adapter.latent_shape(), self.config.rollout
        return Noise(self.config.seed, "rollout", iteration, shape, rollout.shared_noise)

    def metrics_row(self, rollout: Rollout, credit: Advantages) -> dict[str, Any]:
        """Metrics of an iteration's samples, of which the source of prompts learns."""
        self.source.learn(rollout.prompts, aggregate(rollout.rewards, self.weights), credit)
        counts = self.world.gather(self.scorer.take_counts())
        text = self.dead_groups.warning(rollout, credit)
        if text is not None and self.world.main:
            log.warning("%s", text)
        return sample_metrics(rollout, credit, self.scorer.entries, counts)

    @property
    def exhausted(self) -> bool:
        """Every prompt is retired."""
        return self.source.exhausted

    def state_dict(self) -> dict[str, Any]:
        return {"explores": False, "fidelity": None} if self.exploring is None else self.exploring.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.exploring is not None:
            self.exploring.load_state_dict(state)
