"""The lab's recipes, as trees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.extends import KEY, chain, merged

ROOT = Path(__file__).resolve().parents[2]


def recipes() -> dict[str, Path]:
    """Name -> file, the quickstart first."""
    result = {"quickstart": ROOT / "configs" / "quickstart.yaml"}
    return result | {file.stem: file for file in sorted((ROOT / "configs" / "lab").glob("*.yaml"))}


def read_recipe(recipe: Path) -> dict[str, Any]:
    """A recipe's tree, merged with what it extends, its paths relative to the repository instead of to their file."""
    result: dict[str, Any] = {}
    for file in reversed(chain(recipe, _plain)):
        result = merged(result, _from_root(_plain(file), file.resolve().parent))
    return {key: value for key, value in result.items() if key != KEY}


def _plain(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _from_root(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.relpath(folder / value, ROOT)
    if isinstance(value, dict):
        return {key: _from_root(part, folder) for key, part in value.items()}
    return [_from_root(part, folder) for part in value] if isinstance(value, list) else value
