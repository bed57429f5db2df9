"""tiny-sd3-student: tiny-sd3 with guidance in four network evaluations, by regression on segments of its paths.

The teacher walks from N(0, I) by Euler steps with CFG, `substeps` of them between two nodes. The student, without
guidance and at the nodes alone, learns the mean velocity of each segment (MSE):

    v(x_k, sigma_k) := (x_{k+1} - x_k) / (sigma_{k+1} - sigma_k)

That is a map and no posterior mean, so its images are sharp. The states are the teacher's in the first round and in the
second the student's own, from which the teacher takes one segment each; a round trains on the states of all rounds so
far.

Text encoders and VAE are the teacher's, byte for byte. Captions are the training captions.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flowrl
from flowrl import shapes
from flowrl.core import registry
from flowrl.core.types import Condition
from flowrl.diffusion.plan import StepPlan, solver_plan
from flowrl.diffusion.schedules import Schedule
from flowrl.models.base import ModelAdapter
from flowrl.models.pipelines.distilled import Distilled
from flowrl.rollout.library import Model
from flowrl.rollout.policy import Policy
from scripts.pretraining.sd3 import MODEL
from scripts.pretraining.stages import ramp
from scripts.pretraining.training import save

NODES = (1.0, 0.75, 0.5, 0.25)
DECLARED = Distilled(kind="nodes", sigmas=NODES, evidence="", declared=True)
SHARED = ("vae", *(f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")))
"""Folders that are the teacher's."""
TOKENS = 9
"""T5 tokens, as in the lab."""
README = """\
# tiny-sd3-student

tiny-sd3 distilled to four network evaluations without guidance by `python -m scripts.pretraining tiny-sd3-student`: a
StableDiffusion3Pipeline whose scheduler gives the sigmas 1, 0.75, 0.5 and 0.25 at 4 steps, the only ones it knows.
`pipe(prompt, num_inference_steps=4, guidance_scale=1.0, max_sequence_length=9)`; `model_index.json` says that it is
distilled, in keys that diffusers ignores. Transformer weights are stored in half precision and loaded as float32; text
encoders and VAE are those of tiny-sd3. Licence: Apache-2.0. Measured accuracy: `pretraining.json`.
"""


@dataclass(frozen=True, kw_only=True)
class Round:
    trajectories: int
    updates: int
    rate: float
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    output: Path
    teacher: Path
    seed: int = 0
    rounds: tuple[Round, ...] = (
        Round(trajectories=3072, updates=500, rate=2e-3),
        Round(trajectories=5120, updates=1000, rate=2e-3),
    )
    """The teacher walks in the first; the student, as it is then, in the others."""
    batch_size: int = 64
    decay_from: float = 0.3
    """Share of the updates after which the learning rate falls linearly to 0."""
    average: float = 0.995
    """Of the weights that are kept."""
    guidance_scale: float = 4.0
    """The teacher's."""
    substeps: int = 2
    """Euler steps of the teacher between two nodes."""

    def facts(self) -> dict[str, Any]:
        """What `pretraining.json` tells of them."""
        return {name: value for name, value in asdict(self).items() if name != "output"} | {
            "teacher": self.teacher.name
        }


def grid(steps: int) -> Schedule:
    """The even grid from pure noise to data, in tiny-sd3's timesteps."""
    sigmas = torch.linspace(1, 0, steps + 1)
    return Schedule(sigmas, 1000 * sigmas[:-1])


def load(folder: Path) -> Model:
    """A pipeline folder in float32, all weights of its denoiser trainable."""
    return flowrl.load_model(str(folder), device="cpu", max_sequence_length=TOKENS)


@dataclass(frozen=True)
class Lessons:
    """N states at nodes and what the student answers there."""

    states: Tensor
    """[N, 4, 8, 8]."""
    velocities: Tensor
    """Mean velocity of the teacher's segment from there, like `states`."""
    nodes: Tensor
    """Numbers of the nodes, [N]."""
    captions: Tensor
    """Rows of the training captions, [N]."""

    @staticmethod
    def joined(parts: Sequence[Lessons]) -> Lessons:
        """All, one after the other."""
        return Lessons(*map(torch.cat, zip(*map(astuple, parts), strict=True)))


