"""Fingerprints of a lab cell: what its numbers depend on, as the working tree is now."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.extends import KEY, chain, merged

ROOT = Path(__file__).resolve().parents[2]
# Imported by a run and unable to change its numbers: they save, report, look up and refuse. A module that is not
# named here counts, so a new one cannot be forgotten.
SILENT = (
    *("config/checks", "config/extends", "config/locate", "config/places", "config/older", "core/errors", "core/files"),
    *("core/paths", "core/registry", "core/strict", "core/subprocesses", "core/versions", "data/contents"),
    *("display/console", "display/phases", "evaluation/moved", "media/media", "media/mp4"),
    *("planning/memory", "planning/out_of_memory"),
    *("run/checkpoint", "run/ending", "run/export", "run/folder", "run/gauges", "run/handover", "run/inputs"),
    *("run/launch", "run/state", "run/status", "training/dead_groups", "training/metrics"),
)


FLAT_PAIRS = {
    "pairs": "path",  # first: it makes the mapping of the others
    "eval_pairs": "eval",
    "pair_options": "records",
    "pairs_per_iteration": "per_iteration",
    "max_eval_pairs": "max_eval",
    "caption_dropout": "caption_dropout",
    "crop": "crop",
    "posterior": "posterior",
    "flip": "flip",
}
"""Keys that fingerprints have next to `data` -> keys inside `data.pairs`."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What a cell depends on."""

    recipe: str
    """The parsed recipe and the model it names."""
    code: str
    """The meaning of every module of the run that can change a number, wherever its file lies: comments, docstrings
    and imports do not count. What is imported does: it is one of the modules."""


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


def _words(value: Any) -> Iterator[str]:
    """All strings of a parsed recipe."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _words(part)


@cache
def _names(code: str) -> tuple[str, ...]:
    """Names below flowrl that a module imports, inside functions too: modules, and what may be one."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(name for name in names if name.startswith("flowrl.")))


def _imported(file: Path) -> Iterator[Path]:
    """Files of this repository that a module imports."""
    for name in _names(file.read_text(encoding="utf-8")):
        # The files of flowrl.rewards lie in rewards/.
        place = name.removeprefix("flowrl.") if name.startswith("flowrl.rewards.") else name
        target = _file_of(place.replace(".", "/"))
        if target.is_file():
            yield target


def _file_of(module: str) -> Path:
    """File of a module, or of a package, by its path without an ending."""
    package = ROOT / module / "__init__.py"
    return package if package.is_file() else ROOT / f"{module}.py"


def code_files(tree: dict[str, Any]) -> list[Path]:
    """What a recipe's run imports, from the trainer and the recipe's own components down."""
    rewards = [*tree.get("rewards", []), *tree.get("eval", {}).get("rewards", [])]
    starts = [
        "flowrl/run/trainer.py",
        str(_file_of(f"flowrl/models/{tree['model']['name']}").relative_to(ROOT)),
        *(f"flowrl/samplers/{law['name']}.py" for law in [tree["rollout"].get("sampler")] if law),
        f"flowrl/algorithms/{tree['algorithm']['name']}.py",
        *(f"rewards/{entry['name']}.py" for entry in rewards),
    ]
    silent = {ROOT / "flowrl" / f"{name}.py" for name in SILENT}
    waiting, result = [ROOT / start for start in starts], set[Path]()
    while waiting:
        file = waiting.pop()
        if file not in result | silent and file.is_file():
            result.add(file)
            waiting += _imported(file)
    return sorted(result)


def model_files(tree: dict[str, Any]) -> list[Path]:
    """Weights, configurations and tokenizers of the models in assets/ that a recipe names."""
    folders = {ROOT / "assets" / word for word in _words(tree) if re.fullmatch(r"[\w.-]+", word)}
    patterns = ("**/*.safetensors", "*/*.json", "model_index.json")
    return sorted({file for folder in folders for pattern in patterns for file in folder.glob(pattern)})


class _Meaning(ast.NodeTransformer):
    """Drops what tells a reader something and the run nothing: docstrings, a level, where a name comes from."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        return None if [ast.unparse(target) for target in node.targets] == ["LEVEL"] else node


@cache
def meaning(code: str) -> str:
    """Python code without comments, docstrings, imports, layout and level; of one version of Python.

    >>> meaning("'Says.'; LEVEL = 'tested'; from a import b; x = (1 +  2)  # three")
    'x = 1 + 2'
    """
    return ast.unparse(_Meaning().visit(ast.parse(code)))


def _as_hashed(tree: dict[str, Any]) -> dict[str, Any]:
    """A recipe by the names of the flowrl that the cells were first hashed with: the same options, the same values."""
    pairs = tree.get("data", {}).get("pairs")
    if pairs is None:
        return tree
    flat = {old: pairs[new] for old, new in FLAT_PAIRS.items() if new in pairs}
    return tree | {"data": {key: value for key, value in tree["data"].items() if key != "pairs"} | flat}


def _recipe_digest(tree: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(_as_hashed(tree), sort_keys=True).encode())
    for file in model_files(tree):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _code_digest(files: list[Path]) -> str:
    """By meaning alone: a module that moves is the same code, and one without any is none."""
    texts = filter(None, (meaning(file.read_text(encoding="utf-8")) for file in files))
    meanings = sorted(hashlib.sha256(text.encode()).digest() for text in texts)
    return hashlib.sha256(b"".join(meanings)).hexdigest()[:16]


def fingerprints(recipe: Path) -> Fingerprints:
    """As the working tree is now."""
    tree = read_recipe(recipe)
    return Fingerprints(_recipe_digest(tree), _code_digest(code_files(tree)))


def state(cell: dict[str, Any] | None, now: Fingerprints) -> str:
    """Of a cell: "not run", "fresh", "replayed" (fresh by a replay), "stale: recipe" or "stale: code"."""
    if cell is None:
        return "not run"
    if cell["recipe"] != now.recipe:
        return "stale: recipe"
    if cell["code"] == now.code:
        return "fresh"
    return "replayed" if cell.get("checked", {}).get("code") == now.code else "stale: code"
