"""Run the commands of a tutorial (docs/tutorials), in the working directory, which should be an empty folder.

    python -m scripts.pages tutorials PAGE.md          small runs, as the tests do it
    python -m scripts.pages tutorials PAGE.md --full   the commands as they stand; their times go onto the page

PYTHONPATH names the repository, whose scripts an empty folder does not have.

A block ```bash holds commands, any other block with a title (```python title="warm.py") is a file that the reader
writes. A comment before a block says what a test runs in place of it: `<!-- test: WORDS -->`, with WORDS one of

    key=value ...       options added to each command of the block that takes a configuration; `model=NAME` is one of
                        MODELS. Nothing but what makes a run small may be changed: SMALL.
    instead COMMAND     the command of the block needs weights, a cluster or a program of it; COMMAND stands in for it.
    installs            the command makes or enters the environment that the test is in already: INSTALLS.
    serves              the command stays up until the page ends; the test goes on once it answers.

With `--full` options that only make a run small are left out. A block whose model or command was replaced stays
replaced: it is no part of the page's times. A page that keeps times has a line `<!-- times -->`, a table, and a line
`<!-- end of times -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("*.md"))
INSTALLS = ("git clone", "cd flowrl", "bash scripts/quickstart.sh", "source .venv/bin/activate")
CONFIGURED = ("train", "plan", "sweep", "pairs")
"""Commands whose further words may be options of a configuration."""
PLAIN = ("cat", "curl", "ls", "python")
"""Programs that a page may call besides flowrl."""
MODELS = {
    "tiny-sd3": "model={path: tiny-sd3, max_sequence_length: 9, lora: {rank: 4, alpha: 8}}",
    "tiny-sd": "model={path: tiny-sd, lora: {rank: 4, alpha: 8}}",
}
"""Name of a stand-in -> the option that puts it in the place of the page's model."""
SMALL = re.compile(
    r"iterations|seed|name|rewards|data\.(prompts|eval_prompts|max_eval_prompts|cache_text|pairs)|eval\.[a-z_.]+"
    r"|rollout\.(prompts_per_iteration|group_size|batch_size|num_inference_steps)|checkpoint\.(every|keep)"
    r"|optim\.(batch_size|updates_per_iteration)|data\.pairs\.(path|eval|per_iteration|max_eval|crop)"
)
"""Options that a test may set: the size of a run, and what would need a download."""
TIMES = re.compile(r"(?<=<!-- times -->\n\n).*?(?=\n\n<!-- end of times -->)", flags=re.S)
"""The table of a page's times."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    """Name of the file that is written; "" for commands."""
    text: str
    test: str
    """What the comment before it says; "" without one."""

    @property
    def as_written(self) -> bool:
        """Whether a full run executes its commands unchanged, so that their times are the page's."""
        kept = self.test in ("", "serves") or not (
            self.test.startswith(("instead ", "model=")) or self.test == "installs"
        )
        return not self.title and kept

    @property
    def commands(self) -> list[str]:
        """Its commands, without comments, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page in order, output (```text) left out."""
    found = re.findall(
        r'(?:<!-- test: ([^\n]*?) -->\n+)?^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', page, flags=re.S | re.M
    )
    result = [Block(language, title, text, test) for test, language, title, text in found if language != "text"]
    if page.count("<!-- test:") != sum(bool(block.test) for block in result):
        raise ValueError("a comment `<!-- test: ... -->` stands before no block")
    return result


def faults(block: Block) -> list[str]:
    """What a test could not run, or may not replace."""
    if block.title:
        return [] if not block.test else [f"{block.title} is a file; what replaces a command does not belong to it"]
    if block.language != "bash":
        return [f"a block of {block.language} has no title"]
    if block.test == "installs":
        return [f"{line!r} installs nothing" for line in block.commands if not line.startswith(INSTALLS)]
    if block.test.startswith("instead "):
        known = program(block.test.removeprefix("instead ")) == "flowrl"
        return ([] if known else [f"{block.test!r}: only flowrl may stand in"]) + (
            [] if len(block.commands) == 1 else [f"{block.test!r} stands in for {len(block.commands)} commands"]
        )
    result = [] if block.test == "serves" else [f"{key} may not be replaced" for key in set_by(block) if not legal(key)]
    for line in block.commands:
        words = shlex.split(line, comments=True)
        if program(line) not in ("flowrl", *PLAIN):
            result.append(f"the tests do not know how to run {line!r}")
        elif words[:2] in (["flowrl", "train"], ["flowrl", "sweep"]) and "iterations=2" not in block.test:
            result.append(f"{line!r} has no iterations=2 in a comment before it")
    return result


