"""Imports point downward only (DESIGN section 2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top down. A module may import its own layer and those below. Folders stand for all their files.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "commands", "__main__", "__init__"),
    (
        *("trainer", "session", "collect", "learner", "replay"),
        *("noising", "evaluate", "evaltree", "gallery", "checkpoint"),
        *("checkpoint", "optim"),
        *("preferences", "pairdata", "labels", "records", "pairing", "pairplan", "pairfolder"),
        *(
            "distributed",
            "metrics",
            "prompts",
            "sources",
            "config",
            "data_options",
            "reward_entries",
            "resolved",
            "load",
            "retired",
            "checks",
            "strict",
            "runs",
            "report",
            "memory",
        ),
        *("meter", "fewbits", "export", "assembly", "outofmemory", "media", "sharding", "state", "components"),
        *("treework", "initials", "rewardcheck", "serving", "given", "offline", "calls", "judges", "recall", "locate"),
        *("inputs", "contents", "handover", "divergence", "deadgroups", "promptfiles", "places", "statistics"),
        "library",
        "contracts",
        *("signals", "ending", "status", "heldout", "rollout_options"),
        "rewards",
    ),
    ("algorithms",),
    (
        *("rollout", "routes", "recorder", "tree", "buffer", "models", "spatial", "matching", "preview"),
        *("exploration", "learned_noise", "value", "transitions", "trajectories"),
    ),
    (
        *("samplers", "solvers", "sa_solver", "plan", "branching", "flash", "times", "batches"),
        *("reward", "onecall", "attempts", "scorecache", "overlap", "threads", "surroundings"),
    ),
    (
        "process",
        "schedules",
        "vp_schedules",
        "advantages",
        "history",
        "selection",
        "objectives",
        "matching_losses",
        "preference_losses",
    ),
    (
        "errors",
        "files",
        "phases",
        "units",
        "paths",
        "types",
        "rng",
        "registry",
        "shapes",
        "embedded",
        "pictures",
        "orphans",
    ),
)
TORCH_ONLY = (
    "process",
    "schedules",
    "vp_schedules",
    "advantages",
    "history",
    "selection",
    "objectives",
    "matching_losses",
    "preference_losses",
)
FOR_REWARDS = {
    f"flowrl.{name}" for name in ("errors", "paths", "reward", "rewards", "types", "shapes", "embedded", "pictures")
}


def level(part: str) -> int:
    """Number of the layer of a top-level module or folder of flowrl; 0 is the top."""
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def part_of(file: Path) -> str:
    """The top-level module or folder of flowrl that a file belongs to."""
    return file.relative_to(ROOT / "flowrl").with_suffix("").parts[0]


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if _type_checking(node):
            yield from (inner for other in node.orelse for inner in (other, *_nodes(other)))
            continue
        yield node
        yield from _nodes(node)


def imports(source: str, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions; `from a import b` gives a.b."""
    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module or ""]).strip(".")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def imports_of(file: Path) -> list[tuple[int, str]]:
    return list(imports(file.read_text(encoding="utf-8"), ".".join(file.relative_to(ROOT).parent.parts)))


def upward(part: str, names: list[tuple[int, str]]) -> list[str]:
    """Imports of flowrl's own modules that lie above the layer of `part`."""
    found = []
    for line, name in names:
        pieces = name.split(".")
        if pieces[0] != "flowrl":
            continue
        target = pieces[1] if len(pieces) > 1 else "__init__"
        if target.startswith("__version") or target[0].isupper():  # an export of flowrl/__init__.py
            target = "__init__"
        if level(target) < level(part):
            found.append(f"line {line}: {name}")
    return found


# ---- the checker itself


def test_every_kind_of_import_is_seen():
    source = (
        "import flowrl.run.trainer\nfrom flowrl import rng, config as c\nfrom flowrl.models.base import X\n"
        "from . import sibling\nfrom ..process import expand\ndef f():\n    import torch.nn as nn\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flowrl.cli import app\nelse:\n    import json\n"
    )
    found = [name for _, name in imports(source, "flowrl.samplers")]
    assert found == [
        "flowrl.run.trainer",
        "flowrl.core.rng",
        "flowrl.config.schema",
        "flowrl.models.base.X",
        "flowrl.samplers.sibling",
        "flowrl.diffusion.process.expand",
        "torch.nn",
        "typing.TYPE_CHECKING",
        "json",
    ]


@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [
        ("samplers", "flowrl.rollout.loop", True),
        ("process", "flowrl.diffusion.plan.StepPlan", True),
        ("rollout", "flowrl.config.schema", True),
        ("trainer", "flowrl.commands.train", True),
        ("types", "flowrl.Trainer", True),
        ("trainer", "flowrl.algorithms.base.Networks", False),
        ("samplers", "flowrl.samplers.base", False),
        ("trainer", "torch", False),
    ],
)
def test_an_upward_import_is_told_from_a_downward_one(part, name, wrong):
    assert bool(upward(part, [(1, name)])) == wrong


# ---- the laws


def test_every_module_has_a_layer():
    known = {name for layer in LAYERS for name in layer}
    assert not sorted({part_of(file) for file in files("flowrl")} - known), "place it in LAYERS and in DESIGN section 2"


@pytest.mark.parametrize("file", files("flowrl"), ids=lambda f: str(f.relative_to(ROOT)))
def test_a_module_imports_nothing_above_its_layer(file):
    assert upward(part_of(file), imports_of(file)) == []


@pytest.mark.parametrize("file", files("rewards"), ids=lambda f: str(f.relative_to(ROOT)))
def test_a_reward_imports_only_the_contract_the_types_and_the_shapes_world(file):
    own = [name for _, name in imports_of(file) if name.split(".")[0] == "flowrl"]
    assert not [name for name in own if ".".join(name.split(".")[:2]) not in FOR_REWARDS]


@pytest.mark.parametrize("part", TORCH_ONLY)
def test_the_mathematics_needs_nothing_but_torch(part):
    roots = {name.split(".")[0] for _, name in imports_of(ROOT / "flowrl" / f"{part}.py")}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "flowrl"}


def test_accelerate_is_imported_for_processes_and_for_weights_without_storage_only():
    users = {
        str(file.relative_to(ROOT))
        for folder in ("flowrl", "rewards")
        for file in files(folder)
        if any(name.split(".")[0] == "accelerate" for _, name in imports_of(file))
    }
    assert users == {"flowrl/training/world.py", "rewards/_checkpoints.py"}


def test_importing_flowrl_loads_neither_torch_nor_diffusers_nor_transformers():
    code = "import sys, flowrl; print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_importing_the_trainer_and_every_component_folder_loads_neither_diffusers_nor_transformers():
    """They are loaded when a model is built, so that a bad configuration is refused at once."""
    code = (
        "import sys, flowrl.run.trainer;"
        "from flowrl import registry;"
        "[registry.load(kind, name) for kind in ('samplers', 'algorithms', 'models') for name in registry.names(kind)];"
        "print([m for m in ('diffusers', 'transformers', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
