"""Components by folder: a component is named after its file or package.

A third party names a dotted module path ("my_package.my_reward") or a file ("path/my_reward.py"). An installed package
may bring rewards of its own by name: an entry point of the group `flowrl.rewards` that names a module.
"""

import difflib
import hashlib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.core.errors import UnknownName

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS: dict[str, str] = {kind: f"flowrl.{kind}" for kind in ("models", "samplers", "algorithms", "rewards")}
FOLDERS["suites"] = "flowrl.apps.suites"
BASES = {"samplers": ("flowrl.samplers.base", "Sampler"), "algorithms": ("flowrl.algorithms.base", "Method")}
"""Kind -> (module, class) that its components extend."""
PLUGINS = {"rewards": "flowrl.rewards"}
"""Kind -> entry-point group by which packages add to it."""
_SHORT = {"grpo": "flow_grpo", "dpo": "diffusion_dpo", "nft": "diffusion_nft"}
"""Short name of a paper -> the component that is meant where there is one of that name."""


@cache
def stored(kind: str) -> dict[str, dict[str, Any]]:
    """Built-in component -> what lists and messages say of it, so that neither it nor torch is imported for them.

    `row` are the cells of a list, `shown` a reward or a suite in words, `options` dotted names ("": those of every
    model), `default_sampler` that of a method. `python -m scripts.pages listed` writes them.
    """
    return json.loads(Path(__file__).with_name("components.json").read_bytes()).get(kind, {})


def near(name: str, valid: Sequence[str], cutoff: float = 0.5) -> list[str]:
    """Valid names that may be meant, the likeliest first.

    The same but for letter case and separators; the short name of a paper; initials; one with nearly all letters in
    common; those that have these parts; the one with most letters in common. `cutoff`: least share of letters in
    common, in [0, 1].

    >>> near("Flow-GRPO", ["flow_grpo", "dgpo"]), near("grpo", ["g2rpo", "flow_grpo"]), near("lr", ["learning_rate"])
    (['flow_grpo'], ['flow_grpo'], ['learning_rate'])
    >>> near("fast", ["flow_grpo", "flow_grpo_fast"]), near("tree", ["dynamic_tree_rpo", "tree_grpo", "tp_grpo"])
    (['flow_grpo_fast'], ['tree_grpo', 'dynamic_tree_rpo'])
    >>> near("widht", ["width"]), near("num_epoch", ["num_epochs", "num_batches_per_epoch"]), near("x", ["y"])
    (['width'], ['num_epochs'], [])
    """
    parts = {known: _parts(known) for known in valid}
    own = _parts(name)
    same = [known for known, each in parts.items() if "".join(each) == "".join(own)]
    short = [known for known, each in parts.items() if "_".join(each) == _SHORT.get("_".join(own))]
    initials = [known for known, each in parts.items() if len(each) > 1 and own == ["".join(word[0] for word in each)]]
    having = sorted((known for known, each in parts.items() if own and set(own) <= set(each)), key=len)
    small = {known.lower(): known for known in valid}
    alike = [small[known] for known in difflib.get_close_matches(name.lower(), list(small), n=1, cutoff=cutoff)]
    if difflib.get_close_matches(name.lower(), [each.lower() for each in alike if each not in having], cutoff=0.85):
        having = []  # a slip of the fingers
    # Of two names with these initials neither is taken.
    return same or short or (initials if len(initials) == 1 else having or alike)


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"[\W_]+", name) if part]


def close_to(name: str, valid: Sequence[str], cutoff: float = 0.5) -> str | None:
    """The valid name that is most likely meant (`near`); None if there is none."""
    return next(iter(near(name, valid, cutoff)), None)


def suggest(name: str, valid: Sequence[str]) -> str:
    """ "did you mean X? ", of up to three names, or "".

    >>> suggest("Tree", ["tree_grpo", "dynamic_tree_rpo"])
    "did you mean 'tree_grpo' or 'dynamic_tree_rpo'? "
    """
    meant = " or ".join(map(repr, near(name, valid)[:3]))
    return f"did you mean {meant}? " if meant else ""


def names(kind: str) -> list[str]:
    """Names of the built-in components of a kind, one of `FOLDERS`.

    A component is a file, or a package with `build`. What else lies there, and none, is what components share: the
    `base` that they extend, a name with an underscore, a package without `build`.
    """
    # By the package's path: in a checkout the files of rewards are outside flowrl/.
    folders = [Path(folder) for folder in importlib.import_module(FOLDERS[kind]).__path__]
    result = {file.stem for folder in folders for file in folder.glob("*.py")} - {"base"}
    packages = [file for folder in folders for file in folder.glob("*/__init__.py")]
    result |= {file.parent.name for file in packages if "\ndef build(" in file.read_text(encoding="utf-8")}
    return sorted(name for name in result if not name.startswith("_"))


