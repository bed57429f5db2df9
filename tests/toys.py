"""A tiny model family behind the ModelAdapter protocol: no diffusers, no download, milliseconds.

Two prompts never have the same embedding, and every parameter reaches the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.algorithms.base import Method, Networks, SampleMethod
from flowrl.algorithms.flow_grpo import Config as GrpoConfig
from flowrl.algorithms.flow_grpo import build as build_grpo
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core import registry, rng
from flowrl.core.types import Condition, Edges, SampleId, Samples, Step
from flowrl.credit.advantages import Advantages
from flowrl.data.prompts import Prompt, distinct_numbers
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import FlowProcess, PredictionType, Process, VPProcess, expand
from flowrl.diffusion.schedules import Schedule
from flowrl.evaluation.results import Evaluation
from flowrl.losses.batches import LossOutput, Microbatch, NoisedBatch
from flowrl.models._guidance import guided
from flowrl.models.base import ModelAdapter
from flowrl.models.weights.roles import Weights
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.outputs import Outputs
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.trajectories import Asked, Rollout, Trajectories
from flowrl.samplers import flow_sde
from flowrl.samplers.base import Sampler
from flowrl.samplers.ode import Ode
from flowrl.training.base import Iteration, UpdateContext
from flowrl.training.edge_batches import EdgeBatches
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums
from flowrl.training.microbatches import microbatches
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from flowrl.training.sample_batches import SampleBatches
from flowrl.training.sampling import Sampling
from flowrl.training.world import World, shard

SHAPE = (2, 4, 4)
WIDTH = 3
ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class OneOf(World):
    """One of several processes, which hears of no other."""

    def gather(self, value: object) -> list[object]:
        return [value]

    def any(self, flag: bool) -> bool:
        return flag


def algorithms(base: type[Method]) -> tuple[str, ...]:
    """Names of the methods in the folder that are of a base class."""
    modules = {name: registry.load("algorithms", name) for name in registry.names("algorithms")}
    return tuple(name for name, module in modules.items() if isinstance(module.build(module.Config()), base))


class ToyNetwork(nn.Module):
    """Two convolutions with the timestep and the prompt added in between, [B, 2, 4, 4] -> [B, 2, 4, 4]."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Conv2d(2, 6, 3, padding=1)
            self.embed = nn.Linear(WIDTH + 1, 6)
            self.outer = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
        hidden = self.embed(torch.cat([prompt, timestep[:, None] / 1000], dim=1))
        return self.outer(torch.tanh(self.inner(x) + hidden[:, :, None, None]))


class ToyAdapter(ModelAdapter):
    """Flow with shift 3 by default; with `vp` an SD1.x-like noise-prediction model."""

    lora_targets = ("embed",)
    height = width = 4

    def __init__(self, *, vp: bool = False, seed: int = 0, key_per_step: bool = False) -> None:
        self.process: Process = VPProcess() if vp else FlowProcess()
        self.prediction_type: PredictionType = "eps" if vp else "velocity"
        self.network: nn.Module = ToyNetwork(seed)
        self.key_per_step = key_per_step
        self.encoded: list[list[str]] = []
        self.freed = False

    def encode(self, prompts: Sequence[str]) -> Condition:
        if self.freed:
            raise RuntimeError("the encoders were freed")
        self.encoded.append(list(prompts))
        return Condition({"prompt": torch.cat([rng.normal((WIDTH,), 0, f"toy/{text}", [()]) for text in prompts])})

    def free_text_encoders(self) -> None:
        self.freed = True

    def latent_shape(self) -> tuple[int, ...]:
        return SHAPE

    def schedule(self, num_inference_steps: int) -> Schedule:
        if isinstance(self.process, VPProcess):
            return vp_schedule(num_inference_steps)
        return flow_schedule(num_inference_steps)

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        empty = Condition({"prompt": torch.zeros(1, WIDTH)})
        return guided(self._forward, x, timestep, cond, empty, guidance_scale)

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        return self.network(x.float(), timestep, cond["prompt"])

    def batch_key(self, step_index: int) -> int:
        return step_index if self.key_per_step else 0

    def decode(self, latents: Tensor) -> Tensor:
        return latents.mean(dim=1, keepdim=True).sigmoid().expand(-1, 3, -1, -1)

    def encode_images(self, pictures: Tensor, noise: Tensor | None = None) -> Tensor:
        """Two channels of the picture, from -1 to 1; the posterior's std is 0.1."""
        return 2 * pictures[:, :2] - 1 + (0 if noise is None else 0.1 * noise)

    def to(self, device: torch.device) -> None:
        self.network.to(device)


