"""A run: a session with a folder, signals and a loop of iterations, evaluations and checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config.load import load_config
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig
from flowrl.data.contents import require_unedited
from flowrl.display import display
from flowrl.display.console import close_log_file, log, set_up_logging
from flowrl.evaluation import copying, sharpness
from flowrl.evaluation.held_out import require_same_split
from flowrl.evaluation.results import Evaluation
from flowrl.planning.checkpointing import decided
from flowrl.planning.out_of_memory import explaining
from flowrl.run import checkpoint, handover, telling
from flowrl.run.best_guidance import GuidanceSearch
from flowrl.run.changes import Accepted
from flowrl.run.dial import Dial
from flowrl.run.dialled import load_newest_dialled
from flowrl.run.ending import Ending
from flowrl.run.folder import RunFolder, provenance
from flowrl.run.guarding import Guarding, refuse_guarded
from flowrl.run.report import After, Levels, Report, row_line
from flowrl.run.requests import Desk
from flowrl.run.session import Session, resolved
from flowrl.run.state import Clock, Saver, load_newest
from flowrl.run.teaching import compare_teachers
from flowrl.run.texts import text_lengths
from flowrl.run.trackers import Trackers
from flowrl.training import determinism
from flowrl.training.signals import Signals
from flowrl.training.world import World, join


class Trainer:
    """A run from its configuration. `fit()` trains, evaluates, saves and returns the summary."""

    def __init__(self, config: RunConfig | Resolved) -> None:
        self.resolved = resolved(config)
        self.config = self.resolved.run
        self.signals, self.clock = Signals(), Clock()

    # ---- set-up

    def fit(
        self, resume: bool = False, accept_changes: bool | Sequence[str] = False, after: Sequence[After] = ()
    ) -> dict[str, Any]:
        """Train to the last iteration.

        Args:
            resume: an existing run is resumed; otherwise it is refused.
            accept_changes: True accepts other contents of the user's files than the run was started with; a list
                accepts other values of the options that it names by dotted keys, and "files" in it the contents.
            after: what comes after the run, in this order, on the first process: the weights and the summary are
                written and the verdict is logged. A failure in it ends the call as any other does; the run has
                finished, and `resume` calls the list again.

        Raises:
            ConfigError: something the user can mend; finished iterations are saved.
            Stopped: a signal came; the last finished iteration is saved.
            Exited: code of the run called `sys.exit`.
            Exception: any other failure; the last finished iteration is saved, unless it was the update that failed.
        """
        accept = Accepted.of(accept_changes)
        self.world, self.folder, self.after = self._join(), RunFolder(self.config.folder), after
        self.desk = Desk(self.folder.path, self.world, self.signals)
        try:
            start = self.world.agree(lambda: self._open_folder(resume, accept))[0]
            set_up_logging(self.folder.path / "train.log", main=self.world.main, rank=self.world.rank)
            if resume and not start:
                log.info("nothing to resume in %s: starting from the beginning", self.folder.path)
            with self.signals.listening():
                return self._train(start, accept.files)
        finally:
            self.desk.close()
            self.folder.unlock()
            self.world.close()
            close_log_file()

    def _join(self) -> World:
        if self.config.deterministic:
            determinism.prepare()
        return join()

    def _open_folder(self, resume: bool, accept: Accepted) -> int:
        """The finished iteration to resume after; only the first process touches the folder."""
        self.trackers = Trackers(self.config, self.resolved.tree(), self.folder, main=self.world.main)
        if not self.world.main:
            return 0
        self.desk.open(launched=self.folder.hold())
        checkpoint.remove_leftovers(self.folder.path)
        if resume:
            refuse_guarded(self.folder.path, self.config.guard)
        start = self.folder.begin(self.resolved, resume, accept)
        if not start:
            # A run that was killed before its first checkpoint may have left rows.
            self.folder.forget_after(0)
            handover.forget(self.folder.path)  # weights of a checkpoint that is gone
        return start

    def _train(self, start: int, accept: bool) -> dict[str, Any]:
        planned = self.config.iterations
        ending = Ending(self.folder, self.world, self.signals, self.clock, start=start, planned=planned)
        try:
            ending.begin()
            self.resolved = decided(self.resolved, self.world)
            with explaining(self.resolved, self.world):
                self.world.agree(lambda: self._open_session(start, accept))
                self.saver = ending.saver = Saver(self.session, self.folder, self.clock)
                self.guard = Guarding(self.session, self.folder)
                self.report = Report(self.session, self.folder, self.clock, self.guard)
                place = {"run": str(self.folder.path), "device": str(self.world.device)}
                search = 0 if self.report.search is None else self.report.search.coming
                coming = telling.planned(self.session.parts.evaluator, self.config.eval, planned, search)
                display.run_starts(start, planned, coming, processes=self.world.size, **place)
                # Before a checkpoint is restored: these are the untrained weights.
                before = self.report.before()
                if start:
                    self.saver.restore(start, accept)
                else:
                    compare_teachers(self.session)
                self.guard.begin(before[0], self.saver)
                return self._loop(start, before)
        except BaseException as error:  # the folder records every end
            last = ending.leave(error)
            self.trackers.leave(-1 if ending.saver is None else ending.saver.saved)
            if last is error:
                raise
            raise last from error

    def _open_session(self, start: int, accept: bool, *, training: bool = True) -> None:
        """Load the parts, and record them in the folder."""
        self.session = Session(
            self.resolved, world=self.world, folder=self.folder.path, signals=self.signals, training=training
        )
        parts = self.session.parts
        if self.world.main:
            facts = provenance(self.resolved, str(self.world.device), self.world.size)
            if parts.data.images:
                facts["data"] = {name: fact for each in parts.data.images for name, fact in each.facts().items()}
            if training:
                facts["text"] = text_lengths(parts.sampling.adapter, self.resolved.model.config, parts.data.prompts)
            self.folder.write_json("provenance.json", facts)
            if training:
                self.folder.agree_on_sets(parts.data.sets(self.resolved), start, accept)
            log.info("%s", parts.introduction())

    def evaluate_only(
        self, run: Path | None, out: Path, accept_changes: bool = False, dial: Dial | None = None
    ) -> tuple[Evaluation, dict[str, Any]]:
        """Evaluate the untrained model, or the newest checkpoint of a run folder, into `out`; under its `dial`, if any.

        Returns:
            The evaluation, and `GuidanceSearch.entries` of a run folder; {} without `eval.best_guidance`.
        """
        self.world, self.folder = self._join(), RunFolder(out)
        set_up_logging(None, main=self.world.main)
        with explaining(self.resolved, self.world):
            self._open_session(0, accept_changes, training=False)
            search = base = None
            if run is not None:
                parts = self.session.parts
                require_same_split(load_config(run / "config.yaml"), self.config, parts.data.prompts)
                require_unedited(run, parts.data.sets(self.resolved), accept=accept_changes)
                search = GuidanceSearch(self.session) if self.config.eval.best_guidance else None
                base = search and search(search.base(run), run)
                if dial is None:
                    load_newest(self.session, run, accept_changes)
                else:
                    load_newest_dialled(self.session, dial, accept_changes)
            tag = "evaluation" if dial is None else f"evaluation{dial.tag}"
            result = self.session.evaluate(tag, pairs=run is not None and dial is None, tree=False)
            return result, {} if search is None or base is None else search.entries(base, search(result))

    # ---- the loop

    def _loop(self, start: int, before: Levels) -> dict[str, Any]:
        config, session, saver = self.config, self.session, self.saver
        self.signals.honour(self.world)
        self.report.announce(before)
        self.trackers.open(start)
        if saver.due is not None:
            self._record(saver.due)
            saver.saved = -1
            saver.save()  # the same as without an interruption
        for iteration in range(start + 1, config.iterations + 1):
            if self.guard.over:
                break
            if session.exhausted:
                log.info("every prompt is retired: training ends after iteration %d", session.iteration)
                break
            self._record(session.step(iteration))
            saver.settle(only_done=True)  # a checkpoint that could not be written ends the run
            last = iteration == config.iterations or session.exhausted or self.guard.over
            if last or iteration % config.checkpoint.every == 0 or self.guard.wants_checkpoint:
                saver.save(wait=last)
            self.trackers.send(saver.saved)
            if self.signals.honour(self.world, self.desk.waits()):
                self.desk.serve(session, saver, last=last)
        saver.settle()
        optimizer = session.parts.learner.optimizer
        if optimizer.skipped and not optimizer.updates:
            log.warning(
                "none of %d updates was made, since no gradient was finite: the result is the untrained network; "
                "model.dtype=float32 or a smaller optim.learning_rate may help",
                optimizer.skipped,
            )
        self.guard.conclude(saver)
        finished = self.report.finish(before)
        for each in self.after if self.world.main else ():
            each(finished)
        self.world.barrier()
        self.trackers.finish(finished.summary)
        return finished.summary

    def _record(self, row: dict[str, Any]) -> None:
        """Evaluate if that is due, and write the row of the finished iteration."""
        config, iteration, saver = self.config, self.session.iteration, self.saver
        self.world.together(self.folder.require_own)  # before an evaluation makes a folder at this path
        saver.due = row  # a checkpoint from here on records that this is unfinished
        if config.eval.every and iteration % config.eval.every == 0 and iteration < config.iterations:
            result = self.session.evaluate(f"iteration-{iteration:06d}", limit=config.eval.periodic_prompts)
            row |= {f"eval/{name}": float(np.nanmean(table)) for name, table in result.scores.items()}
            row[sharpness.METRIC] = float(np.nanmean(result.sharpness))
            if (copies := copying.copied(result)) is not None:
                row[copying.METRIC] = float(np.nanmean(copies))
            if result.agreement is not None:
                row["eval/implicit_accuracy"] = result.agreement.mean()
            self.guard.look(result, row)
        if self.world.main:
            self.folder.add_row(row)
            self.trackers.add(row)
            log.info("%s", row_line(row, config.iterations, self.session.parts.data.prompts))
            display.iteration_done(row)
        saver.due = None
        self.guard.settle(saver)
