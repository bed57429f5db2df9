"""A run whose samples people judge: where they are asked, and how processes wait for each other's answers.

A process waits for the votes on its own groups, and then for the other processes to have theirs, by looking for files:
a collective would end the run after its time limit, while people may take days.

    votes/iteration-000003/.done-1     process 1 has its scores
    votes/iteration-000003/.left-1     it was stopped, or failed: nobody waits for people any more
"""

import time
from collections.abc import Sequence
from contextvars import Token
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from flowrl.core.errors import Abandoned, ConfigError, WriteError
from flowrl.core.files import writing
from flowrl.core.polls import OCCASION, Occasion
from flowrl.core.types import SampleId
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.media.media import FPS
from flowrl.run.people import polls
from flowrl.run.people.occasion import Reminder, RunOccasion
from flowrl.run.people.votes import FOLDER
from flowrl.scoring.scorer import Scorer
from flowrl.training.signals import Stop
from flowrl.training.world import World

_DONE, _LEFT = "done", "left"
LOOK_S = 0.5
"""Seconds between looks for the other processes."""


@dataclass(frozen=True, slots=True)
class People:
    """What a run needs to ask people about its samples."""

    run: Path
    """Its folder."""
    world: World
    stop: Stop

    @classmethod
    def of(cls, scorer: Scorer, run: Path | None, world: World, stop: Stop, slots: int) -> "People | None":
        """Of a run that trains on the rewards of `scorer`, with so many prompts an iteration; None: no people judge.

        Raises ConfigError: a session without a run folder, a folder that not all processes see, or groups that
        processes would have to share.
        """
        name = next((entry.name for entry in scorer.entries if entry.reward.card.by_people), None)
        if name is None:
            return None
        if run is None or not (run / "config.yaml").is_file():
            seen = "there is none here" if run is None else f"process {world.rank} does not see {run}"
            raise ConfigError(
                f"rewards: {name} asks people through the run's folder, and {seen}; train with flowrl train, with the "
                "folder on a file system that all machines of the run share"
            )
        if slots < world.size:
            raise ConfigError(
                f"rollout.prompts_per_iteration={slots}: {name} compares all samples of a prompt, which must be on one "
                f"of {world.size} processes",
                {"rollout.prompts_per_iteration": world.size},
            )
        for what in (_DONE, _LEFT) if world.main else ():  # of an earlier call of the program
            for mark in (run / FOLDER).glob(f"{polls.ROUND}*/.{what}-*"):
                mark.unlink(missing_ok=True)
        return cls(run, world, stop)


@dataclass(slots=True)
class Asking:
    """The part of an iteration in which people are asked (`scoring.asking`), on each process.

    It ends when all processes have their scores, at once where one of them has failed or was stopped: the failure is
    then shared as any other.

    Raises (at its end):
        Abandoned: a process left, or the run is to stop.
    """

    people: People
    iteration: int
    _slots: set[int] = field(default_factory=set)
    _occasion: RunOccasion | None = None
    _token: Token[Occasion | None] | None = None

    def begin(self, ids: Sequence[SampleId], fps: float = FPS) -> None:
        """As `scoring.asking.Asking.begin`."""
        people, self._slots = self.people, {one.slot for one in ids}
        self._occasion = RunOccasion(
            run=people.run, iteration=self.iteration, ids=tuple(ids), stop=self._stops, fps=fps
        )
        self._token = OCCASION.set(self._occasion)

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._token is not None:
            OCCASION.reset(self._token)
        if error is not None:
            self._leave()  # first: what follows may fail too, and the others would wait
            if isinstance(error, Exception):
                try:
                    polls.reopen(self.people.run / FOLDER, self.iteration, self._slots)
                except (ConfigError, WriteError) as failure:  # it must not hide why the iteration failed
                    log.warning("%s: the prompts of iteration %d that lack votes stay closed", failure, self.iteration)
            return
        if self.people.world.size == 1:
            return
        try:
            self._mark(_DONE)
        except WriteError:
            self._leave()
            raise
        remind = None if self._occasion is None else Reminder(self._occasion, log.info)
        read = polls.Log(self.people.run / FOLDER)
        with working("waiting for votes of other processes"):
            while self._marked(_DONE) < self.people.world.size:
                if self._stops():
                    self._leave()
                    raise Abandoned
                if remind is not None:
                    remind(read.votes())
                time.sleep(LOOK_S)

    def _stops(self) -> bool:
        return self.people.stop.here() or (self.people.world.size > 1 and self._marked(_LEFT) > 0)

    @property
    def _folder(self) -> Path:
        return self.people.run / FOLDER / f"{polls.ROUND}{self.iteration:06d}"

    def _marked(self, what: str) -> int:
        return sum(1 for _ in self._folder.glob(f".{what}-*"))

    def _mark(self, what: str) -> None:
        file = self._folder / f".{what}-{self.people.world.rank}"
        with writing(file):
            self._folder.mkdir(parents=True, exist_ok=True)
            file.touch()

    def _leave(self) -> None:
        if self.people.world.size == 1:
            return
        try:
            self._mark(_LEFT)
        except WriteError as error:  # it must not hide why this process leaves
            log.warning("%s: other processes wait for their votes to the end", error)
