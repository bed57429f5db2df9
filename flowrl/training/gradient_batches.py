"""The training data of a method on the gradient of rewards: its samples' kept steps, from late to early.

Of each forward's samples the rewards' gradient is taken first, at finished latents, and its graph is gone before the
network is evaluated. Then a step at a time: memory does not grow with the number of steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowrl.algorithms.base import GradientMethod
from flowrl.core.errors import ConfigError
from flowrl.core.rng import normal
from flowrl.core.tensors import sent
from flowrl.core.types import Condition, Step
from flowrl.data.prompts import identity, reworded
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import expand
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import GradientBatch
from flowrl.losses.reward_gradients import Link, Recovery, Wordings, levers, links, misses, pulled_back, recovered
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.surroundings import Latents
from flowrl.training.base import Demand, Iteration, Setting, Training, UpdateContext, Work
from flowrl.training.microbatches import with_lengths


class GradientTraining(Training[GradientMethod]):
    """Kept steps of a deterministic rollout, with the gradient of the rewards at its samples."""

    rows_are = "steps"
    climbs = True

    def __init__(self, method: GradientMethod) -> None:
        super().__init__(method)
        self.takes_sampler = method.config.noisy

    def check(self, setting: Setting) -> None:
        super().check(setting)
        rollout, name, sampler = setting.rollout, setting.name, setting.rollout.sampler
        refused = {
            "rollout.shared_noise=true": (rollout.shared_noise, "equal noise gives equal samples", False),
            f"rollout.sampler={sampler}": (sampler and not self.takes_sampler, "its rollout is deterministic", None),
        }
        for option, (given, why, instead) in refused.items():
            if given:
                key = option.partition("=")[0]
                raise ConfigError(f"{option}: {why} ({name})", {key: instead})
        if self.method.passes > 1:
            raise ConfigError(f"passes={self.method.passes}: {name} climbs from a rollout once; its samples move")

    def check_grid(self, schedule: Schedule, seed: int) -> None:
        for recovery in self.method.route(levers(schedule), 1, seed).recoveries:
            schedule.timestep_at(torch.tensor(recovery.start))

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        route = self.method.route(levers(plan.schedule), 1, setting.seed)
        rows = 2 * len(route.recoveries) or len(route.trained)
        return Demand(rows=rows + 2 * self.method.redrawn, share=1.0, latents=2 * len(plan.keep))

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        return GradientBatches(context, iteration)


def transposed(output: Callable[[Tensor], Tensor], x: Tensor, a: Tensor) -> Tensor:
    """(d output / dx)^T a at latents x, [M, ...]."""
    x, size = x.clone().requires_grad_(), a.abs().amax().clamp(min=1e-30)
    with torch.enable_grad():  # what is small would vanish in half precision
        return size * torch.autograd.grad(output(x), x, a / size)[0]


def forwards(context: UpdateContext, rollout: Rollout, rows: Tensor) -> Iterator[Tensor]:
    """Samples [n] of each forward, of one length of text where that counts."""
    adapter = context.networks.policy.adapter
    keys = with_lengths(torch.zeros_like(rows), adapter, rollout.cond, rollout.rows[rows])
    for key in keys.unique():
        yield from rows[keys == key].split(context.optim.batch_size)


def slope(
    work: Work, x: Tensor, rows: Tensor, words: Wordings = (), sigma: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rewards' gradient at latents [M, ...] of the samples `rows`, with its metrics, name -> [M].

    Latents are clean, or of noise levels `sigma` [M]; `words` stand in place of the prompts'.
    """
    context, iteration, rollout = work.context, work.iteration.number, work.iteration.rollout
    assert context.climb is not None
    ids, place = [rollout.samples.ids[row] for row in rows.tolist()], rollout.rows[rows]
    own, keys = [rollout.prompts[i.slot] for i in ids], [(context.seed, iteration, i.slot, i.sample) for i in ids]
    read = [] if words else [(1.0, own, rollout.cond, place)]
    for factor, wording in words:
        texts, at = [reworded(prompt, wording) for prompt in own], (rollout.cond, place)
        if context.lookup is not None and any(entry.reward.on_latents for entry in context.climb.climbed):
            at = context.lookup([identity(text) for text in texts]), torch.arange(len(rows))
        read.append((factor, texts, *at))
    found = context.climb(Latents(x, rollout.cond, place, sigma), read, keys)
    size = found.gradient.flatten(1).norm(dim=1)
    return found.gradient, {
        "reward_gradient/value": found.value.nan_to_num(),
        "reward_gradient/norm": size,
        "reward_gradient/flat_share": (size == 0).float(),
        "reward_gradient/saturated_share": found.saturated,
    }


