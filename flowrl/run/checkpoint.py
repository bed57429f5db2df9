"""Checkpoints: all state of a bitwise resume, written atomically, verified when read.

A checkpoint is a folder `iteration-000040` with `state.safetensors`, `state.json` and `manifest.json`
(sizes and SHA-256 of the other two). It is written under a temporary name, fsynced, then renamed.
Tensors that are split over N processes are in N files, `state-00000.safetensors` and on; `state.json` then holds
the rows of each file, so that any other number of processes can read it.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrl.core.errors import CheckpointError as CheckpointError
from flowrl.core.errors import OutOfMemory, UnwritableCheckpoint
from flowrl.core.files import file_sha256, fsync, loads, write_atomically
from flowrl.run.people.votes import FOLDER
from flowrl.training.sharding import Rows
from flowrl.training.world import ALONE, World

FORMAT = 2
KEPT = "kept.json"
"""Checkpoints that retention leaves alone, in the folder of all checkpoints: iteration -> why."""
STATE = "state.json"
_TENSORS = re.compile(r"state(-\d{5})?\.safetensors")
_ASIDE = ".old.tmp"
"""Ending of a checkpoint that a new one of the same iteration is about to replace; its name begins with a dot."""
_TEMPORARY = re.compile(r"\..+\.tmp|\.tmp.*|\.writable.*")
"""Names of temporary files: ours, safetensors' (.tmp with random letters), and the one that tests a folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named tensors and plain data of the end of an iteration."""

    iteration: int
    tensors: dict[str, Tensor]
    state: dict
    rows: dict[str, Rows] = field(default_factory=dict)
    """First row and end of each tensor that is split over processes."""


def path_of(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:06d}"


def available(folder: Path) -> list[int]:
    """Iterations with a finished checkpoint, ascending."""
    if not folder.is_dir():
        return []
    result = [re.fullmatch(r"iteration-(\d{6,})", entry.name) for entry in folder.iterdir()]
    return sorted(int(match.group(1)) for match in result if match)


