"""The parts of a run: data, rewards, model, weights and method, checked before anything is trained."""

from dataclasses import dataclass
from pathlib import Path

from flowrl.config.resolved import Resolved
from flowrl.evaluation.evaluator import Evaluator
from flowrl.evaluation.previews import Previews, require_learned
from flowrl.evaluation.sources import Sources
from flowrl.rollout.saliency_maps import Mapper, mapper_of
from flowrl.run.assembly.data import Data, read
from flowrl.run.assembly.learner import learner_of, new_training
from flowrl.run.assembly.model import load, sampling_of, trained_weights, try_compiled
from flowrl.run.assembly.rewards import Scorers
from flowrl.run.inputs import made_with
from flowrl.training import optimizers
from flowrl.training.learner import Learner
from flowrl.training.sampling import Sampling
from flowrl.training.world import World


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

    Evaluations are written below `folder`; None: nothing is written. `training` False leaves out what no evaluation
    needs: the backbone of saliency maps.

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
    if training:
        data.require_reached(adapter, resolved)
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
        sources=Sources(sampling.adapter),
    )
