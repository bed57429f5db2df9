"""One iteration after another: roll out, score, credit, update, evaluate, save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from flowrl import checkpoint, ending, state
from flowrl.advantages import Advantages
from flowrl.assembly import assemble
from flowrl.collect import Collector
from flowrl.config import RunConfig
from flowrl.contents import require_unedited
from flowrl.distributed import join
from flowrl.errors import Abandoned, ConfigError, Elsewhere
from flowrl.evaltree import EvalTree
from flowrl.evaluate import Evaluation
from flowrl.heldout import require_same_split
from flowrl.load import load_config, resolve
from flowrl.metrics import Progress, Sums, Timer, log, set_up_logging
from flowrl.offline import HeldOutPairs, PairCollector
from flowrl.outofmemory import explaining
from flowrl.phases import phase
from flowrl.report import announce, evaluate_base, finish, told_mean
from flowrl.resolved import Resolved
from flowrl.reward import RewardError
from flowrl.runs import RunFolder, provenance
from flowrl.signals import NEVER, Signals, Stop
from flowrl.trajectories import Rollout

T = TypeVar("T")


class Trainer:
    """A run from its configuration. `fit()` trains, evaluates, saves and returns the summary."""

    def __init__(self, config: RunConfig | Resolved) -> None:
        self.resolved = config if isinstance(config, Resolved) else resolve(config)
        self.config = self.resolved.run
        self.signals = Signals()
        self.stop: Stop = NEVER
        self.seconds_before = 0.0
        self.started = time.monotonic()
        self.iteration = 0
        """The last finished one."""
        self.saved = self.attempted = -1
        """The last one of which there is a checkpoint, and the last one of which there was to be one."""
        self.plain: dict[str, Any] = {}
        """What its parts remembered at the end of that."""
        self.due: dict[str, Any] | None = None
        """Its row, while that and the evaluation which belongs to it are still to be written."""
        self.between_updates = True
        """The weights are those of the end of an iteration."""

    # ---- set-up

    def fit(self, resume: bool = False, accept_changes: bool = False) -> dict[str, Any]:
        """Train to the last iteration.

        `accept_changes` goes on with other contents of the user's files than the run was started with.

        Raises:
            ConfigError: something the user can mend; nothing was trained, or what was is saved.
            Stopped: a signal came; the last finished iteration is saved.
            Exited: code of the run called `sys.exit`.
            Exception: any other failure; the last finished iteration is saved, unless it was the update that failed.
        """
        self.world = join()
        self.folder = RunFolder(self.config.folder)
        try:
            self.start = self.iteration = self.agree(lambda: self._open_folder(resume, accept_changes))[0]
            set_up_logging(self.folder.path / "train.log", main=self.world.main, rank=self.world.rank)
            if resume and not self.start:
                log.info("nothing to resume in %s: starting from the beginning", self.folder.path)
            with self.signals.heard():
                return self._train(accept_changes)
        finally:
            self.folder.unlock()
            self.world.close()

    def _train(self, accept: bool) -> dict[str, Any]:
        try:
            if self.world.main:
                ending.begin(self)
            with explaining(self.resolved, self.world):
                self.agree(lambda: self._load(accept=accept))
                # Before a checkpoint is put back: these are the untouched weights.
                base = evaluate_base(self)
                if self.start:
                    state.restore(self, self.start, accept)
                return self._loop(base)
        except BaseException as error:  # whatever ends a run, its folder says so
            last = ending.leave(self, error)
            if last is error:
                raise
            raise last from error

    def evaluate_only(self, run: Path | None, out: Path, accept_changes: bool = False) -> Evaluation:
        """Evaluate the untouched model, or the newest checkpoint of a run folder, into `out`."""
        self.world, self.folder, self.start = join(), RunFolder(out), 0
        set_up_logging(None, main=self.world.main)
        with explaining(self.resolved, self.world):
            self._load(training=False)
            if run is not None:
                self._take_from(run, accept_changes)
            return self.evaluate("evaluation", judge=run is not None, tree=False)

    def _take_from(self, run: Path, accept: bool) -> None:
        """The newest checkpoint of a run folder."""
        require_same_split(load_config(run / "config.yaml"), self.config, self.prompts)
        saved = checkpoint.available(run / "checkpoints")
        if not saved:
            raise ConfigError(f"{run} holds no checkpoint to evaluate")
        require_unedited(run, self.sets(), accept=accept)
        state.load(self, run / "checkpoints", saved[-1], accept)
        owner = RunFolder(run)  # a run under way writes its adapter itself
        if self.world.gather(self.world.main and owner.try_lock())[0]:
            state.mend_adapter(self, run)
        owner.unlock()

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do something on every process; if it fails anywhere with a user's error, all stop with it."""
        try:
            return self.world.together(work, (ConfigError, ValueError, RewardError, checkpoint.CheckpointError))
        except Elsewhere as error:
            raise self.world.sharing(ConfigError(str(error))) from None

    def _open_folder(self, resume: bool, accept: bool) -> int:
        """The iteration to go on from, on the first process, which alone touches the folder."""
        if not self.world.main:
            return 0
        if "FLOWRL_LOCKED" not in os.environ:
            self.folder.lock()
        checkpoint.remove_leftovers(self.folder.path)
        start = self.folder.begin(self.resolved, resume, accept)
        if not start:
            # A run that was killed before its first checkpoint may have left rows behind.
            self.folder.forget_after(0)
        return start

    def _load(self, training: bool = True, accept: bool = False) -> None:
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with phase("loading"):
            parts = assemble(self.resolved, self.world, self.folder.path, training=training)
        self.source, self.texts, self.prompts = parts.source, parts.texts, parts.prompts
        self.scorer, self.watched = parts.scorer, parts.watched
        self.adapter, self.weights, self.dtype = parts.adapter, parts.weights, parts.dtype
        self.algorithm, self.optimizer, self.policy = parts.algorithm, parts.optimizer, parts.policy
        self.schedule, self.sampler = parts.schedule, parts.sampler
        self.learner, self.evaluator, self.maps = parts.learner, parts.evaluator, parts.maps
        self.tree, self.plain = EvalTree(parts), {}
        self.stop = self.signals.stop(self.world, sharded=parts.sharded)
        for scorer in (self.scorer, self.watched):
            if scorer is not None:
                scorer.stop = self.stop.here
        self.collector: Collector | PairCollector
        self.held_out: HeldOutPairs | None = None
        if parts.given is None:
            self.collector = Collector(parts, self.stop, training=training)
        else:
            self.collector = PairCollector(parts, self.stop)
            if parts.given.held_out_numbers:
                self.held_out = HeldOutPairs(parts)
        self.sets = parts.sets
        if self.world.main:
            facts = provenance(self.resolved, str(self.world.device), self.world.size)
            if parts.given is not None:
                facts["data"] = parts.given.facts()
            self.folder.write_json("provenance.json", facts)
            if training:
                self.folder.agree_on_sets(self.sets(), self.start, accept)
            log.info("%s", parts.introduction())

    # ---- the loop

    def _loop(self, base: tuple[Evaluation, Evaluation | None]) -> dict[str, Any]:
        config = self.config
        self._honour_signals()
        announce(self, base)
        self.plain = state.plain(self)
        if self.due is not None:
            self._record(self.due)
            self.saved = -1
            state.save(self, self.iteration)  # now as it would be without an interruption
        for iteration in range(self.start + 1, config.iterations + 1):
            if self.collector.exhausted:
                log.info("every prompt is retired: training ends after iteration %d", self.iteration)
                break
            row = self._iterate(iteration)
            self.iteration, self.plain, self.between_updates = iteration, state.plain(self), True
            self._record(row)
            ends = iteration == config.iterations or self.collector.exhausted
            if ends or iteration % config.checkpoint.every == 0:
                state.save(self, iteration)
            self._honour_signals()
        return finish(self, base)

    def _record(self, row: dict[str, Any]) -> None:
        """Evaluate where that is due, and write the row of the iteration that is finished."""
        config, iteration = self.config, self.iteration
        self.due = row  # a checkpoint from here on says that this is still to be done
        if config.eval.every and iteration % config.eval.every == 0 and iteration < config.iterations:
            result = self.evaluate(f"iteration-{iteration:06d}", limit=config.eval.periodic_prompts)
            row |= {f"eval/{name}": float(np.nanmean(table)) for name, table in result.scores.items()}
            if result.agreement is not None:
                row["eval/implicit_accuracy"] = result.agreement.mean()
        if self.world.main:
            self.folder.metrics.append(row)
            self._tell(row)
        self.due = None

    def evaluate(
        self,
        tag: str,
        limit: int | None = None,
        *,
        iteration: int | None = None,
        judge: bool = True,
        tree: bool = True,
        **options: Any,
    ) -> Evaluation:
        """Evaluate with the weights that count (EMA if there is one).

        `iteration` is the one that it follows where that is not the last; `judge` False leaves held-out pairs out,
        `tree` False the tree of a method that has one.
        """
        config, iteration = self.config, self.iteration if iteration is None else iteration
        options.setdefault("guidance_scale", self.eval_guidance)
        total = len(self.evaluator.prompts[:limit]) * config.eval.samples_per_prompt // self.world.size
        with phase("evaluation"), self.weights.using(self.optimizer.role):
            if tree:  # before the scores: an evaluation that is there has its tree, whenever a signal came
                self.tree(tag, iteration, self.stop)
            bar = Progress(total, f"evaluating {tag}", show=self.world.main)
            try:
                return self.evaluator(
                    tag,
                    iteration,
                    num_inference_steps=self.eval_steps,
                    limit=limit,
                    progress=bar.update,
                    stop=self.stop,
                    agreement=self.held_out if judge else None,
                    **options,
                )
            finally:
                bar.close()

    @property
    def eval_steps(self) -> int:
        return self.config.eval.num_inference_steps or self.config.rollout.num_inference_steps

    @property
    def eval_guidance(self) -> float:
        given = self.config.eval.guidance_scale
        return self.config.rollout.guidance_scale if given is None else given

    def _iterate(self, iteration: int) -> dict[str, Any]:
        timer, sums = Timer(), Sums()
        with timer.phase("iteration"):
            rollout = self.collector.collect(iteration, timer, sums)
            credit = self.world.in_step(lambda: self._credit(iteration, rollout))
            gate = self.dtype if iteration == self.start + 1 else None
            with timer.phase("update"):
                self.between_updates = False
                self.learner.update(iteration, rollout, credit, sums, gate=gate)
        return self._row(iteration, rollout, credit, sums, timer)

    def _credit(self, iteration: int, rollout: Rollout) -> Advantages:
        credit = self.algorithm.advantages(rollout.rewards, self.collector.weights, rollout.prompts)
        if rollout.plan.tree is None:
            return credit
        return self.algorithm.on_tree(credit, rollout, self.collector.weights, iteration)

    # ---- reporting

    def _row(self, iteration: int, rollout: Rollout, credit: Advantages, sums: Sums, timer: Timer) -> dict[str, Any]:
        row: dict[str, Any] = {"iteration": iteration} | self.collector.told(rollout, credit)
        gathered = self.world.gather(sums)
        row |= sums.merge(gathered).means()
        row |= {f"time/{name}_s": round(value, 4) for name, value in timer.seconds.items()}
        return row

    def _tell(self, row: dict[str, Any]) -> None:
        parts = [f"iteration {row['iteration']}/{self.config.iterations}"]
        shown = {"reward/total_mean": "reward", "policy/implicit_accuracy": "agreement", "policy/loss": "loss"}
        # Without rewards or pairs there is still a loss, but for an iteration without a readable picture.
        parts += [f"{word} {row[name]:.3f}" for name, word in shown.items() if name in row][:1]
        parts += [told_mean(self.prompts, name, row[name]) for name in row if name.startswith("eval/")][:1]
        if "policy/clip_fraction" in row:
            parts.append(f"clip {row['policy/clip_fraction']:.2f}")
        if "advantage/dead_group_share" in row:
            parts.append(f"dead groups {row['advantage/dead_group_share']:.2f}")
        parts.append(f"{row['time/iteration_s']:.2f} s")
        for name, text in (("reward/masked", "samples masked"), ("pairs/unreadable", "pairs unreadable")):
            if row.get(name):
                parts.append(f"{row[name]} {text}")
        log.info("  ".join(parts))

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _honour_signals(self) -> None:
        if self.world.any(self.signals.here()):
            raise Abandoned