def kept(folder: Path) -> dict[int, str]:
    """Iterations whose checkpoints are kept whatever retention says, with the reason; {} if the file is damaged."""
    try:
        return {int(iteration): str(why) for iteration, why in loads((folder / KEPT).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def retain(folder: Path, iteration: int, why: str) -> None:
    """Keep the checkpoint of an iteration, written or about to be, whatever retention says."""
    entries = kept(folder) | {iteration: why}
    write_atomically(folder / KEPT, json.dumps({str(key): entries[key] for key in sorted(entries)}, indent=1) + "\n")


def set_aside(folder: Path, first: int) -> list[int]:
    """Rename the checkpoints of an iteration and of later ones to `diverged-...`, which no run reads; their iterations.

    Their weights make samples that are not finite, so a run that goes on from them ends there again.
    """
    found = [iteration for iteration in available(folder) if iteration >= first]
    for iteration in found:
        target = folder / f"diverged-{iteration:06d}"
        shutil.rmtree(target, ignore_errors=True)
        os.rename(path_of(folder, iteration), target)
    return found


def save(folder: Path, checkpoint: Checkpoint, keep: int, world: World = ALONE, spared: Collection[int] = ()) -> Path:
    """Write a checkpoint and drop all but the newest `keep`, those that are kept in any case, and the `spared` ones.

    The folder holds all checkpoints, on a file system that the processes share. Tensors named in the `rows` of the
    checkpoint hold these rows alone; all processes of `world` call this, and each writes a file. `spared`: iterations
    whose checkpoints stay.

    Raises CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    target = path_of(folder, checkpoint.iteration)
    temporary = folder / f".{target.name}.tmp"
    try:
        world.together(lambda: _make_empty(temporary) if world.main else None)
        parts = world.together(lambda: _write_tensors(temporary, checkpoint, world))
        world.together(lambda: _complete(temporary, target, checkpoint, parts) if world.main else None)
    except (torch.OutOfMemoryError, OutOfMemory):  # no fault of the disk
        raise
    except Exception as error:  # safetensors reports a full disk with an error class of its own
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # the next call of the run tries again; `error` is the one to tell
                _take_back(folder)
        earlier = available(folder)
        safe = f"iteration {earlier[-1]} is safe" if earlier else "there is no earlier checkpoint"
        raise UnwritableCheckpoint(
            f"could not save {target}: {error}; {safe}. Free some space or mend the folder, then go on with --resume"
        ) from error
    if world.main:
        always = kept(folder)
        for iteration in set([each for each in available(folder) if each not in always][:-keep]).difference(spared):
            shutil.rmtree(path_of(folder, iteration))
    return target


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_tensors(folder: Path, checkpoint: Checkpoint, world: World) -> tuple[str, dict, dict[str, Rows]]:
    """Write this process's file, the first process also what is not split; (name, fingerprint, rows in it)."""
    from safetensors.torch import save_file

    name = "state.safetensors" if world.size == 1 else f"state-{world.rank:05d}.safetensors"
    rows = {key: (first, last) for key, (first, last) in checkpoint.rows.items() if first < last}
    chosen = [key for key in checkpoint.tensors if key in rows or (world.main and key not in checkpoint.rows)]
    save_file({key: checkpoint.tensors[key].detach().cpu().contiguous() for key in chosen}, folder / name)
    fsync(folder / name)
    return name, fingerprint(folder / name), rows


def _complete(temporary: Path, target: Path, checkpoint: Checkpoint, parts: list[tuple[str, dict, dict]]) -> None:
    """Add the plain data and the manifest, then give the folder its name."""
    plain = {"format": FORMAT, "iteration": checkpoint.iteration} | checkpoint.state
    if checkpoint.rows:
        plain["rows"] = {name: rows for name, _, rows in parts}
    (temporary / STATE).write_text(json.dumps(plain, indent=1))
    manifest = {name: fingerprint for name, fingerprint, _ in parts} | {STATE: fingerprint(temporary / STATE)}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for name in (STATE, "manifest.json"):
        fsync(temporary / name)
    fsync(temporary)
    _give_name(temporary, target)


def _give_name(temporary: Path, target: Path) -> None:
    """Give a complete checkpoint its name; an earlier one of its iteration is set aside until then.

    A kill in between leaves the earlier one, which `remove_leftovers` gives its name back.
    """
    aside = target.with_name(f".{target.name}{_ASIDE}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(temporary, target)
    fsync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _take_back(folder: Path) -> None:
    """Give checkpoints that were set aside their names back, where the new ones never came."""
    for aside in folder.glob(f".iteration-*{_ASIDE}"):
        target = folder / aside.name.removeprefix(".").removesuffix(_ASIDE)
        if not target.exists():
            os.rename(aside, target)


def load(
    folder: Path, iteration: int, wanted: Callable[[str], Rows | None] = lambda name: None, verify: slice = slice(None)
) -> Checkpoint:
    """Read and verify a checkpoint. `wanted`: the rows to read of a tensor, which may be in several files; None: all of
    it. `verify`: the files of tensors to hash, where several processes share that work.

    Raises CheckpointError: a file is missing, truncated or changed.
    """
    source = path_of(folder, iteration)
    others = [i for i in available(folder) if i < iteration]
    remedy = f"delete {source} to go on from " + (f"iteration {others[-1]}" if others else "the start")
    try:
        manifest = loads((source / "manifest.json").read_text(encoding="utf-8"))
        files = sorted(name for name in manifest if _TENSORS.fullmatch(name))
        for name in (STATE, *files[verify]):
            if fingerprint(source / name) != manifest[name]:
                raise CheckpointError(f"checkpoint {source / name} is truncated or was changed; {remedy}")
        state = loads((source / STATE).read_text())
        index = state.pop("rows", {})
        if not files or index.keys() - set(files):
            raise KeyError("the manifest leaves out a file of tensors")
        if state.pop("format") != FORMAT:
            raise CheckpointError(f"checkpoint {source} was written by another version of flowrl; {remedy}")
        return Checkpoint(state.pop("iteration"), _read(source, files, index, wanted), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {source} is damaged ({type(error).__name__}: {error}); {remedy}") from error


def _read(
    source: Path, files: list[str], index: dict[str, dict[str, Rows]], wanted: Callable[[str], Rows | None]
) -> dict[str, Tensor]:
    """The wanted rows of the tensors of all files."""
    pieces: dict[str, list[Tensor]] = {}
    for file in files:
        with safe_open(source / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is not a dict
                part = opened.get_slice(name)
                shape, rows = part.get_shape(), wanted(name)
                if rows is None or not shape:
                    piece = opened.get_tensor(name)
                else:
                    first, last = index.get(file, {}).get(name, (0, shape[0]))
                    low, high = (min(max(row, first), last) - first for row in rows)
                    piece = part[low:high]
                pieces.setdefault(name, []).append(piece)
    return {name: result[0] if len(result) == 1 else torch.cat(result) for name, result in pieces.items()}


def fingerprint(file: Path) -> dict:
    """Size and SHA-256 of a file, as the manifest has them."""
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed run left half written in its folder: files and folders with temporary names.

    Those of the votes stay: `flowrl vote` may be writing them. A checkpoint that was being replaced is kept.
    """
    _take_back(folder / "checkpoints")
    # Longest first: the folder of a checkpoint goes after what is in it.
    for path in sorted(folder.rglob(".*"), reverse=True):
        if not _TEMPORARY.fullmatch(path.name) or path.is_relative_to(folder / FOLDER):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
