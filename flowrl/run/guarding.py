"""The guard in a run: its half of the prompts, the best checkpoint, the end that an alarm asks for.

`warn` says an alarm and changes nothing else. `stop` and `rollback` end the run: with its last weights, or with those
of the best evaluation so far. The final numbers of such a run are of the prompts that the guard did not see. A run that
goes on after its guard ended it, with guard.mode=warn or off, goes on from the last iteration: bitwise the run whose
guard had only warned.
"""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config.schema import GuardConfig
from flowrl.config.watched import Scored, require_watched, watched_outputs
from flowrl.core.errors import ConfigError
from flowrl.core.files import known_object
from flowrl.data.prompts import Prompt, identity
from flowrl.display.console import log, verdict
from flowrl.evaluation.guard import KL, NORM_RATIO, Guard, Look, State, Verdict
from flowrl.evaluation.held_out import guards_half
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.signs import signs_of
from flowrl.run import handover
from flowrl.run.folder import RunFolder
from flowrl.run.session import Session
from flowrl.run.state import Saver, load, write_adapter
from flowrl.run.status import GUARDED, SUMMARY
from flowrl.scoring.weighted import WeightedReward

LEAST = 4
"""Distinct prompts of an evaluation below which half of them say nothing."""


def refuse_guarded(folder: Path, guard: GuardConfig) -> None:
    """Refuse to resume a run that its guard ended. Raises ConfigError: guard.mode would end it again."""
    known = known_object(folder / SUMMARY)
    if known.get("status") != GUARDED:
        return
    facts = known.get("guard") or {}
    ended = f"the guard ended this run after iteration {facts.get('ended')}: {facts.get('sentence')}"
    if guard.acts:
        raise ConfigError(
            f"{folder}: {ended} guard.mode={guard.mode} would leave it there",
            [{"guard.mode": "warn"}, {"guard.mode": "off"}],
        )
    log.info("%s It goes on from there, and the guard does not end it again", ended)


def _scored(entry: WeightedReward) -> Scored:
    return Scored.of(entry.reward.card.outputs, entry)


