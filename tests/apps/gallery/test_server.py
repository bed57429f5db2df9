"""`flowrl watch`'s server: what it gives out and what it refuses, and pages that follow a run folder."""

import fcntl
import gzip
import io
import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.apps.gallery import live
from flowrl.apps.gallery.server import Server
from flowrl.apps.gallery.watched import Rows, Watched
from flowrl.core.errors import ConfigError
from flowrl.core.files import read_rows
from tests.apps.folders import change, make_run, write_scores
from tests.apps.local import ask as asked
from tests.apps.local import served

PROMPTS = ["a red circle", "two blue squares", "a <script>alert(1)</script> sign"]


def serving(*folders: Path) -> AbstractContextManager[Server]:
    return served(Server(folders, 0))


def ask(server: Server, name: str = "", method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    return asked(server, "/" + name, method, None, **headers)


def state(server: Server) -> Any:
    return json.loads(ask(server, "state")[1])


def changes(server: Server, have: str) -> Any:
    return json.loads(ask(server, f"parts?have={have}")[1])


def running(folder: Path) -> Path:
    """The run as it is under way: no tuned model, no times, no end."""
    (folder / "eval" / "tuned.json").unlink(missing_ok=True)
    (folder / "summary.json").write_text('{"status": "running", "command": "flowrl train x.yaml --resume"}')
    return folder


def add_row(folder: Path, iteration: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": iteration, "reward/total_mean": iteration / 100}) + "\n")


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """As a process that trains holds the folder; another descriptor of this process counts as another one."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", prompts=PROMPTS, iterations=40)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SHARE", 0)


# ---- what it gives out


def test_page_and_images_are_served_and_nothing_is_written(folder):
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    with serving(folder) as server:
        status, page, headers = ask(server)
        assert status == 200
        assert headers["Content-Type"].startswith("text/html")
        text = page.decode()
        assert "data:image" not in text
        assert "<script>alert(1)" not in text
        addresses = re.findall(r'src="(files/[^"]+)"', text)
        assert addresses
        assert not re.search(r'(?:src|href)="(?!files/|#|data:,")', text), "addresses are relative"
        for address in set(addresses):
            status, data, headers = ask(server, address.replace("&amp;", "&"))
            assert status == 200
            assert headers["Content-Type"] == "image/png"
            Image.open(io.BytesIO(data)).verify()
        packed = ask(server, "", **{"Accept-Encoding": "gzip"})[1]
        assert gzip.decompress(packed) == page
        assert ask(server, "", "HEAD")[:2] == (200, b"")
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_a_large_image_comes_small_and_links_to_its_file(folder):
    for file in folder.glob("eval/*/*.png"):
        Image.new("RGB", (900, 600), (200, 90, 40)).save(file)
    with serving(folder) as server:
        text = ask(server)[1].decode()
        small, link = re.findall(r'<a href="(files/[^"]+)">\s*<img[^>]* src="([^"]+)" width="384" height="256"', text)[
            0
        ]
        small, link = link.replace("&amp;", "&"), small
        assert Image.open(io.BytesIO(ask(server, small)[1])).size == (384, 256)
        assert Image.open(io.BytesIO(ask(server, link)[1])).size == (900, 600)


@pytest.mark.parametrize(
    "name",
    [
        *("files/0/config.yaml", "files/0/summary.json", "files/0/gallery/index.html", "files/0/", "files/", "files/0"),
        *("files/0/../secret.png", "files/0/%2e%2e/secret.png", "files/0/eval/..%2f..%2f../secret.png"),
        *("files/0//etc/passwd", "files/0/%2fetc%2fpasswd", "../secret.png", "files/1/eval/base/00000-0.png"),
        *("files/-1/x.png", "files/x/x.png", "files/0/out.png", "files/0/outside/secret.png", "files/0/named.png"),
        *("files/0/a%00b.png", "files/0/circle.png", "run/0/", "favicon.ico", "eval/base/00000-0.png"),
    ],
)
def test_no_other_file_is_given_out(folder, name):
    secret = folder.parent / "secret.png"
    Image.new("RGB", (4, 4)).save(secret)
    (folder / "out.png").symlink_to(secret)
    (folder / "outside").symlink_to(folder.parent)
    (folder / "named.png").symlink_to(folder / "config.yaml")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    with serving(folder) as server:
        assert ask(server, name)[0] == 404


def test_it_only_reads(folder):
    with serving(folder) as server:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, _, headers = ask(server, "state", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_another_name_than_this_machines_is_refused(folder):
    with serving(folder) as server:
        evil = ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil:80", "", "10.0.0.1")
        for host in evil:
            for name in ("", "state", "files/0/eval/base/00000-0.png"):
                assert ask(server, name, Host=host)[0] == 403, host
        for host in ("localhost", "localhost:1", "127.0.0.1:65000", "[::1]:80", "LOCALHOST:8080"):
            assert ask(server, "state", Host=host)[0] == 200, host
        assert server.server_address[0] == "127.0.0.1"


# ---- what it says, and how it follows the run


def test_a_new_row_changes_the_curves_alone(folder):
    running(folder)
    with serving(folder) as server, locked(folder):
        first = changes(server, "")
        assert "main" in first
        assert state(server)["version"] == first["version"]
        add_row(folder, 41)
        new = state(server)
        assert new["version"] != first["version"]
        assert new["runs"][0]["text"] == "Live: iteration 41."
        second = changes(server, first["version"])
        assert set(second["parts"]) == {"run-0-head", "run-0-curves"}
        assert second["version"] == new["version"]
        assert changes(server, second["version"])["parts"] == {}
        assert "main" in changes(server, "of-another-server")


def test_a_new_evaluation_changes_the_sections_of_images(folder):
    running(folder)
    tuned = json.loads((folder / "eval" / "base.json").read_text()) | {"iteration": 41}
    shutil.copytree(folder / "eval" / "base", folder / "eval" / "iteration-000041")
    with serving(folder) as server, locked(folder):
        before = changes(server, "")["version"]
        (folder / "eval" / "iteration-000041.json").write_text(json.dumps(tuned)[:100])
        half = state(server)
        assert half["problem"] == ""
        assert "half written" in changes(server, before)["parts"]["run-0-head"]
        (folder / "eval" / "iteration-000041.json").write_text(json.dumps(tuned))
        found = changes(server, before)["parts"]
        assert {"run-0-head", "run-0-film", "run-0-pairs", "run-0-prompts"} <= set(found)
        assert "half written" not in found["run-0-head"]


def test_states_of_a_run(folder):
    running(folder)
    with serving(folder) as server:
        with locked(folder):
            assert state(server)["state"] == "live"
        died = state(server)["runs"][0]
        assert died["state"] == "died"
        assert died["text"].startswith("Died at iteration 40 (it was killed")
        assert died["command"] == "flowrl train x.yaml --resume"
        assert 0 <= died["age_s"] < 3600
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", died["at"])
        assert "The run died" in ask(server)[1].decode()
        # Rows that come while nobody here holds the lock are of a run on another machine.
        add_row(folder, 41)
        assert state(server)["state"] == "live"
        assert "The run died" not in ask(server)[1].decode()
        (folder / "summary.json").write_text('{"status": "finished", "iterations": 41}')
        ended = state(server)
        assert (ended["state"], ended["over"], ended["runs"][0]["command"]) == ("ended", True, "")
        assert ended["runs"][0]["text"] == "Finished at iteration 41."
        (folder / "summary.json").unlink()
        shutil.rmtree(folder)
        gone = state(server)
        assert gone["state"] == "gone"
        assert "no longer there" in gone["runs"][0]["text"]
        assert ask(server)[0] == 200, "the page shows what was read last"
        assert gone["problem"] == "" or str(folder) in gone["problem"]


def test_a_run_without_rows_and_evaluations_waits_for_them(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: new\niterations: 5\n")
    with serving(folder) as server, locked(folder):
        assert state(server)["runs"][0]["text"] == "Live: waits for the first evaluation."
        first = changes(server, "")["version"]
        (folder / "eval").mkdir()
        write_scores(folder, "base", {"m": np.ones((1, 1))}, prompts=["a"])
        assert state(server)["runs"][0]["text"] == "Live: waits for the first iteration."
        add_row(folder, 1)
        assert state(server)["runs"][0]["text"] == "Live: iteration 1 of 5."
        assert "run-0-curves" in changes(server, first)["parts"]
    with serving(folder) as server:
        assert "no summary.json" in state(server)["runs"][0]["text"]


def test_several_runs_are_compared_and_have_pages_of_their_own(folder, tmp_path):
    names = ("run", "two", "three", "four")
    for name in names[1:]:
        shutil.copytree(folder, tmp_path / name)
        change(tmp_path / name / "config.yaml", name=name)
    running(tmp_path / "four")
    with serving(*(tmp_path / name for name in names)) as server:
        assert state(server)["text"] == "4 runs: 1 died, 3 ended."
        page = ask(server)[1].decode()
        assert "4 runs compared" in page
        assert 'href="run/3/"' in page
        own = ask(server, "run/3/")[1].decode()
        assert 'src="../../files/3/eval/' in own
        assert json.loads(ask(server, "run/3/state")[1])["state"] == "died"
        before = changes(server, "")["version"]
        add_row(tmp_path / "four", 41)
        assert "m0-leaders" in changes(server, before)["parts"]


def test_parts_that_are_about_another_metric_than_before_come_with_their_frame(folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    with serving(folder, other) as server:
        before = changes(server, "")
        assert re.findall(r'data-metric="(\w+)"', before["main"]) == ["shapes_strict", "shapes_partial"]
        for run in (folder, other):
            change(run / "summary.json", primary="shapes_partial")
        after = changes(server, before["version"])
        assert "parts" not in after, "the page would keep the old metric around the new numbers"
        assert re.findall(r'data-metric="(\w+)"', after["main"]) == ["shapes_partial", "shapes_strict"]


# ---- rows


def test_rows_are_read_once_and_equal_those_of_the_whole_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = Rows(file)
    assert rows.read() == ([], False)
    text = "".join(json.dumps({"iteration": i, "x": i * 0.1}) + "\n" for i in range(1, 30))
    for cut in (10, 11, 200, 201, len(text) - 3, len(text)):
        file.write_text(text[:cut])
        expected, torn = read_rows(file)
        found, half = rows.read()
        # A last line without its end is complete for the reader of whole files where it happens to parse.
        assert found == expected[: len(found)]
        assert len(expected) - len(found) in ((0,) if half == torn else (0, 1))
    assert len(rows.read()[0]) == 29
    # A resumed run replaces the file by a shorter one.
    shorter = tmp_path / "new"
    shorter.write_text(text[: text.index('{"iteration": 6')])
    os.replace(shorter, file)
    assert [row["iteration"] for row in rows.read()[0]] == [1, 2, 3, 4, 5]
    file.write_text('{"no iteration": 1}\n{"iteration": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1"):
        rows.read()


def test_a_damaged_row_leaves_the_last_page_and_names_the_line(folder):
    with serving(folder) as server:
        text = (folder / "metrics.jsonl").read_text().splitlines()
        text[3] = "no row"
        (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")
        assert "damaged" in state(server)["runs"][0]["text"]
        assert ask(server)[0] == 200
        assert "metrics.jsonl:4" in state(server)["problem"]


def test_the_lock_is_asked_without_taking_it(folder):
    running(folder)
    watched = Watched(folder)
    with locked(folder):
        watched.look()
        assert watched.alive
    watched.look()
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- what is refused


def test_a_folder_that_is_no_run_is_named(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    reasons = {"none": "no such folder", "empty": "is empty", "other": "no config.yaml", "other/x": "file"}
    for place, why in reasons.items():
        with pytest.raises(ConfigError, match=f"{place} is not a run: .*{why}.*flowrl train"):
            Server([folder, tmp_path / place], 0)


def test_a_port_in_use_is_named_and_the_default_takes_the_next(folder, monkeypatch):
    with serving(folder) as server:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=f"--port {port}: another program listens there; leave out --port"):
            Server([folder], port)
        monkeypatch.setattr("flowrl.apps.gallery.local.PORT", port)
        with Server([folder]) as other:
            assert port < other.server_address[1]


def test_runs_that_cannot_be_compared_are_refused(folder, tmp_path):
    other = make_run(tmp_path / "other", prompts=["another prompt", "one more", "and a third"], iterations=40)
    with pytest.raises(ConfigError, match="shares no prompt"):
        Server([folder, other], 0)


def test_a_page_is_not_built_more_often_than_its_share(folder, monkeypatch):
    monkeypatch.setattr(live, "SHARE", 1e6)
    running(folder)
    with serving(folder) as server, locked(folder):
        before = changes(server, "")["version"]
        add_row(folder, 41)
        assert changes(server, before)["version"] == before
        assert state(server)["version"] != before
        monkeypatch.setattr(live, "SHARE", 0)
        assert changes(server, before)["version"] != before


def test_a_question_costs_calls_of_stat_and_reads_no_file(folder, monkeypatch):
    with serving(folder) as server:
        state(server)
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("a file was read"))
        monkeypatch.setattr(live, "load_run", lambda *_, **__: pytest.fail("the page was built"))
        assert state(server)["over"]