def program(line: str) -> str:
    return next((word for word in shlex.split(line) if "=" not in word), "")


def set_by(block: Block) -> list[str]:
    return [word.partition("=")[0] for word in shlex.split(block.test)]


def legal(key: str) -> bool:
    return key == "model" or SMALL.fullmatch(key) is not None


def replaced(block: Block, line: str) -> str:
    """The command that a test runs."""
    if block.test.startswith("instead "):
        return block.test.removeprefix("instead ")
    words = shlex.split(line, comments=True)
    if block.test in ("", "serves") or words[:1] != ["flowrl"] or words[1] not in CONFIGURED:
        return line
    for word in shlex.split(block.test):
        key, _, value = word.partition("=")
        words.append(MODELS[value] if key == "model" else word)
    return shlex.join(words)


def run(page: Path, *, full: bool = False) -> list[tuple[str, float, float]]:
    """Do what the page says, in the working directory.

    Args:
        page: a file of docs/tutorials.
        full: the commands as they stand, each in a process of its own; else as small as the page's comments say.

    Returns:
        Command, seconds and CPU seconds of each command of the page that ran unchanged; servers left out.

    Raises:
        SystemExit: a command failed, or a block is not as the tests want it.
    """
    servers: list[subprocess.Popen[bytes]] = []
    result: list[tuple[str, float, float]] = []
    try:
        for block in blocks(page.read_text(encoding="ascii")):
            if wrong := faults(block):
                raise SystemExit("\n".join(wrong))
            if block.title:
                Path(block.title).write_text(block.text, encoding="ascii")
            elif block.test == "serves":
                servers += [_served(line) for line in block.commands]
            elif block.test != "installs":
                for line in block.commands:
                    written = full and block.as_written
                    took = _one(line if written else replaced(block, line), apart=full)
                    result += [(line, *took)] if written or replaced(block, line) == line else []
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    return result


def table(times: list[tuple[str, float, float]]) -> str:
    """Rows of a page: flowrl's commands, seconds and CPU seconds. Others take no time worth a row."""
    rows = [f"| `{line}` | {took:.0f} | {cpu:.0f} |" for line, took, cpu in times if program(line) == "flowrl"]
    return "\n".join(["| command | seconds | CPU seconds |", "|---|---|---|", *rows])


def _one(line: str, *, apart: bool) -> tuple[float, float]:
    """Run a command. flowrl runs in this process unless `apart`, so that the libraries are loaded once a page."""
    from flowrl.cli import main

    print(f"$ {line}", flush=True)
    words, began, before = shlex.split(line, comments=True), time.monotonic(), _cpu()
    if words[0] == "flowrl" and not apart and not {"|", ">", "&&"} & set(words):
        sys.argv = words
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
    else:
        code = subprocess.run(["bash", "-c", line], check=False).returncode
    result = time.monotonic() - began, _cpu() - before
    print(f"({result[0]:.1f} s)", flush=True)
    if code:
        raise SystemExit(f"{line}: exit code {code}")
    return result


def _cpu() -> float:
    """CPU seconds of this process and of those that it waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in spent)


def _served(line: str) -> subprocess.Popen[bytes]:
    print(f"$ {line} &", flush=True)
    words = shlex.split(line, comments=True)
    server = subprocess.Popen([sys.executable, "-m", *words])
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"{line}: ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{words[words.index('--port') + 1]}/health", timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    server.kill()
    raise SystemExit(f"{line}: no answer in 60 s")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages tutorials",
        description=__doc__.partition("\n\n")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", type=Path, help="a file of docs/tutorials")
    parser.add_argument("--full", action="store_true", help="the commands as they stand; write their times to the page")
    options = parser.parse_args(words)
    text = options.page.read_text(encoding="ascii")
    if options.full and not TIMES.search(text):
        raise SystemExit(
            f"{options.page}: no lines <!-- times --> and <!-- end of times --> to write the times between"
        )
    if os.listdir():
        raise SystemExit(f"{Path.cwd()} is not empty; a page's first command begins in an empty folder")
    page = options.page.resolve()
    times = run(page, full=options.full)
    if options.full:
        page.write_text(TIMES.sub(lambda _: table(times), text), encoding="ascii")
        print(table(times))
