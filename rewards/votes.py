"""Votes of people: a run asks which of two samples of a prompt is better, and waits for the answers.

The samples of an iteration are written to the run's folder, and `flowrl vote RUN` shows them in pairs. A sample's score
is its Bradley-Terry strength among the samples of its prompt, in log-odds: a sample with a score higher by s is
preferred with probability 1 / (1 + exp(-s)). The mean over a prompt's samples is 0. A sample that nobody compared has
no score (NaN), and is left out of training. Samples whose images are equal have one score.

Evaluations, their guard and trees of evaluations do not ask people: their images are new every time.

Source: Bradley, Terry, Rank analysis of incomplete block designs, 1952.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, RewardError, WriteError
from flowrl.core.polls import OCCASION, Closed, Question, Terms, Vote
from flowrl.core.types import SampleId
from flowrl.reward import Card, Images, Reward, unscored
from flowrl.statistics.bradley_terry import strengths

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


@dataclass(frozen=True, kw_only=True)
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
        scores=tuple(float(found[row]) for row in rows),
        missing=tuple(int(missing[row]) for row in rows),
        votes=round(float(wins.sum())),
    )


def build(config: Config) -> Reward:
    terms = Terms(votes_per_sample=config.votes_per_sample, time_limit=config.time_limit, grace=config.grace)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        occasion = OCCASION.get()
        if occasion is None:
            raise RewardError(
                "reward 'votes' asks people about the samples of a training iteration, and nothing else does: give it "
                "in `rewards` of flowrl train, and leave it out here"
            )
        assert len(occasion.ids) == len(prompts), "each sample has its identity"
        try:
            answers = occasion.ask(images, prompts, terms, partial(scored, prior=config.prior), metadata)
        except (ConfigError, WriteError) as error:  # no call mends it, so that none is tried again
            raise RewardError(str(error)) from error
        lost = sum(math.isnan(score) for _, result in answers for score in result.scores)
        if lost:
            unscored(
                f"{lost} samples of iteration {occasion.iteration} were not compared by anybody (time_limit="
                f"{config.time_limit}); vote with `flowrl vote {shlex.quote(str(occasion.run))}` while the run waits, "
                "raise time_limit, or let more samples be left out, by max_failed_share of the reward's entry"
            )
        return tables(occasion.ids, answers)

    return Reward(score, CARD)


def tables(ids: Sequence[SampleId], answers: Sequence[tuple[Question, Closed]]) -> dict[str, Tensor]:
    """The outputs of B samples, each [B]; NaN for one that was not asked about."""
    known = {
        (question.slot, sample): values
        for question, result in answers
        for sample, *values in zip(question.samples, result.scores, result.missing, strict=True)
    }
    none = [math.nan, math.nan]
    rows = [known.get((one.slot, one.sample), none) for one in ids]
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2)
    return {"votes": values[:, 0], "votes_missing": values[:, 1]}
