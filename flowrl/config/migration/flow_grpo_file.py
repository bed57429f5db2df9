"""Reading a configuration of flow_grpo: FILE.py:NAME, with the base.py beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.config.migration.flow_grpo_keys import KEYS
from flowrl.config.migration.python_config import Node, Reader, flat
from flowrl.config.migration.table import Source
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest

_BASE = "get_config"
_CALLS = ("base.get_config",)


def read(place: str) -> Source:
    """The configuration that FILE.py:NAME names.

    Raises:
        ConfigError: no such file or function, or a statement that cannot be read without executing it.
    """
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = Path(path)
    base, notes = _base(file)
    reader = Reader(file, dict.fromkeys(_CALLS, lambda: base))
    names = [each for each in reader.functions if each != _BASE or len(reader.functions) == 1]
    if not name and len(names) == 1:
        name = names[0]
    if name not in reader.functions:
        asked = f"it has no configuration {name!r}; {suggest(name, names)}" if name else "name one of its functions: "
        raise ConfigError(f"{file}: {asked}{file}:NAME with NAME one of {', '.join(names) or '(none)'}")
    config = reader.call(name)
    if not isinstance(config, Node):
        raise ConfigError(f"{file}: {name} returns no ConfigDict; name a function that returns the configuration")
    values, untouched = {}, {}
    for key, (node, own, value) in flat(config).items():
        default = KEYS[key].default if key in KEYS else None
        changed = key not in KEYS or not _same(value, default)
        (values if (node, own) in reader.assigned or changed else untouched)[key] = value
    return Source(file, name, values, untouched, _gpus(file, reader), notes)


def _base(file: Path) -> tuple[Node, tuple[str, ...]]:
    """What base.get_config() gives: of the base.py beside the file, else the published one."""
    beside = file.parent / "base.py"
    if beside.is_file() and beside.resolve() != file.resolve():
        found = Reader(beside)
        if _BASE not in found.functions:
            raise ConfigError(f"{beside}: it has no {_BASE}, which {file.name} calls; give flow_grpo's config/base.py")
        config = found.call(_BASE)
        if not isinstance(config, Node):
            raise ConfigError(f"{beside}: {_BASE} returns no ConfigDict; give flow_grpo's config/base.py")
        return config, ()
    config = Node()
    for key, entry in KEYS.items():
        parts, node = key.split("."), config
        for part in parts[:-1]:
            node = node.setdefault(part, Node())
        if entry.default is not None or key in ("resume_from", "train.lora_path"):
            node[parts[-1]] = entry.default
    return config, (f"There is no base.py beside {file.name}: the published defaults stand for it.",)


def _gpus(file: Path, reader: Reader) -> int | None:
    count = reader.names.get("gpu_number")
    if count is None:
        return None
    if type(count) is not int:
        raise ConfigError(f"{file}: gpu_number={count!r}: it must be a whole number; correct it in the file")
    return count


def _same(value: Any, default: Any) -> bool:
    return value == default or (
        isinstance(value, list | tuple) and isinstance(default, tuple) and tuple(value) == default
    )
