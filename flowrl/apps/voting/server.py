"""The server of `flowrl vote`: its page, the images on it, and the answers of voters.

It listens as `flowrl watch` does (flowrl/apps/gallery/local.py). An answer changes a file, so one is taken only from
the page itself: JSON, with the origin of this server and the token that was in the page, which no other page can read.
"""

import html
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.apps.gallery.local import LocalHandler, LocalServer
from flowrl.apps.plain_text import Named
from flowrl.apps.voting.ballot import LONGEST_NAME, Ballot, Refusal
from flowrl.core.errors import WriteError
from flowrl.core.files import is_mapping, loads
from flowrl.media import media

LARGEST_BODY = 4096
"""Bytes of the longest answer that is read."""
TOKEN = "X-Vote-Token"
"""Header with the token of the page."""
_PAGE = Path(__file__).parent
_KINDS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class VoteServer(LocalServer):
    """The page of a run, for several voters at once."""

    def __init__(
        self, ballot: Callable[[str], Ballot], voter: str, port: int | None, told: Callable[[str], None] | None = None
    ) -> None:
        """Bind the port (as for `LocalServer`), then open the votes: `ballot` makes the ballot, given the address.
        `voter`: name that the page begins with; `told` is called with the name of a voter who has answered every pair.

        Raises ConfigError: a port in use, or what `ballot` raises.
        """
        super().__init__(port, VoteHandler)
        self.voter, self.token, self._told = voter, secrets.token_urlsafe(24), told
        try:
            self.ballot = ballot(self.address)
        except BaseException:
            self.server_close()
            raise

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve until the server is shut down or interrupted; then no answer is taken any more."""
        try:
            super().serve_forever(poll_interval)
        finally:
            self.ballot.end()

    def page(self) -> str:
        """The page, with the token and the name in it."""
        values = {"TOKEN": self.token, "VOTER": self.voter, "LONGEST": str(LONGEST_NAME)}
        text = (_PAGE / "page.html").read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace(f"@{name}@", html.escape(value))
        return text

    def answered(self, question: str, said: dict[str, Any]) -> dict[str, Any]:
        """What becomes of a question of the page; as the methods of the ballot."""
        if question == "vote":
            state = self.ballot.vote(_text(said, "voter"), _text(said, "pair"), _text(said, "choice"))
            if state["pair"] is None and not state["waits"] and self._told is not None:
                self._told(state["voter"])
            return state
        return {"undo": self.ballot.undo, "ask": self.ballot.ask}[question](_text(said, "voter"))


class VoteHandler(LocalHandler):
    """Answers of the server."""

    @property
    def site(self) -> VoteServer:
        assert isinstance(self.server, VoteServer)
        return self.server

    def get(self, path: str, query: str) -> None:
        if path == "":
            data = self.site.page().encode("utf-8", "replace")
            self.send_data(200, data, "text/html; charset=utf-8", {"Content-Security-Policy": _POLICY})
        elif path in _KINDS:
            self.send_data(200, (_PAGE / path).read_bytes(), _KINDS[path])
        elif path.startswith("image/"):
            self._image(path.removeprefix("image/"))
        else:
            self.send_text(404, "There is no such page.")

    def _image(self, token: str) -> None:
        try:
            found = self.site.ballot.image(token)
        except media.UNREADABLE:  # the copy was deleted, or damaged since
            found = None
        if found is None:
            self.send_text(404, "There is no such image on a page.")
            return
        self.send_data(200, found[0], f"image/{found[1]}", {"Content-Security-Policy": "default-src 'none'"})

    def do_POST(self) -> None:
        if not self.from_here():
            return
        said = self._said()
        if said is None:
            return
        try:
            self.send_json(self.site.answered(self.path.removeprefix("/"), said))
        except Refusal as refusal:
            self.send_json({"problem": str(refusal)}, 409)
        except WriteError as error:
            self.send_json({"problem": Named({})(str(error))}, 507)

    def _said(self) -> dict[str, Any] | None:
        """The JSON object of a question that came from the page; None: it was refused."""
        why = self._fault()
        if why is None:
            try:
                said = loads(self.rfile.read(int(self.headers["Content-Length"])))
                if is_mapping(said) and all(isinstance(value, str) for value in said.values()):
                    return said
            except ValueError:  # no JSON, or no text
                pass
            why = 400, "The body is not a JSON object of texts."
        self.close_connection = True
        self.send_text(*why)
        return None

    def _fault(self) -> tuple[int, str] | None:
        """(code, sentence) of what is wrong with a question before its body is read; None: nothing."""
        length = self.headers.get("Content-Length", "")
        given = self.headers.get(TOKEN, "").encode("utf-8", "replace")
        if self.path not in ("/ask", "/vote", "/undo"):
            return 404, "There is no such question: ask, vote and undo are."
        if self.headers.get("Origin", "").lower() != f"http://{self.headers['Host'].strip().lower()}":
            return 403, "Answers are taken from the page of this server alone."
        if not secrets.compare_digest(given, self.site.token.encode()):
            return 403, "The page is of an earlier flowrl vote: load it again."
        if self.headers.get_content_type() != "application/json":
            return 415, "The body must be application/json."
        if not length.isdecimal():
            return 411, "The length of the body is missing."
        if int(length) > LARGEST_BODY:
            return 413, f"The body has more than {LARGEST_BODY} bytes."
        return None


def _text(said: dict[str, Any], key: str) -> str:
    """A value of the question. Raises Refusal: it is missing."""
    if key not in said:
        raise Refusal(f"The question lacks {key!r}.")
    return said[key]
