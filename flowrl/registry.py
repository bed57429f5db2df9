"""Components by folder: the name of a component is its file name.

A third party names a dotted module path ("my_package.my_reward") or a file ("path/my_reward.py").
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
FOLDERS: dict[str, str] = {
    "models": "flowrl.models",
    "samplers": "flowrl.samplers",
    "algorithms": "flowrl.algorithms",
    "rewards": "rewards",
}
_HELPERS = {"base", "weights"}


class UnknownName(ValueError):
    """No component of that name; the message lists what there is."""


def suggest(name: str, valid: list[str]) -> str:
    """ "did you mean X? " or ""."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _folder(kind: str) -> Path:
    root = PACKAGE.parent if kind == "rewards" else PACKAGE
    return root / kind


def names(kind: str) -> list[str]:
    """Names of the built-in components of a kind ("models", "samplers", "algorithms", "rewards")."""
    files = _folder(kind).glob("*.py")
    return sorted(f.stem for f in files if not f.stem.startswith("_") and f.stem not in _HELPERS)


def load(kind: str, name: str) -> ModuleType:
    """The module of a component, by name, dotted path or `.py` file.

    Raises:
        UnknownName: nothing there goes by that name.
    """
    if name in names(kind):
        return importlib.import_module(f"{FOLDERS[kind]}.{name}")
    if name.endswith(".py"):
        return _load_file(Path(name), kind)
    if "." in name:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UnknownName(f"{kind}: no module {name!r} can be imported (looked in {sys.path[0] or '.'})") from None
    valid = names(kind)
    raise UnknownName(f"{kind[:-1]} name={name!r} is unknown; {suggest(name, valid)}there are: {', '.join(valid)}")


def _load_file(path: Path, kind: str) -> ModuleType:
    if not path.is_file():
        raise UnknownName(f"{kind[:-1]} path={str(path)!r}: there is no such file")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    module_name = f"flowrl_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