def sampling_of(
    adapter: ModelAdapter,
    prompts: Sequence[Prompt | str],
    sampler: Sampler | None = None,
    num_steps: int = 3,
    **options: Any,
) -> Sampling:
    """The parts that draw samples of a toy; `options` are fields of `Sampling`."""
    return Sampling(
        policy=Policy(adapter, sampler or Ode(), 1.0),
        schedule=adapter.schedule(num_steps),
        texts=Texts(adapter, prompts, cache=False),
        counter=Evaluations(adapter.network),
        **{"world": ALONE, **options},
    )


@dataclass(frozen=True)
class Session:
    """A finished toy rollout with everything that a loss needs."""

    adapter: ToyAdapter
    weights: Weights
    algorithm: Any
    """A `Method`; tests use what its own class has."""
    policy: Policy
    networks: Networks
    plan: StepPlan
    noise: Noise
    ids: tuple[SampleId, ...]
    samples: Samples
    edges: Edges
    cond: Condition
    rows: Tensor
    """Row of `cond` of each sample."""
    batch_size: int
    maps: Tensor | None = None

    def batches(
        self, advantage: Tensor, *, batch_size: int | None = None, order: Tensor | None = None
    ) -> list[Microbatch]:
        """Microbatches, by default in the edges' own order; with `key_per_step` exactly the rollout's batches."""
        size = self.batch_size if batch_size is None else batch_size
        return list(microbatches(self.drawn, advantage[:, None], self.adapter, batch_size=size, order=order))

    def batch(self, advantage: Tensor | None = None) -> Microbatch:
        """All edges at once; `draw_advantages` unless others are given."""
        given = draw_advantages(len(self.edges)) if advantage is None else advantage
        (batch,) = self.batches(given, batch_size=len(self.edges))
        return batch

    @property
    def drawn(self) -> Trajectories:
        return Trajectories(self.plan, self.samples, self.edges, self.cond, self.rows)

    def gradient(self, advantage: Tensor, **options: Any) -> dict[str, Tensor]:
        """Of the mean loss over all edges, by parameter name, through Method.loss."""
        self.adapter.network.zero_grad()
        for batch in self.batches(advantage, **options):
            (self.algorithm.loss(batch, self.networks).loss / len(self.edges)).backward()
        return gradient_of(self.adapter.network)


def roll_out(
    adapter: ToyAdapter,
    config: GrpoConfig | None = None,
    *,
    prompts: int = 2,
    group: int = 3,
    num_steps: int = 6,
    batch_size: int = 4,
    guidance_scale: float = 1.0,
    iteration: int = 1,
    shared_start: bool = False,
    columns: Sequence[str] = (),
    algorithm: Method | None = None,
    sampler: Sampler | None = None,
) -> Session:
    """One toy rollout with full weights, under Flow-GRPO and the Flow-SDE unless others are given."""
    algorithm = algorithm or build_grpo(config or GrpoConfig())
    weights = Weights(adapter.network, None, (), 0)
    for role in algorithm.roles:
        weights.snapshot(role)
    sampler = sampler or flow_sde.build(flow_sde.Config(noise_level=0.7))
    policy = Policy(adapter, sampler, guidance_scale)
    plan = algorithm.plan(adapter.schedule(num_steps), sampler, iteration, 0)
    group += -group % plan.leaves  # whole trees
    ids = tuple(SampleId(slot, sample) for slot in range(prompts) for sample in range(group))
    rows = torch.tensor([i.slot for i in ids])
    cond = adapter.encode([f"prompt {slot}" for slot in range(prompts)])
    noise = Noise(0, "rollout", iteration, adapter.latent_shape(), shared_start)
    recording = training_of(algorithm).recording(sampler)
    recording = replace(recording, columns=tuple(columns) or recording.columns)
    with weights.using(algorithm.behaviour):
        asked, options = Asked(ids, cond, rows), RunOptions(recording=recording)
        samples, edges = run(policy, plan, noise, asked, batch_size=batch_size, options=options)
    networks = Networks(policy, weights)
    return Session(
        adapter, weights, algorithm, policy, networks, plan, noise, ids, samples, edges, cond, rows, batch_size
    )


