"""Training on a rollout's stochastic steps: credit, shares of the updates, old log-probs evaluated once more."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.types import SampleId
from flowrl.credit.saliency import apply_map
from flowrl.diffusion.plan import StepPlan
from flowrl.losses.batches import Microbatch
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Rollout
from flowrl.samplers.base import Sampler, takes_vp
from flowrl.training import replay_gate
from flowrl.training.base import Demand, Iteration, Setting, Training, UpdateContext, Work
from flowrl.training.microbatches import batch_keys, forwards, microbatches
from flowrl.training.sharding import longest


def nodes_per_sample(plan: StepPlan) -> int:
    """Latents kept per sample of a chain: both ends of every trained step, shared where steps are neighbours.

    >>> from flowrl.diffusion.plan import window
    >>> from flowrl.diffusion.schedules import Schedule
    >>> grid = Schedule(torch.linspace(1, 0, 9), torch.arange(8.0))
    >>> nodes_per_sample(window(grid, 0.7, [0, 1, 2])), nodes_per_sample(window(grid, 0.7, [0, 3]))
    (4, 4)
    """
    return 2 if plan.own else len(plan.train) + sum(k - 1 not in plan.train for k in plan.train)


class EdgeTraining(Training[EdgeMethod]):
    """The stochastic steps of this iteration's rollout, each once per pass."""

    rows_are = "steps"
    takes_sampler = True

    def check(self, setting: Setting) -> None:
        wanted, given = self.method.guidance_scale, setting.rollout.guidance_scale
        if wanted is not None and wanted != given:
            raise ConfigError(
                f"algorithm.guidance_scale={wanted} differs from rollout.guidance_scale={given}: the ratio of a method "
                "with log-probs needs the same",
                {"algorithm.guidance_scale": None},
            )
        self._check_steps(setting)
        super().check(setting)
        self._check_trees(setting)

    def _check_steps(self, setting: Setting) -> None:
        steps, trained = setting.rollout.num_inference_steps, self.method.sde_steps
        # Flows end at clean data. The end of a noise-prediction model's last step is known with its scheduler.
        flow = not takes_vp(setting.sampler)
        if steps < 1 + flow:
            raise ConfigError(
                f"rollout.num_inference_steps={steps}: at least 2, since a flow's last step ends at clean data, where "
                "no noise is left to be scored",
                {"rollout.num_inference_steps": 2},
            )
        if trained is not None and max(trained) > steps - 1 - flow:
            raise ConfigError(
                f"algorithm.sde_steps={trained}: with rollout.num_inference_steps={steps} "
                f"the last trainable step is {steps - 1 - flow}"
            )
        if setting.sampler.default_noise_level() == 0:
            raise ConfigError(
                f"rollout.sampler={setting.rollout.sampler}: this sampler is deterministic, its steps have no log-prob",
                _with_noise(setting.sampler),
            )

    def _check_trees(self, setting: Setting) -> None:
        """Refuse groups that are not the leaves of whole trees, for a method on trees."""
        config, name, group = self.method.config, setting.name, setting.rollout.group_size
        leaves = config.leaves(setting.rollout.num_inference_steps)
        if group % leaves:
            raise ConfigError(
                f"rollout.group_size={group}: the samples of a prompt are the leaves of whole trees, and one "
                f"of {name} has {leaves} here",
                {"rollout.group_size": -(-group // leaves) * leaves},
            )
        least = config.least_trees * leaves
        if group < least:
            raise ConfigError(
                f"rollout.group_size={group}: {name} compares the trees of a prompt, and one has {leaves} leaves here",
                {"rollout.group_size": least},
            )
        trees, updates = setting.samples // leaves, setting.optim.updates_per_iteration
        if leaves > 1 and trees % updates:
            valid = [n for n in range(1, trees + 1) if trees % n == 0]
            near = sorted(sorted(valid, key=lambda n: abs(n - updates))[:3])
            raise ConfigError(
                f"optim.updates_per_iteration={updates} does not divide the {trees} trees of an iteration, which an "
                f"update takes whole ({setting.slots} prompts x {group} samples in trees of {leaves})",
                remedies=[Remedy({"optim.updates_per_iteration": number}) for number in near],
            )

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        share, size = self.method.taken(setting.group_size) / setting.group_size, setting.group_size
        kept = self.method.kept_edges([SampleId(0, k) for k in range(size)], plan, 1, setting.seed)
        share = share if kept is None else share * float(kept.float().mean())
        return Demand(rows=plan.trained, share=share, latents=nodes_per_sample(plan))

    def recording(self, sampler: Sampler) -> Recording:
        return Recording(self.method.log_prob_form(sampler), self.method.columns)

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        return EdgeBatches(context, iteration)

    def pass_gate(self, work: Work, dtype: torch.dtype) -> None:
        assert isinstance(work, EdgeBatches)
        replay_gate.pass_gate(work, dtype)


class EdgeBatches(Work):
    """This rank's edges of an iteration, in shares of one update each."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        method, rollout, credit = context.method, iteration.rollout, iteration.credit
        self.rollout = rollout = replace(rollout, edges=method.annotated(rollout, credit))
        self.adapter = context.networks.policy.adapter
        edges, identity, leaves = rollout.edges, rollout.identity, rollout.plan.leaves
        kept = method.kept_edges(rollout.samples.ids, rollout.plan, iteration.number, context.seed)
        if credit.steps is None or credit.pruned is None:
            self.advantage = self._advantages(identity)[edges.sample]  # [E, R', *pos]
            taken = credit.kept
        else:
            place = identity[edges.sample], edges.step
            self.advantage = credit.steps.flatten(0, 1)[place][:, None]
            live, taken = ~credit.pruned.flatten(0, 1)[place], ~credit.pruned.all(dim=2)
            kept = live if kept is None else live & kept
        # A tree's edges share their starts, so it stays whole; a chain is a tree of one leaf.
        useful = taken.flatten().reshape(-1, leaves).any(dim=1).nonzero().squeeze(1)
        for number, chunk in enumerate(self.chunks(useful, taken.shape[1] // leaves)):
            inside = torch.isin(identity[edges.sample] // leaves, chunk)
            rows = (inside if kept is None else inside & kept).nonzero().squeeze(1)
            self.shares.append(rows[self.order(len(rows), "edges", number)])

    def _advantages(self, identity: Tensor) -> Tensor:
        """Advantages of this rank's samples, [B, R', *pos]; by position for a method with `spatial`."""
        credit, maps, sums = self.iteration.credit, self.rollout.maps, self.iteration.sums
        own, options = credit.values.flatten(0, 1)[identity], self.context.method.spatial
        if options is None:
            return own
        assert maps is not None
        sums.add("spatial/map_mean", float(maps.flatten(1).mean(dim=1).sum()), len(maps))
        sums.add("spatial/flat_share", float((maps == 1).flatten(1).all(dim=1).sum()), len(maps))
        return apply_map(own, maps, options.ratio, credit.bound)

    def prepare(self) -> None:
        if self.context.method.recompute:
            self.rollout = self._recomputed()

    def batches(self, number: int) -> Iterator[tuple[Microbatch, bool]]:
        return self.in_step(self.shares[number])

    def in_step(self, order: Tensor) -> Iterator[tuple[Microbatch, bool]]:
        """Forwards of the edges `order` [n], and whether they count.

        With a sharded network every process makes the same forwards by batch key: where another process has more of a
        key, an edge of this one is repeated, and does not count.
        """
        context, real = self.context, self.forwards(order, self.advantage)
        if not context.sharded:
            yield from ((batch, True) for batch in real)
            return
        edges = self.rollout.edges
        own = Counter(forward.key for forward in forwards(self.rollout, self.adapter, order, context.optim.batch_size))
        keys = batch_keys(self.adapter, edges.step)
        for key, most in longest(context.world.gather(own)).items():
            mine = own.get(key, 0)
            for _ in range(mine):
                yield next(real), True
            spare = (keys == key).nonzero()[0]
            for _ in range(most - mine):
                with context.counter.uncounted():
                    yield next(self.forwards(spare, torch.zeros_like(self.advantage))), False

    def forwards(self, order: Tensor, advantage: Tensor) -> Iterator[Microbatch]:
        """Forwards of the edges `order` [n], with the advantages of all."""
        size, device = self.context.optim.batch_size, self.context.world.device
        return microbatches(self.rollout, advantage, self.adapter, batch_size=size, order=order, device=device)

    def _recomputed(self) -> Rollout:
        """The rollout with old log-probs, and old means if the method keeps them, at the batches of the updates.

        With gradients, like those, though none is taken: kernels may be others without.
        """
        edges = self.rollout.edges
        old, columns = edges.old_log_prob.clone(), {name: value.clone() for name, value in edges.columns.items()}
        for share in self.shares:
            for batch, counts in self.in_step(share):
                log_prob, mean = self._scored(batch)
                if not counts:
                    continue
                rows = share[batch.place]
                old[rows] = log_prob
                if "mean_old" in columns:
                    columns["mean_old"][rows] = mean
        return replace(self.rollout, edges=replace(edges, old_log_prob=old, columns=columns))

    def _scored(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """(log-probs [E, *pos], means [E, ...]) of the edges under the policy, on the CPU, without their graph."""
        networks = self.context.networks
        policy = networks.transition(batch)
        log_prob = policy.log_prob(batch.next_latents, self.context.method.log_prob_form(networks.policy.sampler))
        return log_prob.detach().cpu(), policy.mean.detach().cpu()


def _with_noise(sampler: Sampler) -> Remedy:
    """The sampler's own noise level, or a stochastic sampler of flows and noise predictions alike."""
    level = next((field.default for field in fields(sampler.config) if field.name == sampler.noise_key), None)
    if level is None:
        return Remedy({"rollout.sampler": {"name": "ddim", "eta": 1.0}})
    return Remedy({f"rollout.sampler.{sampler.noise_key}": level or 1.0})
