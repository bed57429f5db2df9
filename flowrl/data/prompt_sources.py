"""Sources of prompts: files (flowrl/data/prompt_files.py), data sets of Hugging Face, the shapes world.

A record has a prompt, perhaps images, and metadata for the rewards: all its other values. Images are passed as paths.
Those inside a data set are written to the user's cache under the hash of their content, so that their paths are the
same for every run, process and resume.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flowrl import moving_shapes, shapes
from flowrl.core.assets import embedded_prompts
from flowrl.core.errors import ConfigError
from flowrl.core.files import cache_folder
from flowrl.core.paths import lost, lost_in, split_of
from flowrl.core.registry import suggest
from flowrl.data.prompt_files import FORMS, REFERENCE, TEXTS, NoText, missing_package, note_sampler_keys, read_records
from flowrl.data.prompts import Prompt
from flowrl.media.media import UNREADABLE, open_image, opened


@dataclass(frozen=True, slots=True)
class Columns:
    """Keys of a record, or columns of a table."""

    prompt: str | tuple[str, ...] = "prompt"
    """Key of the text; several: the first of them that the record has."""
    image: str | None = None
    """Key of an image or a list of images; None: `image` or `images`, if there is one."""
    subset: str | None = None
    """Subset of a data set that has several."""
    names_sample: bool = False
    """Whether `image` names the sample that the record is about, which is then metadata and no reference image."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Keys that may have the text."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    def names(self, record: Iterable[str]) -> list[str]:
        """Keys of images among those of a record."""
        wanted = ("image", "images") if self.image is None else (self.image,)
        return [name for name in wanted if name in record and not (self.names_sample and name == "image")]


def load_prompts(source: str, key: str, columns: Columns = Columns(), most: int | None = None) -> list[Prompt]:
    """Prompts of a file, an embedded list such as `shapes-train.txt`, `shapes:train|heldout` or, of videos,
    `shapes:motion-train|motion-heldout|motion-pretrain`, or a data set, `hf:PATH` or `hf:PATH:SPLIT`.

    `key`: the configuration key, for messages. `columns`: keys of records; a .txt has none. `most`: number of prompts
    to read, the first ones; None: all.

    Raises ConfigError: no such file, split or column, an unknown suffix, an empty set, a broken record, an image that
    is missing or unreadable, a package that is not installed.
    """
    where = f"{key}={source!r}"
    if source.startswith("shapes:"):
        return _shapes(source, where)[:most]
    try:
        prompts = _read(source, where, columns, most)
    except NoText as error:
        column = next((name for name in TEXTS if name in error.columns), None)
        if column is None or isinstance(columns.prompt, tuple):
            raise
        raise ConfigError(str(error), {"data.prompt_column": column}) from None
    if not columns.names_sample:  # nothing is sampled by them
        note_sampler_keys(where, {name for prompt in prompts for name in prompt.metadata})
    return prompts


def hub_id(source: str | None) -> str | None:
    """The hub id of `hf:PATH[:SPLIT]` if PATH is not a folder on this machine; None for any other source."""
    if source is None or not source.startswith("hf:"):
        return None
    path, _ = split_of(source.removeprefix("hf:"))
    return None if Path(path).expanduser().exists() else path


# ---- where records come from


def _shapes(source: str, where: str) -> list[Prompt]:
    """The prompts of a split of the shapes world."""
    part = source.removeprefix("shapes:")
    moving = part.startswith("motion-")
    try:
        texts = moving_shapes.prompts(part.removeprefix("motion-")) if moving else shapes.prompts(part)
    except ValueError as error:
        more = "after shapes:motion-" if moving else "or, of videos, 'motion-train' or 'motion-heldout'"
        raise ConfigError(f"{where}: {error}, {more}") from None
    return [Prompt(text) for text in texts]


def _read(source: str, where: str, columns: Columns, most: int | None) -> list[Prompt]:
    """The prompts of a data set or a file."""
    if source.startswith("hf:"):
        path, split = split_of(source.removeprefix("hf:"))
        folder = Path(path).expanduser()
        rows = open_data_set(path, split, columns.subset, where)
        stored = () if rows is None else as_stored(rows, columns.names)
        records = ((f"row {number}", record) for number, record in enumerate(stored, 1))
        return _prompts(islice(records, most), where, folder if folder.is_dir() else None, columns)
    # Embedded names come first: files of a configuration have absolute paths (config/locate.py).
    file = embedded_prompts(source) or Path(source).expanduser()
    if not file.is_file():
        looked = "" if Path(source).is_absolute() else f" in {Path.cwd()}, and no embedded one of that name"
        raise ConfigError(f"{where}: there is no such file{looked}; give {FORMS}")
    if file.suffix.lower() in ("", ".txt"):
        columns = replace(columns, image=None)  # lines have no columns
    records = read_records(file, where, *columns.texts)
    return _prompts(islice(records, most), where, file.parent, columns)


