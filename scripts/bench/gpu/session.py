"""A session for measurements: the recipe's parts, its own or random weights, and small rollouts with random rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.credit.advantages import Advantages
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import StepPlan
from flowrl.rollout.flop import RowFlop
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.trajectories import Asked, NoiseDraws, Rollout, Trajectories
from flowrl.run.session import Session
from flowrl.training.base import UpdateContext, Work
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums
from flowrl.training.noise_batches import numbers_of
from flowrl.training.optim import StepReport
from flowrl.training.world import join
from scripts.bench.gpu.clock import Clock
from scripts.bench.random_weights import randomised

REWARD = "scripts.bench.gpu.reward"
TOWER = "scripts.bench.gpu.tower"
VARIANTS: dict[str, tuple[str, ...]] = {
    "now": (),
    "autocast": ("model.precision=autocast",),
    "native": ("model.precision=native",),
    "compile": ("model.compile=blocks",),
    "checkpointing": ("model.gradient_checkpointing=true",),
    "stored": ("model.gradient_checkpointing=false",),
    "positive": ("model.guidance_gradient=positive",),
    "vae-float32": ("model.vae_precision=float32",),
    "vae-bfloat16": ("model.vae_precision=bfloat16",),
    "vae-channels-last": ("model.memory.vae_channels_last=true",),
}
"""Name of a variant -> the options that it sets; `now` is the recipe as it is."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A session with what its measurements share."""

    session: Session
    plan: StepPlan
    batch: int
    """Samples of a forward, in rollout and training."""
    counted: list[RowFlop | None] = field(default_factory=list)
    """The operations of a row, once they are counted."""
    first: dict[int, torch.Tensor] = field(default_factory=dict)
    """Batch -> images on the CPU that the first of several variants decoded, which the others are compared with."""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    @property
    def resolved(self) -> Resolved:
        """The run at this batch."""
        run = self.session.config
        rollout, optim = replace(run.rollout, batch_size=self.batch), replace(run.optim, batch_size=self.batch)
        return replace(self.session.resolved, run=replace(run, rollout=rollout, optim=optim))

    @property
    def context(self) -> UpdateContext:
        """The parts of the updates at this batch."""
        context = self.session.parts.learner.context
        optim = replace(context.optim, batch_size=self.batch)
        return replace(context, optim=optim, rollout_batch_size=self.batch)

    def update(self, own: Rollout, credit: Advantages, microbatches: int) -> None:
        """One update by the run's own learner, of so many training forwards or of as many as the samples give."""

        def shorten(work: Work, number: int) -> None:
            share, most = work.shares[number], self.batch * microbatches
            if isinstance(share, torch.Tensor):
                work.shares[number] = share[:most]
            elif share:  # units of terms, all of one size
                work.shares[number] = share[: max(1, most // len(share[0]))]

        learner = self.session.parts.learner
        shortened = Learner(learner.training, self.context, learner.optimizer)
        shortened.before_update = shorten
        shortened.update(1, own, credit, Sums())

    @contextmanager
    def steps(self) -> Iterator[Clock]:
        """Two marks for each optimizer step of the updates inside: before clipping, and after the averages followed."""
        optimizer, clock = self.session.parts.learner.optimizer, Clock(self.device)
        step = optimizer.step

        def marked(gradients: list[torch.Tensor], divisor: torch.Tensor | None = None) -> StepReport:
            clock.mark()
            report = step(gradients, divisor)
            clock.mark()
            return report

        with patch.object(optimizer, "step", marked):
            yield clock

    @property
    def device(self) -> torch.device:
        return self.session.world.device

    def ids(self, batches: int = 2) -> list[SampleId]:
        """Samples of so many batches, each of its own prompts, in whole trees; fewer where an iteration has fewer."""
        resolved, leaves = self.session.resolved, self.plan.leaves
        each = min(math.ceil(self.batch / leaves) * leaves, resolved.group_size)
        slots = min(batches * math.ceil(self.batch / each), resolved.slots)
        return [SampleId(slot, k) for slot in range(slots) for k in range(each)]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of an iteration; a list that has fewer begins again."""
        train = self.session.parts.data.prompts.train
        return [train[slot % len(train)] for slot in range(self.session.resolved.slots)]

    def asked(self, ids: Sequence[SampleId]) -> Asked:
        """Samples with the conditions of their prompts."""
        return self.session.parts.sampling.asked(self.prompts, ids)

    def noise(self) -> Noise:
        """The noise of the first iteration."""
        run, shape = self.session.config, self.session.model.latent_shape()
        noise = Noise(run.seed, "rollout", 1, shape, run.rollout.shared_noise)
        learned = self.session.parts.sampling.learned
        if learned is None:
            return noise
        numbers = numbers_of(learned, self.prompts)
        return replace(noise, distributions=learned.drawn_from(numbers))

    def draw(self, ids: Sequence[SampleId], options: RunOptions | None = None) -> Trajectories:
        """The samples, denoised by the run's own loop, under the weights that draw in a run.

        Raises:
            Abandoned: as `options.stop` says.
        """
        session, sampling = self.session, self.session.parts.sampling
        recording = session.parts.learner.training.recording(sampling.sampler)
        options = replace(options or RunOptions(), recording=recording)
        with session.weights.using(session.method.behaviour):
            return sampling.draw(self.plan, self.noise(), self.asked(ids), batch_size=self.batch, options=options)

    def scored(self, drawn: Trajectories) -> tuple[Rollout, Advantages]:
        """A rollout with random rewards of the whole iteration, the same in every call, and its credit."""
        session, resolved = self.session, self.session.resolved
        size = (max(len(resolved.rewards), 1), resolved.slots, resolved.group_size)
        rewards = torch.rand(size, generator=torch.Generator().manual_seed(0))
        prompts, noise, learned = self.prompts, None, session.parts.sampling.learned
        if learned is not None:
            noise = NoiseDraws(self.noise().initial(drawn.samples.ids), numbers_of(learned, prompts))
        rollout = drawn.scored(rewards, prompts=tuple(prompts), noise=noise)
        return rollout, session.credit(rollout)

    def flop(self) -> RowFlop | None:
        """Operations of one row of a forward at the texts of the samples; None: not known without weights."""
        if not self.counted:
            self.counted.append(self.session.row_flop(self.asked(self.ids(1)).cond))
        return self.counted[0]


def opened(config: str, words: Sequence[str], *, random: bool) -> Bench:
    """A session of a recipe with a reward that takes no time; where its gradient is climbed, with a CLIP of real size.

    Args:
        config: the recipe.
        words: its overrides.
        random: random weights instead of the model's own.

    Raises:
        ConfigError, ModelError: an option that the model or this machine has not, or a method on given images.
    """
    given = load_config(config, list(words))
    if given.data.pairs is not None:
        raise ConfigError(
            "data.pairs: what is measured here are samples that the network draws; name a method that draws all of "
            "them and data.prompts, and set data.pairs=null"
        )
    few = [f"data.max_prompts={given.rollout.prompts_per_iteration}", "data.max_eval_prompts=2", "data.eval_share=0"]
    climbs = resolve(given).training.climbs
    plain = [f"rewards=[{{name: {TOWER if climbs else REWARD}}}]", "eval.rewards=[]", "optim.updates_per_iteration=1"]
    resolved = resolve(load_config(config, [*words, *few, *plain]))
    world = join()
    if random:
        module = randomised(resolved.model.module, world.device)
        resolved = dataclasses.replace(resolved, model=replace(resolved.model, module=module))
    session = Session(resolved, world=world)
    plan = session.method.plan(session.parts.sampling.schedule, session.parts.sampling.sampler, 1, session.config.seed)
    return Bench(session, plan, given.rollout.batch_size)