class Guarding:
    """The guard of a run; without one every method does nothing. The session has the untrained weights.

    Raises ConfigError: the guard that is asked for has no metric to watch, or too few prompts.
    """

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self.session, self.folder = session, folder
        self.options, self.ended = session.config.guard, 0
        """`ended`: the iteration after which the guard ended the run; 0: it has not."""
        self.base: Evaluation | None = None
        self._base_look: Look | None = None
        self._state: State | None = None
        self._seen: State | None = None
        """The state with the look of an iteration whose row is not written yet."""
        self._own = np.zeros(0, dtype=bool)
        """The guard's prompts among those of an evaluation during training."""
        self.metric, self.higher_is_better = self._chosen()
        if self.metric is not None:
            self._state = State(self.metric)
            self._own = guards_half(self._prompts, session.config.seed)

    def _chosen(self) -> tuple[str | None, bool]:
        """(watched metric, its direction); None: there is no guard."""
        config, scorers, guard = self.session.config, self.session.parts.scorers, self.options
        if guard.mode in ("off", False) or not config.eval.every or scorers.watched is None:
            return None, True
        own = () if scorers.trained is None else scorers.trained.evaluated
        scored = [_scored(entry) for entry in scorers.watched.entries]
        trained, evaluated = scored[: len(own)], scored[len(own) :]
        require_watched(guard, trained, evaluated)
        watched = watched_outputs(trained, evaluated)
        metric = guard.metric if guard.metric is not None else next(iter(watched), None)
        count = len({identity(prompt) for prompt in self._prompts})
        if metric is not None and count < LEAST:
            if guard.asked:
                raise ConfigError(
                    f"guard.mode={guard.mode}: evaluations during training have {count} different prompts, and half of "
                    f"them are the guard's: it needs {LEAST}",
                    {"guard.mode": "off"},
                )
            if self.session.resolved.training.climbs:
                log.warning("no guard watches this run: evaluations have %d prompts, and it needs %d", count, LEAST)
            return None, True
        cards = [entry.reward.card for entry in scorers.watched.distinct]
        lower = {name for card in cards for name in card.lower}
        return metric, metric not in lower

    @property
    def _prompts(self) -> list[Prompt]:
        """Prompts of an evaluation during training."""
        return list(self.session.parts.evaluator.prompts[: self.session.config.eval.periodic_prompts])

    @property
    def mode(self) -> str:
        """What an alarm does."""
        return str(self.options.mode or "warn") if self.metric is not None else "off"

    @property
    def half(self) -> np.ndarray:
        """The guard's prompts among all that are evaluated, [P] bool."""
        return np.pad(self._own, (0, len(self.session.parts.evaluator.prompts) - len(self._own)))

    def introduction(self) -> str:
        """What it watches and does, in a line; "" without a guard."""
        if self.metric is None:
            return ""
        every = self.session.config.eval.every
        return f"guard: {self.mode}, watches {self.metric} on {int(self.half.sum())} prompts every {every} iterations"

    def begin(self, base: Evaluation, saver: Saver) -> None:
        """Take over the state of the checkpoint that `saver` has restored, if any; `base`: of the untrained model."""
        self.base = base
        self._restore(saver.guard)
        self._hand_over(saver)
        if text := self.introduction():
            log.info("%s", text)

    # ---- looks

    def look(self, now: Evaluation, row: dict[str, Any]) -> None:
        """Judge an evaluation during training; `settle` makes that final once its row is written."""
        if self.metric is None or self._state is None or self.base is None:
            return
        judged = self.session.world.together(lambda: self._judged(now, row))[0]
        assert judged is not None
        seen, verdict = judged
        self._seen = seen
        seen.over = self.options.acts and bool(verdict.alarms)
        for alarm in verdict.alarms if self.session.world.main else ():
            log.warning("guard: %s", alarm.sentence)

    def _judged(self, now: Evaluation, row: dict[str, Any]) -> tuple[State, Verdict] | None:
        """(state, verdict) of a look, from the first process, which reads the images; None on the others."""
        if not self.session.world.main:
            return None
        assert self.metric is not None
        assert self.base is not None
        if self._base_look is None:
            self._base_look = self._look(self.base)
        for key, limit, usual, column in (
            ("kl_budget", self.options.kl_budget, None, KL),
            ("norm_ratio", self.options.norm_ratio, GuardConfig().norm_ratio, NORM_RATIO),
        ):
            if limit not in (None, usual) and column not in row and not (self._state and self._state.looks):
                log.warning("guard.%s=%g: this method logs no %s, so there is no alarm", key, limit, column)
        higher, noun = self.higher_is_better, self.session.noun
        guard = Guard(self.options, self.metric, higher_is_better=higher, state=copy.deepcopy(self._state), noun=noun)
        verdict = guard.look(self._base_look, self._look(now), row)
        return guard.state, verdict

    def _look(self, evaluation: Evaluation) -> Look:
        """The guard's half of an evaluation, the base's too, which may have more prompts."""
        own, images = self._own, None
        rows = np.pad(own, (0, len(evaluation.prompts) - len(own)))
        if self.options.diversity is not None or self.options.degeneracy is not None:
            folder = self.folder.path / "eval" / evaluation.tag
            images = signs_of(folder, np.flatnonzero(own).tolist(), evaluation.seeds)
        return Look(evaluation.of(rows), images)

    def settle(self, saver: Saver) -> None:
        """The row of the last look is written, so the next checkpoint holds the look."""
        if self._seen is None:
            return
        self._state, self._seen = self._seen, None
        self._hand_over(saver)
        if self.session.world.main:
            known = json.loads((self.folder.path / SUMMARY).read_text(encoding="utf-8"))
            self.folder.write_json(SUMMARY, known | self.summary())

    # ---- checkpoints

    @property
    def over(self) -> bool:
        """Whether an alarm has ended the run."""
        return self._state is not None and self._state.over and self.options.acts

    @property
    def wants_checkpoint(self) -> bool:
        """Whether this iteration is the best so far, and the guard may take it later."""
        return self.options.acts and self._state is not None and self._state.best == self.session.iteration > 0

    def _hand_over(self, saver: Saver) -> None:
        """Tell what a checkpoint holds of the guard, and which checkpoints it wants kept."""
        saver.guard = None if self._state is None else asdict(self._state)
        saver.spared = () if self._state is None or not self._state.best else (self._state.best,)

    def _restore(self, kept: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state; one of another metric is not taken over."""
        if self._state is None or kept is None:
            return
        if kept["metric"] != self.metric:
            log.warning("the guard watches %s now, and %s before: it begins anew", self.metric, kept["metric"])
            return
        self._state = State(**kept)
        if not self.options.acts:
            self._state.over = False

    # ---- the end

    def conclude(self, saver: Saver) -> None:
        """Take the weights that an alarm asks for: those of the last iteration, or the best checkpoint's."""
        if not self.over or self._state is None:
            return
        session = self.session
        iteration = self.ended = session.iteration
        taken = self._state.best if self.options.mode == "rollback" else iteration
        log.info("guard: the run ends after iteration %d with the weights of iteration %d", iteration, taken)
        if taken != iteration:
            load(session, self.folder.checkpoints, taken)
            saver.saved = saver.attempted = taken  # the session is no newer than its checkpoint
            write_adapter(session, self.folder.path)
        if session.world.main:
            facts = self._facts()
            told = {name: facts[name] for name in ("mode", "alarm", "sentence", "taken", "ended")}
            handover.stamp(self.folder.path, taken, told)
        session.world.barrier()

    @property
    def judged(self) -> np.ndarray | None:
        """The prompts of the final numbers, [P] bool: those that a guard did not see that ended the run; None: all."""
        return ~self.half if self.ended else None

    def say_end(self) -> None:
        """Log that the guard ended the run, and of which prompts the final numbers are."""
        if self.ended:
            facts = self._facts()
            verdict.info("guard: %s The weights are those of iteration %d", facts["sentence"], facts["taken"])
            verdict.info("the numbers below are of the %d prompts that the guard did not see", facts["judged_prompts"])

    def summary(self) -> dict[str, Any]:
        """The entry of `summary.json`; {} without a guard."""
        return {} if self._state is None else {"guard": self._facts()}

    def _facts(self) -> dict[str, Any]:
        state = self._state
        assert state is not None
        facts: dict[str, Any] = {
            "mode": self.mode,
            "metric": self.metric,
            "prompts": int(self.half.sum()),
            "looks": state.looks,
            "best": state.best,
            "best_gain": state.gain,
            "beat_base": state.beat,
            "alarms": state.alarms,
        }
        if not self.ended:
            return facts
        last = [alarm for alarm in state.alarms if alarm["iteration"] == state.looked]
        taken = state.best if self.options.mode == "rollback" else self.ended
        names = {"alarm": last[0]["name"], "sentence": last[0]["sentence"]}
        return facts | names | {"taken": taken, "ended": self.ended, "judged_prompts": int((~self.half).sum())}
