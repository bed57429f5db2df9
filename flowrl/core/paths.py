"""Options that name a file or a folder: an option says so beside its type.

    head: Annotated[str | None, NAME_OR_PATH] = None

What a relative one means is read in `flowrl/config/locate.py`, where a configuration comes from its file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.core.errors import ConfigError

Kind = Literal["path", "secret", "name", "prompts", "pairs", "cache", "output"]


@dataclass(frozen=True, slots=True)
class Place:
    """Marks an option as a place on the disk."""

    kind: Kind


PATH = Place("path")
"""Always a file or folder."""
SECRET = Place("secret")
"""A file that is neither copied nor hashed."""
NAME_OR_PATH = Place("name")
"""Also a name: of the hub, of a package, of an embedded asset. A path where it is there, or looks like one."""
PROMPTS = Place("prompts")
"""A file of prompts, the name of an embedded one, `shapes:...`, or `hf:` before a hub id or folder."""
PAIRS = Place("pairs")
"""A file, folder or pattern of files, or `hf:` before a hub id or folder."""
CACHE = Place("cache")
"""A folder that is made where there is none, or `memory`."""
OUTPUT = Place("output")
"""A folder that is written to: relative to the working directory, wherever the option stands."""


@dataclass(frozen=True, slots=True)
class ComponentOf:
    """Marks an option as the name and options of a component (or a list of such) of this kind."""

    kind: str


def expanded(value: str, key: str) -> str:
    """`value` with a leading `~` and every `${NAME}` filled in.

    Raises:
        ConfigError: there is no such variable.
    """

    def fill(found: re.Match) -> str:
        if found[1] not in os.environ:
            raise ConfigError(
                f"{key}={value!r}: the environment variable {found[1]!r} is not set; set it, or write the path"
            )
        return os.environ[found[1]]

    return os.path.expanduser(re.sub(r"\$\{([^{}]*)\}", fill, value))


def relative_to_folder(folder: Path, value: str) -> str:
    """The absolute path of `value` in `folder`; links in it stay as they are."""
    told = os.path.join(folder.absolute(), value)
    plain = os.path.normpath(told)
    # A link before ".." leads elsewhere than the text says.
    differs = os.path.exists(told) and not (os.path.exists(plain) and os.path.samefile(told, plain))
    return told if differs else plain
