"""The display in a terminal, in a pipe and as JSON, without a run."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.display import display
from flowrl.display.console import log, set_up_logging, verdict
from flowrl.display.display import KINDS, Display, Progress, opened, working
from tests.terminals import in_terminal

DOCS = Path(__file__).resolve().parents[2] / "docs" / "watching.md"
RUN = """
import os, sys, time
from flowrl.display import display
from flowrl.display.board import Scores
with display.opened():
    display.run_starts(0, 4)
    for i in range(1, 4):
        with display.working("iteration"), display.Progress(3, f"iteration {i}: sampling", show=True) as bar:
            for _ in range(3):
                time.sleep(0.05)
                bar.update(1)
                print("a line of the log", i)
        display.current().board.add_evaluation(Scores((1,), "held-out x", 0.1 * i), 1, 0.1)
        display.iteration_done({"iteration": i, "reward/total_mean": 0.5 + i})
        time.sleep(0.12)
        display.current().refresh()
        os.write(2, b"a warning of another process".ljust(79) + b"\\n")
    sys.stderr.write("another bar 10%\\r")
    sys.stderr.write("another bar 20%\\n")
print("the end")
"""


@pytest.fixture(autouse=True)
def nothing_is_open():
    handlers = list(log.handlers)
    yield
    assert display.current() is display.NONE
    log.handlers[:] = handlers


def on_screen(output: str) -> list[str]:
    """The lines that stay in a terminal (of the four sequences that the display uses)."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, lines = row + 1, lines + [""] * (row + 2 - len(lines))
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif part == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif part.startswith("\x1b"):
            assert part.endswith("A"), part
            row -= int(part[2:-1])
        else:
            lines[row] = (lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]).rstrip()
            column += len(part)
    return [line for line in lines if line]


def test_a_terminal_shows_bars_and_keeps_the_lines_of_the_log_alone():
    code, output = in_terminal("-c", RUN)
    assert "iteration 1/4 [#####...............]" in output
    assert re.search(r"iteration 2: sampling \[#+\.*\] \d/3", output)
    assert "held-out x 0.200 \u2191 +0.100" in output
    logged = [*["a line of the log"] * 3, "a warning of another process"] * 3
    assert code == 0
    assert [line.rstrip(" 123") for line in on_screen(output)] == [*logged, "another bar 20%", "the end"]
    assert "\x1b[?25l" not in output  # the cursor is never hidden


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"TERM": "dumb"}])
def test_a_terminal_of_ascii_or_without_sequences_gets_what_it_can_show(environment: dict[str, str]):
    _, output = in_terminal("-c", RUN, environment=environment)
    assert output.isascii()
    assert ("\x1b" in output) == ("TERM" not in environment)
    assert output.count("a line of the log") == 9


def test_a_pipe_gets_plain_lines_about_what_takes_long(monkeypatch: pytest.MonkeyPatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shown = Display()
    with_work = display.Work("loading", clock[0])
    shown.begin(with_work)
    for seconds in (1.0, 1.5, 10.0, 25.0):  # 1001, 1002.5, 1012.5, 1037.5
        clock[0] += seconds
        shown.refresh(late=True)
    assert err.getvalue() == "loading, 2 s\nloading, 38 s\n"


def test_other_processes_and_quiet_ones_say_nothing(monkeypatch: pytest.MonkeyPatch):
    cases: tuple[tuple[display.Mode, bool], ...] = (("auto", False), ("quiet", True))
    for mode, main in cases:
        err = io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        with opened(mode, main=main) as shown, working("loading"):
            for work in shown.board.works:
                work.started -= 100
            shown.refresh(late=True)
            assert err.getvalue() == ""


def test_quiet_shows_warnings_and_the_verdict(capsys: pytest.CaptureFixture[str]):
    with opened("quiet"):
        set_up_logging(None, main=True)
        log.info("a row")
        log.warning("a warning")
        verdict.info("the verdict")
    assert capsys.readouterr().out == "a warning\nthe verdict\n"


def test_json_alone_is_on_the_output_stream(capsys: pytest.CaptureFixture[str]):
    with opened("json"):
        set_up_logging(None, main=True)
        print("a print of a reward")
        log.info("a row")
        log.warning("a warning")
        verdict.info("the verdict")
        display.iteration_done({"iteration": 1, "reward/total_mean": float("nan")})
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows == [
        {"kind": "warning", "level": "warning", "process": 0, "text": "a warning"},
        {"kind": "iteration", "iteration": 1, "reward/total_mean": None},
    ]
    assert err == "a print of a reward\n"


def test_the_kinds_of_objects_are_those_of_the_docs():
    table = DOCS.read_text(encoding="utf-8").split("## Progress")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == KINDS


def test_a_stream_that_nobody_reads_is_said_once_and_ends_nothing():
    code = (
        "import time; from flowrl.display.console import log, set_up_logging; from flowrl.display import display\n"
        "with display.opened():\n  set_up_logging(None, main=True)\n"
        "  for i in range(9): log.info('row %d', i); time.sleep(0.02)\n"
        "import sys; print('went on', file=sys.stderr)"
    )
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("nobody reads"), err.count("Traceback")) == (0, 1, 0)
    assert err.endswith("went on\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "show", "count"), [(io.StringIO(), True, 3), (Terminal(), False, 3), (Terminal(), True, 0)]
)
def test_a_bar_of_its_own_is_quiet_in_a_pipe_without_samples_and_where_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, show: bool, count: int
):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(count, "sampling", show=show) as bar:
        bar.update(count)
        assert display.current() is display.NONE
    assert stream.getvalue() == ""


def test_a_bar_of_its_own_ends_full_and_is_wiped(monkeypatch: pytest.MonkeyPatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(8, "sampling", show=True) as bar:
        for _ in range(4):
            bar.update(2)
            time.sleep(0.11)  # a terminal is drawn ten times a second
    text = stream.getvalue()
    assert "sampling" in text
    assert "8/8" in text
    assert text.endswith("\x1b[J")
    assert display.current() is display.NONE


def test_a_forked_process_has_no_display():
    with opened("quiet"):
        child = os.fork()
        if child == 0:
            os._exit(0 if display.current() is display.NONE else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_display_imports_no_torch():
    code = "import sys, flowrl.display.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_screen_is_left_as_it_was():
    before = (sys.stdout, sys.stderr, logging.raiseExceptions)
    with opened("json"):
        assert sys.stdout is sys.stderr
    assert (sys.stdout, sys.stderr, logging.raiseExceptions) == before
