"""Reads a YAML configuration of Flow-Factory, of the commit that is converted or a newer form of one data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.apps.migration.flow_factory_keys import defaults
from flowrl.apps.migration.table import Source
from flowrl.core.errors import ConfigError
from flowrl.core.strict import parse_yaml, read_text

_SECTIONS = ("data", "model", "log", "train", "scheduler", "eval")
_OPTIMIZER = {
    "learning_rate": "learning_rate",
    "weight_decay": "adam_weight_decay",
    "betas": "adam_betas",
    "eps": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
}


def read(place: str) -> Source:
    """A YAML configuration.

    Raises:
        ConfigError: it is no mapping of sections, or doubles a key.
    """
    file = Path(place)
    tree = parse_yaml(read_text(file, str(file)), str(file))
    if not isinstance(tree, dict) or "train" not in tree:
        raise ConfigError(f"{file}: it must be a mapping with the section train, as Flow-Factory's examples are")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in _SECTIONS:
            values[str(key)] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{name}": below for name, below in value.items()}
        elif value is not None:
            raise ConfigError(f"{file}: {key}={value!r}: it must be a section of options")
    count = values.get("num_processes")
    if count is not None and type(count) is not int:
        raise ConfigError(f"{file}: num_processes={count!r}: it must be a whole number; correct it in the file")
    notes = _one_optimizer(values) + _one_set(values)
    return Source(file, file.stem, values, defaults(values.get("train.trainer_type")), count, notes)


def _one_optimizer(values: dict[str, Any]) -> tuple[str, ...]:
    """Newer files have a list of optimizers: one of them is read as the options of `train` were."""
    found = values.get("optimizers")
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict)):
        return ()
    if any(f"train.{name}" in values for name in _OPTIMIZER.values()):
        return ()  # of both forms: what is listed says so
    del values["optimizers"]
    for name, value in found[0].items():
        if name != "name":
            values[f"train.{_OPTIMIZER[name]}" if name in _OPTIMIZER else f"optimizers.0.{name}"] = value
    return ("optimizers.0 is read as train.learning_rate, adam_* and max_grad_norm, the older names.",)


def _one_set(values: dict[str, Any]) -> tuple[str, ...]:
    """Newer files have a list of data sets: one of them is read as the options of `data` were."""
    found = values.get("data.datasets")
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict)):
        return ()
    if "data.dataset_dir" in values or "data.max_dataset_size" in values:
        return ()
    del values["data.datasets"]
    for name, value in found[0].items():
        if name == "dataset_dir":
            values["data.dataset_dir"] = value
        elif name == "train" and isinstance(value, dict):
            names = {"max_dataset_size": "data.max_dataset_size"}
            values |= {names.get(key, f"data.datasets.0.train.{key}"): v for key, v in value.items() if key != "weight"}
        elif name != "name" and value:
            values[f"data.datasets.0.{name}"] = value
    return ("data.datasets.0 is read as data.dataset_dir, the older name; name and weight say nothing of one set.",)
