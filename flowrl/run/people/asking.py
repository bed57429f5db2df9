"""A run whose samples people judge: the questions in its folder, the wait for votes, and that for other processes.

A process waits for the votes on its own groups, and then for the other processes to have theirs, by looking for files:
a collective would end the run after its time limit, while people may take days.

    votes/iteration-000003/.done-1     process 1 has its scores
    votes/iteration-000003/.left-1     it was stopped, or failed: nobody waits for people any more
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from flowrl.core.errors import Abandoned, ConfigError, WriteError
from flowrl.core.files import writing
from flowrl.core.polls import OCCASION, Closed, Count, Occasion, Question, Terms, Vote
from flowrl.core.types import SampleId
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.media import media
from flowrl.reward import Images
from flowrl.run.people import polls
from flowrl.run.people.votes import FOLDER, keep_file
from flowrl.scoring.scorer import Scorer
from flowrl.training.signals import Stop
from flowrl.training.world import World

Records = Sequence[Mapping[str, Any]]
LOOK_S = 0.5
"""Seconds between looks for new votes, and for the other processes."""


@dataclass(slots=True, kw_only=True)
class RunOccasion:
    """`core.polls.Occasion` of a run."""

    run: Path
    iteration: int
    ids: Sequence[SampleId]
    stop: Callable[[], bool]
    fps: float = media.FPS
    """Frames a second at which videos are shown."""

    @property
    def votes(self) -> Path:
        """Folder of the votes."""
        return self.run / FOLDER

    def ask(
        self, images: Images, prompts: Sequence[str], terms: Terms, count: Count, metadata: Records = ()
    ) -> list[tuple[Question, Closed]]:
        """As `core.polls.Occasion.ask`."""
        questions = list(self.questions(images, prompts, terms.votes_per_sample, metadata))
        with working("waiting for votes"):
            return self._answers(questions, terms, count)

    def questions(
        self, images: Images, prompts: Sequence[str], votes_per_sample: int, metadata: Records = ()
    ) -> Iterator[Question]:
        """A question for each prompt with an image that is finite."""
        groups: dict[int, list[int]] = {}
        for row, one in enumerate(self.ids):
            if bool(images[row].isfinite().all()):
                groups.setdefault(one.slot, []).append(row)
        for slot, rows in groups.items():
            record = metadata[rows[0]] if metadata else {}
            yield Question(
                iteration=self.iteration,
                slot=slot,
                prompt=prompts[rows[0]],
                samples=tuple(self.ids[row].sample for row in rows),
                images=tuple(self._kept(images[row]) for row in rows),
                votes_per_sample=votes_per_sample,
                sources=tuple(keep_file(self.votes, file) for file in record.get("images", ())),
            )

    def _kept(self, image: Tensor) -> str:
        with tempfile.TemporaryDirectory() as place:
            file = media.write(image.detach().cpu(), Path(place) / "sample", fps=self.fps)
            return keep_file(self.votes, file)

    def _answers(self, questions: Sequence[Question], terms: Terms, count: Count) -> list[tuple[Question, Closed]]:
        folder, given, remind = self.votes, polls.Log(self.votes), Reminder(self, log.info)
        polls.forget_others(folder, self.iteration)
        found = {question.slot: polls.put(folder, question) for question in questions}
        began, whole = time.monotonic(), Whole(terms.grace)
        while waiting := [question for question in questions if found[question.slot] is None]:
            if self.stop():
                raise Abandoned
            over = terms.time_limit is not None and time.monotonic() - began >= terms.time_limit
            # Under the turn no vote is added, so that none is told to count and does not.
            with polls.turn(folder):
                votes = given.votes()
                for question in waiting:
                    if over or whole.settled(question, votes):
                        found[question.slot] = result = count(question, votes)
                        polls.close(folder, question, result)
            remind(votes)
            if not over:
                time.sleep(LOOK_S)
        return [(question, result) for question in questions if (result := found[question.slot]) is not None]


class Whole:
    """Questions that lack no vote, and since when; `grace` in seconds."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._since: dict[int, tuple[int, float]] = {}
        """Slot -> its votes when none was missing any more, and since when."""

    def settled(self, question: Question, votes: Sequence[Vote]) -> bool:
        """Whether no vote is missing, and for so long that the last one is meant."""
        if question.missing(votes).any():
            self._since.pop(question.slot, None)
            return False
        count, now = sum(vote.group == question.group for vote in votes), time.monotonic()
        if self._since.get(question.slot, (-1, now))[0] != count:
            self._since[question.slot] = count, now
        return question.needed == 0 or now - self._since[question.slot][1] >= self.grace


class Reminder:
    """Says what an iteration waits for, at once and then once a minute."""

    every_s = 60.0

    def __init__(self, occasion: RunOccasion, log: Any) -> None:
        self.occasion, self._log, self._said = occasion, log, -float("inf")

    def __call__(self, votes: Sequence[Vote]) -> None:
        """To be called while the votes are waited for."""
        if time.monotonic() - self._said < self.every_s:
            return
        self._said = time.monotonic()
        now = self.occasion
        wanted = polls.lacking(polls.open_questions(now.votes, now.iteration), votes)
        if wanted:
            said = "iteration %d waits for people: %s; vote with: flowrl vote %s"
            self._log(said, now.iteration, polls.in_words(wanted), now.run)


_DONE, _LEFT = "done", "left"


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

    def begin(self, ids: Sequence[SampleId], fps: float = media.FPS) -> None:
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
