"""What a reward of people and the run that asks them agree on: the samples, the votes on them, and their scores.

The run shows, waits and keeps (flowrl.run.people); the reward says for how long, and makes the scores of the votes.
Samples whose images are equal are one: they are asked about once, and have the same score.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.core.types import SampleId

CHOICES = ("first", "second", "tie", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One choice of a voter."""

    voter: str
    group: str
    """Name of the group of samples that both are of."""
    prompt: str
    first: str
    """Image file, relative to the folder of votes."""
    second: str
    choice: str
    """One of `CHOICES`: the image that is better, neither, or no answer."""
    sources: tuple[str, ...] = ()
    """Image files that the prompt edits, as `first`."""

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ValueError(f"choice={self.choice!r} must be one of {', '.join(CHOICES)}")


def wins_among(images: Sequence[str], votes: Iterable[Vote]) -> np.ndarray:
    """How often image i was preferred to j, [D, D] float64; a tie is half for both. Votes on others are left out."""
    place = {image: number for number, image in enumerate(images)}
    table = np.zeros((len(place), len(place)))
    for vote in votes:
        if vote.choice != "skip" and {vote.first, vote.second} <= place.keys():
            i, j = place[vote.first], place[vote.second]
            share = {"first": 1.0, "second": 0.0, "tie": 0.5}[vote.choice]
            table[i, j] += share
            table[j, i] += 1.0 - share
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The samples of a prompt that people compare.

    >>> asked = Question(iteration=1, slot=0, prompt="", samples=(0, 1, 2), images=("a", "b", "c"), votes_per_sample=9)
    >>> votes = [Vote(voter="ann", group=asked.group, prompt="", first="b", second="a", choice="first")]
    >>> votes += [Vote(voter="ann", group=asked.group, prompt="", first="a", second="c", choice="tie")]
    >>> asked.wins(votes).tolist()
    [[0.0, 0.0, 0.5], [1.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    >>> asked.missing(votes).tolist()
    [0, 1, 1]
    """

    iteration: int
    slot: int
    prompt: str
    samples: tuple[int, ...]
    """Numbers of the samples in the group, without those that have no image."""
    images: tuple[str, ...]
    """Their files, relative to the folder of votes."""
    votes_per_sample: int
    """Comparisons of each image after which the question is closed."""
    sources: tuple[str, ...] = ()
    """Files of the images that the prompt edits."""

    @property
    def group(self) -> str:
        """Its name in the votes."""
        return f"iteration-{self.iteration:06d}-slot-{self.slot:04d}"

    @property
    def distinct(self) -> tuple[str, ...]:
        """The D different images."""
        return tuple(dict.fromkeys(self.images))

    @property
    def needed(self) -> int:
        """Comparisons that each of them needs: no more than one person can answer, who sees a pair once."""
        return min(self.votes_per_sample, len(self.distinct) - 1)

    def wins(self, votes: Iterable[Vote]) -> np.ndarray:
        """`wins_among` its different images, [D, D] float64."""
        return wins_among(self.distinct, (vote for vote in votes if vote.group == self.group))

    def missing(self, votes: Iterable[Vote]) -> np.ndarray:
        """Comparisons that each of the different images still lacks, [D] int."""
        table = self.wins(votes)
        return np.maximum(self.needed - (table + table.T).sum(axis=1).round().astype(int), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Scores of a question whose votes were counted: so many."""

    scores: tuple[float, ...]
    """Of each sample; NaN: nobody compared it."""
    missing: tuple[int, ...]
    """Comparisons that each sample lacked."""
    votes: int


Count = Callable[[Question, Sequence[Vote]], Closed]
"""The scores of a question by the votes that there are, of which only its own count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a reward asks of people."""

    votes_per_sample: int
    time_limit: float | None
    """Seconds from asking, after which the scores are made of the votes that there are; None: no limit."""
    grace: float
    """Seconds that a question with all of its votes stays open, so that the last one can be taken back."""


class Occasion(Protocol):
    """The samples of a training iteration, for a reward that asks people about them."""

    run: Path
    iteration: int
    ids: "Sequence[SampleId]"
    """Identity of each sample that the reward is given, in their order; of a prompt it is given all or none."""
    stop: Callable[[], bool]
    """Asked often by who waits for people: whether to leave off, which raises `Abandoned`."""

    def ask(
        self,
        images: "Tensor | Sequence[Tensor]",
        prompts: Sequence[str],
        terms: Terms,
        count: Count,
        metadata: Sequence[Mapping[str, Any]] = (),
    ) -> list[tuple[Question, Closed]]:
        """A question for each prompt with an image that is finite, and its scores, once all were closed, now or before.

        `metadata`, where it is given, has the images that are edited under "images".

        Raises Abandoned: the run is to stop; ConfigError, WriteError: a file of the votes is damaged, or cannot be
        written.
        """
        ...


OCCASION: ContextVar[Occasion | None] = ContextVar("flowrl_occasion", default=None)
"""That of the call; None: no run asks, so that a reward of people has no one to ask."""
