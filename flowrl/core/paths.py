"""Marks of options that name a file or a folder, in the option's type:

    head: Annotated[str | None, NAME_OR_PATH] = None

`flowrl/config/locate.py` makes marked options absolute when a configuration is read.
"""

import os
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.core.errors import ConfigError

Kind = Literal["path", "secret", "name", "prompts", "pairs", "cache", "output"]


@dataclass(frozen=True, slots=True)
class Place:
    """Mark of an option that is a path, or may be one."""

    kind: Kind


PATH = Place("path")
"""A file or folder."""
SECRET = Place("secret")
"""A file that is neither copied nor hashed."""
NAME_OR_PATH = Place("name")
"""A path if it exists or looks like one, else a name: of the hub, a package, an embedded asset."""
PROMPTS = Place("prompts")
"""A file of prompts, the name of an embedded one, `shapes:...`, or `hf:` before a hub id or folder."""
PAIRS = Place("pairs")
"""A file, folder or pattern of files, or `hf:` before a hub id or folder."""
CACHE = Place("cache")
"""A folder that is made if it is missing, or `memory`."""
OUTPUT = Place("output")
"""A folder for results: relative to the working directory, also in a file."""


@dataclass(frozen=True, slots=True)
class ComponentOf:
    """Mark of an option that is the name and options of a component of this kind, or a list of such."""

    kind: str


def split_of(path: str) -> tuple[str, str | None]:
    """(path, split) of `PATH` or `PATH:SPLIT`; a split may be a slice such as `train[:100]`.

    >>> split_of("owner/name:train[:100]"), split_of("/data/set")
    (('owner/name', 'train[:100]'), ('/data/set', None))
    """
    result = re.fullmatch(r"(?P<path>.+?):(?P<split>\w[\w.\-]*(\[[^\]]*\])?)", path)
    return (result["path"], result["split"]) if result else (path, None)


def lost_in(path: str, base: Path | None = None) -> Path | None:
    """The folder in which a path would be if it were there: then it is a missing file, and no id of the hub.

    A hub id has no folder of its owner's name here, so that `runs/nope` next to `runs/` asks no hub. `base`: folder of
    a relative path; None: the working directory.
    """
    first, slash, _ = os.path.normpath(path).partition("/")
    folder = Path(first) if base is None else base / first
    return folder if slash and first and folder.is_dir() else None


def refuse_lost(config: object, where: str) -> None:
    """Refuse options that may be a path or a name, and are a path that is not there. `config` is a dataclass with
    marked options, `where` its place in the configuration. Raises ConfigError: `lost_in` a folder.
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if NAME_OR_PATH in typing.get_args(hint) and isinstance(value, str) and not os.path.exists(value):
            folder = lost_in(value)
            if folder is not None:
                raise ConfigError(f"{where}.{name}={value!r}: {lost(folder)}")


def lost(folder: Path) -> str:
    """Why a path in a folder is nothing; the folder is one of `lost_in`."""
    inside = sorted(entry.name for entry in folder.iterdir())
    return (
        f"there is no such file or folder, and it is no id of the hub, since the folder {folder} is here; it has: "
        f"{', '.join(inside[:8]) or 'nothing'}{', ...' if len(inside) > 8 else ''}"
    )


def expanded(value: str, key: str) -> str:
    """`value` with a leading `~` and every `${NAME}` replaced. Raises ConfigError: a variable that is not set."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(
                f"{key}={value!r}: the environment variable {match[1]!r} is not set; set it, or write the path"
            )
        return os.environ[match[1]]

    return os.path.expanduser(re.sub(r"\$\{([^{}]*)\}", fill, value))


def relative_to_folder(folder: Path, value: str) -> str:
    """The absolute path of `value` in `folder`, with its symbolic links unresolved."""
    joined = os.path.join(folder.absolute(), value)
    plain = os.path.normpath(joined)
    # Removing "link/.." from a path changes its meaning.
    differs = os.path.exists(joined) and not (os.path.exists(plain) and os.path.samefile(joined, plain))
    return joined if differs else plain
