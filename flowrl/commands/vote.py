"""`flowrl vote`: people choose between base and tuned of a finished run, or between samples of one that waits."""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.commands._browser import account, show

if TYPE_CHECKING:
    from flowrl.apps.voting.ballot import Ballot


def command(run: Path, voter: str | None = None, port: int | None = None, open_page: bool | None = None) -> None:
    """Let people compare samples of a run. Those of base and tuned, or those on which a run waits.

    Keys: left or 1, right or 2, down for a tie, s skips, u takes back. The votes are in RUN/votes, as preference pairs
    too. Ctrl-C ends, and prints the numbers.
    """
    from flowrl.apps.voting.ballot import Ballot, require_name
    from flowrl.apps.voting.pairs import Finished, load_pairs
    from flowrl.apps.voting.server import VoteServer
    from flowrl.apps.voting.waiting import Waiting, waits
    from flowrl.run.people.votes import FOLDER, VoteBook

    name, books = require_name(account("voter") if voter is None else voter), list[VoteBook]()
    training = waits(run)
    paper = Waiting(run) if training else Finished(load_pairs(run))
    tell = _print_training if training else _print

    def ballot(address: str) -> Ballot:
        books.append(VoteBook(run / FOLDER, address))
        return Ballot(paper, books[0])

    def told(who: str) -> None:
        print(f"{who} has answered every pair. Ctrl-C ends; so far:", flush=True)
        tell(server.ballot)

    with VoteServer(ballot, name, port, told) as server, books[0]:
        what = f"the training of {run} asks" if training else f"{len(server.ballot.pairs)} pairs of {run}"
        print(f"{what} at {server.address} (Ctrl-C ends; the votes are kept)", flush=True)
        show(server.address, open_page)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # the way to end it
            print(flush=True)
        tell(server.ballot)
        print(f"votes and pairs: {run / FOLDER} (train on them: data.pairs.path={run / FOLDER}, docs/votes.md)")


def _print_training(ballot: "Ballot") -> None:
    from flowrl.run.people import polls

    given = [vote for vote in ballot.book.votes.values() if polls.of_training(vote.group)]
    names = ", ".join(f"{name} {count}" for name, count in Counter(vote.voter for vote in given).items())
    print(f"votes of the training: {len(given)}{f' ({names})' if names else ''}", flush=True)
    print(ballot.paper.progress(ballot.book.votes.values(), 0, 0)["progress"], flush=True)
    _print_unreadable(ballot)


def _print(ballot: "Ballot") -> None:
    from flowrl.apps.voting.result import result
    from flowrl.evaluation import moved
    from flowrl.run.people import polls

    votes = ballot.of_present_images()
    # How far the images are from the base's stands beside every win rate.
    far = moved.sentence(moved.measure((pair.first, pair.second) for pair in ballot.pairs))
    print("\n".join([*result(votes).lines(), far]), flush=True)
    trained = sum(polls.of_training(vote.group) for vote in ballot.book.votes.values())
    if trained:
        print(f"{trained} votes of the training are kept, and not counted here", flush=True)
    if others := len(ballot.book.votes) - len(votes) - trained:
        print(f"{others} votes on images of an earlier evaluation are kept, and not counted here", flush=True)
    _print_unreadable(ballot)


def _print_unreadable(ballot: "Ballot") -> None:
    if ballot.unreadable:
        files = ", ".join(f"{pair.first} or {pair.second}" for pair in list(ballot.unreadable)[:3])
        print(f"{len(ballot.unreadable)} pairs left out, an image cannot be read: {files}", file=sys.stderr)
