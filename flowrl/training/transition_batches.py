"""Training on remembered transitions: an iteration's are added, the critic is fitted, every update draws anew."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive, permutation
from flowrl.core.tensors import sent
from flowrl.core.types import Condition
from flowrl.credit.critic import text_features
from flowrl.diffusion.plan import StepPlan
from flowrl.losses.batches import Microbatch
from flowrl.rollout.transitions import Table
from flowrl.training.base import Demand, Iteration, Setting, UpdateContext, Work
from flowrl.training.edge_batches import EdgeBatches, EdgeTraining
from flowrl.training.microbatches import batch_keys, with_lengths


class TransitionTraining(EdgeTraining):
    """Stochastic steps of this and earlier iterations, drawn anew for every update."""

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.model.shard:
            raise ConfigError(
                "model.shard=true: a network that is split needs its processes in step, and the transitions that "
                f"{setting.name} remembers are spread unevenly",
                {"model.shard": False},
            )

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        drawn = setting.samples * len(plan.train)
        return replace(super().demand(plan, setting), share=self.method.config.batch / drawn)

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        return TransitionBatches(context, iteration)

    def pass_gate(self, work: Work, dtype: torch.dtype) -> None:
        super().pass_gate(EdgeBatches(work.context, work.iteration), dtype)


class TransitionBatches(Work):
    """The updates of an iteration. Draws are keyed by it and the same on every process, which takes its share."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        self.method, self.rollout = context.method, iteration.rollout
        self.adapter, self.world = context.networks.policy.adapter, context.world
        self.memory, self.updates = context.method.transitions, 0
        self.shares = [None]  # one per pass, drawn by `batches`

    def prepare(self) -> None:
        """Add the iteration's transitions of all processes, and fit the critic."""
        new = Table.join(self.world.gather(self._own()))
        if len(new):
            self.memory.add(new, self.rollout.identities)
        options = self.method.config.critic
        for number in range(options.steps if len(self.memory) else 0):
            rows = self._drawn(options.batch_size, "value", number)
            part, expected, _, _ = self._expected(rows)
            error = expected - sent(part.reward, expected.device).to(expected)
            if number == 0:
                self.iteration.sums.add("policy/critic_error", float(error.detach().square().mean()))
            assert self.method.critic is not None
            self.method.critic.descend(error)

    def _own(self) -> Table:
        """This rank's transitions in the order (slot, sample, step), without those of masked samples."""
        rollout, edges = self.rollout, self.rollout.edges
        identity, slots = rollout.identity, torch.tensor([i.slot for i in rollout.samples.ids], dtype=torch.int64)
        part = edges.select(self.iteration.credit.kept.flatten()[identity][edges.sample].nonzero().squeeze(1))
        return Table(
            latents=edges.nodes[part.parent],
            next_latents=edges.nodes[part.child],
            step=part.step,
            old_log_prob=part.old_log_prob,
            reward=self.iteration.credit.values.flatten()[identity][part.sample],
            prompt=slots[part.sample],
        )

    def _drawn(self, count: int, purpose: str, number: int) -> Tensor:
        """Rows of `count` transitions without repetition; all of them if there are fewer."""
        key = f"recall/{purpose}", self.iteration.number, number
        return permutation(len(self.memory), self.context.seed, *key)[:count]

    def _expected(self, rows: Tensor) -> tuple[Table, Tensor, Condition, Tensor]:
        """The transitions `rows` [n], the critic's expected rewards, [n] with a graph, the conditions of their distinct
        prompts, and the row of each in these, [n]."""
        assert self.memory.table is not None
        assert self.context.lookup is not None
        part, device = self.memory.table.at(rows), self.world.device
        distinct, place = part.prompt.unique(return_inverse=True)
        cond = self.context.lookup([self.memory.prompts[k] for k in distinct.tolist()])
        latents = sent(part.latents, device).float().flatten(1)
        features = torch.cat([latents, text_features(cond)[sent(place, device)].to(latents)], dim=1)
        seed, steps = derive(self.context.seed, "value"), len(self.rollout.plan)
        critic = self.method.make_critic(features.shape[1], steps, seed, device)
        return part, critic(features, sent(part.step, device)), cond, place

    # ---- updates

    @property
    def sizes(self) -> list[int]:
        """Transitions of this rank in an update."""
        return [len(self._share(torch.arange(min(self.method.config.batch, len(self.memory)))))]

    def _share(self, rows: Tensor) -> Tensor:
        return rows.tensor_split(self.world.size)[self.world.rank]

    def batches(self, number: int) -> Iterator[tuple[Microbatch, bool]]:
        """Training forwards of the next update; all of them count."""
        rows = self._share(self._drawn(self.method.config.batch, "policy", self.updates))
        self.updates += 1
        if not len(rows):
            return
        with torch.no_grad():
            part, expected, cond, place = self._expected(rows)
        advantage = part.reward - expected.float().cpu()
        keys = with_lengths(batch_keys(self.adapter, part.step), self.adapter, cond, place)
        for key in keys.unique():
            for members in (keys == key).nonzero().squeeze(1).split(self.context.optim.batch_size):
                yield self._microbatch(part.at(members), cond.index(place[members]), advantage[members], members), True

    def _microbatch(self, part: Table, cond: Condition, advantage: Tensor, place: Tensor) -> Microbatch:
        plan, device = self.rollout.plan, self.world.device
        step = plan.steps(part.step, self.adapter.process, device)
        return Microbatch(
            latents=sent(part.latents, device),
            start=step,
            cond=cond,
            parent=torch.arange(len(part), device=device),
            next_latents=sent(part.next_latents, device),
            step=step,
            old_log_prob=sent(part.old_log_prob, device),
            advantage=sent(advantage[:, None], device),
            place=place,
            plan=plan,
            alone=True,
        )
