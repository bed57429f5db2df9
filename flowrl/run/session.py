"""A session: the parts of a run and its steps, without a run folder, a lock or signals.

    with flowrl.Session("quickstart", "iterations=3") as session:
        rollout = session.roll_out(1)
        credit = session.credit(rollout)
        row = session.update(rollout, credit)
        row = session.step(2)
        scores = session.evaluate().scores

A trainer is a session with a folder, signals and a loop.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Method, Networks
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig
from flowrl.core.types import Condition
from flowrl.credit.advantages import Advantages
from flowrl.credit.step_values import by_gains
from flowrl.data.given_samples import GivenSource
from flowrl.display.console import log
from flowrl.display.display import Progress
from flowrl.display.phases import phase
from flowrl.evaluation.evaluation_tree import EvalTree
from flowrl.evaluation.evaluator import Evaluator, Setting
from flowrl.evaluation.results import Evaluation
from flowrl.models.base import ModelAdapter, torch_dtype
from flowrl.models.memory.host_memory import keep_freed_memory
from flowrl.models.pipelines import skeletons
from flowrl.models.weights.roles import Weights
from flowrl.planning.checkpointing import decided
from flowrl.rollout.flop import RowFlop, row_flop
from flowrl.rollout.trajectories import Rollout
from flowrl.run.anchoring import Anchor
from flowrl.run.assembly.parts import assemble
from flowrl.run.collector import Collector
from flowrl.run.gauges import Gauges
from flowrl.run.given_collector import HeldOutPairs, PairCollector
from flowrl.run.people.asking import Asking, People
from flowrl.run.renewing import Renewing
from flowrl.run.telling import tell
from flowrl.scoring.scorer import Scorer
from flowrl.training import determinism
from flowrl.training.base import Iteration
from flowrl.training.metrics import Sums, Timer
from flowrl.training.optim import Optimizer
from flowrl.training.signals import Signals
from flowrl.training.world import World, join


class Session(AbstractContextManager["Session"]):
    """The parts of a run, loaded and ready to work, and the steps of an iteration.

    Args:
        config: a recipe (its file, its name, or a run folder), or a configuration that is read already.
        overrides: `a.b=c` words for a recipe.
        world: the processes; None joins the group of this process, and `close` leaves it.
        folder: evaluations write their scores, images and trees below it; None: nothing is written.
        signals: the signals that stop the work early.
        training: False leaves out what evaluations do not need.

    Raises ConfigError, ModelError, RewardError: something the user can mend.
    """

    def __init__(
        self,
        config: RunConfig | Resolved | str | Path,
        *overrides: str,
        world: World | None = None,
        folder: Path | None = None,
        signals: Signals | None = None,
        training: bool = True,
    ) -> None:
        self.resolved = resolved(config, *overrides)
        self.config = self.resolved.run
        if self.config.deterministic:
            determinism.prepare()
        self._joined, self.world = world is None, world or join()
        if self.world.device.type == "cpu":
            keep_freed_memory()
        if training:
            self.resolved = decided(self.resolved, self.world)
        with phase("loading"):
            self.parts = parts = assemble(self.resolved, self.world, folder, training=training)
        self.stop = (signals or Signals()).stop(self.world, sharded=parts.sampling.sharded)
        for scorer in (parts.scorers.trained, parts.scorers.watched):
            if scorer is not None:
                scorer.stop = self.stop.here
        self.collector: Collector | PairCollector
        self.held_out: HeldOutPairs | None = None
        given = parts.data.given
        if given is None:
            if training and self.rewards is not None:
                slots = self.config.rollout.prompts_per_iteration
                people = People.of(self.rewards, parts.evaluator.folder, self.world, self.stop, slots)
                if people is not None:
                    self.rewards.asking = partial(Asking, people)
            self.collector = Collector(parts, self.stop, training=training)
        else:
            self.collector = PairCollector(given, parts.sampling, parts.learner.context, self.stop)
            self.held_out = HeldOutPairs(given, parts.sampling, parts.learner) if given.held_out_numbers else None
        self.anchor = Anchor(parts, self.stop) if parts.data.anchor is not None and training else None
        trained = () if self.rewards is None else self.rewards.entries
        self.renewing = Renewing(self.rewards, parts.sampling)
        self.tree = EvalTree(self.resolved, self.method, trained, parts.evaluator)
        self.iteration = 0
        """The last finished iteration."""
        self.between_updates = True
        """The weights are those of the end of an iteration."""
        self.remembered = self._memory()
        """State of method, data and collector at its end, plain data."""
        self._under_way, self._timer, self._sums = 0, Timer(), Sums()
        self._gated = False
        self._gauges = Gauges(parts.sampling)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group of processes, if the session joined it."""
        if self._joined:
            self.world.close()

    @property
    def model(self) -> ModelAdapter:
        return self.parts.sampling.adapter

    @property
    def noun(self) -> str:
        """What the model makes: "image" or "video"."""
        return "video" if self.model.num_frames > 1 else "image"

    @property
    def weights(self) -> Weights:
        return self.networks.weights

    @property
    def networks(self) -> Networks:
        """The policy with the roles of its weights, as `method.loss` takes them."""
        return self.parts.learner.networks

    @property
    def method(self) -> Method:
        return self.parts.learner.method

    @property
    def rewards(self) -> Scorer | None:
        """Rewards that are trained on; None for a method that learns from given images."""
        return self.parts.scorers.trained

    @property
    def optimizer(self) -> Optimizer:
        return self.parts.learner.optimizer

    # ---- an iteration

    def roll_out(self, iteration: int) -> Rollout:
        """Draw and score the samples of an iteration, or read its given images; this process's share of them.

        Args:
            iteration: counted from 1; keys prompts, noise and the order of the updates.

        Raises Abandoned, Diverged, RewardError: on all processes; what was drawn is lost. Elsewhere: another process
        failed otherwise.
        """
        self._under_way, self._timer, self._sums = iteration, Timer(), Sums()
        self._gauges.begin()
        with self._timer.phase("iteration"):
            rollout = self.collector.collect(iteration, self._timer, self._sums)
            if self.anchor is not None:
                self.anchor.collect(iteration, self._timer, self._sums)
            return rollout

    def credit(self, rollout: Rollout) -> Advantages:
        """Advantages of all samples of the rollout, [P, G], on every process."""
        with self._timer.phase("iteration"):
            return self.world.in_step(lambda: self._credit(rollout))

    def _credit(self, rollout: Rollout) -> Advantages:
        method, weights = self.method, self.collector.weights
        credit = method.advantages(rollout.rewards, weights, rollout.identities)
        if rollout.gains is not None:
            return by_gains(credit, rollout.gains, method.rule.config, vars(method.config)["step_values"].weight)
        if rollout.plan.tree is None:
            return credit
        assert isinstance(method, EdgeMethod)  # its plan has a tree
        return method.on_tree(credit, rollout.leaf_rewards(weights), self._under_way)

    def batches(self, rollout: Rollout, credit: Advantages, batch_size: int | None = None) -> Iterator[Any]:
        """The training forwards of the iteration that was rolled out last, as `method.loss` takes them.

        `batch_size` is in rows of a forward; None: the configuration's.
        """
        learner = self.parts.learner
        context, data = learner.context, Iteration(self._under_way, rollout, credit, Sums())
        if batch_size is not None:
            context = replace(context, optim=replace(context.optim, batch_size=batch_size))
        work = learner.training.work(context, data)
        work.prepare()
        for number in range(len(work.shares)):
            yield from (batch for batch, counts in work.batches(number) if counts)

    def update(self, rollout: Rollout, credit: Advantages) -> dict[str, Any]:
        """The optimizer steps of the iteration that was rolled out last, which they finish; its row of metrics.

        Raises Diverged, ParityError: the weights are then those of an unfinished iteration.
        """
        # The parity gate is passed once, before the first update.
        gate, self._gated = None if self._gated else torch_dtype(self.resolved.model.config.dtype), True
        with self._timer.phase("iteration"), self._timer.phase("update"):
            self.between_updates = False
            self.parts.learner.update(self._under_way, rollout, credit, self._sums, gate=gate)
            self.renewing(self._under_way, rollout, self._sums)
        row = {"iteration": self._under_way} | self.collector.metrics_row(rollout, credit)
        row |= self._sums.merge(self.world.gather(self._sums)).means()
        row |= {f"time/{name}_s": round(value, 4) for name, value in self._timer.seconds.items()}
        row |= self._gauges.row(self._timer.seconds, lambda: self.row_flop(rollout.cond))
        self.iteration, self.remembered, self.between_updates = self._under_way, self._memory(), True
        climb = self.parts.learner.context.climb
        for each in (self.method, climb):
            if each is not None and self.world.main and (warning := each.warning(row)):
                log.warning("%s", warning)
        return row

    def step(self, iteration: int) -> dict[str, Any]:
        """A whole iteration; its row of metrics."""
        rollout = self.roll_out(iteration)
        return self.update(rollout, self.credit(rollout))

    @property
    def exhausted(self) -> bool:
        """True if every prompt is retired, so that nothing is left to train on."""
        return self.collector.exhausted

    def row_flop(self, cond: Condition) -> RowFlop | None:
        """Operations of one row of the network's forwards, for prompts of such conditions; it takes seconds.

        None: the model cannot be measured without its weights.
        """
        model, policy = self.resolved.model, self.parts.sampling.policy
        skeleton = partial(skeletons.skeleton, model.name, model.module)
        return row_flop(skeleton, model.config, policy, cond, frozen=self.resolved.training.frozen)

    # ---- images and scores

    def images(self, rollout: Rollout) -> Tensor:
        """Images of this process's samples as they were scored, in [0, 1]: [B, 3, H, W], or videos [B, F, 3, H, W].

        They are decoded once more, and have the values of 8 bits.
        """
        return self.parts.sampling.images(rollout, self.config.rollout.batch_size).floats()

    @property
    def eval_steps(self) -> int:
        """Denoising steps of evaluations."""
        return self.config.eval.num_inference_steps or self.config.rollout.num_inference_steps

    @property
    def eval_guidance(self) -> float:
        """Guidance scale of evaluations, in the pipeline's units."""
        given = self.config.eval.guidance_scale
        return self.config.rollout.guidance_scale if given is None else given

    def evaluate(
        self,
        tag: str = "evaluation",
        *,
        limit: int | None = None,
        iteration: int | None = None,
        guidance_scale: float | None = None,
        evaluator: Evaluator | None = None,
        pairs: bool = True,
        tree: bool = True,
    ) -> Evaluation:
        """Scores of the evaluated prompts at fixed seeds, with the weights that count (EMA if there is one).

        Args:
            tag: name of the written files, if the session has a folder.
            limit: number of prompts; None: all of them.
            iteration: the finished iteration; None: the last one.
            guidance_scale: None: the configuration's.
            evaluator: with other prompts or noise; None: the run's.
            pairs: compare the network with held-out pairs, for a method that prefers images.
            tree: draw the preview prompts and, for a method on trees, a tree.

        Raises Abandoned, Diverged, RewardError: on all processes; no scores are written. Elsewhere: another process
        failed otherwise.
        """
        iteration = self.iteration if iteration is None else iteration
        scale = self.eval_guidance if guidance_scale is None else guidance_scale
        setting = Setting(tag, iteration, scale, self.eval_steps, limit)
        started, evaluator = time.perf_counter(), evaluator or self.parts.evaluator
        total = len(evaluator.prompts[:limit]) * evaluator.options.samples_per_prompt // self.world.size
        with phase("evaluation"), self.weights.using(self.optimizer.role):
            if tree:  # before the scores: whenever a signal comes, an evaluation with scores has its tree
                self.tree(tag, iteration, self.stop)
                self.parts.previews(tag, iteration, scale, self.eval_steps, self.stop)
            agreement = self.held_out if pairs else None
            with Progress(total, f"evaluating {tag}", show=self.world.main) as bar:
                result = evaluator(setting, progress=bar.update, stop=self.stop, agreement=agreement)
        tell(result, self.parts.data.prompts, total, time.perf_counter() - started)
        return result

    def preview_base(self) -> None:
        """Draw the preview prompts of the base, if the folder lacks them; before a checkpoint is restored."""
        previews = self.parts.previews
        if not previews.has("base", self.eval_guidance, self.eval_steps):
            with phase("evaluation"), self.weights.using(self.optimizer.role):
                previews("base", 0, self.eval_guidance, self.eval_steps, self.stop)

    # ---- its state

    def _memory(self) -> dict[str, Any]:
        parts = {"algorithm": self.method, **self.parts.data.sources, "collector": self.collector}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain data) of the end of the last finished iteration.

        Tensors are named weights/ROLE/PARAMETER, optim/PARAMETER/MOMENT, algorithm/NAME and judges/OUTPUT.
        """
        moments, counters = self.optimizer.state()
        sections = {"weights": self.weights.state(), "optim": moments, "algorithm": self.method.tensors()}
        sections["judges"] = self.renewing.state()
        tensors = {f"{section}/{k}": v for section, values in sections.items() for k, v in values.items()}
        return tensors, {"optimizer": counters, **self.remembered}

    def load_state(
        self, iteration: int, tensors: dict[str, Tensor], plain: dict[str, Any], *, other_data: bool = False
    ) -> None:
        """Restore `state` of the end of an iteration.

        `other_data`: given images may be another set than then.

        Raises ModelError: it is of another model.
        """
        split: dict[str, dict[str, Any]] = {"weights": {}, "optim": {}, "algorithm": {}, "judges": {}}
        for name, value in tensors.items():
            section, _, rest = name.partition("/")
            split[section][rest] = value
        self.weights.load_state(split["weights"])
        self.optimizer.load_state(split["optim"], plain["optimizer"])
        self.method.load_state_dict(plain["algorithm"])
        if split["algorithm"]:
            self.method.load_tensors(split["algorithm"])
        self.renewing.load_state(split["judges"])
        for name, source in self.parts.data.sources.items():
            if not (other_data and isinstance(source, GivenSource)):  # for given images it only names their set
                source.load_state_dict(plain[name])
        self.collector.load_state_dict(plain["collector"])
        self.iteration, self.remembered = iteration, self._memory()


def resolved(config: RunConfig | Resolved | str | Path, *overrides: str) -> Resolved:
    """The resolved configuration. Raises ConfigError, ModelError: something the user can mend."""
    if isinstance(config, Resolved | RunConfig) and overrides:
        raise TypeError(f"overrides {list(overrides)} are for a recipe, and this configuration is read already")
    if isinstance(config, Resolved):
        return config
    return resolve(config if isinstance(config, RunConfig) else load_config(config, list(overrides)))
