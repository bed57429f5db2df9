"""Files that commands write and read back: where results go, a disk that fails, a file that is damaged."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flowrl.core.errors import ConfigError, WriteError


@contextmanager
def writing(what: str | Path, safe: str = "what was written before it is safe") -> Iterator[None]:
    """Turn what a full disk or a read-only folder raises inside the block into one message.

    Args:
        what: file or folder.
        safe: what is not lost.

    Raises:
        WriteError: naming it, why, and how to go on.
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


def out_folder(path: Path, file: str = "", option: str = "--out") -> Path:
    """The folder that a command writes to, made where it is not there yet.

    Args:
        path: as the user gave it.
        file: name of what the command writes there, if that is one file.
        option: that names the folder.

    Raises:
        ConfigError: it is a file, is named like one, or nothing can be written there.
    """
    holds = f", in which it writes {file}" if file else ""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option} {path}: it is a file; give a folder{holds}")
    if file and path.suffix == Path(file).suffix and not path.is_dir():
        raise ConfigError(
            f"{option} {path}: it takes a folder{holds}; leave out the file's name: {option} {path.with_suffix('')}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: it cannot be written ({error.strerror}); choose another place") from None
    return path


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: it is damaged; `remedy` says what is safe to do.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # bytes that are no text, text that is no JSON
        raise damaged(file, error, remedy) from error
    if not isinstance(result, dict):
        raise damaged(file, TypeError(f"it holds a {type(result).__name__}"), remedy)
    return result


def json_ready(value: Any) -> Any:
    """A copy of plain data for JSON, which knows neither NaN nor infinity: null stands for them.

    >>> json_ready({"a": [0.5, float("nan")], "b": float("inf")})
    {'a': [0.5, None], 'b': None}
    """
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def damaged(file: Path, error: Exception, remedy: str) -> ConfigError:
    """The refusal of a file that cannot be understood."""
    reason = (str(error).splitlines() or [""])[0]
    return ConfigError(f"{file} is damaged ({type(error).__name__}: {reason}); {remedy}")


def of_evaluation(file: Path) -> str:
    """What is safe to do about a damaged `eval/<tag>.json` of a run."""
    if file.name.startswith("base"):
        return (
            "restore it from a copy; without one delete it: a run without a checkpoint makes it again, and behind a "
            "checkpoint the untouched weights are gone, so a comparison with them needs a new run under another name"
        )
    return "delete it: a resumed run makes again what follows its checkpoint, and the report does without the rest"


def read_rows(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of `metrics.jsonl`, and whether its last line is torn, as a killed run leaves it, and left out.

    Raises:
        ConfigError: another line is no JSON object with an iteration.
    """
    if not file.is_file():
        return [], False
    rows: list[dict[str, Any]] = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append(row | {"iteration": int(row["iteration"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            if number == len(lines):
                return rows, True
            raise ConfigError(
                f"{file}:{number} is no JSON object with an iteration; delete the line: checkpoints do not depend on "
                "it, and the curves lose one point"
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
    """The same for every file below a folder, and the folders."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        fsync(path)


def write_atomically(file: Path, text: str) -> None:
    """A small text file that is either the old one or the new one, never half of it, also after a power cut.

    Raises:
        WriteError: the disk is full or not writable; the old one is there still.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, file)
        fsync(file.parent)
