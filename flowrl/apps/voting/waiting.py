"""The pairs of a run under way that waits for votes: two samples of a prompt, in an order and on sides that are drawn.

D different images of a prompt.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flowrl.apps.plain_text import Named
from flowrl.apps.voting.pairs import VotePair, drawn_left
from flowrl.core.errors import ConfigError
from flowrl.core.polls import Question, Vote
from flowrl.run import status
from flowrl.run.people import polls
from flowrl.run.people.votes import FOLDER

REWARD = "votes"


def waits(run: Path) -> bool:
    """Whether votes are for the training of a run that is under way; False: it asks nobody, or has finished.

    Raises ConfigError: its training would ask people, and it has ended before its end; with the command that goes on.
    """
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # who reads the run says what is wrong with it
        return False
    rewards = config.get("rewards") if isinstance(config, dict) else None
    named = [entry.get("name") for entry in rewards or () if isinstance(entry, dict)]
    if REWARD not in named and not any((run / FOLDER).glob(f"{polls.ROUND}*/slot-*.json")):
        return False
    summary = status.read(run)
    state = summary.get("status")
    if state in status.ENDED:
        return False
    if state != "running":
        raise ConfigError(f"RUN {run} waits for no votes: {_how(summary)}")
    return True


def _how(summary: dict[str, Any]) -> str:
    """That a run has ended, and what to do."""
    if summary.get("status") in status.ENDED:
        return "it has finished; end flowrl vote and start it again, to compare base and tuned"
    text = status.describe(summary) or "The run has not begun. Start it, then vote."
    return f"{text[0].lower()}{text[1:].rstrip('.')}. Start flowrl vote again then"


class Waiting:
    """The pairs of a run under way, as a ballot takes them: they change with every question that it asks or closes."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / FOLDER

    def pairs(self, votes: Collection[Vote]) -> Sequence[VotePair]:
        """Those that have a sample which lacks votes: first where both do, and prompt by prompt."""
        by_group: dict[str, list[Vote]] = {}
        for vote in votes:
            by_group.setdefault(vote.group, []).append(vote)
        found: list[VotePair] = []
        for question in polls.open_questions(self.folder):
            missing = question.missing(by_group.get(question.group, ())) > 0
            order = [(i, j) for i, j in schedule(question) if missing[i] or missing[j]]
            order.sort(key=lambda pair: not (missing[pair[0]] and missing[pair[1]]))
            found += [self._pair(question, i, j) for i, j in order]
        return found

    def _pair(self, question: Question, i: int, j: int) -> VotePair:
        first, second = question.distinct[i], question.distinct[j]
        return VotePair(
            prompt=question.prompt,
            group=question.group,
            distinct=question.slot,
            first=self.folder / first,
            second=self.folder / second,
            second_left=drawn_left("side", question.group, first, second),
            sources=tuple(self.folder / name for name in question.sources),
        )

    def turn(self) -> AbstractContextManager[None]:
        return polls.turn(self.folder)

    def refusal(self, group: str, *images: str) -> str | None:
        if not polls.of_training(group):
            return "That vote was on base and tuned of a run that had finished: flowrl vote takes it back there."
        if polls.is_closed(self.folder, group):
            _, iteration, _, slot = group.split("-")
            return (
                f"Iteration {int(iteration)} has counted the votes on its prompt {int(slot) + 1}, and trains on them: "
                "none is added or taken back any more."
            )
        summary = status.read(self.run)
        if summary.get("status") != "running":
            return f"The run takes no votes, and this one does not count: {Named({})(_how(summary))}"
        asked = next((each for each in polls.open_questions(self.folder) if each.group == group), None)
        if asked is None or not set(images) <= set(asked.images):
            return "The run has drawn other samples since, and does not ask about these any more."
        return None

    def progress(self, votes: Collection[Vote], answered: int, total: int) -> dict[str, Any]:
        summary = status.read(self.run)
        if summary.get("status") != "running":
            return {"progress": f"The run takes no votes: {Named({})(_how(summary))}", "waits": True}
        questions = polls.open_questions(self.folder)
        lacking = polls.lacking(questions, tuple(votes))
        if not lacking:
            now = "counts the votes" if questions else "draws its next samples"
            return {"progress": f"The run {now}", "waits": True}
        return {"progress": f"Iteration {questions[0].iteration}: {polls.in_words(lacking)}", "waits": True}


def schedule(question: Question) -> Iterator[tuple[int, int]]:
    """All pairs of the D images, [0, D) by [0, D); of the first ones each image has its share.

    Images are put in a circle, in an order that is drawn by identity. Neighbours come first, two by two; then those
    between the twos, so that all are connected; then the ones two apart, and so on.
    """
    count = len(question.distinct)
    digest = hashlib.sha256(f"{question.group}\0{question.distinct}".encode()).digest()
    circle = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "big"))).permutation(count).tolist()
    seen: set[frozenset[int]] = set()
    for apart in range(1, count // 2 + 1):
        for start in sorted(range(count), key=lambda start: (start // apart) % 2):
            pair = circle[start], circle[(start + apart) % count]
            if frozenset(pair) not in seen:
                seen.add(frozenset(pair))
                yield pair