def name_of(component: object) -> str:
    """The name of a built-in component; of any other its file."""
    module = type(component).__module__
    package, _, name = module.rpartition(".")
    return name if package in FOLDERS.values() else vars(sys.modules[module]).get("__file__", module)


def plugins(kind: str) -> dict[str, list[EntryPoint]]:
    """Name -> its entry points in installed packages; several, or the name of a built-in, are a collision."""
    result: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=PLUGINS[kind]) if kind in PLUGINS else ():
        result.setdefault(entry.name, []).append(entry)
    return dict(sorted(result.items()))


def collision(kind: str, name: str) -> str | None:
    """Sentence about a plug-in whose name is taken; None if it is not."""
    entries = plugins(kind).get(name, [])
    owners = [f"{entry.value} of {entry.dist.name if entry.dist else 'an unnamed package'}" for entry in entries]
    if entries and name in names(kind):
        return f"the name {name!r} of {' and '.join(owners)} is that of a built-in one, which is used"
    return f"the name {name!r} is given twice: {' and '.join(owners)}" if len(entries) > 1 else None


def require_known(kind: str, name: str) -> None:
    """Refuse a name that is neither that of a component nor a dotted path or a `.py` file; nothing is imported.

    Raises UnknownName: with the nearest name, and all of them.
    """
    if name in names(kind) or name.endswith(".py") or "." in name or name in plugins(kind):
        return
    valid = sorted({*names(kind), *plugins(kind)})
    raise UnknownName(f"{kind[:-1]} name={name!r} is unknown; {suggest(name, valid)}there are: {', '.join(valid)}")


def load(kind: str, name: str) -> ModuleType:
    """The module of a component by a built-in name, that of an installed package, a dotted path or a `.py` file.

    Raises UnknownName: there is no such component, or two packages use the name.
    """
    if name in names(kind):
        return importlib.import_module(f"{FOLDERS[kind]}.{name}")
    require_known(kind, name)
    brought = plugins(kind)
    if name.endswith(".py"):
        return completed(_load_file(Path(name), kind), kind, name)
    if name in brought:
        return _load_plugin(kind, brought[name][0])
    return completed(_import(kind, name), kind, name)


def _import(kind: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        valid = sorted({*names(kind), *plugins(kind)})
        raise UnknownName(
            f"{kind}: no module {name!r} can be imported (looked in the working directory {Path.cwd()} too); "
            f"{suggest(name, valid)}there are: {', '.join(valid)}, or the dotted path of a module"
        ) from None


def _load_plugin(kind: str, entry: EntryPoint) -> ModuleType:
    wrong = collision(kind, entry.name)
    if wrong is not None:
        raise UnknownName(f"{kind}: {wrong}; use the dotted path of the one you mean, or uninstall the other")
    if entry.attr:
        raise UnknownName(
            f"{kind}: the entry point {entry.name} = {entry.value} must name a module with Config and build, not "
            f"something in it: {entry.name} = {entry.module}"
        )
    return _import(kind, entry.module)


def _load_file(path: Path, kind: str) -> ModuleType:
    if not path.is_file():
        looked = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UnknownName(f"{kind[:-1]} path={str(path)!r}: there is no such file{looked}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    module_name = f"flowrl_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def completed(module: ModuleType, kind: str, name: str) -> ModuleType:
    """A user's module with `Config` and `build`; one without `build` gets them from its only class.

    Config is that of the class's file, else of the nearest class that it extends.

    Raises UnknownName: no class, or several.
    """
    defined = vars(module)
    if kind not in BASES or "build" in defined:
        return module
    place, base = BASES[kind]
    own = [each for each in defined.values() if isinstance(each, type) and each.__module__ == module.__name__]
    own = [one for one in own if any((part.__module__, part.__name__) == (place, base) for part in one.__mro__)]
    public = [one for one in own if not one.__name__.startswith("_")]
    # Without those that another class of the file extends.
    last = [one for one in public if not any(other is not one and issubclass(other, one) for other in own)]
    if len(last) != 1:
        names = f": {', '.join(one.__name__ for one in last)}" if last else ""
        raise UnknownName(
            f"{name} is not a component: it must define one class that extends flowrl.{base} (it has {len(last)}"
            f"{names}), or Config and build(config)"
        )
    for part in last[0].__mro__:
        config = vars(sys.modules[part.__module__]).get("Config", vars(part).get("Config"))
        if config is not None:
            defined |= {"Config": config, "build": last[0]}
            break
    return module
