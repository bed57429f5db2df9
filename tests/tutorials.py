"""Reads the pages of docs/tutorials and runs their commands: `python -m tests.tutorials PAGE` in an empty folder.

A block ```bash holds commands, any other block with a title (```python title="warm.py") is a file that the reader
writes. A comment before a block says what a test runs in place of it: `<!-- test: WORDS -->`, with WORDS one of

    key=value ...       options added to each command of the block that takes a configuration; `model=NAME` is one of
                        MODELS. Nothing but what makes a run small may be changed: SMALL.
    instead COMMAND     the command of the block needs weights, a cluster or a program of it; COMMAND stands in for it.
    installs            the command makes or enters the environment that the test is in already: INSTALLS.
    serves              the command stays up until the page ends; the test goes on once it answers.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def run(page: Path) -> None:
    """Do what the page says, in the working directory.

    Raises:
        SystemExit: a command failed, or a block is not as the tests want it.
    """
    servers: list[subprocess.Popen[bytes]] = []
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
                    _one(replaced(block, line))
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _one(line: str) -> None:
    from flowrl.cli import main

    print(f"$ {line}", flush=True)
    words, began = shlex.split(line, comments=True), time.monotonic()
    # flowrl runs in this process, so that the libraries are loaded once a page.
    if words[0] == "flowrl" and not {"|", ">", "&&"} & set(words):
        sys.argv = words
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
    else:
        code = subprocess.run(["bash", "-c", line], check=False).returncode
    print(f"({time.monotonic() - began:.1f} s)", flush=True)
    if code:
        raise SystemExit(f"{line}: exit code {code}")


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


if __name__ == "__main__":
    run(Path(sys.argv[1]))
