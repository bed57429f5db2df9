"""Fixed-seed evaluation and its statistics: the same prompts and noise before and after, intervals over prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flowrl import media
from flowrl.checkpoint import write_atomically
from flowrl.distributed import World
from flowrl.initials import numbers_of
from flowrl.learned_noise import LearnedNoise
from flowrl.models.base import ModelAdapter, decoded
from flowrl.overlap import Beside
from flowrl.plan import deterministic
from flowrl.prompts import Prompt, Texts
from flowrl.reward import Scorer, Scores
from flowrl.rollout import Noise, Policy, run
from flowrl.samplers.ode import Ode
from flowrl.types import SampleId

BOOTSTRAP = 10_000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of P prompts x S fixed seeds, with the ODE sampler.

    `scores[metric]` is [P, S] float64, NaN where a reward could not score.
    """

    tag: str
    iteration: int
    guidance_scale: float
    num_inference_steps: int
    prompts: tuple[str, ...]
    scores: dict[str, np.ndarray]

    def save(self, folder: Path) -> None:
        """`eval/<tag>.json`."""
        record = {
            "tag": self.tag,
            "iteration": self.iteration,
            "guidance_scale": self.guidance_scale,
            "num_inference_steps": self.num_inference_steps,
            "seeds": list(range(next(iter(self.scores.values())).shape[1])),
            "prompts": list(self.prompts),
            "scores": {
                name: [[None if np.isnan(v) else round(float(v), 6) for v in row] for row in table]
                for name, table in self.scores.items()
            },
            "images": f"eval/{self.tag}",
        }
        write_atomically(folder / f"{self.tag}.json", json.dumps(record))

    @staticmethod
    def load(file: Path) -> Evaluation:
        record = json.loads(file.read_text(encoding="utf-8"))
        scores = {name: np.asarray(table, dtype=np.float64) for name, table in record["scores"].items()}
        return Evaluation(
            tag=record["tag"],
            iteration=record["iteration"],
            guidance_scale=record["guidance_scale"],
            num_inference_steps=record["num_inference_steps"],
            prompts=tuple(record["prompts"]),
            scores=scores,
        )


class Interrupted(Exception):
    """An evaluation was given up on all processes."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What stays the same in every evaluation of a run."""

    adapter: ModelAdapter
    texts: Texts
    scorer: Scorer
    world: World
    folder: Path
    prompts: tuple[Prompt, ...]
    seed: int
    samples_per_prompt: int
    batch_size: int
    save_images: int | None
    sharded: bool = False
    """Every forward, and `stop`, is then a step of all processes together."""
    learned: LearnedNoise | None = None
    """Laws that the initial noise is drawn from; None: the standard one."""

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
        stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Evaluate the network as it is now. Every process returns the whole result; the first one writes it.

        Raises:
            Interrupted: `stop()` became true on some process; all of them raise, and no scores are written.
        """
        prompts = self.prompts[:limit]
        policy = Policy(self.adapter, Ode(), guidance_scale)
        plan = deterministic(self.adapter.schedule(num_inference_steps))
        laws = None if self.learned is None else self.learned.drawn_from(numbers_of(self.learned, prompts))
        noise = Noise(self.seed, "eval", None, self.adapter.latent_shape(), laws=laws)
        due: list[tuple[list[SampleId], Scores]] = []
        with Beside(self.scorer) as beside:
            for slots, counts in self._rounds(len(prompts)):
                if stop():
                    break
                ids = [SampleId(slot, k) for slot in slots for k in range(self.samples_per_prompt)]
                rows = torch.arange(len(slots)).repeat_interleave(self.samples_per_prompt)
                cond = self.texts.lookup([prompts[slot] for slot in slots])
                options = {"batch_size": self.batch_size, "device": self.world.device}
                samples, _ = run(policy, plan, noise, ids, cond, rows, **options)
                if not counts:
                    continue
                images = decoded(self.adapter, samples.x0.to(self.world.device), cond, rows).cpu()
                asked = [prompts[i.slot] for i in ids]
                due += beside.add(ids, images, [p.text for p in asked], [p.metadata for p in asked])
                if save:
                    self._keep(tag, ids, images)
                progress(len(ids))
            if self.world.any(stop()):
                raise Interrupted
            due += beside.rest()
        own = [
            (i, {name: float(value[j]) for name, value in scores.raw.items()})
            for ids, scores in due
            for j, i in enumerate(ids)
        ]
        table = {name: np.full((len(prompts), self.samples_per_prompt), np.nan) for name in self.scorer.outputs}
        for part in self.world.gather(own):
            for i, values in part:
                for name, value in values.items():
                    table[name][i.slot, i.sample] = value
        texts = tuple(p.text for p in prompts)
        result = Evaluation(tag, iteration, guidance_scale, num_inference_steps, texts, table)
        if save and self.world.main:
            result.save(self.folder / "eval")
        return result

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
                target.mkdir(parents=True, exist_ok=True)
                media.write(image, target / f"{i.slot:05d}-{i.sample}")


def interval(per_prompt: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Mean and 95 % percentile bootstrap over prompts of [P] values; NaN prompts are left out and n says so.

    >>> interval(np.asarray([0.5, 0.5]))
    {'mean': 0.5, 'low': 0.5, 'high': 0.5, 'n': 2}
    """
    values = per_prompt[~np.isnan(per_prompt)]
    if not len(values):
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "n": 0}
    rng = np.random.default_rng(seed)
    means = np.empty(BOOTSTRAP)
    for start in range(0, BOOTSTRAP, 1000):
        means[start : start + 1000] = values[rng.integers(len(values), size=(1000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "n": len(values)}


def _prompt_means(table: np.ndarray) -> np.ndarray:
    """Mean over seeds, [P]; NaN where no seed was scored."""
    valid = ~np.isnan(table)
    count = valid.sum(axis=1)
    total = np.where(valid, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def summary(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> mean with interval."""
    return {name: interval(_prompt_means(table)) for name, table in evaluation.scores.items()}


def difference(base: Evaluation, tuned: Evaluation) -> dict[str, dict[str, float]]:
    """Metric -> paired difference tuned - base with interval; both must hold the same prompts and seeds."""
    if base.prompts != tuned.prompts:
        raise ValueError("a paired difference needs the same prompts in both evaluations")
    for name in base.scores.keys() & tuned.scores.keys():
        if base.scores[name].shape != tuned.scores[name].shape:
            raise ValueError(
                f"a paired difference needs the same seeds in both evaluations: {name} has "
                f"{base.scores[name].shape[1]} and {tuned.scores[name].shape[1]} per prompt"
            )
    return {
        name: interval(_prompt_means(tuned.scores[name] - table))
        for name, table in base.scores.items()
        if name in tuned.scores
    }
