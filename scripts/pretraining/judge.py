"""tiny-judge: tiny-sd3's own transformer as a judge of its latents, taught by the verifier.

The first stage learns which samples of the base the verifier passes, under the captions they were drawn for, beside
rendered scenes and samples under captions that are true of what they show, or near misses. Then come rounds: DRaFT-2
climbs the judge as it is then, by flowrl's own session, and what it draws on its way is labelled and learned too, so
that what fools the judge is known to it. Captions are those of all scenes but the held-out ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flowrl.rewards._latent_judge.network import Judge, from_transformer, save
from flowrl.rewards._latent_judge.training import Trainer
from flowrl.rewards.shapes import Found, detect_all, score_scene
from torch import Tensor

import flowrl
from flowrl import shapes
from flowrl.core import registry
from flowrl.core.types import Condition, SampleId
from flowrl.diffusion.plan import solver_plan
from flowrl.models.base import ModelAdapter, decoded
from flowrl.rollout.library import Model
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.shapes import Placed, Scene
from scripts.pretraining import clip
from scripts.pretraining.sd3 import MODEL
from scripts.pretraining.stages import ramp
from scripts.pretraining.student import load

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "judge" / "draft.yaml"
STEPS = 6
"""Of the lab's rollouts, without guidance."""
README = """\
# tiny-judge

A judge of tiny-sd3's latents: its transformer's blocks and a small head, trained by
`python -m scripts.pretraining tiny-judge` to tell which samples the verifier of the shapes world passes. The reward
`latent_judge` loads it; text encoders and VAE are tiny-sd3's. Weights are stored in half precision. Licence:
Apache-2.0. How far it agrees with the verifier: `pretraining.json`.
"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    steps: int
    rate: float
    """Peak learning rate."""
    climbed: float = 0.0
    """Share of a step's samples that come from the rounds' runs."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    output: Path
    model: Path
    seed: int = 0
    base: int = 24_000
    """Samples of the base."""
    rendered: int = 6000
    batch_size: int = 96
    shown: float = 0.3
    """Share of a step's samples whose caption goes by what they show: true, or a near miss, as often."""
    first: Stage = Stage(steps=1200, rate=1.2e-3)
    rounds: tuple[Stage, ...] = (Stage(steps=300, rate=6e-4, climbed=0.4),) * 3
    climb: int = 48
    """Updates of DRaFT-2 in a round."""
    looks: tuple[int, ...] = (8, 16, 24, 32, 40, 48)
    """Updates of a round after which samples are drawn."""
    fresh: int = 480
    """How many each time."""
    average: float = 0.99
    """Of the weights that are kept."""

    def facts(self) -> dict[str, Any]:
        """What `pretraining.json` tells of them."""
        return {name: value for name, value in asdict(self).items() if name != "output"} | {"model": self.model.name}


class World:
    """The captions with their conditions, and tiny-sd3."""

    def __init__(self, model: Model, vae: Any) -> None:
        self.model, self._vae = model, vae
        self._index = {caption: row for row, caption in enumerate(self.captions)}

    @cached_property
    def captions(self) -> list[str]:
        """Every caption of every scene."""
        return [form for group in shapes.scenes().values() for scene in group for form in scene.forms]

    @cached_property
    def _conditions(self) -> Condition:
        return self.model.condition(self.captions)

    def cond(self, captions: Sequence[str]) -> Condition:
        """The conditions of captions, one row each."""
        return self._conditions.index(torch.tensor([self._index[caption] for caption in captions]))

    @torch.no_grad()
    def encoded(self, images: Tensor) -> Tensor:
        """Latents [B, 4, 8, 8] of pictures [B, 3, 32, 32] in [0, 1]."""
        facts = self._vae.config
        mean = torch.cat([self._vae.encode(part * 2 - 1).latent_dist.mean for part in images.split(500)])
        return (mean - facts.shift_factor) * facts.scaling_factor

    def drawn(self, adapter: ModelAdapter, captions: list[str], seed: int) -> Pool:
        """A sample for each caption by the lab's rollout, and what the verifier sees in it."""
        policy = Policy(adapter, registry.load("samplers", "ode").build(), 1.0)
        noise, plan = Noise(seed, "judge", None, self.model.latent_shape), solver_plan(adapter.schedule(STEPS))
        cond, rows = self.cond(captions), torch.arange(len(captions))
        asked = Asked([SampleId(row, 0) for row in range(len(captions))], cond, rows)
        with torch.no_grad():
            x0 = run(policy, plan, noise, asked, batch_size=120)[0].x0
            found = [
                seen
                for latents, part in zip(x0.split(120), rows.split(120), strict=True)
                for seen in detect_all(decoded(adapter, latents, cond, part).numpy())
            ]
        return Pool(x0, captions, found)


