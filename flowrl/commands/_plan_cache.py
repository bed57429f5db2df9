"""Answers of `flowrl plan` that are kept: the same question is answered before torch and diffusers are imported.

A kept answer is used only while everything that it was made from is as it was:

- the words of the command line, the working directory, the environment, the width of the screen,
- the code of flowrl, Python, and every installed package by name and version,
- each file and folder that was read or listed, and each that the configuration names, whether it is there or not.

Files are compared by size and times of change. What is not certain is not kept: then the plan is measured as ever.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import stat
import sys
import sysconfig
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import flowrl
from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.files import cache_folder, is_mapping, read_object, write_atomically
from flowrl.core.versions import versions

KEPT = 64
"""Answers that are kept, the newest ones."""
_FILES = 5000
"""Most files of a folder that a configuration names; with more the answer is not kept."""
_ABSENT = "absent"
_COARSE = 20_000_000
"""Nanoseconds by which a file system's clock may be behind."""
# Of the shell and the session: nothing that flowrl or a library reads.
_OF_THE_SHELL = ("_", "OLDPWD", "PWD", "SHLVL", "WINDOWID", "LS_COLORS", "PROMPT_COMMAND")
_OF_THE_SESSION = ("SSH_", "XDG_SESSION", "TMUX", "VSCODE_", "COV_CORE", "PYTEST_")
_MAGIC = re.compile(r"[*?[]")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def folder() -> Path:
    """The folder of kept answers; FLOWRL_CACHE sets another place, as for images of data sets."""
    return cache_folder() / "plans"


def question(words: Sequence[str]) -> dict[str, Any]:
    """Plain data of what is asked, and of what answers it; the environment as a hash, since it may hold secrets."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_SHELL and not name.startswith(_OF_THE_SESSION)
    }
    shown = [sys.stdout.isatty(), os.get_terminal_size().columns if sys.stdout.isatty() else 0]
    return {
        "words": list(words),
        "folder": os.getcwd(),
        "environment": hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest(),
        "shown": shown,
        "code": _code(),
        "versions": versions() | {"machine": platform.machine()},
        "packages": _packages(),
    }


def _code() -> str:
    """Hash of the source of flowrl and its rewards."""
    package = Path(flowrl.__file__).resolve().parent
    result = hashlib.sha256()
    for root in (package, package.parent / "rewards"):
        for file in sorted(root.rglob("*.py")):
            result.update(str(file.relative_to(package.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return result.hexdigest()


def _packages() -> list[str]:
    """Installed packages with their versions, as the names of their folders of metadata say."""
    found: set[str] = set()
    for place in sys.path:
        try:
            found |= {name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))}
        except OSError:  # an archive, or a folder that is not there
            continue
    return sorted(found)


def find(asked: dict[str, Any]) -> str | None:
    """The kept answer to a question; None: there is none that is known to hold."""
    file = _file(asked)
    if not file.is_file():
        return None
    try:
        kept = read_object(file, "the plan is measured anew")
    except ConfigError:  # damaged: it is written again
        return None
    states = kept.get("states")
    if kept.get("question") != asked or not is_mapping(states):
        return None
    if any(_state(path) != state for path, state in states.items()):
        return None
    return str(kept["text"])


def keep(asked: dict[str, Any], text: str, paths: set[str], since: int | None = None) -> None:
    """Keep an answer with the state of all that it came from; a folder that cannot be written keeps nothing.

    Args:
        asked: the question.
        text: the answer.
        paths: files and folders that it came from; with a bar at its end, the names in a folder.
        since: start of the measuring, in ns; what has changed after it was perhaps read before, so nothing is kept.
    """
    states = {path: _state(path) for path in sorted(paths)}
    if None in states.values() or (since is not None and any(_changed(path, since) for path in states)):
        return
    file = _file(asked)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # words of a command line are for its user alone
        write_atomically(file, json.dumps({"question": asked, "states": states, "text": text}))
        _prune(file.parent)
    except (OSError, WriteError):  # a plan needs no disk: a full or read-only one costs the time of measuring again
        return


def _prune(place: Path) -> None:
    old = sorted(place.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)[KEPT:]
    for file in old:
        file.unlink(missing_ok=True)


def _file(asked: dict[str, Any]) -> Path:
    return folder() / f"{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()}.json"


def _state(path: str) -> str | None:
    """What a file or folder is now, with a bar at its end the names in it; None: more files than are looked at."""
    if path.endswith(os.sep):
        try:
            return " ".join(sorted(os.listdir(path)))
        except OSError:
            return _ABSENT
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # not there, no right to look, or no name of a file
        return _ABSENT
    if not stat.S_ISDIR(found.st_mode):
        return _times(found)
    result, count = hashlib.sha256(), 0
    for root, folders, files in os.walk(path):
        folders.sort()
        count += len(files) + len(folders)
        if count > _FILES:
            return None
        for name in sorted(files):
            try:
                inside = _times(os.stat(os.path.join(root, name)))
            except OSError:
                inside = _ABSENT  # a broken link
            result.update(f"{os.path.relpath(root, path)}/{name} {inside}\n".encode(errors="replace"))
        result.update("\n".join(folders).encode(errors="replace"))
    return result.hexdigest()


def _changed(path: str, since: int) -> bool:
    """Whether a file, or for one that stands for a folder's content a file in it, has changed since a time in ns."""
    places = [path]
    if not path.endswith(os.sep):
        places += [os.path.join(root, name) for root, folders, files in os.walk(path) for name in (*folders, *files)]
    for place in places:
        try:
            found = os.stat(place)
        except (OSError, ValueError):  # as for `_state`: it is not there
            continue
        if max(found.st_mtime_ns, found.st_ctime_ns) >= since - _COARSE:
            return True
    return False


