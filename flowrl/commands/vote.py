"""`flowrl vote`: people choose between the base and the tuned image of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flowrl.commands._arguments import argument, option
from flowrl.commands._browser import Open, Port, show

if TYPE_CHECKING:
    from flowrl.gallery.voting.ballot import Ballot

VOTES = "votes"
"""Folder of the votes in that of the run."""
RunArgument = Annotated[Path, argument("RUN", "Folder of a finished run, with images of base and tuned.")]
Voter = Annotated[
    str | None,
    option("Name that the page begins with; another person types theirs.", "Default: the name of your account."),
]


def command(run: RunArgument, voter: Voter = None, port: Port = None, open_page: Open = None) -> None:
    """Let people choose between base and tuned, whose names they do not see.

    Keys: left or 1, right or 2, down for a tie, s skips, u takes back. The votes are in RUN/votes, as preference pairs
    too. Ctrl-C ends, and prints the win rate.
    """
    from flowrl.core.votes import VoteBook
    from flowrl.gallery.voting.ballot import Ballot, require_name
    from flowrl.gallery.voting.pairs import load_pairs
    from flowrl.gallery.voting.server import VoteServer

    name, pairs, books = require_name(voter or _account()), load_pairs(run), list[VoteBook]()

    def ballot(address: str) -> Ballot:
        books.append(VoteBook(run / VOTES, address))
        return Ballot(pairs, books[0])

    def told(who: str) -> None:
        print(f"{who} has answered every pair. Ctrl-C ends; so far:", flush=True)
        _print(server.ballot)

    with VoteServer(ballot, name, port, told) as server, books[0]:
        print(f"{len(pairs)} pairs of {run} at {server.address} (Ctrl-C ends; the votes are kept)", flush=True)
        show(server.address, open_page)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # the way to end it
            print(flush=True)
        _print(server.ballot)
        print(f"votes and pairs: {run / VOTES} (train on them: data.pairs.path={run / VOTES}, docs/votes.md)")


def _print(ballot: Ballot) -> None:
    from flowrl.gallery.voting.result import result

    votes = ballot.of_present_images()
    print("\n".join(result(votes).lines()), flush=True)
    if others := len(ballot.book.votes) - len(votes):
        print(f"{others} votes on images of an earlier evaluation are kept, and not counted here", flush=True)
    if ballot.unreadable:
        files = ", ".join(f"{pair.base} or {pair.tuned}" for pair in list(ballot.unreadable)[:3])
        print(f"{len(ballot.unreadable)} pairs left out, an image cannot be read: {files}", file=sys.stderr)


def _account() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user of this number
        return "voter"
