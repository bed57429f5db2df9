"""What must hold on any device; test_on_gpu.py runs it on a card, test_rehearsal.py on the CPU."""

from typing import Any

import torch
from torch import Tensor

from flowrl.models.base import decoded
from flowrl.run.session import Session
from flowrl.training.base import Iteration
from flowrl.training.determinism import strict
from flowrl.training.metrics import Sums
from scripts.bench.gpu import gate, phases
from scripts.bench.gpu.session import Bench, opened

RECIPE = "configs/lab/flow_grpo-lora.yaml"
SMALL = (
    "model={name: sd3, path: tiny-sd3, lora: {rank: 4, alpha: 8}, max_sequence_length: 9}",
    "rollout={sampler: {name: flow_sde, noise_level: 0.7}, num_inference_steps: 4, guidance_scale: 4.5, "
    "prompts_per_iteration: 2, group_size: 4, batch_size: 4}",
    "optim={learning_rate: 1e-3, batch_size: 4, updates_per_iteration: 2}",
    "algorithm.sde_steps=[0, 1]",
    "data.max_eval_prompts=2",
)
"""Overrides of the recipe: 8 samples, 16 edges."""


def bench(*words: str) -> Bench:
    """A small session with rewards that take no time."""
    return opened(RECIPE, [*SMALL, *words], random=False)


def gate_of(*words: str) -> dict[str, Any]:
    """The largest |log ratio| of a replay at several compositions of the batch."""
    with bench(*words) as small:
        return gate.measure(small, 1)


def resumed(*words: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State after two iterations, and after one, a checkpoint's state, and another in a new session."""
    words = (*SMALL, "deterministic=true", *words)
    with Session(RECIPE, *words) as whole:
        whole.step(1)
        tensors, plain = whole.state()
        kept = {name: value.clone() for name, value in tensors.items()}
        whole.step(2)
        expected = {name: value.clone() for name, value in whole.state()[0].items()}
    with Session(RECIPE, *words) as other:
        other.load_state(1, kept, plain)
        other.step(2)
        return expected, {name: value.clone() for name, value in other.state()[0].items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal bits, name by name."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def first_batch(small: Bench) -> Any:
    """The first training forward of an iteration."""
    own, credit = small.scored(small.draw(small.ids()))
    work = small.session.parts.learner.training.work(small.context, Iteration(1, own, credit, Sums()))
    work.prepare()
    return next(iter(work.batches(0)))[0]


def gradients(*words: str, times: int = 2) -> list[list[Tensor]]:
    """The gradient of one microbatch, computed several times."""
    with bench("deterministic=true", *words) as small:
        batch, found = first_batch(small), []
        for _ in range(times):
            with strict():
                small.session.method.loss(batch, small.session.networks).loss.backward()
            found.append([g.clone() for g in small.session.weights.gradients() if g is not None])
            small.session.optimizer.zero_grad()
        return found


def losses(*words: str) -> tuple[float, list[Tensor]]:
    """(loss, gradient) of one microbatch."""
    with bench(*words) as small:
        loss = small.session.method.loss(first_batch(small), small.session.networks).loss
        loss.backward()
        return float(loss.detach()), [g.clone() for g in small.session.weights.gradients() if g is not None]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """|a - b| / |b| of two gradients."""
    difference = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(y.square().sum()) for y in b)) ** 0.5


def memory_ratios(recipe: str, *words: str, random: bool) -> dict[str, float]:
    """Measured over planned bytes of each phase."""
    with opened(recipe, list(words), random=random) as measured:
        return {row["phase"]: row["ratio"] for row in phases.memory(measured, 1)}


def images(*words: str) -> Tensor:
    """Images of the first batch, in [0, 1]."""
    with bench(*words) as small:
        drawn = small.draw(small.ids(1))
        x0 = drawn.samples.x0.to(small.device)
        return decoded(small.session.model, x0, drawn.cond, drawn.rows).cpu()
