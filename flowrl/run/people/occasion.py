"""The samples of an iteration, asked about through the run's folder: questions, the wait for votes, and scores."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.core.errors import Abandoned
from flowrl.core.polls import Closed, Count, Question, Terms, Vote
from flowrl.core.types import SampleId
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.media import media
from flowrl.reward import Images
from flowrl.run.people import polls
from flowrl.run.people.votes import FOLDER, keep_image

LOOK_S = 0.5
"""Seconds between looks for new votes."""


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

    def ask(self, images: Images, prompts: Sequence[str], terms: Terms, count: Count) -> list[tuple[Question, Closed]]:
        """As `core.polls.Occasion.ask`."""
        questions = list(self.questions(images, prompts, terms.votes_per_sample))
        with working("waiting for votes"):
            return self._answers(questions, terms, count)

    def questions(self, images: Images, prompts: Sequence[str], votes_per_sample: int) -> Iterator[Question]:
        """A question for each prompt with an image that is finite."""
        groups: dict[int, list[int]] = {}
        for row, one in enumerate(self.ids):
            if bool(images[row].isfinite().all()):
                groups.setdefault(one.slot, []).append(row)
        for slot, rows in groups.items():
            yield Question(
                iteration=self.iteration,
                slot=slot,
                prompt=prompts[rows[0]],
                samples=tuple(self.ids[row].sample for row in rows),
                images=tuple(self._kept(images[row]) for row in rows),
                votes_per_sample=votes_per_sample,
            )

    def _kept(self, image: Tensor) -> str:
        with tempfile.TemporaryDirectory() as place:
            file = media.write(image.detach().cpu(), Path(place) / "sample", fps=self.fps)
            return keep_image(self.votes, file.read_bytes(), file.suffix)

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
