"""An iteration's edges on their way to the updates: credited, cut into shares, checked against the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.config.schema import RunConfig
from flowrl.core.console import log
from flowrl.core.errors import ParityError
from flowrl.core.rng import permutation
from flowrl.credit.advantages import Advantages
from flowrl.credit.saliency import spread
from flowrl.losses.batches import Microbatch
from flowrl.rollout.policy import Evaluations
from flowrl.rollout.trajectories import Rollout
from flowrl.training.metrics import Sums
from flowrl.training.microbatches import forwards, microbatches, update_chunks
from flowrl.training.sharding import longest
from flowrl.training.world import World


class Replay:
    """This rank's edges of an iteration, in shares of one update each."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: EdgeMethod,
        networks: Networks,
        world: World,
        evaluations: Evaluations,
        rollout: Rollout,
        credit: Advantages,
        iteration: int,
        sums: Sums,
        *,
        sharded: bool = False,
    ) -> None:
        self.config, self.algorithm, self.networks, self.world = config, algorithm, networks, world
        rollout = replace(rollout, edges=algorithm.annotated(rollout, credit))
        self.rollout, self.adapter, self.sharded = rollout, networks.policy.adapter, sharded
        self.evaluations = evaluations
        self.recompute = algorithm.recompute
        edges, identity, leaves = rollout.edges, rollout.identity, rollout.plan.leaves
        kept = algorithm.kept_edges(rollout.samples.ids, rollout.plan, iteration, config.seed)
        if credit.steps is None or credit.pruned is None:
            self.advantage = self._advantages(credit, identity, sums)[edges.sample]  # [E, R', *pos]
            taken = credit.kept
        else:
            place = identity[edges.sample], edges.step
            self.advantage = credit.steps.flatten(0, 1)[place][:, None]
            live, taken = ~credit.pruned.flatten(0, 1)[place], ~credit.pruned.all(dim=2)
            kept = live if kept is None else live & kept
        # A tree's edges share their starts, so it stays whole; a chain is a tree of one leaf.
        useful = taken.flatten().reshape(-1, leaves).any(dim=1).nonzero().squeeze(1)
        chunks = update_chunks(useful, config.optim.updates_per_iteration, config.seed, iteration)
        self.shares = []
        for number, chunk in enumerate(chunks):
            inside = torch.isin(identity[edges.sample] // leaves, chunk)
            rows = (inside if kept is None else inside & kept).nonzero().squeeze(1)
            self.shares.append(rows[permutation(len(rows), config.seed, "edges", iteration, number, world.rank)])

    def _advantages(self, credit: Advantages, identity: Tensor, sums: Sums) -> Tensor:
        """Of this rank's samples, [B, R', *pos]: by position where the method asks for it."""
        own, maps, options = credit.values.flatten(0, 1)[identity], self.rollout.maps, self.algorithm.spatial
        if options is None:
            return own
        assert maps is not None
        sums.add("spatial/map_mean", float(maps.flatten(1).mean(dim=1).sum()), len(maps))
        sums.add("spatial/flat_share", float((maps == 1).flatten(1).all(dim=1).sum()), len(maps))
        return spread(own, maps, options.ratio, credit.bound)

    def prepare(self) -> None:
        """Evaluate old log-probs anew where that is asked for."""
        if self.recompute:
            self.rollout = self._recomputed()

    @property
    def sizes(self) -> list[int]:
        """Edges of each share."""
        return [len(share) for share in self.shares]

    def batches(self, number: int) -> Iterator[tuple[Microbatch, bool]]:
        """Training forwards of a share, and whether they count."""
        return self._in_step(self.shares[number])

    def _in_step(self, order: Tensor) -> Iterator[tuple[Microbatch, bool]]:
        """Forwards of the edges `order` [n]: those of a sharded network come by the same keys on every process.

        Where another one has more of a key, an edge of this process is repeated for nothing, uncounted.
        """
        real = self._batches(order)
        if not self.sharded:
            yield from ((batch, True) for batch in real)
            return
        edges = self.rollout.edges
        own = forwards(edges, self.adapter, order, self.config.optim.batch_size)
        keys = torch.tensor([self.adapter.batch_key(int(k)) for k in edges.step])
        for key, most in longest(self.world.gather(own)).items():
            mine = own.get(key, 0)
            for _ in range(mine):
                yield next(real), True
            spare = (keys == key).nonzero()[0]
            for _ in range(most - mine):
                with self.evaluations.uncounted():
                    yield next(self._batches(spare, torch.zeros_like(self.advantage))), False

    def _batches(self, order: Tensor, advantage: Tensor | None = None) -> Iterator[Microbatch]:
        rollout = self.rollout
        return microbatches(
            rollout.edges,
            self.advantage if advantage is None else advantage,
            rollout.plan,
            self.adapter,
            rollout.cond,
            rollout.rows,
            batch_size=self.config.optim.batch_size,
            order=order,
            device=self.world.device,
        )

    def pass_gate(self, dtype: torch.dtype) -> None:
        """Replay one microbatch before the first update; stop where it does not repeat the rollout.

        The second number is the same at the rollout's own batch composition, where it must be 0.

        Args:
            dtype: of the network.

        Raises:
            ParityError: naming the step.
        """
        size = self.config.optim.batch_size
        worst, step = self._deviation(torch.cat(self.shares)[:size])
        # The first rollout batch at its first trained step, in the rollout's order.
        edges, first = self.rollout.edges, min(self.rollout.plan.train)
        together = self.rollout.plan.drawn_together(self.config.rollout.batch_size)
        same = ((edges.step == first) & (edges.sample < together)).nonzero().squeeze(1)
        exact, _ = self._deviation(same[: size * self.rollout.plan.leaves])
        worst, step, exact = max(self.world.gather((worst, step, exact)))
        tolerance = self.algorithm.parity_tolerance(self.networks.policy.sampler, dtype)
        log.info(
            "parity: replayed log ratios are at most %.2e (allowed %.2e); %.2e at the rollout's own batches",
            worst,
            tolerance,
            exact,
        )
        # Written so that a NaN does not pass.
        if not worst <= tolerance and not self.recompute:
            raise ParityError(
                f"replaying the rollout changes the log ratio by {worst:.2e} at step {step}, more than {tolerance:.2e} "
                "(a tenth of the clip range): set algorithm.old_log_prob=recompute, or equal rollout.batch_size and "
                "optim.batch_size"
            )

    @torch.no_grad()
    def _deviation(self, order: Tensor) -> tuple[float, int]:
        """Largest |log ratio| of a replay at training geometry, and its step."""
        change, sampler = torch.zeros(len(order)), self.networks.policy.sampler
        for batch, counts in self._in_step(order):
            log_ratio = self.algorithm.log_ratio(self.networks.transition(batch), batch, sampler)
            if not counts:
                continue
            # Microbatches come by batch key, so an edge's place in `order` is not its place in the batches.
            change[batch.place] = log_ratio.abs().reshape(len(batch), -1).amax(dim=1).cpu()
        if not len(order):
            return 0.0, -1
        return float(change.max()), int(self.rollout.edges.step[order][change.argmax()])

    @torch.no_grad()
    def _recomputed(self) -> Rollout:
        """Old log-probs, and old means where the method keeps them, at the very batches of the updates."""
        edges = self.rollout.edges
        old, form = edges.old_log_prob.clone(), self.algorithm.log_prob_form(self.networks.policy.sampler)
        columns = {name: value.clone() for name, value in edges.columns.items()}
        for share in self.shares:
            for batch, counts in self._in_step(share):
                policy = self.networks.transition(batch)
                if not counts:
                    continue
                rows = share[batch.place]
                old[rows] = policy.log_prob(batch.next_latents, form).cpu()
                if "mean_old" in columns:
                    columns["mean_old"][rows] = policy.mean.cpu()
        return replace(self.rollout, edges=replace(edges, old_log_prob=old, columns=columns))
