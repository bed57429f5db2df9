"""The learner of a run: its method with the kind of its data, the checks of the first iteration, and the optimizer."""

from dataclasses import replace

from flowrl.algorithms.base import Method, Networks
from flowrl.config.checks import check_model, check_trained
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError, Diverged
from flowrl.display.console import log
from flowrl.models.weights.roles import Weights
from flowrl.scoring.scorer import Scorer
from flowrl.training.base import Training, UpdateContext
from flowrl.training.divergence import remedy
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.optim import Optimizer
from flowrl.training.sampling import Sampling
from flowrl.training.world import World


def new_training(resolved: Resolved, world: World) -> Training:
    """A fresh method and its kind of training data. Raises ConfigError: more processes than have work."""
    leaves = resolved.algorithm.config.leaves(resolved.run.rollout.num_inference_steps)
    samples = resolved.slots * resolved.group_size
    if samples // leaves < world.size:
        what = "data.pairs.per_iteration" if resolved.members else "rollout.prompts_per_iteration x rollout.group_size"
        raise ConfigError(
            f"{what} = {samples} samples{f' in trees of {leaves}' if leaves > 1 else ''} cannot keep {world.size} "
            "processes busy; raise one of them or start fewer processes"
        )
    return training_of(resolved.algorithm.build())


def learner_of(
    resolved: Resolved, kind: Training, sampling: Sampling, weights: Weights, scorer: Scorer | None
) -> tuple[Learner, Sampling]:
    """The learner, and the parts that draw with what it knows: learned noise, and the advice of a divergence.

    `scorer` is that of the trained rewards, whose gradient some methods climb.

    Raises ConfigError: what the first iteration could not do.
    """
    plan = kind.first_plan(sampling.schedule, sampling.sampler, sampling.adapter.process, resolved.run.seed)
    for note in check_model(resolved, sampling.adapter):
        log.warning("%s", note)
    check_trained(resolved, plan, sampling.adapter)
    require_whole_groups(kind.method, resolved.slots, sampling.world)
    learner = _learner(resolved, kind, sampling, weights, scorer)

    def advice(**known: bool) -> tuple[type[Diverged], str]:
        return remedy(resolved.model.config, resolved.run.optim, learner.grad_norm, **known)

    return learner, replace(sampling, learned=kind.learned_noise(weights), remedy=advice)


def require_whole_groups(method: Method, prompts: int, world: World) -> None:
    """Refuse with ConfigError fewer prompts than processes, where a prompt's samples must be on one of them."""
    if method.unit in ("group", "prompt") and prompts < world.size:
        key = "data.pairs.per_iteration" if method.members else "rollout.prompts_per_iteration"
        raise ConfigError(
            f"{key}={prompts}: the loss compares all samples of a prompt, which must be on "
            f"one of {world.size} processes",
            {key: world.size},
        )


def _learner(
    resolved: Resolved, kind: Training, sampling: Sampling, weights: Weights, scorer: Scorer | None
) -> Learner:
    config = resolved.run
    updates = config.iterations * config.optim.updates_per_iteration * kind.method.passes
    # No gradient goes through a frozen network.
    scaled = resolved.model.config.dtype == "float16" and not kind.frozen
    context = UpdateContext(
        method=kind.method,
        networks=Networks(sampling.policy, weights),
        optim=config.optim,
        rollout_batch_size=config.rollout.batch_size,
        seed=config.seed,
        world=sampling.world,
        counter=sampling.counter,
        schedule=sampling.schedule,
        sharded=sampling.sharded,
        climb=None if scorer is None else kind.climb(scorer, sampling.adapter),
        lookup=sampling.texts.of_identities,
    )
    optimizer = Optimizer(weights, config.optim, updates, loss_scaling=scaled, world=sampling.world)
    return Learner(kind, context, optimizer)
