"""Fixed-seed evaluation and its statistics: the same prompts and noise before and after, intervals over prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl import media
from flowrl.checkpoint import write_atomically
from flowrl.distributed import World
from flowrl.divergence import Health
from flowrl.errors import Diverged, RewardError
from flowrl.files import damaged, of_evaluation, read_object
from flowrl.initials import numbers_of
from flowrl.learned_noise import LearnedNoise
from flowrl.metrics import log
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

    def save(self, folder: Path) -> None:
        """`eval/<tag>.json`."""
        record = {
            "tag": self.tag,
            "iteration": self.iteration,
            "guidance_scale": self.guidance_scale,
            "num_inference_steps": self.num_inference_steps,
            "seeds": list(range(self.seeds)),
            "prompts": list(self.prompts),
            "scores": {name: [_plain(row) for row in table] for name, table in self.scores.items()},
            "images": f"eval/{self.tag}",
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
    return Evaluation(
        tag=record["tag"],
        iteration=int(record["iteration"]),
        guidance_scale=float(record["guidance_scale"]),
        num_inference_steps=int(record["num_inference_steps"]),
        prompts=prompts,
        seeds=seeds,
        scores=scores,
        agreement=agreement,
    )


def _plain(values: np.ndarray) -> list[float | None]:
    """NaN is not JSON."""
    return [None if np.isnan(v) else round(float(v), 6) for v in values]


class Interrupted(Exception):
    """An evaluation was given up on all processes."""


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
    """Every forward, and `stop`, is then a step of all processes together."""
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
        stop: Callable[[], bool] = lambda: False,
        agreement: Callable[[], Agreement] | None = None,
    ) -> Evaluation:
        """Evaluate the network as it is now. Every process returns the whole result; the first one writes it.

        `agreement` judges held-out pairs, for a method that prefers pictures.

        Raises:
            Diverged, RewardError: on all processes.
            Interrupted: `stop()` became true on some process; all of them raise, and no scores are written.
        """
        prompts = self.prompts[:limit]
        policy = Policy(self.adapter, Ode(), guidance_scale)
        plan = deterministic(self.adapter.schedule(num_inference_steps))
        laws = None if self.learned is None else self.learned.drawn_from(numbers_of(self.learned, prompts))
        noise = Noise(self.seed, "eval", None, self.adapter.latent_shape(), laws=laws)
        due: list[tuple[list[SampleId], Scores]] = []
        health, failure = Health(), None
        with Beside(self.scorer) as beside:
            for slots, counts in self._rounds(len(prompts)):
                if stop():
                    break
                ids = [SampleId(slot, k) for slot in slots for k in range(self.samples_per_prompt)]
                rows = torch.arange(len(slots)).repeat_interleave(self.samples_per_prompt)
                cond = self.texts.lookup([prompts[slot] for slot in slots])
                options = {"batch_size": self.batch_size, "device": self.world.device}
                samples, _ = run(policy, plan, noise, ids, cond, rows, **options)
                if not counts or failure is not None:
                    continue
                images = decoded(self.adapter, samples.x0.to(self.world.device), cond, rows).cpu()
                images, asked = health.seen(samples.x0, images), [prompts[i.slot] for i in ids]
                try:
                    if not health.diverged:  # then no reward is to be blamed
                        due += beside.add(ids, images, [p.text for p in asked], [p.metadata for p in asked])
                except RewardError as error:
                    failure = error
                    if not self.sharded:  # else every forward needs all processes
                        break
                if save:
                    self._keep(tag, ids, images)
                progress(len(ids))
            if self.world.any(stop()):
                raise Interrupted
            try:
                due += beside.rest() if failure is None else []
            except RewardError as error:
                failure = error
            self.world.agree(self._diverged(health, iteration) or failure, (Diverged, RewardError))
        table = self._gather(due, len(prompts))
        texts = tuple(p.text for p in prompts)
        told = None if agreement is None else agreement()
        settings = (tag, iteration, guidance_scale, num_inference_steps)
        result = Evaluation(*settings, texts, self.samples_per_prompt, table, told)
        if save and self.world.main:
            result.save(self.folder / "eval")
        return result

    def _diverged(self, health: Health, iteration: int) -> Diverged | None:
        """The error of this process, where most of its samples are not finite; a few are told of, and have no score."""
        if health.diverged:
            why = self.remedy(trained=iteration > 0, in_decoder=health.in_decoder)
            return health.error(f"after iteration {iteration}" if iteration else "before any update", why)
        if health.spoiled:
            log.warning("%s; they have no score", health.told(f"after iteration {iteration}"))
        return None

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


def interval(per_prompt: np.ndarray, groups: np.ndarray | None = None, seed: int = 0) -> dict[str, float]:
    """Mean and 95 % percentile bootstrap over prompts of [P] values; NaN prompts are left out and n says so.

    With `groups` [P] the bootstrap draws whole groups: values of one are not independent.

    >>> interval(np.asarray([0.5, 0.5]))
    {'mean': 0.5, 'low': 0.5, 'high': 0.5, 'n': 2}
    """
    valid = ~np.isnan(per_prompt)
    values = per_prompt[valid]
    if not len(values):
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "n": 0}
    rng = np.random.default_rng(seed)
    means = np.empty(BOOTSTRAP)
    place = np.arange(len(values)) if groups is None else np.unique(groups[valid], return_inverse=True)[1]
    count = np.bincount(place)
    total = np.bincount(place, values)
    for start in range(0, BOOTSTRAP, 1000):
        rows = rng.integers(len(count), size=(1000, len(count)))
        means[start : start + 1000] = total[rows].sum(axis=1) / count[rows].sum(axis=1)
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
    common = [name for name in base.scores if name in tuned.scores]
    return {name: interval(_prompt_means(_paired(base, tuned, name))) for name in common}


def _paired(base: Evaluation, tuned: Evaluation, metric: str) -> np.ndarray:
    """tuned - base of every prompt and seed, [P, S].

    Raises:
        ValueError: the two hold others.
    """
    if base.prompts != tuned.prompts:
        raise ValueError("a paired difference needs the same prompts in both evaluations")
    before, after = base.scores[metric], tuned.scores[metric]
    if before.shape != after.shape:
        raise ValueError(
            f"a paired difference needs the same seeds in both evaluations: {metric} has {before.shape[1]} and "
            f"{after.shape[1]} per prompt"
        )
    return after - before


def win_rate(
    base: Evaluation, tuned: Evaluation, metric: str, *, higher_is_better: bool = True, seed: int = 0
) -> dict[str, float]:
    """How often the tuned picture beats the base's of the same prompt and seed; equal scores are ties, kept apart.

    Args:
        base: before training.
        tuned: after it, of the same prompts and seeds.
        metric: what decides.
        higher_is_better: of it.
        seed: of the bootstrap.

    Returns:
        `rate` = wins / (wins + losses) with its 95 % percentile bootstrap `low`, `high` over prompts (whose seeds
        belong together), `n` pairs that are not tied, `wins`, `losses`, `ties`, and `tie_rate` of all that both have
        scored.

    Raises:
        ValueError: other prompts or seeds.
    """
    change = _paired(base, tuned, metric) * (1 if higher_is_better else -1)
    # Scores are saved with six digits, and one of the two may come from its file.
    wins, losses, ties = (part.sum(axis=1) for part in (change > 1e-6, change < -1e-6, abs(change) <= 1e-6))
    decided = int(wins.sum() + losses.sum())
    result = {"wins": int(wins.sum()), "losses": int(losses.sum()), "ties": int(ties.sum()), "n": decided}
    result["tie_rate"] = result["ties"] / max(decided + result["ties"], 1)
    if not decided:
        return result | {"rate": float("nan"), "low": float("nan"), "high": float("nan")}
    rng, rates = np.random.default_rng(seed), np.empty(BOOTSTRAP)
    for start in range(0, BOOTSTRAP, 1000):
        rows = rng.integers(len(wins), size=(1000, len(wins)))
        won, lost = wins[rows].sum(axis=1), losses[rows].sum(axis=1)
        # A resample of ties alone decides nothing: half.
        rates[start : start + 1000] = np.where(won + lost > 0, won / np.maximum(won + lost, 1), 0.5)
    low, high = np.percentile(rates, [2.5, 97.5])
    return result | {"rate": result["wins"] / decided, "low": float(low), "high": float(high)}
