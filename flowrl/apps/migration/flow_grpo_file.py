"""flow_grpo and DiffusionNFT: the reading of a configuration, FILE.py:NAME, with the base.py beside it."""

from pathlib import Path

from flowrl.apps.migration.python_config import Reader
from flowrl.apps.migration.python_values import Node, flat, untouched
from flowrl.apps.migration.table import Source, read_keys, read_table
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.core.strict import read_text

BY_HAND = 100_000
"""Published `num_epochs`: training is stopped by hand."""
KEYS = read_keys("flow_grpo")
_NFT_DEFAULTS = read_table("tables", "flow_grpo")["nft_defaults"]
"""Defaults of DiffusionNFT's base.py that are not those of `KEYS`."""
_BASE = "get_config"
_GPUS = ("gpu_number", "n_gpus")


def read(place: str) -> Source:
    """The configuration of FILE.py:NAME. Raises ConfigError: no such file or function, or it would have to run."""
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = Path(path)
    base, notes = _base(file)
    reader = Reader(file, {"base.get_config": lambda: untouched(base)})
    names = [each for each in reader.functions if not each.startswith("_")]
    names = [each for each in names if each != _BASE or len(names) == 1]
    if not name and len(names) == 1:
        name = names[0]
    if name not in reader.functions:
        asked = f"it has no configuration {name!r}; {suggest(name, names)}" if name else "name one of its functions: "
        raise ConfigError(f"{file}: {asked}{file}:NAME with NAME one of {', '.join(names) or '(none)'}")
    config = reader.call(name)
    if not isinstance(config, Node):
        raise ConfigError(f"{file}: {name} returns no ConfigDict; name a function that returns the configuration")
    values, left = {}, {}
    try:
        found = flat(config)
    except RecursionError:
        raise ConfigError(f"{file}: the configuration of {name} holds itself; correct it in the file") from None
    for key, (assigned, value) in found.items():
        default = KEYS[key].default if key in KEYS else None
        same = tuple(value) == default if isinstance(value, list) and isinstance(default, tuple) else value == default
        (left if same and key in KEYS and not assigned else values)[key] = value
    return Source(file, name, values, left, _gpus(file, reader), notes)


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
    nft = file.stem == "nft" or "decay_type" in read_text(file, str(file))
    config = Node()
    for key, entry in KEYS.items():
        parts, node = key.split("."), config
        for part in parts[:-1]:
            node = node.setdefault(part, Node())
        default = _NFT_DEFAULTS.get(key, entry.default) if nft else entry.default
        if default is not None or key in ("resume_from", "train.lora_path"):
            node[parts[-1]] = default
    whose = "DiffusionNFT's" if nft else "flow_grpo's"
    return config, (f"There is no base.py beside {file.name}: the published defaults stand for it, {whose}.",)


def _gpus(file: Path, reader: Reader) -> int | None:
    """The number of GPUs that the function states, else the one that those which it calls state."""
    *inner, outer = [[frame[name] for name in _GPUS if name in frame] for frame in reader.frames]
    counts = outer or [count for each in inner for count in each]
    if not counts:
        return None
    if type(counts[0]) is not int or any(count != counts[0] for count in counts):
        told = ", ".join(map(repr, counts))
        raise ConfigError(f"{file}: {' and '.join(_GPUS)} are {told}: they must be one whole number; correct the file")
    return counts[0]
