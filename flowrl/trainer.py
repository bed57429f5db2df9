"""One iteration after another: roll out, score, credit, update, evaluate, save."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flowrl import checkpoint
from flowrl.advantages import Advantages
from flowrl.assembly import assemble
from flowrl.checkpoint import Checkpoint
from flowrl.config import ConfigError, Resolved, RunConfig, resolve
from flowrl.distributed import join, shard
from flowrl.evaluate import Evaluation, Interrupted
from flowrl.learner import Rollout
from flowrl.metrics import Progress, Sums, Timer, log, set_up_logging
from flowrl.report import evaluate_base, finish
from flowrl.reward import RewardError
from flowrl.rollout import Noise, run
from flowrl.runs import RunFolder, provenance, versions
from flowrl.types import SampleId


class Stopped(Exception):
    """A signal was honoured and the state saved; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class _Abandon(Exception):
    """This process saw a signal in the middle of a rollout."""


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
            ConfigError: something the user can mend; nothing was trained.
            Stopped: a signal came; the last finished iteration is saved.
        """
        self.world = join()
        self.folder = RunFolder(self.config.folder)
        try:
            self._agree(lambda: self._open_folder(resume))
            handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._agree(self._load)
                if self.start:
                    self._restore(self.start)
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
        self._load(training=False)
        if run is not None:
            saved = checkpoint.available(run / "checkpoints")
            if not saved:
                raise ConfigError(f"{run} holds no checkpoint to evaluate")
            self._load_state(checkpoint.load(run / "checkpoints", saved[-1]))
        return self.evaluate("evaluation")

    def _agree(self, work: Any) -> None:
        """Do something on every process; if it fails anywhere with a user's error, all stop with it."""
        error: Exception | None = None
        try:
            work()
        except (ConfigError, ValueError, RewardError, checkpoint.CheckpointError) as caught:
            error = caught
        first = next((e for e in self.world.gather(str(error) if error else None) if e), None)
        if error is not None:
            raise error
        if first is not None:
            raise ConfigError(first)

    def _open_folder(self, resume: bool) -> None:
        self.start = 0
        if self.world.main:
            if "FLOWRL_LOCKED" not in os.environ:
                self.folder.lock()
            self.start = self.folder.begin(self.resolved, resume)
        self.start = max(self.world.gather(self.start)) if self.world.size > 1 else self.start
        set_up_logging(self.folder.path / "train.log", main=self.world.main)
        if not self.start:
            # A run that was killed before its first checkpoint may have left rows behind.
            if self.world.main:
                self.folder.forget_after(0)
            self.world.barrier()
        if resume and not self.start:
            log.info("nothing to resume in %s: starting from the beginning", self.folder.path)

    def _load(self, training: bool = True) -> None:
        self.started = time.monotonic()
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        parts = assemble(self.resolved, self.world, self.folder.path, training=training)
        self.source, self.texts = parts.source, parts.texts
        self.scorer, self.watched = parts.scorer, parts.watched
        self.adapter, self.weights, self.dtype = parts.adapter, parts.weights, parts.dtype
        self.algorithm, self.optimizer, self.policy = parts.algorithm, parts.optimizer, parts.policy
        self.schedule, self.sampler = parts.schedule, parts.sampler
        self.learner, self.evaluator, self.maps = parts.learner, parts.evaluator, parts.maps
        if self.world.main:
            facts = provenance(self.resolved, str(self.world.device), self.world.size)
            self.folder.write_json("provenance.json", facts)
            log.info("%s", parts.introduction())

    # ---- the loop

    def _loop(self) -> dict[str, Any]:
        config = self.config
        self._honour_signals(self.start)
        base = evaluate_base(self)
        for iteration in range(self.start + 1, config.iterations + 1):
            self.iteration = iteration
            row = self._iterate(iteration)
            if config.eval.every and iteration % config.eval.every == 0 and iteration < config.iterations:
                # A signal in the middle of it is honoured below, once this iteration is recorded.
                with suppress(Interrupted):
                    result = self.evaluate(f"iteration-{iteration:06d}", limit=config.eval.periodic_prompts)
                    row |= {f"eval/{name}": float(np.nanmean(table)) for name, table in result.scores.items()}
            if self.world.main:
                self.folder.metrics.append(row)
                self._tell(row)
            if iteration == config.iterations or iteration % config.checkpoint.every == 0:
                self.save(iteration)
            self._honour_signals(iteration)
        return finish(self, base)

    def evaluate(self, tag: str, limit: int | None = None, **options: Any) -> Evaluation:
        """Evaluate with the weights that count (EMA if there is one)."""
        config = self.config
        options.setdefault("guidance_scale", self.eval_guidance)
        steps = config.eval.num_inference_steps or config.rollout.num_inference_steps
        total = len(self.evaluator.prompts[:limit]) * config.eval.samples_per_prompt // self.world.size
        bar = Progress(total, f"evaluating {tag}", show=self.world.main)
        try:
            with self.weights.using(self.optimizer.role):
                return self.evaluator(
                    tag,
                    self.iteration,
                    num_inference_steps=steps,
                    limit=limit,
                    progress=bar.update,
                    stop=lambda: bool(self.signals),
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
            before = self.learner.evaluations.rows
            rollout = self._roll_out(iteration, timer)
            sums.add("nfe/rollout", self.learner.evaluations.rows - before, len(rollout.rows))
            credit = self.algorithm.advantages(rollout.rewards, torch.tensor([e.weight for e in self.scorer.entries]))
            gate = self.dtype if iteration == self.start + 1 else None
            with timer.phase("update"):
                self.learner.update(iteration, rollout, credit, sums, gate=gate)
        return self._row(iteration, rollout, credit, sums, timer)

    def _roll_out(self, iteration: int, timer: Timer) -> Rollout:
        config, world = self.config, self.world
        drawn = [self.source.prompts[k] for k in self.source.draw(iteration)]
        own = [SampleId(*pair) for pair in shard(len(drawn), config.rollout.group_size, world.rank, world.size)]
        slots = sorted({i.slot for i in own})
        rows = torch.tensor([slots.index(i.slot) for i in own], dtype=torch.int64)
        plan = self.algorithm.plan(self.schedule, self.sampler, iteration, config.seed)
        noise = Noise(config.seed, "rollout", iteration, self.adapter.latent_shape(), config.rollout.shared_noise)
        bar = Progress(len(own), f"iteration {iteration}: sampling", show=world.main)
        abandoned, local, maps = False, None, None
        try:
            with timer.phase("text"):
                cond = self.texts.lookup([drawn[slot] for slot in slots])
            with timer.phase("rollout"):
                samples, edges = run(
                    self.policy,
                    plan,
                    noise,
                    own,
                    cond,
                    rows,
                    batch_size=config.rollout.batch_size,
                    form=self.algorithm.log_prob_form(self.sampler),
                    columns=self.algorithm.columns,
                    device=world.device,
                    progress=lambda count: self._watch(bar, count),
                )
            with timer.phase("decode"):
                images = self._decode(samples.x0)
            if self.maps is not None:
                with timer.phase("maps"):
                    maps = self.maps(images)
            with timer.phase("reward"):
                prompts = [drawn[i.slot] for i in own]
                local = self.scorer.score(images, [p.text for p in prompts], [p.metadata for p in prompts])
        except _Abandon:
            abandoned = True
        finally:
            bar.close()
        if world.any(abandoned or bool(self.signals)):
            self._stop(iteration - 1)
        assert local is not None
        rewards, raw = self._gather_scores(own, local.values, local.raw, len(drawn))
        return Rollout(plan, samples, edges, cond, rows, rewards, raw, _group_spread(images, rows), maps)

    def _watch(self, bar: Progress, count: int) -> None:
        bar.update(count)
        if self.signals:
            raise _Abandon

    def _decode(self, x0: Tensor) -> Tensor:
        size = self.config.rollout.batch_size
        return torch.cat([self.adapter.decode(part.to(self.world.device)).cpu() for part in x0.split(size)])

    def _gather_scores(
        self, own: list[SampleId], values: Tensor, raw: dict[str, Tensor], prompts: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Everybody's scores by identity: [R, P, G] and name -> [P, G]."""
        group = self.config.rollout.group_size
        rewards = torch.full((len(values), prompts, group), torch.nan)
        table = {name: torch.full((prompts, group), torch.nan) for name in raw}
        for ids, part, named in self.world.gather((own, values, raw)):
            slot, sample = torch.tensor([i.slot for i in ids]), torch.tensor([i.sample for i in ids])
            rewards[:, slot, sample] = part
            for name, value in named.items():
                table[name][slot, sample] = value
        return rewards, table

    # ---- reporting and saving

    def _row(self, iteration: int, rollout: Rollout, credit: Advantages, sums: Sums, timer: Timer) -> dict[str, Any]:
        total = (
            rollout.rewards.nan_to_num()
            .mul(torch.tensor([e.weight for e in self.scorer.entries])[:, None, None])
            .sum(0)
        )
        row: dict[str, Any] = {"iteration": iteration, "reward/total_mean": float(total[credit.valid].mean())}
        for name, table in rollout.raw.items():
            scored = table[table.isfinite()]
            row[f"reward/{name}_mean"] = float(scored.mean()) if len(scored) else math.nan
        row["reward/group_std"] = float(total.std(dim=1, correction=0).mean())
        row["reward/masked"] = int((~credit.valid).sum())
        row["advantage/dead_group_share"] = float(credit.dead.float().mean())
        row["sample/group_spread"] = rollout.spread
        gathered = self.world.gather(sums)
        row |= sums.merge(gathered).means()
        row |= {f"time/{name}_s": round(value, 4) for name, value in timer.seconds.items()}
        return row

    def _tell(self, row: dict[str, Any]) -> None:
        parts = [f"iteration {row['iteration']}/{self.config.iterations}", f"reward {row['reward/total_mean']:.3f}"]
        parts += [f"held-out {name[5:]} {row[name]:.3f}" for name in row if name.startswith("eval/")][:1]
        parts.append(f"clip {row.get('policy/clip_fraction', 0.0):.2f}")
        parts.append(f"dead groups {row['advantage/dead_group_share']:.2f}")
        parts.append(f"{row['time/iteration_s']:.2f} s")
        if row["reward/masked"]:
            parts.append(f"{row['reward/masked']} samples masked")
        log.info("  ".join(parts))

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def save(self, iteration: int) -> None:
        """Checkpoint the end of an iteration, with the weights as a plain pipeline loads them."""
        if self.saved == iteration:
            return

        def write() -> None:
            moments, counters = self.optimizer.state()
            tensors = {f"weights/{k}": v for k, v in self.weights.state().items()}
            tensors |= {f"optim/{k}": v for k, v in moments.items()}
            state = {
                "optimizer": counters,
                "algorithm": self.algorithm.state_dict(),
                "seconds": self.seconds,
                "processes": self.world.size,
                "versions": versions(),
                "config": self.resolved.tree(),
            }
            checkpoint.save(self.folder.checkpoints, Checkpoint(iteration, tensors, state), self.config.checkpoint.keep)
            with self.weights.using(self.optimizer.role):
                self.weights.save(self.folder.path / "adapter", type(self.adapter.pipeline))

        error: str | None = None
        if self.world.main:
            try:
                write()
            except (checkpoint.CheckpointError, OSError) as caught:
                error = str(caught)
        error = next((e for e in self.world.gather(error) if e), None)
        if error is not None:
            raise checkpoint.CheckpointError(error)
        self.saved = iteration

    def _load_state(self, saved: Checkpoint) -> None:
        split: dict[str, dict[str, Tensor]] = {"weights": {}, "optim": {}}
        for name, value in saved.tensors.items():
            section, _, rest = name.partition("/")
            split[section][rest] = value
        self.weights.load_state(split["weights"])
        self.optimizer.load_state(split["optim"], saved.state["optimizer"])
        self.algorithm.load_state_dict(saved.state["algorithm"])
        self.iteration = saved.iteration

    def _restore(self, iteration: int) -> None:
        loaded: list[Checkpoint] = []
        self._agree(lambda: loaded.append(checkpoint.load(self.folder.checkpoints, iteration)))
        self._load_state(loaded[0])
        state = loaded[0].state
        self.seconds_before, self.saved = state["seconds"], iteration
        if self.world.main:
            self.folder.forget_after(iteration)
        self.world.barrier()
        log.info("resumed after iteration %d", iteration)
        if state["processes"] != self.world.size:
            log.warning(
                "%d processes before, %d now: the result is right but not bitwise the same",
                state["processes"],
                self.world.size,
            )
        changed = {k: v for k, v in state["versions"].items() if versions().get(k) != v}
        if changed:
            log.warning("other versions than before (%s): the result may differ in the last digits", changed)

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
        if iteration > self.start:
            self.save(iteration)
        if self.world.main:
            log.info("stopped after iteration %d; go on with the same command and --resume", iteration)
        raise Stopped(numbers[0])


def _group_spread(images: Tensor, rows: Tensor) -> float:
    """Mean over prompts of the std of pixels over the group's samples; near 0 means collapse."""
    spreads = [images[rows == row].std(dim=0, correction=0).mean() for row in rows.unique()]
    return float(torch.stack(spreads).mean())
