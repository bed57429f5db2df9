"""One iteration after another: roll out, score, credit, update, evaluate, save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from flowrl import checkpoint, state
from flowrl.advantages import Advantages
from flowrl.assembly import assemble
from flowrl.collect import Abandoned, Collector
from flowrl.config import ConfigError, Resolved, RunConfig, load_config, resolve
from flowrl.distributed import Elsewhere, join
from flowrl.errors import Stopped
from flowrl.evaltree import EvalTree
from flowrl.evaluate import Evaluation, Interrupted
from flowrl.given import TooManyLost
from flowrl.heldout import require_same_split
from flowrl.metrics import Progress, Sums, Timer, log, set_up_logging
from flowrl.offline import HeldOutPairs, PairCollector
from flowrl.outofmemory import explaining
from flowrl.phases import phase
from flowrl.report import evaluate_base, finish, told_mean
from flowrl.reward import RewardError
from flowrl.runs import RunFolder, provenance
from flowrl.types import Rollout

T = TypeVar("T")


class Trainer:
    """A run from its configuration. `fit()` trains, evaluates, saves and returns the summary."""

    def __init__(self, config: RunConfig | Resolved) -> None:
        self.resolved = config if isinstance(config, Resolved) else resolve(config)
        self.config = self.resolved.run
        self.signals: list[int] = []
        self.seconds_before = 0.0
        self.iteration = 0
        self.saved = -1

    # ---- set-up

    def fit(self, resume: bool = False) -> dict[str, Any]:
        """Train to the last iteration.

        Raises:
            ConfigError: something the user can mend; nothing was trained, or what was is saved.
            Stopped: a signal came; the last finished iteration is saved.
        """
        self.world = join()
        self.folder = RunFolder(self.config.folder)
        try:
            self.start = self.agree(lambda: self._open_folder(resume))[0]
            set_up_logging(self.folder.path / "train.log", main=self.world.main)
            if resume and not self.start:
                log.info("nothing to resume in %s: starting from the beginning", self.folder.path)
            handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
            try:
                with explaining(self.resolved, self.world):
                    self.agree(self._load)
                    if self.start:
                        state.restore(self, self.start)
                    return self._loop()
            except Interrupted:
                self._stop(self.iteration)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        finally:
            self.folder.unlock()
            self.world.close()

    def evaluate_only(self, run: Path | None, out: Path) -> Evaluation:
        """Evaluate the untouched model, or the newest checkpoint of a run folder, into `out`."""
        self.world, self.folder, self.start = join(), RunFolder(out), 0
        set_up_logging(None, main=self.world.main)
        with explaining(self.resolved, self.world):
            self._load(training=False)
            if run is not None:
                require_same_split(load_config(run / "config.yaml"), self.config, self.prompts)
                saved = checkpoint.available(run / "checkpoints")
                if not saved:
                    raise ConfigError(f"{run} holds no checkpoint to evaluate")
                state.load(self, run / "checkpoints", saved[-1])
            return self.evaluate("evaluation", judge=run is not None, tree=False)

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do something on every process; if it fails anywhere with a user's error, all stop with it."""
        try:
            return self.world.together(work, (ConfigError, ValueError, RewardError, checkpoint.CheckpointError))
        except Elsewhere as error:
            raise ConfigError(str(error)) from None

    def _open_folder(self, resume: bool) -> int:
        """The iteration to go on from, on the first process, which alone touches the folder."""
        if not self.world.main:
            return 0
        if "FLOWRL_LOCKED" not in os.environ:
            self.folder.lock()
        start = self.folder.begin(self.resolved, resume)
        if not start:
            # A run that was killed before its first checkpoint may have left rows behind.
            self.folder.forget_after(0)
        return start

    def _load(self, training: bool = True) -> None:
        self.started = time.monotonic()
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
        self.sharded, self.tree = parts.sharded, EvalTree(parts)
        self.collector: Collector | PairCollector
        self.held_out: HeldOutPairs | None = None
        if parts.given is None:
            self.collector = Collector(parts, self._signalled, training=training)
        else:
            self.collector = PairCollector(parts, self._signalled)
            if parts.given.held_out_numbers:
                self.held_out = HeldOutPairs(parts)
        if self.world.main:
            facts = provenance(self.resolved, str(self.world.device), self.world.size)
            if parts.given is not None:
                facts["data"] = parts.given.facts()
            self.folder.write_json("provenance.json", facts)
            log.info("%s", parts.introduction())

    # ---- the loop

    def _loop(self) -> dict[str, Any]:
        config = self.config
        self._honour_signals(self.start)
        base = evaluate_base(self)
        for iteration in range(self.start + 1, config.iterations + 1):
            if self.collector.exhausted:
                log.info("every prompt is retired: training ends after iteration %d", self.iteration)
                break
            self.iteration = iteration
            row = self._iterate(iteration)
            if config.eval.every and iteration % config.eval.every == 0 and iteration < config.iterations:
                # A signal in the middle of it is honoured below, once this iteration is recorded.
                with suppress(Interrupted):
                    result = self.evaluate(f"iteration-{iteration:06d}", limit=config.eval.periodic_prompts)
                    row |= {f"eval/{name}": float(np.nanmean(table)) for name, table in result.scores.items()}
                    if result.agreement is not None:
                        row["eval/implicit_accuracy"] = result.agreement.mean()
            if self.world.main:
                self.folder.metrics.append(row)
                self._tell(row)
            ends = iteration == config.iterations or self.collector.exhausted
            if ends or iteration % config.checkpoint.every == 0:
                state.save(self, iteration)
            self._honour_signals(iteration)
        return finish(self, base)

    def evaluate(
        self, tag: str, limit: int | None = None, *, judge: bool = True, tree: bool = True, **options: Any
    ) -> Evaluation:
        """Evaluate with the weights that count (EMA if there is one).

        `judge` False leaves held-out pairs out, `tree` False the tree of a method that has one.
        """
        config = self.config
        options.setdefault("guidance_scale", self.eval_guidance)
        steps = config.eval.num_inference_steps or config.rollout.num_inference_steps
        total = len(self.evaluator.prompts[:limit]) * config.eval.samples_per_prompt // self.world.size
        with phase("evaluation"), self.weights.using(self.optimizer.role):
            if tree:  # before the scores: an evaluation that is there has its tree, whenever a signal came
                self.tree(tag, self.iteration, self._signalled)
            bar = Progress(total, f"evaluating {tag}", show=self.world.main)
            try:
                return self.evaluator(
                    tag,
                    self.iteration,
                    num_inference_steps=steps,
                    limit=limit,
                    progress=bar.update,
                    stop=self._signalled,
                    agreement=self.held_out if judge else None,
                    **options,
                )
            finally:
                bar.close()

    @property
    def eval_guidance(self) -> float:
        given = self.config.eval.guidance_scale
        return self.config.rollout.guidance_scale if given is None else given

    def _iterate(self, iteration: int) -> dict[str, Any]:
        timer, sums = Timer(), Sums()
        with timer.phase("iteration"):
            rollout = self._roll_out(iteration, timer, sums)
            credit = self.algorithm.advantages(rollout.rewards, self.collector.weights, rollout.prompts)
            if rollout.plan.tree is not None:
                credit = self.algorithm.on_tree(credit, rollout, self.collector.weights, iteration)
            gate = self.dtype if iteration == self.start + 1 else None
            with timer.phase("update"):
                self.learner.update(iteration, rollout, credit, sums, gate=gate)
        return self._row(iteration, rollout, credit, sums, timer)

    def _roll_out(self, iteration: int, timer: Timer, sums: Sums) -> Rollout:
        try:
            return self.collector.collect(iteration, timer, sums)
        except Abandoned:
            self._stop(iteration - 1)
        except TooManyLost:
            self._save_before(iteration)
            raise

    def _signalled(self) -> bool:
        """Whether to leave off here: all processes or none where each forward needs all of them."""
        return self.world.any(bool(self.signals)) if self.sharded else bool(self.signals)

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

    # ---- signals

    def _on_signal(self, number: int, frame: object) -> None:
        if self.signals:
            os._exit(128 + number)
        self.signals.append(number)

    def _honour_signals(self, iteration: int) -> None:
        if self.world.any(bool(self.signals)):
            self._stop(iteration)

    def _stop(self, iteration: int) -> NoReturn:
        """Save the last finished iteration and leave."""
        numbers = [n for n in self.world.gather(self.signals[0] if self.signals else None) if n]
        self._save_before(iteration + 1)
        if self.world.main:
            log.info("stopped after iteration %d; go on with the same command and --resume", iteration)
        raise Stopped(numbers[0])

    def _save_before(self, iteration: int) -> None:
        """Save the end of the one before, if this call has trained it."""
        if iteration - 1 > self.start:
            state.save(self, iteration - 1)
