"""The run of a tracker: what makes a resumed training go on in it, and how it takes values and images."""

from __future__ import annotations

import json
import os
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowrl.config.trackers import Entry
from flowrl.core.strict import Options
from flowrl.media import media
from flowrl.run import wandb_files

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from PIL.Image import Image

FOLDER = "trackers"
"""Folder of a run folder with the files of trackers that write to the disk."""
PROJECT = "flowrl"
"""Project of a tracker's run, unless the entry has `project`."""
_LARGEST_PX = 512
"""Longest side of an image that is sent; larger ones are made smaller."""
_FRAMES = 4
"""Frames of a video that are sent, side by side."""
_WANDB = {"console": "off", "finish_timeout": 100.0}
"""Settings of wandb: the terminal is flowrl's, and the end of a run does not wait for an upload for ever."""


@runtime_checkable
class TakesImages(Protocol):
    """A tracker with images."""

    def log_images(self, values: Any, step: int | None = None, **options: Any) -> None: ...


@runtime_checkable
class TakesFiles(Protocol):
    """A tracker with files."""

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None: ...


def new_id(name: str) -> str | None:
    """A tracker run's id that flowrl chooses before its start; None: the tracker chooses it, or has none."""
    if name == "wandb":
        return secrets.token_hex(4)
    if name == "swanlab":
        return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
    return secrets.token_hex(16) if name == "comet_ml" else None


def learned_id(name: str, tracker: Any) -> str | None:
    """The id that a tracker has given its run at the start; None: it has none."""
    learn: dict[str, Callable[[Any], Any]] = {
        "mlflow": lambda run: run.info.run_id,
        "aim": lambda run: run.hash,
        "clearml": lambda task: task.id,
    }
    return str(learn[name](tracker)) if name in learn else None


def make(
    entry: Entry, folder: Path, title: str, run: str | None, *, resumed: bool, last: int, configuration: Options
) -> GeneralTracker:
    """accelerate's tracker of an entry, not started yet; the entry's options take precedence over flowrl's.

    Args:
        entry: the tracker with its options.
        folder: folder for files of trackers.
        title: name of the run when the tracker's run began.
        run: id of the tracker's run; None: it has none, or none yet.
        resumed: whether the tracker's run has begun in an earlier call.
        last: the last iteration that stands in it.
        configuration: of the training, flat; trackio replaces what it has stored with that of a resumed run's start.
    """
    name, options = entry.name, dict(entry.options)
    project = str(options.pop("project", PROJECT)) if entry.kind.project else title
    ours: dict[str, Options] = {
        "tensorboard": {"purge_step": last + 1} if resumed else {},
        "wandb": {"id": run, "resume": "allow", "name": title, "dir": str(_wandb_dir(entry, folder))},
        "swanlab": {"id": run, "resume": "allow", "experiment_name": title, "logdir": str(folder / name)},
        "trackio": {"name": title, "resume": "allow"} | ({"config": dict(configuration)} if resumed else {}),
        "mlflow": {"run_name": title} | ({"run_id": run} if run else {}),
        "comet_ml": {"experiment_key": run},
        "aim": {"run_hash": run} if run else {},
        "dvclive": {
            "dir": str(folder / name),
            "resume": resumed,
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
    if name == "tensorboard":  # a folder in that folder
        return make_one(name, str(folder), **options)
    if make_one.requires_logging_directory:
        return make_one(project, str(folder), **options)
    return make_one(project, **options)


def standing(entry: Entry, folder: Path, run: str | None) -> int | None:
    """The last iteration that stands in a tracker's run, by its own files; None: it has none that flowrl reads."""
    if entry.name != "wandb" or run is None:
        return None
    found = wandb_files.steps(_wandb_dir(entry, folder), run)
    return None if found is None else max(found, default=-1)


def _wandb_dir(entry: Entry, folder: Path) -> Path:
    """Folder in which wandb makes its folder `wandb`."""
    return Path(str(entry.options.get("dir") or os.environ.get("WANDB_DIR") or folder))


def log_values(entry: Entry, tracker: GeneralTracker, values: Mapping[str, float], step: int) -> None:
    """Send the numbers of an iteration, after its images."""
    # wandb keeps a row open for more of its step otherwise.
    tracker.log(dict(values), step=step, **({"commit": True} if entry.name == "wandb" else {}))


def log_images(entry: Entry, tracker: GeneralTracker, name: str, files: Sequence[Path], step: int) -> None:
    """Send images of an evaluation, to a tracker that takes them."""
    import numpy as np

    how = entry.kind.images
    if how == "file":
        if isinstance(tracker, TakesFiles):
            for file in files:
                tracker.log_artifact(str(file), f"{name}/{step:06d}")
        return
    if not isinstance(tracker, TakesImages) or not files:
        return
    arrays = [np.asarray(_image(file)) for file in files]
    if how == "batch":
        tracker.log_images({name: np.stack(arrays)}, step=step, dataformats="NHWC")
    elif how == "single":
        tracker.log_images({f"{name}/{number}": array for number, array in enumerate(arrays)}, step=step)
    else:
        tracker.log_images({name: arrays}, step=step)


def _image(file: Path) -> Image:
    """An image of at most `_LARGEST_PX`; of a video some frames side by side."""
    from PIL import Image as Pillow

    frames = media.read_frames(file)
    wanted = sorted({round(place * (len(frames) - 1) / (_FRAMES - 1)) for place in range(_FRAMES)})
    shown = [frames[number] for number in wanted]
    for frame in shown:
        frame.thumbnail((_LARGEST_PX, _LARGEST_PX))
    sheet = Pillow.new("RGB", (sum(frame.width for frame in shown), shown[0].height))
    for place, frame in enumerate(shown):
        sheet.paste(frame, (place * frame.width, 0))
    return sheet


def flat(tree: Any, prefix: str = "") -> dict[str, str | int | float | bool]:
    """A configuration as one mapping of dotted paths; null is "null", and an empty list or mapping is JSON.

    >>> flat({"a": {"b": 1, "c": [2, {"d": None}]}, "e": []})
    {'a.b': 1, 'a.c.0': 2, 'a.c.1.d': 'null', 'e': '[]'}
    """
    items: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(str(number), value) for number, value in enumerate(tree)]
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
