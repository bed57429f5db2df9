"""Trackers of a run: names and options of the key `trackers`, what accelerate knows, what is installed here."""

import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.core import registry
from flowrl.core.assets import table
from flowrl.core.errors import ConfigError, OptionError, Remedy
from flowrl.core.files import is_mapping
from flowrl.core.strict import Options

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

Images = Literal["list", "batch", "single", "file"]
"""How a tracker takes the images of a name: a list, one array [N, H, W, 3], each by a name of its own, or files."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What flowrl knows of a tracker beyond accelerate's class; a class that is not in `KINDS` has the defaults."""

    target: str | None = None
    """`module:callable` that takes the options; None: the class itself."""
    project: bool = True
    """Whether the class takes a project's name as its first argument; it is the option `project`."""
    install: str | None = None
    """What pip installs; None: the name."""
    images: Images = "list"
    replaces: bool = False
    """Whether values that are sent again for an iteration take the place of the earlier ones."""
    fills: str = ""
    """An option that accelerate's class fills itself."""
    digits: int = 0
    """Length of the id that flowrl chooses for the tracker's run; 0: the tracker chooses it, or has none."""
    learned: str = ""
    """Dotted attribute with the id that a started tracker has chosen."""


KINDS = {name: Kind(**facts) for name, facts in table(Path(__file__).with_suffix(".yaml")).items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of `trackers`."""

    key: str
    """Its place in the configuration, such as `trackers.0`."""
    name: str
    options: Options = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.name, Kind())

    @property
    def tracker(self) -> "type[GeneralTracker]":
        """accelerate's class."""
        return _classes()[self.name]


def entries(trackers: Sequence[Any]) -> list[Entry]:
    """The entries of the key `trackers`, each a name or a mapping with `name` and options.

    Raises ValueError: not such an entry, a name that accelerate does not know, or two entries of one name.
    """
    result: list[Entry] = []
    for number, given in enumerate(trackers):
        key = f"trackers.{number}"
        options = dict(given) if is_mapping(given) else {"name": given}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ValueError(
                f"{key} = {given!r}: must be the name of a tracker, or a mapping with `name` and its options; "
                f"there are: {', '.join(_names())}"
            )
        if name not in _names():
            raise ValueError(
                f"{key} = {name!r}: accelerate knows no tracker of this name; "
                f"{registry.suggest(name, _names())}there are: {', '.join(_names())}"
            )
        twice = next((entry for entry in result if entry.name == name), None)
        if twice is not None:
            raise OptionError(
                f"{key} = {name!r}: {twice.key} is this tracker already; a run has one of each name",
                Remedy(without=key),
            )
        result.append(Entry(key, name, options))
    return result


def require(trackers: Sequence[Any]) -> list[Entry]:
    """The entries of `trackers`. Raises ConfigError: one is not installed here, or has no such option."""
    result = entries(trackers)
    for entry in result:
        if not installed(entry.name):
            raise ConfigError(
                f"{entry.key} = {entry.name!r}: {entry.name} is not installed here",
                [Remedy(command=f"pip install {entry.kind.install or entry.name}"), Remedy(without=entry.key)],
            )
        valid = _options(entry)
        for name, value in entry.options.items():
            if valid is not None and name not in valid:
                raise ConfigError(
                    f"{entry.key}.{name} = {value!r}: {entry.name} has no such option; {registry.suggest(name, valid)}"
                    f"there are: {', '.join(valid)}"
                )
    return result


def known() -> dict[str, bool]:
    """Name of every tracker of accelerate -> whether it is installed here."""
    return {name: installed(name) for name in sorted(_classes())}


def installed(name: str) -> bool:
    """Whether accelerate finds the packages of a tracker; a class that was registered with it brings its own."""
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType

    own = name not in {str(kind.value) for kind in LoggerType}
    return name in _classes() and (own or name in {str(kind) for kind in get_available_trackers()})


def _names() -> list[str]:
    """accelerate's trackers, and what a program has registered with it; accelerate, and torch, are not imported."""
    registered = vars(sys.modules["accelerate.tracking"]) if "accelerate.tracking" in sys.modules else {}
    return sorted({*KINDS, *registered.get("LOGGER_TYPE_TO_CLASS", ())})


def _classes() -> "dict[str, type[GeneralTracker]]":
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS


def _options(entry: Entry) -> list[str] | None:
    """Options of an entry; None: not known, as for an init that takes any keyword."""
    kind, own = entry.kind, inspect.signature(entry.tracker)
    asked = own
    if kind.target is not None:
        module, _, path = kind.target.partition(":")
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = inspect.getattr_static(target, part) if inspect.isclass(target) else vars(target)[part]
        asked = inspect.signature(target.__func__ if isinstance(target, classmethod | staticmethod) else target)
    parameters = list(asked.parameters.values())
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    first = [] if kind.target is not None else list(own.parameters)[:1]  # the project, or the run's name
    left_out = {"self", "cls", "project", kind.fills, *first}
    return ["project"] * kind.project + [each.name for each in parameters if each.name not in left_out]
