"""The packages of flowrl/ in reading order: each imports only itself and those before it (DESIGN section 2)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# In reading order. A late import and one under TYPE_CHECKING count: they hide a circle and do not break it.
ORDER = (
    *("core", "reward", "shapes", "moving_shapes", "edited_shapes", "display", "media"),
    *("statistics", "diffusion", "samplers", "losses", "credit"),
    *("models", "data", "rollout", "scoring", "algorithms", "training"),
    *("config", "evaluation", "planning", "run", "contracts"),
    *("apps", "commands", "cli"),
)
PURE = ("statistics", "diffusion", "losses", "credit")
"""Packages of mathematics."""
SEE_PROCESSES = ("training", "evaluation", "planning", "run", "contracts", "apps", "commands", "cli")
"""Packages that know of ranks and of the number of processes."""
FOR_REWARDS = (
    *("flowrl.core", "flowrl.reward", "flowrl.rewards"),
    *("flowrl.shapes", "flowrl.moving_shapes", "flowrl.edited_shapes"),
    *("flowrl.statistics", "flowrl.media"),  # arrays alone; images and videos as files
)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(file: Path) -> str:
    """Dotted name of a module of flowrl; those of rewards/ are `flowrl.rewards`."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = ["flowrl", *parts] if parts[0] == "rewards" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    """The package, or module at the root, that a dotted name belongs to; "" for flowrl itself."""
    return name.split(".")[1] if "." in name else ""


MODULES = {name_of(file): file for folder in ("flowrl", "rewards") for file in files(folder)}
ROOMS = [name for name in MODULES if room_of(name) not in ("", "__main__", "rewards")]


def imports(source: str) -> Iterator[str]:
    """Absolute dotted names of all imports, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(name: str) -> set[str]:
    """Modules of flowrl that a module imports."""
    found = set()
    for whole in imports(MODULES[name].read_text(encoding="utf-8")):
        found |= {each for each in (whole, whole.rpartition(".")[0]) if each in MODULES and each != name}
        if whole in MODULES:
            found.discard(whole.rpartition(".")[0])
    return found


def later(room: str, others: set[str]) -> list[str]:
    """Those modules that lie in a later package than `room`."""
    return sorted(o for o in others if room_of(o) in ORDER and ORDER.index(room_of(o)) > ORDER.index(room))


# ---- the checker itself


def test_every_kind_of_import_is_seen():
    source = (
        "import flowrl.run.trainer\nfrom flowrl.core import rng, types as t\ndef f():\n    import torch.nn as nn\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flowrl.cli import app\n"
    )
    assert list(imports(source)) == [
        "flowrl.run.trainer",
        "flowrl.core.rng",
        "flowrl.core.types",
        "typing.TYPE_CHECKING",
        "torch.nn",
        "flowrl.cli.app",
    ]


@pytest.mark.parametrize(
    ("room", "other", "wrong"),
    [
        ("samplers", "flowrl.rollout.loop", True),
        ("rollout", "flowrl.config.schema", True),
        ("run", "flowrl.commands.train", True),
        ("run", "flowrl.algorithms.base", False),
        ("samplers", "flowrl.samplers.base", False),
    ],
)
def test_an_upward_import_is_told_from_a_downward_one(room, other, wrong):
    assert bool(later(room, {other})) == wrong


# ---- the laws


def test_every_package_has_its_place():
    assert {room_of(name) for name in ROOMS} <= set(ORDER), "place it in ORDER and in docs/architecture.md"


@pytest.mark.parametrize("name", ROOMS)
def test_a_module_imports_only_its_own_package_and_earlier_ones(name):
    assert later(room_of(name), imported_modules(name)) == []


def test_only_the_command_line_imports_the_wing():
    users = {room_of(name) for name in MODULES if any(room_of(o) == "apps" for o in imported_modules(name))}
    assert users <= {"apps", "commands", "cli"}


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter({name: imported_modules(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {error.args[1]}")


def test_modules_with_an_underscore_stay_inside_their_package():
    def foreign(name: str, other: str) -> bool:
        package, _, last = other.rpartition(".")
        return last.startswith("_") and not f"{name}.".startswith(f"{package}.")

    assert not [(name, o) for name in MODULES for o in imported_modules(name) if foreign(name, o)]


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name) == "rewards"])
def test_a_reward_imports_only_the_contract_the_core_and_the_shapes_world(name):
    known = tuple(f"{package}." for package in FOR_REWARDS)
    assert not [other for other in imported_modules(name) if not f"{other}.".startswith(known)]


@pytest.mark.parametrize("name", [name for name in ROOMS if room_of(name) in PURE])
def test_the_mathematics_needs_nothing_but_torch_numpy_and_scipy(name):
    roots = {whole.split(".")[0] for whole in imports(MODULES[name].read_text(encoding="utf-8"))}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "numpy", "scipy", "flowrl"}


def test_processes_are_known_to_the_packages_that_run_them_alone():
    users = {room_of(name) for name in ROOMS if "flowrl.training.world" in imported_modules(name)}
    assert users <= set(SEE_PROCESSES)


def test_accelerate_is_imported_for_processes_for_weights_without_storage_and_for_trackers_only():
    users = {
        name
        for name, file in MODULES.items()
        if any(whole.split(".")[0] == "accelerate" for whole in imports(file.read_text(encoding="utf-8")))
    }
    trackers = {"flowrl.config.trackers", "flowrl.run.tracker_runs"}
    assert users == {"flowrl.training.world", "flowrl.rewards._vision.checkpoints", *trackers}


@pytest.mark.parametrize("name", ["flowrl", "flowrl.config.load"])
def test_importing_flowrl_or_what_reads_a_configuration_loads_neither_torch_nor_diffusers_nor_transformers(name):
    code = f"import sys, {name}; print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_importing_the_trainer_and_every_component_folder_loads_neither_diffusers_nor_transformers_nor_the_wing():
    """They are loaded when a model is built, so that a bad configuration is refused at once."""
    code = (
        "import sys, flowrl.run.trainer;"
        "from flowrl.core import registry;"
        "[registry.load(kind, name) for kind in ('samplers', 'algorithms', 'models') for name in registry.names(kind)];"
        "print([m for m in ('diffusers', 'transformers', 'accelerate', 'flowrl.apps') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# ---- images and videos


def asks_for_videos(source: str) -> list[int]:
    """Lines whose condition asks whether something is a video: by name, by its frames, by five axes."""
    conditions = [
        (node.test if not isinstance(node, ast.match_case) else node.guard or node.pattern)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.match_case)
    ]
    words = re.compile(r"video|clip_model|num_frames|ndim\s*[=!<>]+\s*5|dim\(\)\s*[=!<>]+\s*5", re.IGNORECASE)
    return [node.lineno for node in conditions if words.search(ast.unparse(node))]


@pytest.mark.parametrize("room", ["credit", "losses", "rollout", "training"])
def test_images_and_videos_go_through_the_same_code(room):
    found = {name_of(file): asks_for_videos(file.read_text(encoding="utf-8")) for file in files(f"flowrl/{room}")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("condition", ["adapter.num_frames > 1", "images.ndim == 5", "is_video", "x.dim() > 5"])
def test_a_question_for_videos_is_found(condition):
    assert asks_for_videos(f"x = 1\nif {condition}:\n    pass\ny = 1 if {condition} else 2") == [2, 4]
