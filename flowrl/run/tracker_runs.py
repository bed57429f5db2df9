"""The run of a tracker: what makes a resumed training go on in it, and how it takes values and images."""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Image
from PIL.Image import new as new_image

from flowrl.config.trackers import Entry
from flowrl.core.strict import Options
from flowrl.media import media

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

FOLDER = "trackers"
"""Folder of a run folder with the files of trackers that write to the disk."""
IMAGES = "eval/images"
"""Name of an evaluation's images."""
PROJECT = "flowrl"
"""Project of a tracker's run, unless the entry has `project`."""
_LARGEST_PX = 512
"""Longest side of an image that is sent; larger ones are made smaller."""
_FRAMES = 4
"""Frames of a video that are sent, side by side."""
_WANDB = {"console": "off", "finish_timeout": 100.0}
"""Settings of wandb: the terminal is flowrl's, and the end of a run does not wait for an upload for ever."""


@dataclass
class Mark:
    """What is known of a tracker's run between two calls of the program."""

    title: str
    run: str | None = None
    begun: bool = False
    sent: int = -1
    """The last iteration that was sent; 0 is the base's evaluation."""
    sending: int = -1
    """The last iteration of those under way; equal to `sent` unless the program was killed in between."""


def make(entry: Entry, folder: Path, mark: Mark, configuration: Options) -> "GeneralTracker":
    """accelerate's tracker of an entry, not started yet; the entry's options take precedence over flowrl's.

    `mark`: what is known of the tracker's run; `configuration`: of the training, flat; trackio replaces what it has
    stored with that of a resumed run's start.
    """
    name, title, run, options = entry.name, mark.title, mark.run, dict(entry.options)
    # TensorBoard's is a folder in that folder.
    first = str(options.pop("project", PROJECT)) if entry.kind.project else {"tensorboard": name}.get(name, title)
    ours: dict[str, Options] = {
        "tensorboard": {"purge_step": mark.sent + 1} if mark.begun else {},
        "wandb": {"id": run, "resume": "allow", "name": title, "dir": str(_wandb_dir(entry, folder))},
        "swanlab": {"id": run, "resume": "allow", "experiment_name": title, "logdir": str(folder / name)},
        "trackio": {"name": title, "resume": "allow"} | ({"config": dict(configuration)} if mark.begun else {}),
        "mlflow": {"run_name": title} | ({"run_id": run} if run else {}),
        "comet_ml": {"experiment_key": run},
        "aim": {"run_hash": run} if run else {},
        "dvclive": {
            "dir": str(folder / name),
            "resume": mark.begun,
            "dvcyaml": str(folder / name / "dvc.yaml"),  # else it writes one into the working folder
        },
        "clearml": {"task_name": title} | ({"continue_last_task": run} if run else {}),
    }
    options = ours.get(name, {}) | options
    if name == "wandb" and isinstance(options.get("settings", {}), Mapping):
        settings = {key: value for key, value in _WANDB.items() if f"WANDB_{key.upper()}" not in os.environ}
        options["settings"] = settings | dict(options.get("settings", {}))
    folder.mkdir(parents=True, exist_ok=True)
    make_one: Any = entry.tracker  # the classes' arguments differ
    return make_one(first, *([str(folder)] if make_one.requires_logging_directory else ()), **options)


def standing(entry: Entry, folder: Path, run: str | None) -> int | None:
    """The last iteration that stands in a tracker's run, by its own files; None: it has none that flowrl reads."""
    if entry.name != "wandb" or run is None:
        return None
    files = _wandb_dir(entry, folder).glob(f"wandb/*run-*-{run}/run-{run}.wandb")
    last = [max((row["_step"] for row in wandb_rows(file)), default=-1) for file in files]
    return max(last, default=None)


def _wandb_dir(entry: Entry, folder: Path) -> Path:
    """Folder in which wandb makes its folder `wandb`."""
    return Path(str(entry.options.get("dir") or os.environ.get("WANDB_DIR") or folder))


def log_images(entry: Entry, tracker: Any, files: Sequence[Path], step: int) -> None:
    """Send images of an evaluation, to a tracker that takes them."""
    how = entry.kind.images
    if how == "file":
        for file in files:
            tracker.log_artifact(str(file), f"{IMAGES}/{step:06d}")
    elif files and "log_images" in dir(tracker):
        arrays = [np.asarray(_image(file)) for file in files]
        if how == "batch":
            tracker.log_images({IMAGES: np.stack(arrays)}, step=step, dataformats="NHWC")
        elif how == "single":
            tracker.log_images({f"{IMAGES}/{number}": array for number, array in enumerate(arrays)}, step=step)
        else:
            tracker.log_images({IMAGES: arrays}, step=step)


def _image(file: Path) -> Image:
    """An image of at most `_LARGEST_PX`; of a video some frames side by side."""
    frames = media.read_frames(file)
    wanted = sorted({round(place * (len(frames) - 1) / (_FRAMES - 1)) for place in range(_FRAMES)})
    shown = [frames[number] for number in wanted]
    for frame in shown:
        frame.thumbnail((_LARGEST_PX, _LARGEST_PX))
    sheet = new_image("RGB", (sum(frame.width for frame in shown), shown[0].height))
    for place, frame in enumerate(shown):
        sheet.paste(frame, (place * frame.width, 0))
    return sheet


def flat(tree: Any, prefix: str = "") -> dict[str, str | int | float | bool]:
    """A configuration as one mapping of dotted paths; null is "null", and an empty list or mapping is JSON.

    >>> flat({"a": {"b": 1, "c": [2, {"d": None}]}, "e": []})
    {'a.b': 1, 'a.c.0': 2, 'a.c.1.d': 'null', 'e': '[]'}
    """
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    items: list[tuple[str, Any]] = [(str(key), value) for key, value in pairs]
    if not items:
        return {prefix: tree if isinstance(tree, str | int | float | bool) else json.dumps(tree)}
    return {
        path: value for key, inner in items for path, value in flat(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a row or summary, by paths with "/".

    >>> numbers({"a": 1, "b": {"c": 0.5, "d": None, "e": "x"}, "f": True})
    {'a': 1, 'b/c': 0.5}
    """
    result: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
            result[f"{prefix}{key}"] = value
    return result


# ---- wandb's own files: its writer keeps rows in memory for some seconds, which a killed run loses


_BLOCK = 32768
_HEAD = 7
"""Bytes before the first record, and before each record: checksum, length (2 bytes), kind."""
_FULL, _LAST = 1, 4
"""Kinds of a record that is complete, and of the last part of one (the others: 2 first, 3 middle)."""


def records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file, a log of LevelDB's format; a torn end is left out."""
    data, place, parts = file.read_bytes(), _HEAD, list[bytes]()
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:  # a record does not begin in the last bytes of a block
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEAD])
        part = data[place + _HEAD : place + _HEAD + length]
        if kind == 0 or len(part) < length:
            return
        place += _HEAD + length
        parts = [part] if kind < 3 else [*parts, part]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows in a `.wandb` file; `_step` is the iteration."""
    from wandb.proto import wandb_internal_pb2

    message: Any = vars(wandb_internal_pb2)["Record"]  # protobuf makes the class when it is imported
    for data in records(file):
        record = message.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            yield row | {"_step": int(record.history.step.num)}