def gradient_of(network: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, by its name."""
    gradients = {}
    for name, p in network.named_parameters():
        assert p.grad is not None, name
        gradients[name] = p.grad.clone()
    return gradients


def draw_advantages(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5))


def off_policy(algorithm: Method, sampler: Sampler | None = None, size: float = 0.02) -> list[Tensor]:
    """What two methods must have in common to be called equal: after an update, every loss and every gradient."""
    session = roll_out(ToyAdapter(), algorithm=algorithm, sampler=sampler)
    advantage = draw_advantages(len(session.edges))
    nudge(session.adapter.network, size)
    losses = [algorithm.loss(batch, session.networks).loss.detach() for batch in session.batches(advantage)]
    return [session.samples.x0, *losses, *session.gradient(advantage).values()]


def bitwise(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def context_of(session: Session, optim: OptimConfig, **options: Any) -> UpdateContext:
    """The parts of a run on one process, unless `options` say otherwise."""
    known = {"networks": session.networks, "rollout_batch_size": session.batch_size, "seed": 0, "world": ALONE}
    known |= {"counter": Evaluations(session.adapter.network), "schedule": session.adapter.schedule(len(session.plan))}
    return UpdateContext(**(known | {"method": session.algorithm, "optim": optim} | options))


def optim_of(updates: int, batch_size: int) -> OptimConfig:
    return OptimConfig(learning_rate=1e-3, updates_per_iteration=updates, batch_size=batch_size)


def learner_of(session: Session, *, updates: int = 2, batch_size: int = 4, **options: Any) -> Learner:
    """A learner on one process; `options` are of its context."""
    context = context_of(session, optim_of(updates, batch_size), **options)
    return Learner(training_of(session.algorithm), context, Optimizer(session.weights, context.optim, 100))


def updated(session: Session, rewards: Tensor, weights: Sequence[float] = (1.0,), **options: Any) -> Sums:
    """What one iteration's updates said; rewards [R, P, G], credited by the algorithm; `options` are of the learner."""
    sums, prompts = Sums(), tuple((f"prompt {slot}", ()) for slot in range(rewards.shape[1]))
    credit = session.algorithm.advantages(rewards, torch.tensor(weights), prompts)
    learner_of(session, **options).update(1, rollout_of(session, rewards), credit, sums)
    return sums


def replay_of(
    session: Session, rewards: Tensor, credit: Advantages | None = None, *, updates: int = 2, batch_size: int = 4
) -> EdgeBatches:
    """The edges of the session, in shares; rewards [R, P, G], credited by the algorithm unless given."""
    known: Advantages = credit or session.algorithm.advantages(rewards, torch.ones(len(rewards)))
    iteration = Iteration(1, rollout_of(session, rewards), known, Sums())
    return EdgeBatches(context_of(session, optim_of(updates, batch_size)), iteration)


def rollout_of(session: Session, rewards: Tensor) -> Rollout:
    """The session as the learner takes it; rewards [R, P, G]."""
    return session.drawn.scored(rewards)


# ---- methods on finished samples


def noising_of(
    session: Session,
    rewards: Tensor,
    credit: Advantages | None = None,
    *,
    updates: int = 1,
    batch_size: int = 4,
    rank: int = 0,
    size: int = 1,
    iteration: int = 1,
) -> SampleBatches:
    """The terms of one of `size` processes; rewards [R, P, G], credited by the algorithm unless given."""
    known: Advantages = credit or session.algorithm.advantages(rewards, torch.ones(len(rewards)))
    rollout, (prompts, group) = rollout_of(session, rewards), rewards.shape[1:]
    own = [slot * group + sample for slot, sample in shard(prompts, group, rank, size)]
    initial = None if session.samples.initial is None else session.samples.initial[own]
    samples = Samples(rollout.samples.x0[own], tuple(session.ids[row] for row in own), initial=initial)
    rollout = replace(rollout, samples=samples, rows=rollout.rows[own])
    world = World(rank, size, torch.device("cpu"))
    context = context_of(session, optim_of(updates, batch_size), world=world)
    return SampleBatches(context, Iteration(iteration, rollout, known, Sums()))


def terms_gradient(session: Session, *parts: SampleBatches, share: int = 0) -> dict[str, Tensor]:
    """Of the mean loss over the terms of a share on all processes, by parameter name."""
    session.adapter.network.zero_grad()
    count = sum(part.sizes[share] for part in parts)
    for part in parts:
        for batch, _ in part.batches(share):
            (session.algorithm.loss(batch, session.networks).loss / count).backward()
    return gradient_of(session.adapter.network)


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Two gradients of the same float32 sum, added in another order: their difference against the length of the whole.

    One parameter's part may be what is left of larger numbers that cancel (an output bias, where advantages sum to 0
    and samples share noise): the rounding of those has nothing to do with its size.
    """
    assert found.keys() == expected.keys()
    length = torch.cat([value.flatten() for value in expected.values()]).norm()
    apart = torch.cat([(found[name] - value).flatten() for name, value in expected.items()]).norm()
    assert float(length) > 0, "no gradient: the comparison would be empty"
    assert float(apart) <= rtol * float(length)


def outputs_of(
    roles: dict[str, Tensor],
    *,
    clean: Tensor,
    eps: Tensor,
    sigma: Tensor,
    advantage: Tensor | None = None,
    sample: Tensor | None = None,
    group: Tensor | None = None,
    old: Tensor | None = None,
    vp: bool = False,
) -> Outputs:
    """What networks say of M terms [M, ...], given by hand, in the precision that is given."""
    adapter, count = ToyAdapter(vp=vp), len(sigma)
    process, each = adapter.process, torch.arange(count)
    batch = NoisedBatch(
        clean=clean,
        eps=eps,
        sigma=sigma,
        timestep=1000 * sigma,
        cond=Condition({"prompt": torch.zeros(count, WIDTH)}),
        advantage=torch.ones(count) if advantage is None else advantage,
        sample=each if sample is None else sample,
        group=torch.zeros_like(each) if group is None else group,
        old=old,
    )
    alpha = process.alpha(sigma).to(clean)
    noised = expand(alpha, clean) * clean + expand(sigma.to(clean), clean) * eps
    target = eps if vp else eps - clean
    return Outputs(adapter, batch, noised, target, roles)


def loss_of(algorithm: SampleMethod, outputs: Outputs) -> LossOutput:
    """The method's loss of networks that say `outputs`."""
    algorithm.outputs = lambda batch, networks, roles=None: outputs
    batch = outputs.batch
    networks: Any = None  # the outputs are given
    if algorithm.centres:  # of an update of these terms alone
        batch = replace(batch, centre=algorithm.measured(batch, networks).detach().mean(dim=0))
    return algorithm.loss(batch, networks)


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers in float64; six rows of eight unless another shape is given."""
    return torch.randn(shape or (6, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CLEAN, EPS, V = draw(1), draw(2), draw(3)
TARGET = EPS - CLEAN
"""Six terms of a flow, what the policy says of them, and what it should say."""


def loss_and_gradient(
    algorithm: SampleMethod, v: Tensor, roles: dict[str, Tensor], **scene: Any
) -> tuple[LossOutput, Tensor]:
    """The loss and its metrics without a graph, and the gradient on the policy's output v."""
    v = v.clone().requires_grad_(True)
    output = loss_of(algorithm, outputs_of({"policy": v} | roles, **scene))
    (gradient,) = torch.autograd.grad(output.loss, v)
    return replace(output, loss=output.loss.detach()), gradient


