"""What the votes of a run say: how often tuned was preferred, and how far people agree."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.apps.voting.pairs import VotePair
from flowrl.core.polls import Vote
from flowrl.statistics.paired import win_share

Counted = Sequence[tuple[VotePair, Vote]]
"""Votes that count, with their pairs."""
_SCORES = {"first": (1.0, 0.0), "second": (0.0, 1.0), "tie": (0.0, 0.0)}
"""Choice -> scores of base and tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Numbers of `lines`."""

    voters: dict[str, int]
    """Voter -> pairs that they decided, a tie is one."""
    votes: int
    ties: int
    skips: int
    win: dict[str, float]
    """`statistics.paired.win_share` of tuned over distinct prompts: mean, low, high, n; {} without votes."""
    agreed: int
    """Of `compared`, those with the same choice."""
    compared: int
    """Two votes of two voters on the same two images."""

    def lines(self) -> list[str]:
        """What the terminal shows at the end."""
        names = ", ".join(f"{name} {count}" for name, count in self.voters.items())
        found = [
            f"votes: {self.votes}{f' ({names})' if names else ''}, ties among them: {self.ties}, skipped: {self.skips}"
        ]
        if not self.votes:
            return [*found, "no win rate: nobody has decided a pair yet; open the page again and vote"]
        low, high = self.win["low"], self.win["high"]
        known = math.isfinite(low) and math.isfinite(high)
        interval = f"95 % {low:.3f} to {high:.3f}" if known else "no interval from so few prompts"
        found.append(
            f"win rate of tuned over base {self.win['mean']:.3f} ({interval}, over {self.win['n']:.0f} prompts; "
            "a tie is half)"
        )
        if self.compared:
            share = self.agreed / self.compared
            found.append(f"agreement between voters {share:.3f} ({self.agreed} of {self.compared} pairs of votes)")
        else:
            found.append("no agreement between voters: no pair was decided by two of them")
        return found


def result(votes: Counted) -> Result:
    """Count votes. Each prompt weighs the same, and so does each of its votes."""
    decided = [(pair, vote) for pair, vote in votes if vote.choice in _SCORES]
    by_prompt: dict[int, list[tuple[float, float]]] = defaultdict(list)
    by_pair: dict[VotePair, dict[str, str]] = defaultdict(dict)
    for pair, vote in decided:
        by_prompt[pair.distinct].append(_SCORES[vote.choice])
        by_pair[pair][vote.voter] = vote.choice
    both = [two for choices in by_pair.values() for two in itertools.combinations(choices.values(), 2)]
    tables = np.full((2, len(by_prompt), max(map(len, by_prompt.values()), default=0)), np.nan)
    for row, scores in enumerate(by_prompt.values()):
        tables[:, row, : len(scores)] = np.transpose(scores)
    return Result(
        voters=dict(Counter(vote.voter for _, vote in decided)),
        votes=len(decided),
        ties=sum(vote.choice == "tie" for _, vote in decided),
        skips=len(votes) - len(decided),
        win=win_share(tables[0], tables[1], np.arange(len(by_prompt))) if decided else {},
        agreed=sum(one == other for one, other in both),
        compared=len(both),
    )
