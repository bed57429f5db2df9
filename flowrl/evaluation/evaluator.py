"""Fixed-seed evaluation: the same prompts and noise before and after."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flowrl.config.schema import EvalConfig
from flowrl.core.files import fsync_all
from flowrl.core.rng import derive
from flowrl.core.types import SampleId
from flowrl.data.prompt_files import REFERENCE
from flowrl.data.prompts import Prompt, distinct_numbers, identity
from flowrl.diffusion.plan import solver_plan
from flowrl.evaluation import diversity
from flowrl.evaluation.results import SOURCES, Agreement, Evaluation
from flowrl.evaluation.sharpness import sharpness
from flowrl.evaluation.sources import Sources
from flowrl.media import media
from flowrl.media.eight_bits import EightBitImages
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Trajectories
from flowrl.samplers.ode import Ode
from flowrl.scoring.overlap import Beside
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.scoring.surroundings import Batch
from flowrl.training.divergence import Health
from flowrl.training.noise_batches import numbers_of
from flowrl.training.sampling import Sampling, latents_of
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World

Keep = Callable[[Sequence[SampleId], EightBitImages], None]
"""Keeps what lasts of a batch of samples."""
PLACES = ("eval", "guidance")
"""Folders of a run's evaluations: of the evaluated prompts, and of the search for the best guidance."""
Mark = tuple[str, float, float, np.ndarray | None]
"""Digest of a sample in 8 bits, its sharpness, its distance from what it edits and, where its prompt's diversity is
measured, its colours [F, 192]."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of one evaluation."""

    tag: str
    """Name of its files."""
    iteration: int
    """The finished iteration; 0: before any update."""
    guidance_scale: float
    num_inference_steps: int
    limit: int | None = None
    """Number of prompts; None: all."""
    save: bool | Literal["images"] = True
    """Write scores and images, if the evaluator has a folder; "images": those alone."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the network of a run: always the same prompts and noise."""

    sampling: Sampling
    scorer: Scorer | None
    """None: images are drawn and not scored."""
    folder: Path | None
    """Scores and images are written to its folder `place`; None: nothing is written."""
    prompts: tuple[Prompt, ...]
    options: EvalConfig
    seed: int = derive(0, "evaluation")
    made_with: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of its results; see `Evaluation`."""
    place: str = PLACES[0]
    """Name of the folder in `folder`."""
    names: tuple[int, ...] | None = None
    """Number of each prompt, which keys its noise; None: its place in `prompts`."""
    sources: Sources | None = None
    """Of edits, from which samples are compared with what they edit; None: they are not."""

    @property
    def world(self) -> World:
        return self.sampling.world

    def __call__(
        self,
        setting: Setting,
        *,
        progress: Callable[[int], None] = lambda count: None,
        stop: Stop = NEVER,
        agreement: Callable[[Stop], Agreement] | None = None,
    ) -> Evaluation:
        """Evaluate the network as it is now. Every process returns the whole result; the first one writes it.

        `progress` is called with the number of samples just finished; `agreement` compares the network with held-out
        pairs, for a method that prefers images.

        Raises Abandoned, Diverged, RewardError: on all processes; no scores are written. Elsewhere: another process
        failed otherwise.
        """
        prompts = self.prompts[: setting.limit]
        folder = None if self.folder is None or not setting.save else self.folder / self.place
        draw = partial(self._drawn, setting, None if folder is None else folder / setting.tag, progress, stop)
        # Of a network that is split no process draws by itself; each batch is then scored in step.
        due, marks = draw() if self.sampling.sharded else self.world.in_step(draw)
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
            **self._gather_marks(marks, len(prompts)),
        )
        if folder is not None and self.world.main and setting.save != "images":
            if self.place == PLACES[0]:
                self._keep_sources(folder / SOURCES, anew=setting.iteration == 0)
            if (folder / setting.tag).is_dir():  # before the scores, which refer to them
                fsync_all(folder / setting.tag)
            result.save(folder)
        return result

    def _keep_sources(self, folder: Path, *, anew: bool) -> None:
        """Copy what the prompts edit, and the results that their records know, for who looks at the run elsewhere."""
        for slot, prompt in enumerate(self.prompts[: self.options.save_images]):
            reference = prompt.metadata.get(REFERENCE) if prompt.images else None
            for name, file in (*enumerate(prompt.images), *([(REFERENCE, reference)] if reference else ())):
                stem = folder / f"{slot:05d}-{name}"
                if anew or media.find(stem) is None:
                    keep_image(file, stem)

    def _drawn(
        self, setting: Setting, kept: Path | None, progress: Callable[[int], None], stop: Stop
    ) -> tuple[list[tuple[list[SampleId], Scores]], dict[SampleId, Mark]]:
        """This process's samples with their scores, and what each is in 8 bits.

        The images are written to the folder `kept`, if any.
        """
        sampling, prompts, size = self.sampling, self.prompts[: setting.limit], self.options.batch_size
        sampling = replace(sampling, policy=Policy(sampling.adapter, Ode(), setting.guidance_scale))
        plan, learned = solver_plan(sampling.adapter.schedule(setting.num_inference_steps)), sampling.learned
        distributions = None if learned is None else learned.drawn_from(numbers_of(learned, prompts))
        shape = sampling.adapter.latent_shape()
        noise = Noise(self.seed, "eval", None, shape, distributions=distributions, names=self.names)
        due: list[tuple[list[SampleId], Scores]] = []
        marks = dict[SampleId, Mark]()
        health, options = Health(), RunOptions(stop=stop.in_step)
        agree: Callable[[Callable[[], list]], list] = self.world.in_step if sampling.sharded else lambda work: work()
        # Where prompts are encoded between batches, encoders may set switches of the process (`Lanes.quiet`).
        device = self.world.device if sampling.texts.ready else torch.device("cpu")
        samples = self.options.samples_per_prompt
        # The missing samples of the prompts whose diversity is measured come last, and are neither scored nor saved.
        missing = (self._diverse(len(prompts)), range(samples, diversity.SAMPLES), False)
        with Beside(self.scorer, device) as beside:
            for count, numbers, judged in ((len(prompts), range(samples), True), missing):
                for slots, counts in self._rounds(count, len(numbers)):
                    ids = [SampleId(slot, k) for slot in slots for k in numbers]
                    drawn = sampling.draw(plan, noise, sampling.asked(prompts, ids), batch_size=size, options=options)
                    keep = partial(self._kept, kept if judged else None, marks)
                    work = partial(self._scored, beside, health, keep, stop, drawn, judged=judged)
                    due += agree(work if counts else list)
                    progress(len(ids) if counts and judged else 0)
            due += agree(partial(self._rest, beside, health, setting.iteration))
        return due, marks

    def _scored(
        self, beside: Beside, health: Health, keep: Keep, stop: Stop, drawn: Trajectories, *, judged: bool
    ) -> list[tuple[list[SampleId], Scores]]:
        """Decode and keep a batch, and begin to score it if it is `judged`; the scores that are due."""
        ids, due = list(drawn.samples.ids), []
        beside.quiet()
        images = self.sampling.images(drawn, self.options.batch_size, health=health, stop=stop)
        if self.sources is not None:  # through the pipeline, so before rewards are at work in a thread
            self.sources.fit([self.prompts[i.slot].images for i in ids])
        if judged and not health.diverged:  # of what diverged no reward is to be blamed
            prompts = [self.prompts[i.slot] for i in ids]
            batch = Batch(images, [p.text for p in prompts], [p.metadata for p in prompts], latents_of(drawn))
            due = beside.add(ids, batch)
        keep(ids, images)
        return due

    def _rest(self, beside: Beside, health: Health, iteration: int) -> list[tuple[list[SampleId], Scores]]:
        """The scores that are due at the end, if most samples are finite."""
        when = f"after iteration {iteration}" if iteration else "before any update"
        self.sampling.require_finite(health, when, trained=iteration > 0)
        return beside.rest()

    def _gather(self, due: Sequence[tuple[list[SampleId], Scores]], prompts: int) -> dict[str, np.ndarray]:
        """Scores of all processes: output -> [P, seeds]."""
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

    def _diverse(self, prompts: int) -> int:
        """Number of prompts whose diversity is measured."""
        enough = self.options.samples_per_prompt >= diversity.SAMPLES
        wanted = self.options.diversity
        return min(prompts, (diversity.PROMPTS if enough else 0) if wanted is None else wanted)

    def _gather_marks(self, own: dict[SampleId, Mark], prompts: int) -> dict[str, Any]:
        """Fields of the evaluation that come from the marks of all processes."""
        shape = (prompts, self.options.samples_per_prompt)
        digests, sharp, apart = np.full(shape, "", dtype="<U16"), np.full(shape, np.nan), np.full(shape, np.nan)
        grids = dict[SampleId, np.ndarray]()
        for part in self.world.gather(list(own.items())):
            for i, (digest, value, away, grid) in part:
                if i.sample < shape[1]:
                    digests[i.slot, i.sample], sharp[i.slot, i.sample], apart[i.slot, i.sample] = digest, value, away
                if grid is not None:
                    grids[i] = grid
        spread, known = diversity.of(grids, self._diverse(prompts)), np.isfinite(apart).any()
        marks = {"digests": digests, "sharpness": sharp, "diversity": spread}
        return marks | {"source_distance": apart if known else None}

    def _rounds(self, prompts: int, samples: int) -> list[tuple[range, bool]]:
        """This process's share of so many prompts with so many samples each, some at a time; whether they count.

        With a sharded network all processes make the same number of rounds, each of as many forwards: a process that
        has finished repeats the first prompt, which does not count.
        """
        if not samples:
            return []
        size, step = self.world.size, max(1, self.options.batch_size // samples)
        bounds = [rank * prompts // size for rank in range(size + 1)]
        every = [
            [range(start, min(start + step, high)) for start in range(low, high, step)]
            for low, high in itertools.pairwise(bounds)
        ]
        own = every[self.world.rank]
        idle = max(map(len, every)) - len(own) if self.sampling.sharded else 0
        return [(slots, True) for slots in own] + [(range(1), False)] * idle

    def _kept(
        self, folder: Path | None, marks: dict[SampleId, Mark], ids: Sequence[SampleId], images: EightBitImages
    ) -> None:
        """Add the marks of samples, and write those that are to be saved to the folder, if any."""
        most = self._diverse(len(self.prompts))
        for i, digest, levels, finite in zip(ids, images.digests(), images.levels, images.finite.tolist(), strict=True):
            looked = i.slot < most and i.sample < diversity.SAMPLES
            sharp = sharpness(levels.numpy()) if finite else math.nan
            apart = self.sources.distance(levels, self.prompts[i.slot].images) if finite and self.sources else math.nan
            marks[i] = digest, sharp, apart, diversity.grid(levels, finite) if looked else None
        if folder is None:
            return
        count, rate, form = self.options.save_images, self.sampling.adapter.fps, self.options.videos
        for i, image, finite in zip(ids, images.levels, images.finite.tolist(), strict=True):
            if finite and (count is None or i.slot < count):
                media.write(image, folder / f"{i.slot:05d}-{i.sample}", fps=rate, form=form)


def keep_image(file: str, stem: Path) -> None:
    """Copy what a prompt edits, or knows as its result, into the run folder; the report goes without a broken file."""
    try:
        image = media.pixels(media.open_image(file))
    except media.UNREADABLE:
        return
    media.write(image, stem)