def opened(settings: Settings) -> World:
    """With the model of the settings."""
    return World(load(settings.model), MODEL.load(settings.model).vae)


@dataclass(frozen=True)
class Pool:
    """Latents x0 [N, 4, 8, 8] with the captions they were made for and the objects that they show."""

    x0: Tensor
    captions: list[str]
    found: list[list[Found]]

    @staticmethod
    def joined(pools: Sequence[Pool]) -> Pool:
        """All, one after the other."""
        captions = [caption for pool in pools for caption in pool.captions]
        return Pool(torch.cat([pool.x0 for pool in pools]), captions, [f for pool in pools for f in pool.found])

    def label(self, row: int, caption: str) -> float:
        """1.0 where the verifier passes a row under a caption, else 0.0."""
        return score_scene(shapes.parse(caption), self.found[row])[0]

    @cached_property
    def strict(self) -> np.ndarray:
        """[N] labels under the own captions."""
        return np.asarray([self.label(row, caption) for row, caption in enumerate(self.captions)])

    @cached_property
    def true(self) -> list[tuple[int, list[str]]]:
        """(row, training captions that are true of it) for rows that have any."""
        return [(row, captions) for row, found in enumerate(self.found) if (captions := _true(found))]


def _true(found: Sequence[Found]) -> list[str]:
    if not 1 <= len(found) <= 4 or any(item.shape == "blob" or item.color is None for item in found):
        return []
    placed = tuple(Placed(item.shape, str(item.color), item.x, item.y, item.radius) for item in found)
    return sorted(clip.true_captions(placed) & clip.known())


def training_captions(count: int, rng: np.random.Generator) -> list[str]:
    """Captions of the training scenes, tasks by their weights."""
    return [scene.forms[rng.integers(len(scene.forms))] for scene in training_scenes(count, rng)]


def training_scenes(count: int, rng: np.random.Generator) -> list[Scene]:
    """Scenes none of which is held out, tasks by their weights."""
    tasks, weights = zip(*clip.TASK_WEIGHTS.items(), strict=True)
    groups = [clip.training_scenes()[tasks[task]] for task in rng.choice(len(tasks), size=count, p=weights)]
    return [group[rng.integers(len(group))] for group in groups]


def rendered(world: World, count: int, rng: np.random.Generator) -> Pool:
    """Pictures of training scenes through the VAE."""
    scenes = training_scenes(count, rng)
    placed = [clip.jittered(shapes.place(scene, rng), rng) for scene in scenes]
    images = torch.from_numpy(np.stack([shapes.render(items) for items in placed]))
    found = [[Found(item.shape, item.color, item.x, item.y, item.radius) for item in items] for items in placed]
    return Pool(world.encoded(images), [scene.caption for scene in scenes], found)


class Lessons:
    """Draws the samples of a training step."""

    def __init__(self, base: Pool, scenes: Pool, climbed: Pool | None, settings: Settings) -> None:
        self._base, self._scenes, self._climbed, self._settings = base, scenes, climbed, settings
        self._rng = np.random.default_rng((settings.seed, 5, 0 if climbed is None else len(climbed.x0)))

    def batch(self, world: World, stage: Stage) -> tuple[Tensor, Condition, Tensor]:
        """(x0, conditions, labels) of one step."""
        count = self._settings.batch_size
        shown, climbed = round(self._settings.shown * count), round(stage.climbed * count)
        rows = [*self._own(self._base, count - shown - climbed)]
        if self._climbed is not None:
            rows += self._own(self._climbed, climbed)
        for number in range(shown):
            rows.append(self._shown(self._scenes if number % 4 < 2 else self._base, true=number % 2 == 0))
        x0, captions, labels = zip(*rows, strict=True)
        return torch.stack(x0), world.cond(captions), torch.tensor(labels)

    def _own(self, pool: Pool, count: int) -> Iterator[tuple[Tensor, str, float]]:
        for row in self._rng.integers(len(pool.x0), size=count):
            yield pool.x0[row], pool.captions[row], float(pool.strict[row])

    def _shown(self, pool: Pool, *, true: bool) -> tuple[Tensor, str, float]:
        row, captions = pool.true[self._rng.integers(len(pool.true))]
        caption = captions[self._rng.integers(len(captions))]
        if not true:
            near = clip.near_misses(shapes.parse(caption))
            caption = near[self._rng.integers(len(near))].caption
        return pool.x0[row], caption, pool.label(row, caption)