def open_data_set(path: str, split: str | None, subset: str | None, where: str, key: str = "data.subset") -> Any | None:
    """Rows of a data set on the hub or in a folder, mapped into memory; None: it has no rows.

    `path` is a hub id or a folder; `split` None: `train`, or the only one; `subset` is for a set that has several, and
    `key` the option that sets it. `where`: key and value of the option, for messages.

    Raises ConfigError: a package that is not installed, no such set or split, or one that cannot be loaded.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise missing_package(error, where) from None
    folder = Path(path).expanduser()
    above = None if folder.is_dir() else lost_in(path)
    if above is not None:
        raise ConfigError(f"{where}: {lost(above)}")
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if saved:  # written by save_to_disk
            loaded = datasets.load_from_disk(str(folder))
            splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded
            chosen = _choose(split, [str(name) for name in splits], where)
            if chosen not in splits:
                raise ConfigError(f"{where}: a folder of save_to_disk() takes a whole split only; leave out the slice")
            rows = splits[chosen]
        else:
            path = str(folder) if folder.is_dir() else path
            names = datasets.get_dataset_split_names(path, subset)
            chosen = _choose(split, names, where)
            rows = datasets.load_dataset(path, subset, split=chosen)
    except ConfigError:
        raise
    except IndexError:  # load_from_disk() of a set without rows
        return None
    # Errors of the hub, the network or a broken file.
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).splitlines()[:2])  # the second line names the subsets if one is required
        raise ConfigError(
            f"{where}, {key}={subset!r}: the data set cannot be loaded ({type(error).__name__}: {reason})"
        ) from None
    return rows.with_format(None)


def _choose(split: str | None, names: Sequence[str], where: str) -> str:
    """The wanted split, else `train`, else the only one."""
    if split is None and "train" not in names and len(names) == 1:
        return names[0]
    wanted = split or "train"
    if wanted.partition("[")[0] not in names:
        raise ConfigError(f"{where}: there is no split {wanted!r}; there are: {', '.join(names)} (hf:PATH:SPLIT)")
    return wanted


def as_stored(rows: Any, images: Callable[[Iterable[str]], Sequence[str]]) -> Any:
    """Rows whose images in the columns that `images` chooses stay encoded, {bytes, path}.

    Columns of other images, sound and videos are left out, since they are not metadata.
    """
    import datasets

    wanted = images(rows.column_names)
    for name, kind in dict(rows.features).items():
        inner = getattr(kind, "feature", kind)
        if name in wanted and isinstance(inner, datasets.Image):
            plain = datasets.Image(decode=False)
            rows = rows.cast_column(name, plain if inner is kind else type(kind)(plain))
        elif hasattr(inner, "decode_example"):
            rows = rows.remove_columns(name)
    return rows


# ---- from a record to a prompt


def _prompts(records: Iterable[tuple[str, dict]], where: str, folder: Path | None, columns: Columns) -> list[Prompt]:
    """Prompts of records; paths of images are relative to `folder`."""
    read: set[Path] = set()
    prompts = [_prompt(record, f"{where}, {place}", folder, columns, read) for place, record in records]
    if not prompts:
        raise ConfigError(f"{where}: there is no prompt in it")
    return prompts


def _prompt(record: dict, where: str, folder: Path | None, columns: Columns, read: set[Path]) -> Prompt:
    """The prompt of a record; its images are opened unless they are among those already `read`."""
    key = next((name for name in columns.texts if name in record), None)
    if key is None:
        raise NoText(where, columns.texts, list(record))
    if columns.image is not None and columns.image not in record:
        close = suggest(columns.image, list(record))
        raise ConfigError(
            f"{where}: has no {columns.image!r} (data.image_column); {close}there are: {', '.join(record)}"
        )
    text = record[key]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: needs a string under {key!r}, got {text!r}")
    names = columns.names(record)
    metadata = {k: v for k, v in record.items() if k not in (key, *names)}
    if len(names) > 1:
        raise ConfigError(f"{where}: has both 'image' and 'images'; keep one of them, or set data.image_column")
    if not names:
        return Prompt(text, metadata)
    given = record[names[0]]
    several = given if isinstance(given, list) else [given]
    if not several or (names == ["images"] and not isinstance(given, list)):
        raise ConfigError(f"{where}: needs a path under 'image', or a list of paths under 'images'; got {given!r}")
    images = tuple(str(_image(one, names[0], where, folder, read)) for one in several)
    result = metadata.get(REFERENCE)
    if isinstance(result, str) and folder is not None and (folder / result).is_file():
        metadata[REFERENCE] = str((folder / result).resolve())
    return Prompt(text, metadata | {"images": list(images)}, images)


def _image(given: Any, column: str, where: str, folder: Path | None, read: set[Path]) -> Path:
    """Absolute path of a readable image, given by a path or as {bytes, path} of a data set."""
    data, name = (given.get("bytes"), given.get("path")) if isinstance(given, dict) else (None, given)
    if data is not None:
        return _kept(data, f"{where}: the image under {column!r}", read)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}: needs a path under 'image', or a list of paths under 'images', or an image; "
            f"got {str(given)[:80]} under {column!r}"
        )
    file = Path(name).expanduser()
    if not file.is_absolute() and folder is None:
        raise ConfigError(
            f"{where}: {name!r} under {column!r} is a relative path, and a data set of the hub has no files"
        )
    file = (folder / file if folder is not None else file).resolve()
    if file in read:
        return file
    if not file.is_file():
        raise ConfigError(f"{where}: there is no image {name!r} ({file}); paths are relative to the file of prompts")
    try:
        open_image(file)
    except UNREADABLE as error:
        raise ConfigError(f"{where}: {name!r} cannot be read as an image: {error}") from None
    read.add(file)
    return file


def image_folder() -> Path:
    """Cache folder of images from data sets."""
    return cache_folder() / "images"


def _kept(data: bytes, what: str, read: set[Path]) -> Path:
    """The cached file of these bytes, which are decoded unless it is among those `read`."""
    try:
        file = cached_image(data)
        if file not in read:
            open_image(file)
    except UNREADABLE as error:
        raise ConfigError(f"{what} cannot be read: {error}") from None
    read.add(file)
    return file


def cached_image(data: bytes) -> Path:
    """The cached file of an image's bytes, named by their hash; written if it is missing. Raises as `opened` does."""
    with opened(io.BytesIO(data)) as image:
        suffix = str(image.format).lower()
    file = image_folder() / f"{hashlib.sha256(data).hexdigest()}.{suffix}"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write the same file.
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_bytes(data)
        os.replace(temporary, file)
    return file
