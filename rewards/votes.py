"""Votes of people: a run asks which of two samples of a prompt is better, and waits for the answers.

The samples of an iteration are written to the run's folder, and `flowrl vote RUN` shows them in pairs. A sample's score
is its Bradley-Terry strength among the samples of its prompt, in log-odds: a sample with a score higher by s is
preferred with probability 1 / (1 + exp(-s)). The mean over a prompt's samples is 0. A sample that nobody compared has
no score (NaN), and is left out of training. Samples whose images are equal have one score.

Evaluations, their guard and trees of evaluations do not ask people: their images are new every time.

Source: Bradley, Terry, Rank analysis of incomplete block designs, 1952.
"""

from __future__ import annotations

import logging
import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.core import polls
from flowrl.core.errors import Abandoned, ConfigError, RewardError, WriteError
from flowrl.core.polls import OCCASION, Closed, Occasion, Question
from flowrl.core.votes import Vote, keep_image
from flowrl.display.display import working
from flowrl.media import media
from flowrl.reward import Card, Images, Reward, unscored
from flowrl.statistics.bradley_terry import strengths

log = logging.getLogger("flowrl")
LEVEL = "tested"
CARD = Card(
    outputs=("votes", "votes_missing"),
    modality="any",
    resolution="as people see it on the page of `flowrl vote`",
    needs_groups=True,
    by_people=True,
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="Bradley and Terry, 1952",
)
LOOK_S = 0.5
"""Seconds between looks for new votes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    votes_per_sample: int = 2
    """Comparisons of each sample with others of its prompt, after which the prompt's scores are made; 2 take as many
    votes as there are samples. No more than the other samples of the prompt are needed."""
    time_limit: float | None = 3600.0
    """Seconds that an iteration waits for its votes, from when it has asked; then the scores are made of those that
    there are. null: until all are there."""
    grace: float = 5.0
    """Seconds that a prompt with all of its votes stays open, so that the last one can be taken back."""
    prior: float = 0.5
    """Virtual comparisons of each sample, half of them won, which keep its score finite; more of them pull scores of
    few votes towards 0."""

    def __post_init__(self) -> None:
        if self.votes_per_sample < 1:
            raise ValueError(f"votes_per_sample={self.votes_per_sample} must be at least 1")
        if self.time_limit is not None and not self.time_limit > 0:
            raise ValueError(f"time_limit={self.time_limit} must be above 0, or null for none")
        if not self.grace >= 0:
            raise ValueError(f"grace={self.grace} must not be negative")
        if not (self.prior > 0 and math.isfinite(self.prior)):
            raise ValueError(f"prior={self.prior} must be above 0: without one a clean sweep has no finite score")


def scored(question: Question, votes: Sequence[Vote], prior: float) -> Closed:
    """Scores of a question by its votes.

    Of two different images and more, those that nobody compared have NaN. Equal images alone have 0, since there is
    nothing to choose, and a sample alone has NaN.
    """
    wins, missing = question.wins(votes), question.missing(votes)
    found = strengths(wins, prior)
    if len(found) == 1 and len(question.samples) > 1:
        found[:] = 0.0
    place = {image: number for number, image in enumerate(question.distinct)}
    rows = [place[image] for image in question.images]
    return Closed(
        images=question.images,
        scores=tuple(float(found[row]) for row in rows),
        missing=tuple(int(missing[row]) for row in rows),
        votes=round(float(wins.sum())),
    )


class Asking:
    """What one call asks people, and how long it waits for them.

    Args:
        occasion: the samples, and where they are asked.
        config: of the reward.
    """

    def __init__(self, occasion: Occasion, config: Config) -> None:
        self.occasion, self.config, self.folder = occasion, config, occasion.votes
        self.log = polls.Log(self.folder)
        self.remind = polls.Reminder(occasion, log.info)

    def ask(self, images: Images, prompts: Sequence[str]) -> Iterator[Question]:
        """A question for each prompt with an image that is finite."""
        groups: dict[int, list[int]] = {}
        for row, one in enumerate(self.occasion.ids):
            if bool(images[row].isfinite().all()):
                groups.setdefault(one.slot, []).append(row)
        for slot, rows in groups.items():
            yield Question(
                iteration=self.occasion.iteration,
                slot=slot,
                prompt=prompts[rows[0]],
                samples=tuple(self.occasion.ids[row].sample for row in rows),
                images=tuple(self._kept(images[row]) for row in rows),
                votes_per_sample=self.config.votes_per_sample,
            )

    def _kept(self, image: Tensor) -> str:
        with tempfile.TemporaryDirectory() as place:
            file = media.write(image.detach().cpu(), Path(place) / "sample", fps=self.occasion.fps)
            return keep_image(self.folder, file.read_bytes(), file.suffix)

    def answers(self, questions: Sequence[Question]) -> dict[int, Closed]:
        """Slot -> scores, once all are closed.

        Raises:
            Abandoned: the run is to stop.
            ConfigError, WriteError: a file is damaged, or cannot be written.
        """
        polls.forget_others(self.folder, self.occasion.iteration)
        found = {question.slot: polls.put(self.folder, question) for question in questions}
        began = time.monotonic()
        whole: dict[int, tuple[int, float]] = {}
        """Slot -> its votes when none was missing any more, and since when."""
        while waiting := [question for question in questions if found[question.slot] is None]:
            if self.occasion.stop():
                raise Abandoned
            over = self.config.time_limit is not None and time.monotonic() - began >= self.config.time_limit
            # Under the turn no vote is added, so that none is told to count and does not.
            with polls.turn(self.folder):
                votes = self.log.votes()
                for question in waiting:
                    if over or self._settled(question, votes, whole):
                        found[question.slot] = result = scored(question, votes, self.config.prior)
                        polls.close(self.folder, question, result)
            self.remind(votes)
            if not over:
                time.sleep(LOOK_S)
        return {slot: result for slot, result in found.items() if result is not None}

    def _settled(self, question: Question, votes: Sequence[Vote], whole: dict[int, tuple[int, float]]) -> bool:
        """Whether no vote is missing, and for so long that the last one is meant; `whole` remembers since when."""
        if question.missing(votes).any():
            whole.pop(question.slot, None)
            return False
        count, now = sum(vote.group == question.group for vote in votes), time.monotonic()
        if whole.get(question.slot, (-1, now))[0] != count:
            whole[question.slot] = count, now
        return question.needed == 0 or now - whole[question.slot][1] >= self.config.grace


def build(config: Config) -> Reward:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        occasion = OCCASION.get()
        if occasion is None:
            raise RewardError(
                "reward 'votes' asks people about the samples of a training iteration, and nothing else does: give it "
                "in `rewards` of flowrl train, and leave it out here"
            )
        assert len(occasion.ids) == len(prompts), "each sample has its identity"
        asking = Asking(occasion, config)
        try:
            questions = list(asking.ask(images, prompts))
            with working("waiting for votes"):
                closed = asking.answers(questions)
        except (ConfigError, WriteError) as error:  # no call mends it, so that none is tried again
            raise RewardError(str(error)) from error
        lost = sum(math.isnan(score) for result in closed.values() for score in result.scores)
        if lost:
            unscored(
                f"{lost} samples of iteration {occasion.iteration} were not compared by anybody (time_limit="
                f"{config.time_limit}); vote with `flowrl vote {shlex.quote(str(occasion.run))}` while the run waits, "
                "raise time_limit, or let more samples be left out, by max_failed_share of the reward's entry"
            )
        return tables(occasion, questions, closed)

    return Reward(score, CARD)


def tables(occasion: Occasion, questions: Sequence[Question], closed: dict[int, Closed]) -> dict[str, Tensor]:
    """The outputs of the samples of an occasion, each [B]; NaN for one that was not asked about."""
    known = {
        (question.slot, sample): values
        for question in questions
        for sample, *values in zip(
            question.samples, closed[question.slot].scores, closed[question.slot].missing, strict=True
        )
    }
    none = [math.nan, math.nan]
    rows = [known.get((one.slot, one.sample), none) for one in occasion.ids]
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2)
    return {"votes": values[:, 0], "votes_missing": values[:, 1]}
