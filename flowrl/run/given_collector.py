"""The first half of an iteration for methods on given images, and the network's preference among held-out pairs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.types import Condition, Identity, SampleId, Samples, no_edges
from flowrl.credit.advantages import Advantages
from flowrl.data.given_samples import PAIR, Given, Latents, Look, Slot, latents_of, slot_of
from flowrl.data.labels import LabelledSource
from flowrl.diffusion.plan import StepPlan, solver_plan
from flowrl.display.display import Progress
from flowrl.evaluation.results import Agreement
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.trajectories import Asked, Rollout, Trajectories
from flowrl.training.base import Iteration, UpdateContext
from flowrl.training.determinism import strict
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums, Timer
from flowrl.training.sample_batches import SampleBatches
from flowrl.training.sampling import Sampling, by_identity, slots_and_rows
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import largest_shard, shard

_DRAWS = 4
"""Noisings of a held-out pair whose margins are averaged: the sign of a single one is noisy."""
_CHUNK = 64
"""Held-out pairs whose conditions are in memory at once."""


class PairCollector:
    """Makes the rollouts of a run from given images; the network draws the samples that a slot lacks."""

    exhausted = False

    def __init__(self, given: Given, sampling: Sampling, context: UpdateContext, stop: Stop = NEVER) -> None:
        self.given, self.sampling, self.context, self.stop = given, sampling, context, stop
        self.world, self.weights = sampling.world, torch.ones(1)

    def collect(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        """The rollout of an iteration.

        Raises Abandoned: on all processes; Elsewhere: another process failed; TooManyLost: too many images cannot be
        read.
        """
        sampling, given, seed = self.sampling, self.given, self.context.seed
        numbers, size = given.source.draw(iteration), len(given.members)
        plan = self.context.method.plan(sampling.schedule, sampling.sampler, iteration, seed)
        own = [SampleId(*pair) for pair in shard(len(numbers), size, self.world.rank, self.world.size)]
        slots, rows = slots_and_rows(own)
        look = Look(given.options, seed, iteration)

        def of_slot(slot: int) -> Slot:
            return slot_of(given.records, numbers[slot], given.members, graded=given.graded, own=given.own_noise)

        def prepare() -> tuple[Latents, Condition]:
            with timer.phase("images"):
                size = self.context.rollout_batch_size
                result = latents_of(of_slot, own, sampling.adapter, batch_size=size, look=look, stop=self.stop.here)
            with timer.phase("text"):
                return result, sampling.texts.of_identities([look.caption(slot, result.texts[slot]) for slot in slots])

        result, cond = self.world.in_step(prepare)
        x0 = result.x0
        if "drawn" in given.members:
            complete = partial(self._completed, plan, result, Asked(own, cond, rows), iteration, timer, sums)
            x0 = complete() if sampling.sharded else self.world.in_step(complete)
        rewards = by_identity(self.world, own, result.rewards[None], len(numbers), size)
        given.require_readable(int(rewards[0].isnan().any(dim=1).sum()), len(numbers))
        samples = Samples(x0, tuple(own), initial=result.initial)
        return Trajectories(plan, samples, no_edges(samples), cond, rows).scored(rewards)

    def _completed(self, plan: StepPlan, read: Latents, own: Asked, iteration: int, timer: Timer, sums: Sums) -> Tensor:
        """The latents [B, ...], with those that the method's behaviour network draws."""
        sampling, context, place = self.sampling, self.context, self.given.members.index("drawn")
        mine = torch.tensor([row for row, i in enumerate(own.ids) if i.sample == place], dtype=torch.int64)
        asked = Asked([own.ids[row] for row in mine.tolist()], own.cond, own.rows[mine])
        noise = Noise(context.seed, "rollout", iteration, sampling.adapter.latent_shape())
        size, before = context.rollout_batch_size, sampling.counter.rows
        # A slot has one drawn sample: as many batches are made elsewhere as for groups of one.
        most = largest_shard(self.given.options.per_iteration, 1, self.world.size)
        with Progress(len(mine), f"iteration {iteration}: sampling", show=self.world.main) as bar:
            options = RunOptions(progress=bar.update, stop=self.stop.in_step)
            with timer.phase("rollout"), strict(), context.networks.weights.using(context.method.behaviour):
                drawn = sampling.draw(plan, noise, asked, batch_size=size, options=options, most=most)
        sums.add("nfe/rollout", sampling.counter.rows - before, len(mine))
        return read.x0.index_copy(0, mine, drawn.samples.x0)

    def metrics_row(self, rollout: Rollout, credit: Advantages) -> dict[str, Any]:
        """Metrics of an iteration's data: among them the share of the set that it draws, of labels of each class."""
        count, source = self.given.options.per_iteration, self.given.source
        row: dict[str, float] = {"pairs/unreadable": int(credit.dead.sum())}
        if not isinstance(source, LabelledSource):
            return row | {"pairs/epochs_per_iteration": count / len(self.given.records)}
        return row | {
            f"pairs/{word}_epochs_per_iteration": count * share / len(source.classes[sign])
            for word, sign, share in (("liked", 1, source.share), ("disliked", -1, 1 - source.share))
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class HeldOutPairs:
    """Agreement of the network with the preferences of held-out pairs.

    Times and noise are the same at every evaluation of a run: iterations of training count from 1, these below 0.
    """

    def __init__(self, given: Given, sampling: Sampling, learner: Learner) -> None:
        self.given, self.sampling, self.method, self.world = given, sampling, learner.method, sampling.world
        context = learner.context
        self.context = replace(context, optim=replace(context.optim, updates_per_iteration=1))
        self.numbers = self.given.held_out_numbers
        self.count = len(self.numbers)
        low, high = (rank * self.count // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        self.own = range(low, high)
        # A process without a pair shares in the forwards of a sharded network with one that it does not count.
        self.slots = self.own or range(min(1, self.count))
        self.latents: Latents | None = None

    def __call__(self, stop: Stop = NEVER) -> Agreement:
        """Agreement on N pairs; with labels the mean over both images of a pair.

        Raises Abandoned, on all processes: one stops early; Elsewhere: another process failed.
        """
        latents, ids = self.world.in_step(lambda: self._latents(stop)), self._ids(self.own)
        rewards = by_identity(self.world, ids, latents.rewards[None, : len(ids)], self.count, len(PAIR))
        credit = self.method.advantages(rewards, torch.ones(1))
        starts = range(0, len(self.own), _CHUNK)
        most = max(self.world.gather(len(starts)))

        def compare() -> Tensor:
            sums = torch.zeros(self.count * len(PAIR), dtype=torch.float64)
            for place in range(most if self.sampling.sharded else len(starts)):
                idle = place >= len(starts)
                chunk = self.slots[:1] if idle else self.own[starts[place] : starts[place] + _CHUNK]
                result = self._compared(chunk, latents, rewards, credit, stop)
                sums += 0 if idle else result
            return sums

        sums = compare() if self.sampling.sharded else self.world.in_step(compare)
        total = torch.stack(self.world.gather(sums)).sum(dim=0).reshape(self.count, len(PAIR))
        right = ((total > 0).double() + (total >= 0).double()).mean(dim=1) / 2
        texts = {slot: text for part in self.world.gather(latents.texts) for slot, text in part.items()}
        first: dict[Identity, int] = {}
        return Agreement(
            torch.where(credit.dead, torch.nan, right).numpy(),
            np.array([first.setdefault(texts[slot], slot) for slot in range(self.count)], dtype=np.int64),
        )

    def _ids(self, slots: Sequence[int]) -> list[SampleId]:
        return [SampleId(slot, sample) for slot in slots for sample in range(len(PAIR))]

    def _latents(self, stop: Stop) -> Latents:
        """Latents of this process's pairs, encoded once."""
        if self.latents is None:
            records = self.given.held_out
            assert records is not None
            size = self.context.rollout_batch_size

            def read(slot: int) -> Slot:
                return slot_of(records, self.numbers[slot], PAIR)

            ids = self._ids(self.slots)
            self.latents = latents_of(read, ids, self.sampling.adapter, batch_size=size, stop=stop.here)
        return self.latents

    @torch.no_grad()
    def _compared(
        self, slots: Sequence[int], latents: Latents, rewards: Tensor, credit: Advantages, stop: Stop
    ) -> Tensor:
        """Summed agreement of the samples of `slots`, by identity [2 N] float64."""
        ids, first = self._ids(slots), (slots[0] - self.slots[0]) * len(PAIR)
        samples = Samples(latents.x0[first : first + len(ids)], tuple(ids))
        cond = self.sampling.texts.of_identities([latents.texts[slot] for slot in slots])
        rows, plan = slots_and_rows(ids)[1], solver_plan(self.sampling.schedule)
        rollout = Trajectories(plan, samples, no_edges(samples), cond, rows).scored(rewards)
        sums = torch.zeros(self.count * len(PAIR), dtype=torch.float64)
        for draw in range(1, _DRAWS + 1):
            work = SampleBatches(self.context, Iteration(-draw, rollout, credit, Sums()))
            for batch, counts in work.plain_batches(0):
                if stop.in_step():
                    raise Abandoned
                result = self.method.preferred(batch, self.context.networks).cpu()
                if counts:
                    sums.index_add_(0, batch.sample.cpu(), result)
        return sums