class GradientBatches(Work):
    """This rank's samples of an iteration, in shares of one update each."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        self.method: GradientMethod = context.method
        self.rollout, self.adapter = iteration.rollout, context.networks.policy.adapter
        self.plan, self.kept = self.rollout.plan, self.rollout.samples.kept
        self.route = self.method.route(levers(context.schedule), iteration.number, context.seed)
        adapter, sampler = self.adapter, context.networks.policy.sampler
        self.links = links(self.plan, adapter.process, adapter.prediction_type, self.route, sampler)
        identity, kept, tau = self.rollout.identity, iteration.credit.kept, self.method.tau
        self.weights: Tensor | None = None
        """Of the samples, [B]; None: all weigh alike."""
        if tau is not None and self.kept:
            missed = misses(self.plan, self.adapter.process, self.route, self.kept, self.rollout.samples.x0)
            self.weights = 1 / missed.clamp(min=tau).sum(dim=0)
        for number, chunk in enumerate(self.chunks(kept.flatten().nonzero().squeeze(1), kept.shape[1])):
            rows = torch.isin(identity, chunk).nonzero().squeeze(1)
            self.shares.append(rows[self.order(len(rows), "climbs", number)])

    def batches(self, number: int) -> Iterator[tuple[GradientBatch, bool]]:
        own = list(forwards(self.context, self.rollout, self.shares[number]))
        most = max(self.context.world.gather(len(own))) if self.context.sharded else len(own)
        for rows in own:
            yield from ((batch, True) for batch in self._of(rows))
        for _ in range(most - len(own)):  # every forward of a sharded network is one of all processes
            with self.context.counter.uncounted():
                yield from ((batch, False) for batch in self._of(torch.zeros(1, dtype=torch.int64)))

    def _of(self, rows: Tensor) -> Iterator[GradientBatch]:
        """The steps of some samples, late to early, and then those of their redrawn ends."""
        method, device, cond = self.method, self.context.world.device, self.rollout.cond.index(self.rollout.rows[rows])
        if self.route.recoveries:
            yield from (self._recovered(recovery, rows, cond) for recovery in self.route.recoveries)
            return
        ends, sigma = self.kept[self.route.end].x0_hat if method.predicts else self.rollout.samples.x0, None
        if self.route.ahead:
            after = self.route.end + 1
            ends = self.kept[after].x if after in self.kept else ends
            sigma = self.plan.schedule.sigmas[after].expand(len(rows)).to(device)
        clean = sent(ends[rows], device)
        gradient, metrics = slope(self, clean, rows, sigma=sigma)
        if self.route.noised:
            for k in self.route.trained:
                x = self._noised(clean, k, rows, "noised_sample", k)
                yield GradientBatch(x, self._at(k, rows), cond, gradient, metrics, clean)
            return
        draws, share = method.redrawn, 1 / (1 + method.redrawn)
        places = {k: sent(self.kept[k].x[rows], device) for k in self.route.trained}
        if self.weights is not None:
            weight = sent(self.weights[rows], device)
            gradient, metrics = expand(weight, gradient) * gradient, {**metrics, "reward_gradient/leap_weight": weight}
        yield from self._steps(share * gradient, metrics, places, self.links, cond)
        for draw in range(draws):
            x, clean = self._redrawn(rows, draw, cond)
            gradient, metrics = slope(self, clean, rows)
            yield from self._steps(share * gradient, metrics, {self.route.end: x}, self.links[:1], cond)

    def _recovered(self, recovery: Recovery, rows: Tensor, cond: Condition) -> GradientBatch:
        """The forward of a recovery, at the finished samples noised by the noise that they began with."""
        policy, schedule, samples = self.context.networks.policy, self.plan.schedule, self.rollout.samples
        process, size = self.adapter.process, len(self.route.recoveries)
        start, end = schedule.at_flow(torch.tensor([recovery.start, recovery.end]))
        levels = {"sigma": start, "sigma_next": end, "timestep": schedule.timestep_at(start)}
        levels |= {"alpha": process.alpha(start), "alpha_next": process.alpha(end)}
        here = self._at(0, rows)
        step = replace(here, **{name: value.expand(len(rows)).to(here.sigma) for name, value in levels.items()})
        freed = partial(recovered, step=step, process=process, kind=self.adapter.prediction_type)
        x0, eps = (sent(each[rows], here.sigma.device).float() for each in (samples.x0, self.kept[0].x))
        x = expand(step.alpha, x0) * x0 + expand(step.sigma, x0) * eps
        with torch.no_grad():
            clean = freed(policy.output(x, step, cond).float(), x, eps)
        gradient, metrics = slope(self, clean, rows, recovery.readings)
        gain = freed(torch.ones_like(x), torch.zeros_like(x), torch.zeros_like(x))
        return GradientBatch(x, step, cond, gain * gradient / size, metrics)

    def _at(self, k: int, rows: Tensor) -> Step:
        """Step k of as many samples."""
        return self.plan.steps(torch.full((len(rows),), k), self.adapter.process, self.context.world.device)

    def _steps(
        self,
        gradient: Tensor,
        metrics: Mapping[str, Tensor],
        places: Mapping[int, Tensor],
        links: Sequence[Link],
        cond: Condition,
    ) -> Iterator[GradientBatch]:
        """The forwards of the trained steps, at the latents `places`."""
        policy = self.context.networks.policy

        def product(k: int, c: Tensor) -> Tensor:
            return transposed(lambda x: policy.output(x, self._at(k, c), cond).float(), places[k], c)

        for k, c in pulled_back(gradient, links, self.route.trained, product):
            yield GradientBatch(places[k], self._at(k, c), cond, c, metrics)

    @torch.no_grad()
    def _redrawn(self, rows: Tensor, draw: int, cond: Condition) -> tuple[Tensor, Tensor]:
        """The predictions at the end of the route noised again to its noise level, and the predictions from there."""
        k = self.route.end
        x = self._noised(sent(self.kept[k].x0_hat[rows], self.context.world.device), k, rows, "redrawn_end", draw)
        return x, self.context.networks.policy.predict(x, self._at(k, rows), cond).x0_hat

    def _noised(self, clean: Tensor, k: int, rows: Tensor, purpose: str, draw: int) -> Tensor:
        """Clean latents of the samples `rows` at the noise level of step k, [M, ...]."""
        ids, step = [self.rollout.samples.ids[row] for row in rows.tolist()], self._at(k, rows)
        keys = [(self.iteration.number, i.slot, i.sample, draw) for i in ids]
        eps = sent(normal(clean.shape[1:], self.context.seed, purpose, keys), clean.device)
        return expand(step.alpha, eps) * clean + expand(step.sigma, eps) * eps