class Moves(list[tuple[str, float]]):
    """Weights that note which role followed the policy, and with which decay."""

    def follow(self, role: str, decay: float) -> None:
        self.append((role, decay))


def nudge(network: nn.Module, size: float = 0.02, seed: int = 1) -> None:
    """Move every weight a little, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))


def column(*values: float) -> Tensor:
    return torch.tensor(values)


def make_step(process: Process, sigma: float, sigma_next: float, noise_level: float, ceiling: float = 0.96) -> Step:
    """One step of a path, as one sample."""
    sigmas = column(sigma, sigma_next)
    alpha, alpha_next = process.alpha(sigmas).split(1)
    return Step(
        alpha=alpha,
        sigma=sigmas[:1],
        alpha_next=alpha_next,
        sigma_next=sigmas[1:],
        timestep=1000 * sigmas[:1],
        index=torch.zeros(1, dtype=torch.int64),
        noise_level=column(noise_level),
        sigma_ceiling=column(ceiling),
    )


def evaluation(
    tag: str,
    iteration: int,
    guidance_scale: float,
    steps: int,
    prompts: Sequence[str],
    seeds: int,
    scores: dict[str, np.ndarray],
    **known: Any,
) -> Evaluation:
    """An evaluation whose equal texts are one prompt, and whose images are not known to be the same as any other's."""
    texts = tuple(prompts)
    told: dict[str, Any] = {"digests": np.full((len(texts), seeds), ""), "sharpness": np.full((len(texts), seeds), 0.1)}
    told |= {"distinct": tuple(distinct_numbers(texts))} | known
    return Evaluation(tag, iteration, guidance_scale, steps, texts, seeds, scores, **told)
