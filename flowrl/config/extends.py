"""`extends: recipe.yaml`: a configuration that says only how it differs from another one.

Mappings are merged deeply, lists and plain values replaced. A mapping whose `name` changes replaces the whole mapping:
options of one component mean nothing to another. Paths keep their meaning: each is relative to the file that holds it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.config.locate import inside
from flowrl.core import assets, registry, strict
from flowrl.core.errors import ConfigError, told
from flowrl.core.files import is_mapping
from flowrl.core.paths import expanded, relative_to_folder
from flowrl.core.strict import Options, find_config

KEY = "extends"
_BY_PATH = ("algorithm", "rollout.sampler")
"""Mappings in which `path` names the component too."""
_DEFAULTS = {"algorithm": "flow_grpo"}


@dataclass(frozen=True, slots=True)
class Layers:
    """A configuration and the ones that it extends."""

    files: tuple[Path, ...]
    """The file itself, then what each extends."""
    tree: Options
    """Merged plain data without `extends`."""
    holders: Mapping[str, Path] = field(default_factory=dict)
    """Dotted key of a value -> the file that holds it; empty for a file that extends none."""

    @contextmanager
    def named(self, overrides: Sequence[str]) -> Iterator[None]:
        """Add to the lines of a ConfigError the file that holds the key. The keys that `overrides`, words of the
        command line, set are in no file. Raises ConfigError: with those files.
        """
        try:
            yield
        except ConfigError as error:
            if len(self.files) == 1:
                raise
            words = [word.partition("=")[0] for word in overrides]
            lines = [f"{line}{self._note(line, words)}" for line in told(error).splitlines()]
            raise ConfigError("\n".join(lines), remedies=error.remedies) from None

    def _note(self, line: str, overridden: Sequence[str]) -> str:
        key = (re.match(r"[\w.-]+", line) or [""])[0].rstrip(".")
        if not key or any(inside(key, word) or inside(word, key) for word in overridden):
            return ""
        files = [file for place, file in self.holders.items() if inside(key, place) or inside(place, key)]
        names = " and ".join(map(str, dict.fromkeys(files)))
        return f" (in {names})" if names else ""


def load_layers(path: str | Path) -> Layers:
    """A configuration by file, recipe's name or run folder, merged with what it extends.

    Raises ConfigError: `extends` of a wrong type, of a missing file, or in a circle; with the chain.
    """
    file = find_config(path)
    own = strict.load_tree(path)
    if KEY not in own:
        return Layers((file,), own)
    trees = [own]
    files = chain(file, lambda base: trees.append(strict.load_tree(base)) or trees[-1], own)
    tree, holders = {}, dict[str, Path]()
    for base, values in zip(reversed(files), reversed(trees), strict=True):
        rest = {key: value for key, value in values.items() if key != KEY}
        tree, own = merged(tree, rest), set(_keys(rest))
        holders = {key: base if key in own else holders[key] for key in _keys(tree)}
    return Layers(files, tree, holders)


def _keys(tree: Any, place: str = "") -> Iterator[str]:
    """Dotted keys of the plain values, lists and empty mappings of a tree."""
    if is_mapping(tree) and tree:
        for key, value in tree.items():
            yield from _keys(value, f"{place}.{key}" if place else str(key))
    elif place:
        yield place


def chain(file: Path, read: Callable[[Path], Options], own: Options | None = None) -> tuple[Path, ...]:
    """The file itself, then what each file extends. `read` gives the plain data of a file; `own`: those of the first
    file; None: as `read` gives them.

    Raises ConfigError: `extends` of a wrong type, of a missing file, or in a circle.
    """
    files, tree = [file], read(file) if own is None else own
    while KEY in tree:
        base = _base(tree[KEY], files)
        known = [one.resolve() for one in files]
        if base.resolve() in known:
            circle = [*files[known.index(base.resolve()) :], base]
            raise ConfigError(
                f"{files[-1]}: {KEY}={tree[KEY]!r} closes a circle: {_arrows(circle)}; take {KEY} out of one of them"
            )
        files.append(base)
        tree = read(base)
    return tuple(files)


def _base(value: Any, files: Sequence[Path]) -> Path:
    """The file that `extends` names in the last of the files: relative to it, else a recipe of flowrl."""
    here, way = files[-1], f" (read as {_arrows(files)})" if len(files) > 1 else ""
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{here}: {KEY}={value!r} must be one file or the name of a recipe{way}; a file that is to extend two "
            "extends one that extends the other"
        )
    path = Path(relative_to_folder(here.parent, expanded(value, f"{here}: {KEY}")))
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if path.is_file():
        return path
    shipped = assets.recipe_file(value)
    if shipped is not None:
        return shipped
    if Path(value).is_file():
        there = os.path.relpath(value, here.parent)
        hint = f"it is relative to the file that says it: write {there!r}; "
    else:
        hint = registry.suggest(value, assets.recipes())
    raise ConfigError(
        f"{here}: {KEY}={value!r}: there is no {path}, nor a recipe of this name{way}; {hint}"
        "`flowrl list recipes` names the recipes"
    )


def _arrows(files: Sequence[Path]) -> str:
    return " -> ".join(map(str, files))


def merged(base: Options, own: Options, place: str = "") -> Options:
    """`own` over `base`: mappings merged deeply unless they name different components, all else replaced.

    >>> merged({"eval": {"every": 5, "rewards": [1, 2]}}, {"eval": {"rewards": []}})
    {'eval': {'every': 5, 'rewards': []}}
    >>> merged({"algorithm": {"name": "awm", "ema": {}}}, {"algorithm": {"name": "raft"}})
    {'algorithm': {'name': 'raft'}}
    """
    result = dict(base)
    for key, value in own.items():
        inner, before = f"{place}.{key}" if place else str(key), base.get(key)
        if is_mapping(value) and is_mapping(before) and not _another(before, value, inner):
            result[key] = merged(before, value, inner)
        else:
            result[key] = value
    return result


def _another(base: Options, own: Options, place: str) -> bool:
    """Whether two mappings name different components. A model without a name is any, until one is given."""
    for key in ("name", "path") if place in _BY_PATH else ("name",):
        known = base.get(key) or (_DEFAULTS.get(place) if key == "name" and not base.get("path") else None)
        if own.get(key) is not None and own[key] != known and not (place == "model" and known is None):
            return True
    return False