def teach(trainer: Trainer, world: World, lessons: Lessons, stage: Stage, settings: Settings) -> None:
    """One stage; the average of the weights is kept."""
    weights = list(trainer.network.parameters())
    average, shown, started = [p.detach().clone() for p in weights], 0.0, time.process_time()
    for step in range(1, stage.steps + 1):
        trainer.rate = stage.rate * ramp(step, stage.steps, warm=30, decay_from=0.4)
        loss = trainer.renew(*lessons.batch(world, stage))["loss"]
        decay = min(settings.average, (1 + step) / (10 + step))
        for mean, p in zip(average, weights, strict=True):
            mean.lerp_(p, 1 - decay)
        shown = loss if step == 1 else 0.98 * shown + 0.02 * loss
        if step % 50 == 0:
            print(f"step {step}/{stage.steps} loss {shown:.4f} {time.process_time() - started:.0f} s", flush=True)
    for p, mean in zip(weights, average, strict=True):
        p.data.copy_(mean)


def climb(folder: Path, seed: int, updates: int, looks: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """DRaFT-2 on the judge of a folder; (update, the policy then) at every look."""
    words = (f"seed={seed}", f"iterations={updates}", f"rewards.0.model={folder}", "eval.every=0")
    with flowrl.Session(str(RECIPE), *words) as session:
        for update in range(1, updates + 1):
            session.step(update)
            if update in looks:
                yield update, session.model


def pools(world: World, settings: Settings) -> tuple[Pool, Pool]:
    """Samples of the base, and rendered scenes."""
    rng = np.random.default_rng((settings.seed, 1))
    base = world.drawn(world.model.adapter, training_captions(settings.base, rng), settings.seed)
    print(f"{len(base.x0)} samples of the base, strict {base.strict.mean():.3f}", flush=True)
    return base, rendered(world, settings.rendered, rng)


def untaught(world: World, settings: Settings) -> Trainer:
    """Of a judge whose head is drawn."""
    torch.manual_seed(settings.seed)
    judge = from_transformer(world.model.adapter.network)
    return Trainer(judge, seed=settings.seed, batch_size=settings.batch_size)


def climbing(world: World, number: int, settings: Settings) -> Pool:
    """What DRaFT-2 draws on its way up the saved judge, in the round of a number from 1."""
    rng, found = np.random.default_rng((settings.seed, 6, number)), []
    seed = 1000 * (settings.seed + 1) + number
    for update, adapter in climb(settings.output, seed, settings.climb, settings.looks):
        found.append(world.drawn(adapter, training_captions(settings.fresh, rng), 100 * seed + update))
        print(f"round {number}, update {update}: strict {found[-1].strict.mean():.3f}", flush=True)
    return Pool.joined(found)


def make(settings: Settings) -> None:
    """Train and save, anew after each round."""
    world = opened(settings)
    base, scenes = pools(world, settings)
    trainer, climbed = untaught(world, settings), list[Pool]()
    teach(trainer, world, Lessons(base, scenes, None, settings), settings.first, settings)
    write(trainer.network, settings)
    for number, stage in enumerate(settings.rounds, 1):
        climbed.append(climbing(world, number, settings))
        teach(trainer, world, Lessons(base, scenes, Pool.joined(climbed), settings), stage, settings)
        write(trainer.network, settings)


def write(judge: Judge, settings: Settings) -> None:
    save(judge, settings.output)
    (settings.output / "README.md").write_text(README, encoding="utf-8")
