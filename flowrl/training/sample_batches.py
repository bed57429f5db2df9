"""The finished samples of an iteration for its updates: noised again, cut into shares, batched.

A term is a sample at one training time. Its time and noise are keyed by identity, so they depend neither on batches
nor on processes, and stay the same in every pass.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowrl.algorithms.base import SampleMethod
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.rng import normal
from flowrl.core.tensors import sent
from flowrl.core.types import SampleId
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import NoisedBatch
from flowrl.models.base import ModelAdapter
from flowrl.rollout.ahead import Ahead, pinned
from flowrl.rollout.exploration import require_pool
from flowrl.rollout.options import RolloutConfig
from flowrl.rollout.outputs import training_guidance
from flowrl.training.base import Demand, Iteration, Setting, Training, UpdateContext, Work


class SampleTraining(Training[SampleMethod]):
    """Finished samples, noised again to the training times."""

    renoises = True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        rollout, method, name = setting.rollout, self.method, setting.name
        if method.unit == "group" and rollout.group_size < 2:
            raise ConfigError(
                f"rollout.group_size=1: the loss of {name} compares the samples of a prompt", {"rollout.group_size": 2}
            )
        if rollout.shared_noise:
            raise ConfigError(
                f"rollout.shared_noise=true: the samples of {name} differ by their initial noise",
                {"rollout.shared_noise": False},
            )
        if rollout.sampler is not None:
            raise ConfigError(
                f"rollout.sampler={rollout.sampler}: {name} scores no transition, so it takes no sampler; "
                "algorithm.solver takes the steps",
                {"rollout.sampler": None},
            )
        self._check_units(setting)

    def _check_units(self, setting: Setting) -> None:
        """Refuse forwards too small for what the loss compares."""
        method, size = self.method, setting.optim.batch_size
        terms, taken = method.config.terms(setting.rollout.num_inference_steps), method.taken(setting.group_size)
        whole = {"term": 1, "sample": terms, "group": taken, "prompt": taken * terms}[method.unit]
        if whole > size:
            what = {"sample": "all times of a sample", "group": "all samples of a prompt"}.get(
                method.unit, "all samples of a prompt at all their times"
            )
            raise ConfigError(
                f"optim.batch_size={size}: a forward of {setting.name} must hold {what}, "
                f"{whole} rows (model.gradient_checkpointing=true saves memory)",
                {"optim.batch_size": whole},
            )

    def _check_exploration(self, setting: Setting) -> None:
        options, model = setting.rollout.exploration, setting.model
        if options is None:
            return
        few_bits = model.memory.quantize is not None or model.memory.layerwise_casting is not None
        if options.network != "policy" and (model.shard or few_bits):
            key = "model.shard" if model.shard else "model.memory"
            raise ConfigError(
                f"rollout.exploration.network={options.network}: weights that {key} splits or stores in few bits have "
                "no plain copy",
                {"rollout.exploration.network": "policy"},
            )
        try:
            require_pool(options, setting.rollout.group_size)
        except ValueError as error:
            raise ConfigError.about(error, "rollout.exploration.", place="rollout.exploration") from None

    def check_grid(self, schedule: Schedule, seed: int) -> None:
        self.method.times(schedule, [SampleId(0, 0)], 1, seed)

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        share = self.method.taken(setting.group_size) / setting.group_size
        return Demand(rows=self.method.config.terms(len(plan.schedule)), share=share, latents=0)

    def guidance(self, adapter: ModelAdapter, rollout: float) -> float:
        return training_guidance(adapter, rollout, self.method.guidance_scale)

    def work(self, context: UpdateContext, iteration: Iteration) -> "SampleBatches":
        return SampleBatches(context, iteration)


class GivenTraining(SampleTraining):
    """Samples in slots that are filled from pairs or labelled images; the network draws the missing ones."""

    def _check_exploration(self, setting: Setting) -> None:
        """Refuse exploration, and options of slots that a rollout draws."""
        given, default = dataclasses.asdict(setting.rollout), dataclasses.asdict(RolloutConfig())
        for name in ("prompts_per_iteration", "group_size", "exploration"):
            if given[name] != default[name]:
                raise ConfigError(
                    f"rollout.{name}={given[name]}: the slots of {setting.name} are filled from the pairs; "
                    "data.pairs.per_iteration is their number",
                    Remedy(without=f"rollout.{name}"),
                )


class SampleBatches(Work):
    """This rank's terms of an iteration, in shares of one update each.

    A share is a list of units: terms [n] that a forward must hold together. A term's number is row * T + time.
    """

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        self.method, self.rollout = context.method, iteration.rollout
        samples, credit = iteration.rollout.samples, iteration.credit
        self.identity = iteration.rollout.identity
        self.credit = credit.values.flatten(0, 1).squeeze(1)[self.identity]
        self.times = self.method.times(context.schedule, samples.ids, iteration.number, context.seed)
        self.count = self.times.sigma.shape[1]
        self.slot = torch.tensor([i.slot for i in samples.ids])
        self.margin = None if credit.margin is None else credit.margin.float()[self.slot]
        self.old: Tensor | None = None
        # The first update meets the very network that drew the samples: its old values would be its own.
        self.fresh = self.method.behaviour == "policy" and self.method.passes == 1
        lengths = context.networks.policy.adapter.text_lengths(self.rollout.cond)
        self.lengths = None if lengths is None else lengths[self.rollout.rows].tolist()
        kept = credit.kept.flatten()[self.identity]
        for number, chunk in enumerate(self._chunks(credit)):
            rows = (kept & torch.isin(self.identity, chunk)).nonzero().squeeze(1)
            units = self._units(rows)
            self.shares.append([units[k] for k in self.order(len(units), "terms", number).tolist()])

    def _chunks(self, credit: Advantages) -> list[Tensor]:
        """Global sample numbers of each update: of each prompt as many samples, or whole groups."""
        prompts, size = credit.kept.shape
        if self.method.unit not in ("group", "prompt"):
            return self.chunks(credit.kept.flatten().nonzero().squeeze(1), size)
        slots = credit.kept.any(dim=1).nonzero().squeeze(1)
        return [(chunk[:, None] * size + torch.arange(size)).flatten() for chunk in self.chunks(slots, prompts)]

    def _units(self, rows: Tensor) -> list[Tensor]:
        """Units of the samples `rows`."""
        times = torch.arange(self.count)
        if self.method.unit == "term":
            return list((rows[:, None] * self.count + times).reshape(-1, 1))
        if self.method.unit == "sample":
            return list(rows[:, None] * self.count + times)
        groups = [rows[self.slot[rows] == slot] for slot in self.slot[rows].unique()]
        if self.method.unit == "prompt":
            return [(group[:, None] * self.count + times).flatten() for group in groups]
        return [group * self.count + time for group in groups for time in range(self.count)]

    def prepare(self) -> None:
        method, networks = self.method, self.context.networks
        shares = self.shares[1:] if self.fresh else self.shares
        if not method.keeps_old or not shares:
            return
        old = torch.zeros(len(self.identity) * self.count, dtype=torch.float64)
        places: list[Tensor] = []
        values: list[Tensor] = []
        with torch.no_grad(), networks.weights.using(method.behaviour):
            for terms, batch, counts in (each for share in shares for each in self._in_step(share)):
                result = method.old(batch, networks)
                if counts:
                    places.append(terms)
                    values.append(result)
        if values:
            old[torch.cat(places)] = torch.cat(values).cpu()
        self.old = old

    @property
    def sizes(self) -> list[int]:
        """Terms of each share."""
        return [sum(map(len, share)) for share in self.shares]

    def batches(self, number: int) -> Iterator[tuple[NoisedBatch, bool]]:
        centre = self._centre(number) if self.method.centres else None
        return ((replace(batch, centre=centre), counts) for batch, counts in self.plain_batches(number))

    def plain_batches(self, number: int) -> Iterator[tuple[NoisedBatch, bool]]:
        """The same batches without the means of `method.centres`."""
        known = not (self.fresh and number == 0)
        batches = ((batch, counts) for _, batch, counts in self._in_step(self.shares[number]))
        return ((batch if known else replace(batch, old=None), counts) for batch, counts in batches)

    def _centre(self, number: int) -> Tensor | None:
        """Means of `method.measured` over the terms of a share on all processes, [K]; None without terms."""
        sums, count = torch.zeros((), device=self.context.world.device), 0
        with torch.no_grad():
            for batch, counts in self.plain_batches(number):
                result = self.method.measured(batch, self.context.networks)
                if counts:
                    sums, count = sums + result.sum(dim=0), count + len(batch)
        parts = [part for part in self.context.world.gather((sums.cpu(), count)) if part[1]]
        if not parts:
            return None
        total = torch.stack([sums for sums, _ in parts]).sum(dim=0) / sum(count for _, count in parts)
        return total.to(self.context.world.device)

    def _in_step(self, share: list[Tensor]) -> Iterator[tuple[Tensor, NoisedBatch, bool]]:
        """Terms of each forward, their batch, and whether they count; of a sharded network as many forwards on every
        process."""
        own = list(self._forwards(share))
        most = max(self.context.world.gather(len(own))) if self.context.sharded else len(own)
        with Ahead((partial(self._eps, terms) for terms in own), self.context.world.device) as drawn:
            for terms in own:
                yield terms, self._batch(terms, drawn.take()), True
        spare = torch.zeros(1, dtype=torch.int64)
        for _ in range(most - len(own)):
            with self.context.counter.uncounted():
                yield spare, self._batch(spare, self._eps(spare)), False

    def _forwards(self, share: list[Tensor]) -> Iterator[Tensor]:
        """Terms [n] of each forward: whole units, of one length of text where that counts, at most `optim.batch_size`
        terms."""
        waiting: dict[int, list[Tensor]] = {}
        for unit in share:
            # A unit is of one prompt.
            length = 0 if self.lengths is None else self.lengths[int(unit[0]) // self.count]
            units = waiting.get(length, [])
            if units and sum(map(len, units)) + len(unit) > self.context.optim.batch_size:
                yield torch.cat(units)
                units = []
            waiting[length] = [*units, unit]
        yield from (torch.cat(units) for units in waiting.values())

    def _eps(self, terms: Tensor) -> Tensor:
        """The noise of each term, on the CPU."""
        rows, time, samples = terms // self.count, terms % self.count, self.rollout.samples
        if samples.initial is not None:
            return pinned(samples.initial[rows])
        keys = [
            (self.iteration.number, i.slot, i.sample if self.method.eps == "sample" else 0, k)
            for i, k in zip([samples.ids[row] for row in rows.tolist()], time.tolist(), strict=True)
        ]
        return pinned(normal(samples.x0.shape[1:], self.context.seed, "training_noise", keys))

    def _batch(self, terms: Tensor, eps: Tensor) -> NoisedBatch:
        rows, time, device = terms // self.count, terms % self.count, self.context.world.device
        return NoisedBatch(
            clean=sent(self.rollout.samples.x0[rows], device),
            eps=sent(eps, device),
            sigma=sent(self.times.sigma[rows, time], device),
            timestep=sent(self.times.timestep[rows, time], device),
            cond=self.rollout.cond.index(self.rollout.rows[rows]),
            advantage=sent(self.credit[rows], device),
            sample=sent(self.identity[rows], device),
            group=sent(self.slot[rows] * self.count + time, device),
            old=None if self.old is None else sent(self.old[terms], device),
            margin=None if self.margin is None else sent(self.margin[rows], device),
        )