def _times(found: os.stat_result) -> str:
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


@dataclass
class Reads:
    """Files and folders that this process reads while `active`, by Python's audit events."""

    paths: set[str] = field(default_factory=set)
    active: bool = False
    since: int = field(default_factory=time.time_ns)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if isinstance(path, int) or path is None:
            return
        if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.paths.add(os.path.abspath(os.fsdecode(path)) + ("" if event == "open" else os.sep))


@contextmanager
def reading() -> Generator[Reads]:
    """Tell the files that are read inside the block, but those of libraries, which their versions stand for."""
    reads = Reads()
    sys.addaudithook(reads)
    reads.active = True
    try:
        yield reads
    finally:
        reads.active = False
    reads.paths = {path for given in reads.paths if (path := _source(given)) is not None}


def _source(path: str) -> str | None:
    """The file that stands for one that was read; None: its version or the code does, or it is no file of a disk."""
    package = os.path.dirname(os.path.abspath(flowrl.__file__))
    own = (f"{package}{os.sep}", f"{os.path.join(os.path.dirname(package), 'rewards')}{os.sep}")
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries |= {os.path.realpath(one) for one in libraries}
    if path.startswith(("/proc/", "/sys/", "/dev/")) or any(path.startswith(f"{one}{os.sep}") for one in libraries):
        return None
    if path.endswith(os.sep):
        # Python lists the folders that it imports from, torch looks for its libraries in each; what they take is read.
        searched = path.rstrip(os.sep) in {os.path.abspath(one or ".") for one in sys.path}
        return None if searched or path.startswith(own) or not os.path.isdir(path) else path
    if f"{os.sep}__pycache__{os.sep}" in path:
        try:
            path = importlib.util.source_from_cache(path)
        except ValueError:  # no compiled module
            return path
    return None if path.startswith(own) and path.endswith(".py") else path


def named(tree: Any, hub: str) -> Iterator[str]:
    """Every place that a configuration may name: its texts as paths, and what the hub's cache has of a hub id."""
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from named(part, hub)
    elif isinstance(tree, str) and tree and "\n" not in tree:
        for text in {tree, tree.partition(":")[2], tree.rpartition(":")[0], tree.partition(":")[2].rpartition(":")[0]}:
            if text:
                magic = _MAGIC.search(text)  # of shards: the folder that holds them
                plain = text if magic is None else os.path.dirname(text[: magic.start()])
                yield os.path.abspath(os.path.expanduser(plain))
                if _HUB_ID.fullmatch(text):
                    yield os.path.join(hub, f"models--{text.replace('/', '--')}")


class Both(io.TextIOBase):
    """A stream that writes to another one and remembers the text."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream, self.parts = stream, list[str]()

    def write(self, text: str, /) -> int:
        self.parts.append(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # rich draws by it
        return self.stream.encoding

    def text(self) -> str:
        """All that was written."""
        return "".join(self.parts)
