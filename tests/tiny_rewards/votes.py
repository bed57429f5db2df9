"""Votes of a thread that prefers the brighter image, on an occasion of their own for each call."""

import itertools
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.core.polls import OCCASION, Vote
from flowrl.core.types import SampleId
from flowrl.media import media
from flowrl.reward import Images, Reward
from flowrl.rewards import votes
from flowrl.run.people import asking as waiting
from flowrl.run.people import polls
from flowrl.run.people.asking import RunOccasion
from flowrl.run.people.votes import FOLDER, VoteBook


def brightness(file: Path) -> float:
    return float(np.mean([np.asarray(frame, dtype=float).mean() for frame in media.read_frames(file)]))


def vote_for_bright(book: VoteBook, at_most: int | None = None) -> None:
    """Compare all images of every open question, or of `at_most` of them."""
    for question in polls.open_questions(book.folder)[:at_most]:
        known = {vote.group for vote in book.votes.values()}
        for first, second in () if question.group in known else itertools.combinations(question.distinct, 2):
            choice = "first" if brightness(book.folder / first) > brightness(book.folder / second) else "second"
            with polls.turn(book.folder):
                book.add(
                    Vote(
                        voter="ann",
                        group=question.group,
                        prompt=question.prompt,
                        first=first,
                        second=second,
                        choice=choice,
                    )
                )


@contextmanager
def voting_for_bright(run: Path, every_s: float = 0.01) -> Generator[threading.Thread]:
    """A thread that votes on what the run asks."""
    ended = threading.Event()

    def work() -> None:
        with VoteBook(run / FOLDER, "a thread") as book:
            while not ended.wait(every_s):
                vote_for_bright(book)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


def occasion(run: Path, prompts: Sequence[str], iteration: int = 1, **other: Any) -> RunOccasion:
    """Of samples in a slot for each different prompt."""
    slots = {text: slot for slot, text in enumerate(dict.fromkeys(prompts))}
    ids = tuple(SampleId(slots[text], prompts[:i].count(text)) for i, text in enumerate(prompts))
    return RunOccasion(**{"run": run, "iteration": iteration, "ids": ids, "stop": lambda: False} | other)


@contextmanager
def asking(now: RunOccasion) -> Generator[None]:
    token = OCCASION.set(now)
    try:
        yield
    finally:
        OCCASION.reset(token)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    reward, count = votes.build(votes.Config(grace=0.0)), itertools.count(1)
    stack.enter_context(voting_for_bright(folder))
    before, waiting.LOOK_S = waiting.LOOK_S, 0.005
    stack.callback(setattr, waiting, "LOOK_S", before)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        with asking(occasion(folder, prompts, next(count))):
            found = reward.score(images, prompts, metadata)
            assert isinstance(found, dict)
            return found

    return {"bright": Reward(score, reward.card)}
