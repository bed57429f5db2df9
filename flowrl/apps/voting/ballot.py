"""Who is asked which pair next, and what becomes of the answer."""

import io
import secrets
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.apps.voting.pairs import Finished, VotePair
from flowrl.apps.voting.waiting import Waiting
from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.polls import Vote
from flowrl.media import media
from flowrl.run.people.votes import VoteBook, image_name, keep_file, keep_image

SECOND_EVERY = 4
"""Every so many pairs, a voter is asked one that another voter has decided: how far people agree is measured there."""
LONGEST_NAME = 40


class Refusal(Exception):
    """An answer that cannot be taken, in words for the voter."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A pair on a voter's screen."""

    pair: VotePair
    first: str
    """Copy of the image, relative to the folder of votes."""
    second: str
    token: str
    left: str
    """Token of the left image: paths of images name the model."""
    right: str
    sources: dict[str, str]
    """Token -> copy of each image that the prompt edits."""


class Ballot:
    """The pairs (`paper`) of a run and the votes (`book`) on them; its methods may be called from several threads.

    A vote counts for the images that were on the screen: they are copied next to the votes before they are shown, by
    their contents, so that a later evaluation changes neither the votes nor the pairs made of them. A voter who has
    answered, or skipped, is not asked again unless the images are others.
    """

    def __init__(self, paper: Finished | Waiting, book: VoteBook) -> None:
        self.paper, self.book = paper, book
        self.pairs = paper.pairs(book.votes.values())
        self.unreadable: set[VotePair] = set()
        """Pairs that are left out, since an image of theirs cannot be read."""
        self._lock = threading.Lock()
        self._ended = False
        self._open: dict[str, Asked] = {}
        """Voter -> the pair on the screen."""
        self._images: dict[str, Path] = {}
        """Token -> copy."""
        self._copied: dict[VotePair, tuple[tuple[int, ...], tuple[str, str]]] = {}

    def ask(self, voter: str) -> dict[str, Any]:
        """What the page of a voter shows: the pair that was open, or the next one.

        Raises Refusal: the name cannot be used, or voting has ended; WriteError: the copies could not be written.
        """
        with self._lock:
            return self._state(self._voter(voter))

    def vote(self, voter: str, token: str, choice: str) -> dict[str, Any]:
        """Keep the answer (left, right, tie or skip) to the pair on the screen, that of `token`; what the page shows
        then.

        Raises Refusal: another pair is open, there is no such choice, the votes on it were counted, or voting has
        ended. WriteError: the vote could not be written, and does not count; or it counts, and the preference pairs
        could not be written, which the next vote does.
        """
        with self._lock:
            name = self._voter(voter)
            asked = self._open.get(name)
            if asked is None or asked.token != token:
                raise Refusal("This pair was answered already, in another tab or before; the page shows the next one.")
            sides = {"left": asked.pair.second_left, "right": not asked.pair.second_left}
            if choice in sides:
                choice = "second" if sides[choice] else "first"
            elif choice not in ("tie", "skip"):
                raise Refusal(f"choice={choice!r} must be left, right, tie or skip.")
            vote = Vote(
                voter=name,
                group=asked.pair.group,
                prompt=asked.pair.prompt,
                first=asked.first,
                second=asked.second,
                choice=choice,
                sources=tuple(asked.sources.values()),
            )
            with self.paper.turn():
                self._require_open(vote.group, vote.first, vote.second, voter=name)
                try:
                    self.book.add(vote)
                except WriteError:
                    if self.book.last(name) is vote:  # it counts, and only the pairs file is behind: not asked twice
                        self._close(name)
                    raise
            self._close(name)
            return self._state(name)

    def undo(self, voter: str) -> dict[str, Any]:
        """Take back the voter's last answer, and show its pair again.

        Raises Refusal: there is none, it was counted, or voting has ended; WriteError: it could not be written, and the
        vote still counts.
        """
        with self._lock:
            name = self._voter(voter)
            with self.paper.turn():
                vote = self.book.last(name)
                if vote is None:
                    raise Refusal("There is no vote of yours to take back.")
                self._require_open(vote.group)
                self.book.undo(name)
            self._close(name)
            for pair in self.paper.pairs(self.book.votes.values()):
                if pair.group == vote.group and self._files(pair) == (vote.first, vote.second):
                    self._show(name, pair)
            return self._state(name)

    def end(self) -> None:
        """Take no more answers: the connection of a page may outlive the server, and the folder is freed."""
        with self._lock:
            self._ended = True

    def shown(self, voter: str) -> VotePair | None:
        """The pair on a voter's screen."""
        asked = self._open.get(voter)
        return None if asked is None else asked.pair

    def image(self, token: str) -> tuple[bytes, str] | None:
        """(contents, kind) of an image on a screen, without the note about its model; None: no such token."""
        file = self._images.get(token)
        if file is None:
            return None
        if media.is_video_file(file):  # an <img> shows no MP4
            frames, rate = media.decode_video(file)
            with tempfile.TemporaryDirectory() as folder:
                media.encode_video(Path(folder, "video.webp"), frames, rate)
                return Path(folder, "video.webp").read_bytes(), "webp"
        if file.suffix == ".webp":  # the note of a video is a file of its own
            return file.read_bytes(), file.suffix[1:]
        buffer = io.BytesIO()
        media.read_frames(file)[0].save(buffer, "PNG", compress_level=1)
        return buffer.getvalue(), "png"

    def of_present_images(self) -> list[tuple[VotePair, Vote]]:
        """The votes that count for the images as they are now, with their pairs, in the order of the votes."""
        with self._lock:
            by_group = {pair.group: pair for pair in self.pairs}
            found = [(by_group.get(vote.group), vote) for vote in self.book.votes.values()]
            return [
                (pair, vote)
                for pair, vote in found
                if pair is not None and self._files(pair) == (vote.first, vote.second)
            ]

    def _voter(self, voter: str) -> str:
        if self._ended:
            raise Refusal("flowrl vote has ended, and this answer does not count. Start it again, and open its page.")
        return named(voter)

    def _require_open(self, group: str, *images: str, voter: str = "") -> None:
        """Refuse a vote that counts no more, and take its pair from the voter's screen."""
        why = self.paper.refusal(group, *images)
        if why is not None:
            self._close(voter)
            raise Refusal(why)

    def _state(self, voter: str) -> dict[str, Any]:
        self.pairs = self.paper.pairs(self.book.votes.values())
        answered, decided = self._answered(voter)
        asked = self._open.get(voter)
        if asked is not None and self.paper.refusal(asked.pair.group, asked.first, asked.second) is not None:
            self._close(voter)
            asked = None
        if asked is None:
            while (pair := self._next(voter, answered, decided)) is not None and not self._show(voter, pair):
                pass
            asked = self._open.get(voter)
        total, last = len(self.pairs) - len(self.unreadable - answered), self.book.last(voter)
        state: dict[str, Any] = {
            "voter": voter,
            "answered": len(answered),
            "total": total,
            "undoable": last is not None and self.paper.refusal(last.group) is None,
            "pair": None,
            **self.paper.progress(self.book.votes.values(), len(answered), total),
        }
        if asked is not None:
            state["pair"] = {
                "token": asked.token,
                "prompt": asked.pair.prompt,
                "noun": "image" if asked.pair.first.suffix == ".png" else "video",
                "left": f"image/{asked.left}",
                "right": f"image/{asked.right}",
                "sources": [f"image/{token}" for token in asked.sources],
            }
        return state

    def _answered(self, voter: str) -> tuple[set[VotePair], set[VotePair]]:
        """(pairs that the voter has answered or skipped, pairs that others have decided), of the images as they are."""
        votes: dict[str, list[Vote]] = {}
        for vote in self.book.votes.values():
            votes.setdefault(vote.group, []).append(vote)
        answered: set[VotePair] = set()
        decided: set[VotePair] = set()
        for pair in self.pairs:
            # Only pairs with votes are read.
            for vote in votes.get(pair.group, ()):
                if (vote.first, vote.second) != self._files(pair):
                    continue
                if vote.voter == voter:
                    answered.add(pair)
                elif vote.choice != "skip":
                    decided.add(pair)
        return answered, decided

    def _next(self, voter: str, answered: set[VotePair], decided: set[VotePair]) -> VotePair | None:
        left = [pair for pair in self.pairs if pair not in answered and pair not in self.unreadable]
        elsewhere = {asked.pair for name, asked in self._open.items() if name != voter}
        of_others = [pair for pair in left if pair in decided]
        fresh = [pair for pair in left if pair not in decided and pair not in elsewhere]
        if len(answered) % SECOND_EVERY == SECOND_EVERY - 1:
            return next(iter([*of_others, *fresh, *left]), None)
        return next(iter([*fresh, *of_others, *left]), None)

    def _show(self, voter: str, pair: VotePair) -> bool:
        """Put a pair on a voter's screen; False where an image of it cannot be read."""
        try:
            for file in (pair.first, pair.second, *pair.sources):
                media.read_frames(file)
            contents = [(file.read_bytes(), file.suffix) for file in (pair.first, pair.second)]
        except media.UNREADABLE:
            self.unreadable.add(pair)
            return False
        first, second = (keep_image(self.book.folder, *each) for each in contents)
        sources = {secrets.token_urlsafe(12): keep_file(self.book.folder, file) for file in pair.sources}
        tokens = [secrets.token_urlsafe(12) for _ in range(3)]
        shown = (second, first) if pair.second_left else (first, second)
        self._open[voter] = Asked(pair, first, second, *tokens, sources=sources)
        named = dict(zip(tokens[1:], shown, strict=True)) | sources
        self._images |= {token: self.book.folder / name for token, name in named.items()}
        return True

    def _close(self, voter: str) -> None:
        asked = self._open.pop(voter, None)
        if asked is not None:
            for token in (asked.left, asked.right, *asked.sources):
                del self._images[token]

    def _files(self, pair: VotePair) -> tuple[str, str] | None:
        """Names that copies of its images have; None where they cannot be read. Read again only when they changed."""
        try:
            known = [file.stat() for file in (pair.first, pair.second)]
            mark = tuple(part for each in known for part in (each.st_mtime_ns, each.st_size))
            if pair not in self._copied or self._copied[pair][0] != mark:
                first, second = (image_name(file.read_bytes(), file.suffix) for file in (pair.first, pair.second))
                self._copied[pair] = mark, (first, second)
        except OSError:
            return None
        return self._copied[pair][1]


def named(voter: str) -> str:
    """The name of a voter, stripped of spaces. Raises Refusal: empty, long, or with characters that do not print."""
    name = " ".join(voter.split())
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise Refusal(f"The name of a voter has 1 to {LONGEST_NAME} printable characters; this one is {voter[:60]!r}.")
    return name


def require_name(voter: str) -> str:
    """`named`, for the option of the command. Raises ConfigError: as there."""
    try:
        return named(voter)
    except Refusal as refusal:
        raise ConfigError(f"--voter: {refusal} Give another one") from None
