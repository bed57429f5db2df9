"""The parts of a run: data, rewards, model, weights, method and learner, checked before anything is trained."""

from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.algorithms.base import Method, Networks
from flowrl.config.checks import check_model, check_trained
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError, Diverged
from flowrl.display.console import log
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.previews import Previews, require_learned
from flowrl.models.weights.roles import Weights
from flowrl.rollout.saliency_maps import Mapper, mapper_of
from flowrl.run.assembly.data import Data, read
from flowrl.run.assembly.model import load, sampling_of, trained_weights, try_compiled
from flowrl.run.assembly.rewards import Scorers
from flowrl.run.inputs import made_with
from flowrl.scoring.scorer import Scorer
from flowrl.training import optimizers
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


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a run."""

    resolved: Resolved
    data: Data
    scorers: Scorers
    sampling: Sampling
    learner: Learner
    """The method with its networks and their optimizer."""
    evaluator: Evaluator
    previews: Previews
    """Draws the user's own prompts."""
    maps: Mapper | None
    """Saliency maps of a rollout's images, for a method with `spatial`."""

    def introduction(self) -> str:
        """Method, model, data and processes of the run, in a few lines."""
        resolved, prompts, weights = self.resolved, self.data.prompts, self.learner.networks.weights
        line = (
            f"{resolved.run.name}: {resolved.algorithm.name} on {resolved.model.config.path}, "
            f"{weights.count:,} trained values ({weights.description}), {self.data.describe()}, "
            f"{self.learner.world.size} process(es){', which share the network' if self.sampling.sharded else ''}"
        )
        if prompts.share is not None:
            line += f"\nheld out: {prompts.source}"
        if prompts.remark:
            line += f"\n{prompts.remark}"
        if prompts.evaluated and self.scorers.watched is None:
            line += "\neval.rewards is empty: evaluation draws samples and scores nothing"
        return line


def assemble(resolved: Resolved, world: World, folder: Path | None, *, training: bool = True) -> Parts:
    """Load what the configuration names, cheapest first, and try the rewards before anything is trained.

    Args:
        resolved: the configuration.
        world: the processes.
        folder: evaluations are written below it; None: nothing is written.
        training: False leaves out what no evaluation needs: the backbone of saliency maps.

    Raises ConfigError, ModelError, RewardError: something the user can mend.
    """
    optimizers.require(resolved.run.optim.name, world.device)
    kind = new_training(resolved, world)
    data = read(resolved, kind)
    prompts = data.prompts
    scorers = Scorers.of(resolved, kind.climbs, prompts)
    if kind.method.rule.config.virtual_best:
        kind.method.rule.best = scorers.highest()
    adapter = load(resolved)
    data.require_fit(adapter, resolved)
    weights = trained_weights(resolved, kind, adapter, prompts.train, world)
    scorers.tried(adapter, prompts)
    shown, texts = data.embed(resolved, adapter, world)
    scorers.tried(adapter, prompts, texts)
    kind.begin(weights, texts, prompts.train, resolved.run.seed)
    for role in kind.method.roles:
        weights.snapshot(role)
    if resolved.model.config.compile is not None:
        first = data.texts(cache=resolved.run.data.caches_text)[:1]
        try_compiled(resolved, kind, adapter, weights, texts, first)
    sampling = sampling_of(resolved, adapter, texts, world)
    learner, sampling = learner_of(resolved, kind, sampling, weights, scorers.trained)
    if learner.context.climb is not None:
        learner.context.climb.probe(texts.lookup(prompts.train[:1]), prompts.train[0], world.device)
    require_learned(data.previews, sampling.learned)
    evaluator = _evaluator(resolved, data, sampling, scorers, folder)
    spatial = kind.method.spatial if training else None
    return Parts(
        resolved=resolved,
        data=data,
        scorers=scorers,
        sampling=sampling,
        learner=learner,
        evaluator=evaluator,
        previews=Previews(evaluator, data.previews, shown),
        maps=None if spatial is None else mapper_of(adapter, spatial, world.device),
    )


def _evaluator(resolved: Resolved, data: Data, sampling: Sampling, scorers: Scorers, folder: Path | None) -> Evaluator:
    scorer = scorers.watched
    outputs = [] if scorer is None else [entry.reward.card.outputs for entry in scorer.entries]
    return Evaluator(
        sampling=sampling,
        scorer=scorer,
        folder=folder,
        prompts=tuple(data.prompts.evaluated),
        options=resolved.run.eval,
        made_with=made_with(resolved, data.prompts.evaluated, outputs),
    )
