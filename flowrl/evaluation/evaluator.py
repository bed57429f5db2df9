"""Fixed-seed evaluation: the same prompts and noise before and after; statistics.py makes numbers of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.core import media
from flowrl.core.console import log
from flowrl.core.errors import Abandoned
from flowrl.core.files import damaged, fsync_all, of_evaluation, read_object, write_atomically
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt, distinct_numbers, identity
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import deterministic
from flowrl.evaluation.statistics import interval
from flowrl.models.base import ModelAdapter, decoded
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.samplers.ode import Ode
from flowrl.scoring.overlap import Beside
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.training.divergence import Health
from flowrl.training.noise_batches import numbers_of
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether the network prefers what the data prefer, of N held-out pairs."""

    right: np.ndarray
    """[N] float64: 1, 0, or 1/2 where it does not tell them apart, NaN for a pair that cannot be read."""
    captions: np.ndarray
    """[N] int64: pairs of one number have one caption, and are no independent draws."""

    def mean(self) -> float:
        return float(np.nanmean(self.right))

    def interval(self) -> dict[str, float]:
        """Over captions."""
        return interval(self.right, self.captions)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of P prompts x S fixed seeds, with the ODE sampler.

    `scores[metric]` is [P, S] float64, NaN where a reward could not score; without a reward there are pictures alone.
    """

    tag: str
    iteration: int
    guidance_scale: float
    num_inference_steps: int
    prompts: tuple[str, ...]
    seeds: int
    scores: dict[str, np.ndarray]
    agreement: Agreement | None = None
    distinct: tuple[int, ...] | None = None
    """[P] number of the distinct prompt; None: texts tell (files of older versions)."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the model, the prompts and of what gives each score (run/inputs.py); none of older ones."""

    @property
    def groups(self) -> np.ndarray:
        """[P] int64, counted from 0 in order: prompts of one number are the same, and no independent draws."""
        return np.asarray(distinct_numbers(self.prompts) if self.distinct is None else self.distinct, dtype=np.int64)

    def unlike(self, other: Evaluation, score: str | None = None) -> list[str]:
        """What the two were made with that is not the same, in words; with `score` of the other scores nothing."""
        plain = ("prompts", "seeds", "guidance_scale", "num_inference_steps")
        found = [what.replace("_", " ") for what in plain if getattr(self, what) != getattr(other, what)]
        for what in sorted(self.made_with.keys() & other.made_with.keys()):
            told = "the model" if what == "model" else what if what == "prompts" else f"what gives {what[6:]}"
            asked = score is None or not what.startswith("score ") or what == f"score {score}"
            if asked and told not in found and self.made_with[what] != other.made_with[what]:
                found.append(told)
        return found

    def save(self, folder: Path) -> None:
        """`eval/<tag>.json`."""
        record = {
            "tag": self.tag,
            "iteration": self.iteration,
            "guidance_scale": self.guidance_scale,
            "num_inference_steps": self.num_inference_steps,
            "seeds": list(range(self.seeds)),
            "prompts": list(self.prompts),
            "distinct": self.groups.tolist(),
            "scores": {name: [_plain(row) for row in table] for name, table in self.scores.items()},
            "images": f"eval/{self.tag}",
            "made_with": self.made_with,
        }
        if self.agreement is not None:
            record["agreement"] = _plain(self.agreement.right)
            record["agreement_captions"] = self.agreement.captions.tolist()
        write_atomically(folder / f"{self.tag}.json", json.dumps(record))

    @staticmethod
    def load(file: Path) -> Evaluation:
        """What `save` wrote.

        Raises:
            ConfigError: the file is damaged.
        """
        record = read_object(file, of_evaluation(file))
        try:
            return _evaluation(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(file, error, of_evaluation(file)) from error


def _evaluation(record: dict[str, Any]) -> Evaluation:
    scores = {name: np.asarray(table, dtype=np.float64) for name, table in record["scores"].items()}
    agreement = None
    if "agreement" in record:
        right = np.asarray(record["agreement"], dtype=np.float64)
        agreement = Agreement(right, np.asarray(record["agreement_captions"], dtype=np.int64))
    prompts, seeds = tuple(record["prompts"]), len(record["seeds"])
    for name, table in scores.items():
        if len(table) != len(prompts) or (prompts and table.shape != (len(prompts), seeds)):
            raise ValueError(f"scores.{name} is {list(table.shape)} for {len(prompts)} prompts and {seeds} seeds")
    if len(record.get("distinct", prompts)) != len(prompts):
        raise ValueError(f"distinct has {len(record['distinct'])} numbers for {len(prompts)} prompts")
    return Evaluation(
        tag=record["tag"],
        iteration=int(record["iteration"]),
        guidance_scale=float(record["guidance_scale"]),
        num_inference_steps=int(record["num_inference_steps"]),
        prompts=prompts,
        seeds=seeds,
        scores=scores,
        agreement=agreement,
        distinct=tuple(map(int, record["distinct"])) if "distinct" in record else None,
        made_with=dict(record.get("made_with") or {}),
    )


def _plain(values: np.ndarray) -> list[float | None]:
    """Every digit, so that a number made from the file is bitwise the one made in memory; NaN is not JSON."""
    return [None if np.isnan(v) else float(v) for v in values]


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
    """None: pictures alone are drawn."""
    world: World
    folder: Path
    prompts: tuple[Prompt, ...]
    seed: int
    samples_per_prompt: int
    batch_size: int
    save_images: int | None
    sharded: bool = False
    """Every forward is then a step of all processes together."""
    made_with: Mapping[str, str] = field(default_factory=dict)
    """Of its results."""
    learned: LearnedNoise | None = None
    """Laws that the initial noise is drawn from; None: the standard one."""
    remedy: Callable[..., str] = lambda **known: "lower optim.learning_rate"
    """`divergence.remedy` of this run."""

    def __call__(
        self,
        tag: str,
        iteration: int,
        *,
        guidance_scale: float,
        num_inference_steps: int,
        limit: int | None = None,
        save: bool = True,
        progress: Callable[[int], None] = lambda count: None,
        stop: Stop = NEVER,
        agreement: Callable[[Stop], Agreement] | None = None,
    ) -> Evaluation:
        """Evaluate the network as it is now. Every process returns the whole result; the first one writes it.

        `agreement` judges held-out pairs, for a method that prefers pictures.

        Raises:
            Abandoned, Diverged, RewardError: on all processes; no scores are written.
            Elsewhere: another process failed otherwise.
        """
        prompts = self.prompts[:limit]
        settings = (prompts, guidance_scale, num_inference_steps)
        draw = partial(self._drawn, *settings, iteration, tag if save else None, progress, stop)
        # Of a network that is split no process draws by itself; each batch is then scored in step.
        due = draw() if self.sharded else self.world.in_step(draw)
        table = self._gather(due, len(prompts))
        texts = tuple(p.text for p in prompts)
        distinct = tuple(distinct_numbers([identity(p) for p in prompts]))
        told = None if agreement is None else agreement(stop)
        known = (tag, iteration, guidance_scale, num_inference_steps)
        result = Evaluation(*known, texts, self.samples_per_prompt, table, told, distinct, dict(self.made_with))
        if save and self.world.main:
            if (self.folder / "eval" / tag).is_dir():  # before the scores, which say that they are there
                fsync_all(self.folder / "eval" / tag)
            result.save(self.folder / "eval")
        return result

    def _drawn(
        self,
        prompts: Sequence[Prompt],
        guidance_scale: float,
        num_inference_steps: int,
        iteration: int,
        kept: str | None,
        progress: Callable[[int], None],
        stop: Stop,
    ) -> list[tuple[list[SampleId], Scores]]:
        """This process's samples with their scores; the pictures are kept under the tag `kept`, if any."""
        policy = Policy(self.adapter, Ode(), guidance_scale)
        plan = deterministic(self.adapter.schedule(num_inference_steps))
        laws = None if self.learned is None else self.learned.drawn_from(numbers_of(self.learned, prompts))
        noise = Noise(self.seed, "eval", None, self.adapter.latent_shape(), laws=laws)
        due: list[tuple[list[SampleId], Scores]] = []
        health = Health()
        agree: Callable[[Callable[[], list]], list] = self.world.in_step if self.sharded else lambda work: work()
        with Beside(self.scorer) as beside:
            for slots, counts in self._rounds(len(prompts)):
                ids = [SampleId(slot, k) for slot in slots for k in range(self.samples_per_prompt)]
                rows = torch.arange(len(slots)).repeat_interleave(self.samples_per_prompt)
                cond = self.texts.lookup([prompts[slot] for slot in slots])
                options = {"batch_size": self.batch_size, "device": self.world.device}
                samples, _ = run(policy, plan, noise, ids, cond, rows, **options, stop=stop.in_step)
                batch = _Batch(ids, [prompts[i.slot] for i in ids], samples.x0, cond, rows)
                due += agree(partial(self._scored, beside, health, kept, stop, batch) if counts else list)
                progress(len(ids) if counts else 0)
            due += agree(partial(self._rest, beside, health, iteration))
        return due

    def _scored(
        self, beside: Beside, health: Health, kept: str | None, stop: Stop, batch: _Batch
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
            log.warning("%s; they have no score", health.told(f"after iteration {iteration}"))
        return beside.rest()

    def _gather(self, due: Sequence[tuple[list[SampleId], Scores]], prompts: int) -> dict[str, np.ndarray]:
        """Everybody's scores: output -> [P, samples_per_prompt]."""
        own = [
            (i, {name: float(value[j]) for name, value in scores.raw.items()})
            for ids, scores in due
            for j, i in enumerate(ids)
        ]
        names = () if self.scorer is None else self.scorer.outputs
        table = {name: np.full((prompts, self.samples_per_prompt), np.nan) for name in names}
        for part in self.world.gather(own):
            for i, values in part:
                for name, value in values.items():
                    table[name][i.slot, i.sample] = value
        return table

    def _rounds(self, prompts: int) -> list[tuple[range, bool]]:
        """This process's prompts, some at a time, and whether they count: of a sharded network all processes make as
        many rounds, each of as many forwards; those that are done repeat the first prompt."""
        size, step = self.world.size, max(1, self.batch_size // self.samples_per_prompt)
        bounds = [rank * prompts // size for rank in range(size + 1)]
        every = [
            [range(start, min(start + step, high)) for start in range(low, high, step)]
            for low, high in itertools.pairwise(bounds)
        ]
        own = every[self.world.rank]
        idle = max(map(len, every)) - len(own) if self.sharded else 0
        return [(slots, True) for slots in own] + [(range(1), False)] * idle

    def _keep(self, tag: str, ids: Sequence[SampleId], images: torch.Tensor) -> None:
        target = self.folder / "eval" / tag
        for i, image in zip(ids, images, strict=True):
            if self.save_images is None or i.slot < self.save_images:
                media.write(image, target / f"{i.slot:05d}-{i.sample}")
