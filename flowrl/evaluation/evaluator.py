"""Fixed-seed evaluation: the same prompts and noise before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flowrl.config.schema import EvalConfig
from flowrl.core import media
from flowrl.core.console import log
from flowrl.core.errors import Abandoned
from flowrl.core.files import fsync_all
from flowrl.core.rng import derive
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt, distinct_numbers, identity
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import solver_plan
from flowrl.evaluation.results import Agreement, Evaluation
from flowrl.models.base import ModelAdapter, decoded
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked, Rollout
from flowrl.samplers.ode import Ode
from flowrl.scoring.overlap import Beside
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.training.divergence import Health
from flowrl.training.noise_batches import numbers_of
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Setting:
    """One evaluation of a run among others."""

    tag: str
    """Name of its files."""
    iteration: int
    """The one that it follows; 0: before any update."""
    guidance_scale: float
    num_inference_steps: int
    limit: int | None = None
    """Of the prompts; None: all."""
    save: bool = True
    """Write scores and images, if the evaluator has a folder."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Samples that are scored together, drawn and not decoded yet."""

    ids: list[SampleId]
    asked: list[Prompt]
    x0: torch.Tensor
    cond: Condition
    rows: torch.Tensor
    """Row of `cond` of each."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What stays the same in every evaluation of a run."""

    adapter: ModelAdapter
    texts: Texts
    scorer: Scorer | None
    """None: images alone are drawn."""
    world: World
    folder: Path | None
    """Scores and images are written to its `eval`; None: nothing is."""
    prompts: tuple[Prompt, ...]
    options: EvalConfig
    seed: int = derive(0, "evaluation")
    sharded: bool = False
    """Every forward is then a step of all processes together."""
    made_with: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of its results; see `Evaluation`."""
    learned: LearnedNoise | None = None
    """Distributions that the initial noise is drawn from; None: the standard one."""
    remedy: Callable[..., str] = lambda **known: "lower optim.learning_rate"
    """`divergence.remedy` of this run."""

    def __call__(
        self,
        setting: Setting,
        *,
        progress: Callable[[int], None] = lambda count: None,
        stop: Stop = NEVER,
        agreement: Callable[[Stop], Agreement] | None = None,
    ) -> Evaluation:
        """Evaluate the network as it is now. Every process returns the whole result; the first one writes it.

        `agreement` judges held-out pairs, for a method that prefers images.

        Raises:
            Abandoned, Diverged, RewardError: on all processes; no scores are written.
            Elsewhere: another process failed otherwise.
        """
        prompts = self.prompts[: setting.limit]
        folder = None if self.folder is None or not setting.save else self.folder / "eval"
        draw = partial(self._drawn, setting, None if folder is None else folder / setting.tag, progress, stop)
        # Of a network that is split no process draws by itself; each batch is then scored in step.
        due = draw() if self.sharded else self.world.in_step(draw)
        result = Evaluation(
            tag=setting.tag,
            iteration=setting.iteration,
            guidance_scale=setting.guidance_scale,
            num_inference_steps=setting.num_inference_steps,
            prompts=tuple(p.text for p in prompts),
            seeds=self.options.samples_per_prompt,
            scores=self._gather(due, len(prompts)),
            agreement=None if agreement is None else agreement(stop),
            distinct=tuple(distinct_numbers([identity(p) for p in prompts])),
            made_with=dict(self.made_with),
        )
        if folder is not None and self.world.main:
            if (folder / setting.tag).is_dir():  # before the scores, which say that they are there
                fsync_all(folder / setting.tag)
            result.save(folder)
        return result

    def _drawn(
        self, setting: Setting, kept: Path | None, progress: Callable[[int], None], stop: Stop
    ) -> list[tuple[list[SampleId], Scores]]:
        """This process's samples with their scores; the images are written to the folder `kept`, if any."""
        policy = Policy(self.adapter, Ode(), setting.guidance_scale)
        plan, prompts = solver_plan(self.adapter.schedule(setting.num_inference_steps)), self.prompts[: setting.limit]
        distributions = None if self.learned is None else self.learned.drawn_from(numbers_of(self.learned, prompts))
        noise = Noise(self.seed, "eval", None, self.adapter.latent_shape(), distributions=distributions)
        due: list[tuple[list[SampleId], Scores]] = []
        health, seeds = Health(), self.options.samples_per_prompt
        agree: Callable[[Callable[[], list]], list] = self.world.in_step if self.sharded else lambda work: work()
        with Beside(self.scorer) as beside:
            for slots, counts in self._rounds(len(prompts)):
                ids = [SampleId(slot, k) for slot in slots for k in range(seeds)]
                rows = torch.arange(len(slots)).repeat_interleave(seeds)
                cond = self.texts.lookup([prompts[slot] for slot in slots])
                options, size = RunOptions(device=self.world.device, stop=stop.in_step), self.options.batch_size
                samples, _ = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=size, options=options)
                batch = _Batch(ids, [prompts[i.slot] for i in ids], samples.x0, cond, rows)
                due += agree(partial(self._scored, beside, health, kept, stop, batch) if counts else list)
                progress(len(ids) if counts else 0)
            due += agree(partial(self._rest, beside, health, setting.iteration))
        return due

    def _scored(
        self, beside: Beside, health: Health, kept: Path | None, stop: Stop, batch: _Batch
    ) -> list[tuple[list[SampleId], Scores]]:
        """Decode and keep a batch, and begin to score it; what is due."""
        if stop.here():
            raise Abandoned
        images = decoded(self.adapter, batch.x0.to(self.world.device), batch.cond, batch.rows).cpu()
        images, due = health.seen(batch.x0, images), []
        if not health.diverged:  # then no reward is to be blamed
            due = beside.add(batch.ids, images, [p.text for p in batch.asked], [p.metadata for p in batch.asked])
        if kept is not None:
            self._keep(kept, batch.ids, images)
        return due

    def _rest(self, beside: Beside, health: Health, iteration: int) -> list[tuple[list[SampleId], Scores]]:
        """What is due at the end, where most samples are finite; a few that are not are told of, and have no score."""
        if health.diverged:
            why = self.remedy(trained=iteration > 0, in_decoder=health.in_decoder)
            raise health.error(f"after iteration {iteration}" if iteration else "before any update", why)
        if health.spoiled:
            log.warning("%s; they have no score", health.message(f"after iteration {iteration}"))
        return beside.rest()

    def _gather(self, due: Sequence[tuple[list[SampleId], Scores]], prompts: int) -> dict[str, np.ndarray]:
        """Everybody's scores: output -> [P, seeds]."""
        own = [
            (i, {name: float(value[j]) for name, value in scores.raw.items()})
            for ids, scores in due
            for j, i in enumerate(ids)
        ]
        names = () if self.scorer is None else self.scorer.outputs
        table = {name: np.full((prompts, self.options.samples_per_prompt), np.nan) for name in names}
        for part in self.world.gather(own):
            for i, values in part:
                for name, value in values.items():
                    table[name][i.slot, i.sample] = value
        return table

    def _rounds(self, prompts: int) -> list[tuple[range, bool]]:
        """This process's prompts, some at a time, and whether they count: of a sharded network all processes make as
        many rounds, each of as many forwards; those that are done repeat the first prompt."""
        size, step = self.world.size, max(1, self.options.batch_size // self.options.samples_per_prompt)
        bounds = [rank * prompts // size for rank in range(size + 1)]
        every = [
            [range(start, min(start + step, high)) for start in range(low, high, step)]
            for low, high in itertools.pairwise(bounds)
        ]
        own = every[self.world.rank]
        idle = max(map(len, every)) - len(own) if self.sharded else 0
        return [(slots, True) for slots in own] + [(range(1), False)] * idle

    def _keep(self, folder: Path, ids: Sequence[SampleId], images: torch.Tensor) -> None:
        count = self.options.save_images
        for i, image in zip(ids, images, strict=True):
            if count is None or i.slot < count:
                media.write(image, folder / f"{i.slot:05d}-{i.sample}")


def images_of(
    rollout: Rollout, adapter: ModelAdapter, device: torch.device, batch_size: int, stop: Stop = NEVER
) -> torch.Tensor:
    """Images of this process's samples, [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W]; on the CPU.

    Raises:
        Abandoned: as `stop` says.
    """
    x0, made = rollout.samples.x0, []
    for b in torch.arange(len(x0)).split(batch_size):
        if stop.here():
            raise Abandoned
        made.append(decoded(adapter, x0[b].to(device), rollout.cond, rollout.rows[b]).cpu())
    return torch.cat(made)