class Teacher:
    """Tells where a segment leads."""

    def __init__(self, adapter: ModelAdapter, settings: Settings) -> None:
        self._policy = _policy(adapter, settings.guidance_scale)
        self._plan = solver_plan(grid(len(NODES) * settings.substeps))
        self._substeps = settings.substeps

    def velocity(self, x: Tensor, k: int, cond: Condition) -> Tensor:
        """Mean velocity from x [B, ...] at node k to the next node."""
        end = x
        for j in range(k * self._substeps, (k + 1) * self._substeps):
            end = _stepped(self._policy, self._plan, j, end, cond)
        return (x - end) * len(NODES)

    def path(self, x: Tensor, cond: Condition, walker: ModelAdapter | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(k, state, velocity) at every node, from x [B, ...] at pure noise; the teacher walks, or the student."""
        plan = solver_plan(grid(len(NODES)))
        for k in range(len(NODES)):
            velocity = self.velocity(x, k, cond)
            yield k, x, velocity
            x = x - velocity / len(NODES) if walker is None else _stepped(_policy(walker), plan, k, x, cond)


def _policy(adapter: ModelAdapter, guidance_scale: float = 1.0) -> Policy:
    return Policy(adapter, registry.load("samplers", "ode").build(), guidance_scale)


def _stepped(policy: Policy, plan: StepPlan, k: int, x: Tensor, cond: Condition) -> Tensor:
    step = plan.steps(torch.full((len(x),), k), policy.adapter.process)
    return policy.transition(x, step, cond).mean


@torch.no_grad()
def lessons(
    teacher: Model, walker: Model | None, wanted: Round, generator: torch.Generator, settings: Settings
) -> Lessons:
    """Those of one round; every caption as often as any other, but for one."""
    captions, count = shapes.prompts("train"), wanted.trajectories
    repeats = -(-count // len(captions))
    rows = torch.cat([torch.randperm(len(captions), generator=generator) for _ in range(repeats)])[:count]
    cond, guide, found = teacher.condition(captions), Teacher(teacher.adapter, settings), []
    for part in rows.split(settings.batch_size):
        x = torch.randn(len(part), *teacher.latent_shape, generator=generator)
        walk = guide.path(x, cond.index(part), None if walker is None else walker.adapter)
        found += [Lessons(state, velocity, torch.full_like(part, k), part) for k, state, velocity in walk]
    return Lessons.joined(found)


def regress(student: Model, taught: Lessons, wanted: Round, generator: torch.Generator, settings: Settings) -> None:
    """Train the denoiser; the average of its weights is kept."""
    updates, rate = wanted.updates, wanted.rate
    parameters = list(student.weights.parameters.values())
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    cond, nodes = student.condition(shapes.prompts("train")), torch.tensor(NODES)
    order, shown, started = torch.empty(0, dtype=torch.long), 0.0, time.process_time()
    for step in range(1, updates + 1):
        if len(order) < settings.batch_size:
            order = torch.cat([order, torch.randperm(len(taught.states), generator=generator)])
        pick, order = order[: settings.batch_size], order[settings.batch_size :]
        texts, timestep = cond.index(taught.captions[pick]), 1000 * nodes[taught.nodes[pick]]
        found = student.adapter.predict(taught.states[pick], timestep, texts, 1.0)
        loss = F.mse_loss(found, taught.velocities[pick])
        optimizer.param_groups[0]["lr"] = rate * ramp(step, updates, warm=20, decay_from=settings.decay_from)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(settings.average, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        shown = loss.item() if step == 1 else 0.98 * shown + 0.02 * loss.item()
        if step % 50 == 0:
            spent = time.process_time() - started
            print(f"update {step}/{updates} loss {shown:.4f} {spent:.0f} s of CPU", flush=True)
    for p, mean in zip(parameters, average, strict=True):
        p.data.copy_(mean)


def distil(settings: Settings) -> Model:
    """The student after all rounds."""
    generator = torch.Generator().manual_seed(settings.seed)
    teacher, student, taught = load(settings.teacher), load(settings.teacher), []
    for wanted in settings.rounds:
        taught.append(lessons(teacher, student if taught else None, wanted, generator, settings))
        regress(student, Lessons.joined(taught), wanted, generator, settings)
    return student


def write(student: Model, settings: Settings) -> None:
    """The teacher's pipeline with the student's denoiser, a scheduler of the nodes, and the declaration."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    pipe = MODEL.load(settings.teacher)
    pipe.transformer.load_state_dict(student.adapter.network.state_dict())
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=NODES[-1])
    save(pipe, MODEL, settings.output)
    for name in SHARED:  # a saved tokenizer says how it was loaded
        shutil.copytree(settings.teacher / name, settings.output / name, dirs_exist_ok=True)
    DECLARED.write(settings.output)
    (settings.output / "README.md").write_text(README, encoding="utf-8")
