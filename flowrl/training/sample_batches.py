"""An iteration's finished samples on their way to the updates: noised again, cut into shares, batched.

A term is a sample at one training time. Its time and noise are keyed by identity, so they depend neither on batches
nor on processes, and stay the same in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.config.schema import RunConfig
from flowrl.core.rng import normal, permutation
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import NoisedBatch
from flowrl.rollout.policy import Evaluations
from flowrl.rollout.trajectories import Rollout
from flowrl.training.microbatches import update_chunks
from flowrl.training.world import World


class Noising:
    """This rank's terms of an iteration, in shares of one update each.

    A share is a list of units: terms [n] that a forward must hold together. A term's number is row * T + time.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: SampleMethod,
        networks: Networks,
        world: World,
        evaluations: Evaluations,
        rollout: Rollout,
        credit: Advantages,
        iteration: int,
        schedule: Schedule,
        *,
        sharded: bool = False,
    ) -> None:
        self.config, self.algorithm, self.networks, self.world = config, algorithm, networks, world
        self.rollout, self.iteration, self.sharded = rollout, iteration, sharded
        self.evaluations = evaluations
        self.identity = rollout.identity
        self.credit = credit.values.flatten(0, 1).squeeze(1)[self.identity]
        self.times = algorithm.times(schedule, rollout.samples.ids, iteration, config.seed)
        self.count = self.times.sigma.shape[1]
        self.slot = torch.tensor([i.slot for i in rollout.samples.ids])
        self.old: Tensor | None = None
        kept = credit.kept.flatten()[self.identity]
        self.shares: list[list[Tensor]] = []
        for number, chunk in enumerate(self._chunks(credit)):
            rows = (kept & torch.isin(self.identity, chunk)).nonzero().squeeze(1)
            units = self._units(rows)
            order = permutation(len(units), config.seed, "terms", iteration, number, world.rank).tolist()
            self.shares.append([units[k] for k in order])

    def _chunks(self, credit: Advantages) -> list[Tensor]:
        """Global sample numbers of each update: samples at random, or whole groups."""
        updates, seed = self.config.optim.updates_per_iteration, self.config.seed
        if self.algorithm.unit not in ("group", "prompt"):
            useful = credit.kept.flatten().nonzero().squeeze(1)
            return update_chunks(useful, updates, seed, self.iteration)
        slots, size = credit.kept.any(dim=1).nonzero().squeeze(1), credit.kept.shape[1]
        groups = update_chunks(slots, updates, seed, self.iteration)
        return [(chunk[:, None] * size + torch.arange(size)).flatten() for chunk in groups]

    def _units(self, rows: Tensor) -> list[Tensor]:
        """Of the samples `rows`."""
        times = torch.arange(self.count)
        if self.algorithm.unit == "term":
            return list((rows[:, None] * self.count + times).reshape(-1, 1))
        if self.algorithm.unit == "sample":
            return list(rows[:, None] * self.count + times)
        groups = [rows[self.slot[rows] == slot] for slot in self.slot[rows].unique()]
        if self.algorithm.unit == "prompt":
            return [(group[:, None] * self.count + times).flatten() for group in groups]
        return [group * self.count + time for group in groups for time in range(self.count)]

    def prepare(self) -> None:
        """Evaluate what the loss compares with, of the behaviour policy, before the policy moves."""
        algorithm, updates = self.algorithm, len(self.shares) * self.algorithm.passes
        if not algorithm.keeps_old or (updates == 1 and algorithm.behaviour == "policy"):
            return
        old = torch.zeros(len(self.identity) * self.count, dtype=torch.float64)
        with torch.no_grad(), self.networks.weights.using(algorithm.behaviour):
            for terms, counts in (each for share in self.shares for each in self._in_step(share)):
                found = algorithm.old(self._batch(terms), self.networks).cpu()
                if counts:
                    old[terms] = found
        self.old = old

    @property
    def sizes(self) -> list[int]:
        """Terms of each share."""
        return [sum(map(len, share)) for share in self.shares]

    def batches(self, number: int) -> Iterator[tuple[NoisedBatch, bool]]:
        """Training forwards of a share, and whether they count."""
        centre = self._centre(number) if self.algorithm.centres else None
        return ((replace(batch, centre=centre), counts) for batch, counts in self.plain_batches(number))

    def plain_batches(self, number: int) -> Iterator[tuple[NoisedBatch, bool]]:
        """The same without the means that a loss may ask for."""
        return ((self._batch(terms), counts) for terms, counts in self._in_step(self.shares[number]))

    def _centre(self, number: int) -> Tensor | None:
        """Means of what the method measures over the terms of a share on all processes, [K]; None without terms."""
        sums, count = torch.zeros(()), 0
        with torch.no_grad():
            for batch, counts in self.plain_batches(number):
                found = self.algorithm.measured(batch, self.networks)
                if counts:
                    sums, count = sums + found.sum(dim=0).cpu(), count + len(batch)
        everyone = [part for part in self.world.gather((sums, count)) if part[1]]
        if not everyone:
            return None
        total = torch.stack([sums for sums, _ in everyone]).sum(dim=0) / sum(count for _, count in everyone)
        return total.to(self.world.device)

    def _in_step(self, share: list[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Terms of each forward; of a sharded network as many on every process, some of them for nothing, uncounted."""
        own = list(self._forwards(share))
        most = max(self.world.gather(len(own))) if self.sharded else len(own)
        yield from ((terms, True) for terms in own)
        for _ in range(most - len(own)):
            with self.evaluations.uncounted():
                yield torch.zeros(1, dtype=torch.int64), False

    def _forwards(self, share: list[Tensor]) -> Iterator[Tensor]:
        """Terms [n] of each forward: whole units, at most `optim.batch_size` terms."""
        waiting: list[Tensor] = []
        for unit in share:
            if waiting and sum(map(len, waiting)) + len(unit) > self.config.optim.batch_size:
                yield torch.cat(waiting)
                waiting = []
            waiting.append(unit)
        if waiting:
            yield torch.cat(waiting)

    def _batch(self, terms: Tensor) -> NoisedBatch:
        rows, time, device = terms // self.count, terms % self.count, self.world.device
        clean = self.rollout.samples.x0[rows]
        keys = [
            (self.iteration, i.slot, 0 if self.algorithm.shared_eps else i.sample, k)
            for i, k in zip([self.rollout.samples.ids[row] for row in rows.tolist()], time.tolist(), strict=True)
        ]
        return NoisedBatch(
            clean=clean.to(device),
            eps=normal(clean.shape[1:], self.config.seed, "training_noise", keys).to(device),
            sigma=self.times.sigma[rows, time].to(device),
            timestep=self.times.timestep[rows, time].to(device),
            cond=self.rollout.cond.index(self.rollout.rows[rows]),
            advantage=self.credit[rows].to(device),
            sample=self.identity[rows].to(device),
            group=(self.slot[rows] * self.count + time).to(device),
            old=None if self.old is None else self.old[terms].to(device),
        )
