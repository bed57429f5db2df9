"""Files of runs and commands: folders for results, failing disks, damaged files, plain data of JSON."""

import hashlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from safetensors import SafetensorError

from flowrl.core.errors import ConfigError, Remedy, WriteError

_Made = TypeVar("_Made")


@contextmanager
def writing(what: str | Path, safe: str = "what was written before it is safe") -> Generator[None]:
    """Turn errors of a full disk or a read-only folder inside the block into one message. `safe` says what is not lost.
    Raises WriteError: with the name, the reason, and how to go on.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with a class of its own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WriteError(
            f"{what} could not be written ({reason}); {safe}. Free some space or mend the folder, then give the same "
            "command again, a training with --resume"
        ) from error


def cache_folder() -> Path:
    """Folder of what flowrl can make again, such as images of data sets; FLOWRL_CACHE sets another place."""
    cache = os.environ.get("FLOWRL_CACHE") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/flowrl"
    return Path(cache).expanduser().resolve()


def out_folder(path: Path, file: str = "") -> Path:
    """The folder that a command writes to; it is made if it is missing. `file`: name of the file that the command
    writes there, if it is one.

    Raises ConfigError: it is a file, is named like one, or cannot be written.
    """
    holds = f", in which it writes {file}" if file else ""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path}: it is a file; give a folder{holds}")
    if file and path.suffix == Path(file).suffix and not path.is_dir():
        raise ConfigError(f"--out {path}: it takes a folder{holds}", Remedy(flag=f"--out {path.with_suffix('')}"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
            pass
    except OSError as error:
        raise ConfigError(f"--out {path}: it cannot be written ({error.strerror}); choose another place") from None
    return path


def loads(text: str | bytes, **options: Any) -> Any:
    """`json.loads` for texts of other people, in which thousands of brackets are a ValueError too."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError: the file is damaged; `remedy` says what is safe to do."""
    try:
        result = loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not text, or not JSON
        raise damaged(file, error, remedy) from error
    if not is_mapping(result):
        raise damaged(file, TypeError(f"it holds a {type(result).__name__}"), remedy)
    return result


def parsed(file: Path, remedy: str, make: Callable[[dict[str, Any]], _Made]) -> _Made:
    """What `make` makes of the JSON object in a file. Raises ConfigError: it is damaged, or of another version."""
    record = read_object(file, remedy)
    try:
        return make(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, error, remedy) from error


def known_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if it is missing or damaged."""
    try:
        return read_object(file, "")
    except ConfigError:
        return {}


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's contents."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether plain data are a mapping, an object in JSON."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether plain data are a list."""
    return isinstance(value, list)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether plain data are a list or a tuple."""
    return isinstance(value, list | tuple)


def json_ready(value: Any) -> Any:
    """A copy of plain data with null for NaN and infinity, which JSON does not have.

    >>> json_ready({"a": [0.5, float("nan")], "b": float("inf")})
    {'a': [0.5, None], 'b': None}
    """
    if is_mapping(value):
        return {k: json_ready(v) for k, v in value.items()}
    if is_sequence(value):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def damaged(file: Path, error: Exception, remedy: str) -> ConfigError:
    """The error about a damaged file."""
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, KeyError):
        return ConfigError(f"{file} has no {reason}: it is damaged, or of another version of flowrl; {remedy}")
    return ConfigError(f"{file} is damaged ({type(error).__name__}: {reason}); {remedy}")


def evaluation_remedy(file: Path) -> str:
    """Remedy for a damaged `eval/<tag>.json` of a run."""
    if file.name.startswith("base"):
        return (
            "restore it from a copy; without one delete it: a run without a checkpoint makes it again, and after a "
            "checkpoint the untouched weights are gone, so a comparison with them needs a new run under another name"
        )
    return "delete it: a resumed run makes again what follows its checkpoint, and the report leaves out the rest"


def read_rows(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """(rows of `metrics.jsonl`, whether a last line that a killed run left incomplete was skipped).

    Raises ConfigError: another line is not a JSON object with an iteration.
    """
    if not file.is_file():
        return [], False
    rows: list[dict[str, Any]] = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = loads(line)
            rows.append(row | {"iteration": int(row["iteration"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            if number == len(lines):
                return rows, True
            raise ConfigError(
                f"{file}:{number} is not a JSON object with an iteration; delete the line: checkpoints do not depend "
                "on it, and the curves lose one point"
            ) from None
    return rows, False


def fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_all(folder: Path) -> None:
    """Wait until a folder with everything in it is on the disk.

    Several at a time: one after the other each file waits for a commit of its own, and a thousand of them for seconds.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16, "fsync") as pool:
        for done in [pool.submit(fsync, path) for path in folder.rglob("*")]:
            done.result()
    for path in (folder, folder.parent):
        fsync(path)


@contextmanager
def replaced(file: Path, safe: str = "what was written before it is safe") -> Generator[Path]:
    """A path to write to, which no other process has; it becomes `file` at the end of the block, so none reads a part.

    Raises WriteError: as `writing`, which gets the sentence `safe`; the old file remains.
    """
    temporary = file.with_name(f".{uuid.uuid4().hex}.tmp")
    with writing(file, safe):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            fsync(temporary)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(file: Path, text: str) -> None:
    """Write a small text file; even after a power cut it is the old or the new one, never a part.

    Raises WriteError: the disk is full or not writable; the old file remains.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, file)
        fsync(file.parent)
