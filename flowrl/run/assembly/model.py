"""The model of a run: loaded, with its trained weights on its device, compared, compiled, and ready to draw."""

from collections.abc import Sequence

import torch

from flowrl.config.resolved import Resolved
from flowrl.core.rng import derive
from flowrl.data.prompts import Prompt, identity
from flowrl.data.text_cache import Texts
from flowrl.display.display import working
from flowrl.models.base import ModelAdapter, torch_dtype
from flowrl.models.memory.compiled import probe
from flowrl.models.weights.roles import Weights
from flowrl.planning.parity import require_own_call
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.training.base import Training
from flowrl.training.sampling import Sampling
from flowrl.training.sharding import split
from flowrl.training.world import World


def load(resolved: Resolved) -> ModelAdapter:
    """The run's adapter with its published weights, in host memory."""
    with working(f"loading the model {resolved.model.config.path}"):
        return resolved.model.build()


def trained_weights(
    resolved: Resolved, kind: Training, adapter: ModelAdapter, train: Sequence[Prompt], world: World
) -> Weights:
    """The trained weights; the adapter is then on its device, its network split where `model.shard` says so, and its
    prediction known to be that of its pipeline."""
    options, seed = resolved.model.config, derive(resolved.run.seed, "lora")
    weights = kind.weights(adapter, options, [identity(prompt) for prompt in train], seed, world.device)
    if _sharded(resolved, world):
        split(adapter, weights, world, torch_dtype(options.dtype))
    else:
        adapter.to(world.device)
    rollout = resolved.run.rollout.guidance_scale
    require_own_call(adapter, (rollout, kind.guidance(adapter, rollout)), world)
    return weights


@working("compiling the network")
def try_compiled(
    resolved: Resolved,
    kind: Training,
    adapter: ModelAdapter,
    weights: Weights,
    texts: Texts,
    first: Sequence[str | Prompt],
) -> None:
    """A microbatch's forward and backward and a rollout's forward through compiled blocks, for the prompt of `first`:
    what cannot be compiled ends here, not in the first iteration."""
    run, cond = resolved.run, texts.lookup(first)
    timesteps = adapter.schedule(run.rollout.num_inference_steps).timesteps[[0, -1]].unique().to(cond.device)

    def try_batch(count: int, guidance_scale: float, trained: list[torch.nn.Parameter]) -> None:
        rows = cond.index(torch.zeros(count, dtype=torch.int64, device=cond.device))
        probe(adapter, rows, timesteps, guidance_scale, trained)

    scale = kind.guidance(adapter, run.rollout.guidance_scale)
    if kind.frozen:
        return try_batch(run.rollout.batch_size, scale, [])
    try_batch(run.optim.batch_size, scale, list(weights.parameters.values()))
    if resolved.drawn:
        try_batch(run.rollout.batch_size, run.rollout.guidance_scale, [])


def sampling_of(resolved: Resolved, adapter: ModelAdapter, texts: Texts, world: World) -> Sampling:
    """The parts that draw samples as the run's rollouts do."""
    rollout = resolved.run.rollout
    return Sampling(
        policy=Policy(adapter, resolved.sampler.build(), rollout.guidance_scale),
        schedule=adapter.schedule(rollout.num_inference_steps),
        texts=texts,
        counter=Evaluations(adapter.network),
        world=world,
        sharded=_sharded(resolved, world),
    )


def _sharded(resolved: Resolved, world: World) -> bool:
    return resolved.model.config.shard and world.size > 1
