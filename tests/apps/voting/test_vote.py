"""`flowrl vote`: a scripted voter over HTTP, what the server refuses, the order of the pairs, and the numbers."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from flowrl.apps.gallery.local import HOST
from flowrl.apps.voting.ballot import SECOND_EVERY, Ballot, Refusal, named, require_name
from flowrl.apps.voting.pairs import Finished, VotePair, load_pairs
from flowrl.apps.voting.result import result
from flowrl.apps.voting.server import LARGEST_BODY, TOKEN, VoteServer
from flowrl.apps.voting.waiting import Waiting, waits
from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.polls import Vote
from flowrl.data.options import PreferenceOptions
from flowrl.data.preferences import load_preferences
from flowrl.media import media
from flowrl.run.people.votes import LOG, VoteBook
from tests.apps.folders import SEEDS, change, make_run
from tests.apps.local import ask, served

PROMPTS = ["a red circle", "two blue squares", "a <script>alert(1)</script> sign"]


@contextmanager
def voting(folder: Path, port: int = 0) -> Generator[VoteServer]:
    paper = Waiting(folder) if waits(folder) else Finished(load_pairs(folder))
    books: list[VoteBook] = []

    def ballot(address: str) -> Ballot:
        books.append(VoteBook(folder / "votes", address))
        return Ballot(paper, books[0])

    server = VoteServer(ballot, "ann", port)
    with books[0], served(server):
        yield server


class Page:
    """What a browser that has the page does."""

    def __init__(self, server: VoteServer, voter: str = "ann") -> None:
        self.server, self.voter = server, voter
        self.html = self.ask("GET", "/")[1].decode()
        found = re.search(r'name="vote-token" content="([^"]+)"', self.html)
        assert found
        self.headers = {"Origin": server.address[:-1], "Content-Type": "application/json", TOKEN: found[1]}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        return ask(self.server, path, method, body, **headers)

    def post(self, question: str, **said: str) -> tuple[int, Any]:
        status, data, _ = self.ask(
            "POST", "/" + question, json.dumps({"voter": self.voter, **said}).encode(), **self.headers
        )
        return status, json.loads(data)

    def state(self) -> Any:
        status, state = self.post("ask")
        assert status == 200
        return state

    def vote(self, choice: str) -> Any:
        status, state = self.post("vote", pair=self.state()["pair"]["token"], choice=choice)
        assert status == 200, state
        return state


def prefer(page: Page, what: str) -> Any:
    """Vote for the image of base or tuned, as somebody does who knows them by their looks."""
    pair = page.state()["pair"]
    open_one = page.server.ballot.shown(page.voter)
    assert open_one is not None
    shown = Image.open(io.BytesIO(page.ask("GET", "/" + pair["left"])[1])).tobytes()
    left = "tuned" if shown == Image.open(open_one.second).tobytes() else "base"
    return page.vote("left" if left == what else "right")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", prompts=PROMPTS, iterations=20)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "votes" / name).read_text().splitlines()]


# ---- voting


def test_a_vote_that_is_in_the_log_is_not_asked_again_where_the_pairs_could_not_be_written(folder, monkeypatch):
    with voting(folder) as server:
        page = Page(server)
        pair = page.state()["pair"]
        with monkeypatch.context() as patch:
            patch.setattr("flowrl.run.people.votes.write_atomically", _full)
            status, said = page.post("vote", pair=pair["token"], choice="left")
        assert (status, "pairs.jsonl" in said["problem"]) == (507, True)
        assert page.post("vote", pair=pair["token"], choice="left")[0] == 409
        assert len(server.ballot.book.votes) == 1
        page.vote("right")
    assert len((folder / "votes" / "pairs.jsonl").read_text().splitlines()) == 2


def _full(file: Path, text: str) -> None:
    raise WriteError(f"{file} could not be written")


def test_the_page_and_its_images_do_not_name_the_models(folder):
    for file in folder.glob("eval/*/*.png"):
        opened = Image.open(file)
        opened.load()
        note = PngInfo()
        note.add_text("flowrl", json.dumps({"tag": file.parent.name}))
        opened.save(file, pnginfo=note)
    with voting(folder) as server:
        page = Page(server)
        pair = page.state()["pair"]
        text = page.html + json.dumps(pair)
        for name in ("page.js", "page.css"):
            status, data, _ = page.ask("GET", "/" + name)
            assert status == 200
            text += data.decode()
        assert not re.search(r"\b(base|tuned|eval)\b", text)
        for side in ("left", "right"):
            status, data, headers = page.ask("GET", "/" + pair[side])
            assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "image/png", "no-store")
            assert Image.open(io.BytesIO(data)).info == {}


def test_votes_are_pairs_that_a_run_can_train_on(folder):
    with voting(folder) as server:
        page = Page(server)
        first = page.state()["pair"]["prompt"]
        assert prefer(page, "tuned")["answered"] == 1
        second = page.state()["pair"]["prompt"]
        prefer(page, "base")
        assert page.vote("tie")["answered"] == 3
        page.vote("skip")
    pairs = lines(folder, "pairs.jsonl")
    assert [pair["prompt"] for pair in pairs] == [first, second]
    assert [vote["choice"] for vote in lines(folder, LOG)] == ["second", "first", "tie", "skip"]
    # A later evaluation does not change what was voted on.
    seen = [(folder / "votes" / pair["chosen"]).read_bytes() for pair in pairs]
    number = PROMPTS.index(first)
    assert seen[0] in [(folder / "eval" / "tuned" / f"{number:05d}-{k}.png").read_bytes() for k in range(len(SEEDS))]
    for file in folder.glob("eval/*/*.png"):
        Image.new("RGB", (8, 8)).save(file)
    assert [(folder / "votes" / pair["chosen"]).read_bytes() for pair in pairs] == seen
    read = load_preferences(str(folder / "votes"), "data.pairs.path", PreferenceOptions())
    assert [read.read(i).prompt.text for i in range(2)] == [first, second]
    assert read.read(0).chosen.open().size == (32, 32)


def test_undo_takes_the_vote_back_and_shows_its_pair_again(folder):
    with voting(folder) as server:
        page = Page(server)
        before = page.state()["pair"]["prompt"]
        assert page.post("undo")[0] == 409
        assert page.vote("left")["pair"]["prompt"] != before
        status, state = page.post("undo")
        assert (status, state["pair"]["prompt"], state["answered"], state["undoable"]) == (200, before, 0, False)
        assert lines(folder, "pairs.jsonl") == []
        page.vote("right")
        assert len(lines(folder, "pairs.jsonl")) == 1


def test_a_voter_is_not_asked_again_by_a_later_call_unless_the_images_are_others(folder):
    with voting(folder) as server:
        page = Page(server)
        for choice in ("left", "skip", "tie"):
            page.vote(choice)
        shown = server.ballot.shown("ann")
        assert shown is not None
    with voting(folder) as server:
        page = Page(server)
        assert page.state()["answered"] == 3
        assert server.ballot.shown("ann") == shown
        while page.state()["pair"]:
            page.vote("tie")
        assert page.state()["answered"] == len(PROMPTS) * len(SEEDS) == len(server.ballot.of_present_images())
    for file in folder.glob("eval/tuned/00000-*.png"):
        Image.new("RGB", (32, 32), (9, 9, 9)).save(file)
    with voting(folder) as server:
        assert Page(server).state()["answered"] == (len(PROMPTS) - 1) * len(SEEDS)
        assert len(server.ballot.of_present_images()) == (len(PROMPTS) - 1) * len(SEEDS)


def test_an_answer_counts_once_and_only_for_the_pair_on_the_screen(folder):
    with voting(folder) as server:
        page = Page(server)
        token = page.state()["pair"]["token"]
        assert page.post("vote", pair=token, choice="left")[0] == 200
        assert page.post("vote", pair=token, choice="left")[0] == 409
        assert page.post("vote", pair=page.state()["pair"]["token"], choice="best")[0] == 409
        assert page.post("vote", choice="left")[0] == 409
        for name in ("", "   ", 41 * "a", "a\x07"):
            assert page.post("ask", voter=name)[0] == 409
        assert len(lines(folder, LOG)) == 1


def test_voters_share_the_pairs_and_meet_at_every_fourth(folder):
    with voting(folder) as server:
        ann, bob = Page(server), Page(server, "bob")
        of_ann, of_bob = [], []
        for _ in range(SECOND_EVERY):
            for page, list_ in ((ann, of_ann), (bob, of_bob)):
                page.state()
                list_.append(server.ballot.shown(page.voter))
            ann.vote("tie")
            prefer(bob, "tuned")
        assert not set(of_ann[:-1]) & set(of_bob[:-1])
        assert of_ann[-1] in of_bob
        assert of_bob[-1] in of_ann
        found = result(server.ballot.of_present_images())
        assert found.voters == {"ann": 4, "bob": 4}
        assert (found.compared, found.agreed) == (2, 0)


def test_a_video_in_mp4_is_shown_as_a_webp_of_the_same_frames(folder):
    pytest.importorskip("av", reason="needs the extra video")
    frames = torch.arange(5, dtype=torch.uint8).mul(40).view(5, 1, 1, 1).expand(5, 3, 16, 16).contiguous()
    for file in folder.glob("eval/*/*.png"):
        media.write(frames, file.with_suffix(""), fps=8, form="mp4")
        file.unlink()
    with voting(folder) as server:
        page = Page(server)
        pair = page.state()["pair"]
        status, data, headers = page.ask("GET", "/" + pair["left"])
    assert pair["noun"] == "video"
    assert (status, headers["Content-Type"]) == (200, "image/webp")
    (folder / "shown.webp").write_bytes(data)
    shown, fps = media.decode_video(folder / "shown.webp")
    assert (len(shown), fps) == (5, 8)
    assert int((shown.int() - frames.int()).abs().max()) <= 3, "H.264's rounding"


def test_an_image_that_cannot_be_read_is_left_out_and_said(folder):
    first = load_pairs(folder)[0]
    first.second.write_bytes(b"no image")
    with voting(folder) as server:
        state = Page(server).state()
        assert state["total"] == len(PROMPTS) * len(SEEDS) - 1
        assert server.ballot.unreadable == {first}


# ---- the order, and the numbers


def test_the_order_spreads_over_prompts_and_sides_are_drawn_by_identity(finished, tmp_path):
    pairs = load_pairs(finished)
    assert len(pairs) == len(PROMPTS) * len(SEEDS)
    for start in range(0, len(pairs), len(PROMPTS)):
        assert {pair.prompt for pair in pairs[start : start + len(PROMPTS)]} == set(PROMPTS)
    assert pairs == load_pairs(finished)
    other = Path(shutil.copytree(finished, tmp_path / "run"))
    change(other / "config.yaml", seed=1)
    assert [p.group for p in pairs] != [p.group for p in load_pairs(other)]
    many = load_pairs(make_run(tmp_path / "many", num_prompts=40, iterations=20, size=4))
    left = sum(pair.second_left for pair in many)
    assert abs(left - len(many) / 2) < 5 * (len(many) / 4) ** 0.5, "five standard deviations of a coin"


def test_the_win_rate_weighs_prompts_alike_and_a_tie_is_half(finished):
    def voted(number: int, choice: str, voter: str = "ann") -> Any:
        pair = VotePair(prompt="p", group="g", distinct=number, first=Path("b"), second=Path("t"), second_left=True)
        return pair, Vote(voter=voter, group="g", prompt="p", first="b", second="t", choice=choice)

    votes = [voted(0, "second"), voted(0, "second", "bob"), voted(1, "first"), voted(2, "tie"), voted(3, "skip")]
    found = result(votes)
    assert (found.votes, found.ties, found.skips, found.win["n"]) == (4, 1, 1, 3)
    assert found.win["mean"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert (found.agreed, found.compared) == (1, 1)
    assert "win rate of tuned over base 0.500 (" in found.lines()[1]
    assert "nobody has decided a pair yet" in result(votes[4:]).lines()[1]


# ---- what is refused


def test_answers_of_other_pages_are_refused_and_change_nothing(folder):
    with voting(folder) as server:
        page = Page(server)
        good = {"voter": "ann", "pair": page.state()["pair"]["token"], "choice": "left"}

        def refused(code: int, headers: dict[str, str | None], body: bytes = json.dumps(good).encode()) -> None:
            sent = {key: value for key, value in {**page.headers, **headers}.items() if value is not None}
            assert page.ask("POST", "/vote", body, **sent)[0] == code

        for origin in ("http://evil.example", "null", None, "http://127.0.0.1:1", "https" + server.address[4:-1]):
            refused(403, {"Origin": origin})
        for token in ("", "x" * 32, None):
            refused(403, {TOKEN: token})
        refused(403, {"Host": "evil.example", "Origin": "http://evil.example"})
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            refused(415, {"Content-Type": kind})
        refused(413, {}, json.dumps(good | {"more": "x" * LARGEST_BODY}).encode())
        refused(413, {"Content-Length": "99999999999"})
        refused(411, {"Content-Length": "-1"})
        for body in (b"", b"{", b"[]", b"\xff", b'{"voter": 1}'):
            refused(400, {}, body)
        assert page.ask("POST", "/votes", b"{}", **page.headers)[0] == 404
        assert page.ask("PUT", "/vote")[0] == 405
        for path in ("/image/x", "/votes.jsonl", "/image/../votes.jsonl", "/page.html", "/eval/base/00000-0.png"):
            assert page.ask("GET", path)[0] == 404
        assert not (folder / "votes" / LOG).read_bytes()
        refused(200, {})
        assert len(lines(folder, LOG)) == 1


def vote(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "flowrl", "vote", *words, "--no-open"], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_runs_without_both_images_are_refused_with_the_remedy(folder, tmp_path):
    (folder / "eval" / "tuned.json").rename(tmp_path / "tuned.json")
    written = r"no eval/tuned.json: its evaluation was not written.*flowrl train .*--resume"
    with pytest.raises(ConfigError, match=written):
        load_pairs(folder)
    (folder / "summary.json").write_text('{"status": "stopped", "command": "flowrl train x --resume"}')
    with pytest.raises(ConfigError, match=r"has not finished \(status stopped\); finish it with `flowrl train x --res"):
        load_pairs(folder)
    (tmp_path / "tuned.json").rename(folder / "eval" / "tuned.json")
    shutil.rmtree(folder / "eval" / "tuned")
    with pytest.raises(ConfigError, match=r"images of both base and tuned were saved; train with eval.save_images"):
        load_pairs(folder)
    code, said = vote(str(folder))
    assert (code, said.count("\n")) == (2, 1)


def test_a_port_in_use_a_second_server_and_a_damaged_file_are_refused(folder):
    with voting(folder) as server:
        with pytest.raises(ConfigError, match="another program listens"), voting(folder, server.server_address[1]):
            pass
        with pytest.raises(ConfigError, match=f"takes votes already, at {server.address}"), voting(folder):
            pass
    (folder / "votes" / LOG).write_text("no vote\n")
    with pytest.raises(ConfigError, match=r"votes.jsonl:1 is damaged"), voting(folder):
        pass
    (folder / "votes" / LOG).unlink()
    with voting(folder) as server:
        assert Page(server).state()["answered"] == 0


@pytest.fixture
def heeded():
    """Ctrl-C as in a terminal: a process inherits that it is ignored, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_command_ends_by_ctrl_c_with_the_numbers(folder, heeded):
    words = [sys.executable, "-m", "flowrl", "vote", str(folder), "--port", "0", "--no-open", "--voter", "ann"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.search(r"at http://127\.0\.0\.1:(\d+)/", line)
            assert found, process.communicate()
            page = Page(AnotherServer(int(found[1])))
            page.vote("tie")
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert "votes: 1 (ann 1), ties among them: 1, skipped: 0" in said
    assert "win rate of tuned over base 0.500" in said
    assert f"data.pairs.path={folder / 'votes'}" in said


class AnotherServer(VoteServer):
    """The address of a server of another process."""

    def __init__(self, port: int) -> None:
        self.server_address = (HOST, port)


def test_the_name_of_a_voter_on_the_command_line_is_checked():
    assert named("  ann  lee ") == "ann lee"
    with pytest.raises(Refusal):
        named("\0")
    with pytest.raises(ConfigError, match=r"--voter: .*1 to 40"):
        require_name(50 * "a")
