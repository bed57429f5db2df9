"""Mutants: does the suite notice a small wrong change of a formula?

    python scripts/mutants.py                                        # this tree, the mutants of scripts/mutants.yaml
    python scripts/mutants.py --root ../before --out before.json     # another checkout, with its own tests
    python scripts/mutants.py --against before.json --only shift kl-half

Each mutant is one changed text in a temporary copy of the tree, under which the tests of its room run until the first
failure; a survivor gets the wider list too. Tests that fail without a mutant are left out, and named. It takes some
seconds a mutant on one core. The result is a table, and a JSON file for `--against`. Exit status 1: a mutant survived.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parents[1]
_LIMIT_S = 900  # of one run of tests; a mutant that hangs is caught
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "build", "dist", ".*_cache", ".hypothesis")

NEAR = {
    "samplers": ("tests/samplers", "tests/contracts/test_samplers.py", "tests/contracts/test_vp.py"),
    "losses": ("tests/losses", *(f"tests/algorithms/test_{name}.py" for name in ("dpok", "find", "imitation"))),
    "credit": ("tests/credit",),
    "rollout": (
        *("tests/rollout", "tests/contracts/test_iteration.py", "tests/diffusion/test_branching.py"),
        *("tests/algorithms/test_dpok.py", "tests/algorithms/test_find.py"),
        "tests/losses/test_preference_objectives.py",
    ),
    "diffusion": ("tests/diffusion", "tests/samplers"),
    "algorithms": ("tests/algorithms",),
    "models/weights": ("tests/models/test_teachers.py",),
    "statistics": ("tests/statistics",),
    "core": ("tests/core/test_questions.py",),
    "data": tuple(f"tests/data/test_{name}.py" for name in ("priority", "given", "preferences")),
    "evaluation": ("tests/evaluation/test_copying.py", "tests/apps/suites"),
    "apps/suites": ("tests/apps/suites",),
}
"""Room -> the tests that run first; the doctests of the room come with them."""
WIDE = (
    *(f"tests/{room}" for room in NEAR if "/" not in room),
    *("tests/contracts", "tests/training", "tests/models", "tests/run"),
)
"""The tests of a survivor."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change: `old`, which stands exactly once in the Python files of flowrl/`room`, becomes `new`."""

    name: str
    room: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant: `by` is the first that failed, None where all passed."""

    name: str
    by: str | None
    seconds: float


def read(file: Path) -> list[Mutant]:
    """The mutants of a YAML file.

    Raises:
        ValueError: two of one name.
    """
    mutants = [Mutant(**entry) for entry in yaml.safe_load(file.read_text())]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"mutant {twice[0]!r} is there twice in {file}: rename one")
    return mutants


def locate(mutant: Mutant, root: Path) -> Path:
    """The file that the mutant changes.

    Raises:
        ValueError: its text does not stand exactly once in the room, or the change is no Python.
    """
    files = sorted((root / "flowrl" / mutant.room).rglob("*.py"))
    found = [(file, count) for file in files if (count := file.read_text().count(mutant.old))]
    total = sum(count for _, count in found)
    if total != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: the text {mutant.old!r} stands {total} times in flowrl/{mutant.room}, and must "
            "stand once: adapt it in scripts/mutants.yaml"
        )
    file = found[0][0]
    compile(file.read_text().replace(mutant.old, mutant.new), str(file), "exec")
    return file


# Imported once, before the fork of each run: they are most of the time of a small one.
_LIBRARIES = ("accelerate", "diffusers", "matplotlib", "numpy", "open_clip", "peft", "PIL", "safetensors", "scipy")
_LIBRARIES += ("sklearn", "torch", "torchvision", "transformers")


def preload(names: Sequence[str]) -> None:
    """Import the modules of large libraries, so that children have them."""
    for name in names:
        if name.partition(".")[0] in _LIBRARIES and name not in sys.modules:
            # A name that another module put there, say a lazy one.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _child(root: Path, arguments: list[str], output: Path, modules: Path) -> None:
    """pytest in a fork of this process, whose last word is the names of the modules that it imported."""
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    # Without bytecode: its check is by whole seconds and size, so a change and its removal could go unseen.
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry).resolve() not in (HERE, HERE / "scripts"))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flowrl", "rewards", "tests")]:
        del sys.modules[name]
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w")
    status = pytest.main(arguments)
    modules.write_text("\n".join(sys.modules))
    sys.stdout.flush()
    os._exit(int(status))


def run_tests(root: Path, paths: Sequence[str], left_out: Sequence[str] = (), *, first: bool = True) -> list[str]:
    """The tests that fail in a tree, as pytest names them; only the first one where `first`.

    Raises:
        RuntimeError: pytest itself failed, say because no test was found.
    """
    arguments = ["--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not gpu"]
    arguments += [*(["-x"] if first else []), *(f"--deselect={test}" for test in left_out)]
    present = [path for path in paths if (root / path).exists()]
    if not present:
        raise RuntimeError(f"none of {', '.join(paths)} is in {root}")
    arguments += present
    output, modules = root.parent / "output.txt", root.parent / "modules.txt"
    child = multiprocessing.get_context("fork").Process(target=_child, args=(root, arguments, output, modules))
    child.start()
    child.join(_LIMIT_S)
    if child.exitcode is None:
        child.kill()
        return [f"no end after {_LIMIT_S} s"]
    text = output.read_text()
    words = [line.split() for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if child.exitcode != 0 and (child.exitcode not in (1, 2) or not words):
        raise RuntimeError(f"pytest ended with {child.exitcode} in {root}:\n{text[-4000:]}")
    if not first:
        preload(modules.read_text().splitlines())
    return [line[1] for line in words]


class Bench:
    """A temporary copy of a tree, and what fails in it without a mutant."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(root, self.tree, ignore=_LEFT_OUT, symlinks=True)
        self.failing: dict[tuple[str, ...], list[str]] = {}

    def __call__(self, mutant: Mutant, paths: tuple[str, ...]) -> Outcome:
        """The outcome under the tests of `paths`; the copy is whole again afterwards."""
        file, left_out, began = locate(mutant, self.tree), self._without_mutant(paths), time.monotonic()
        whole = file.read_text()
        try:
            file.write_text(whole.replace(mutant.old, mutant.new))
            failed = run_tests(self.tree, paths, left_out)
        finally:
            file.write_text(whole)
        return Outcome(mutant.name, failed[0] if failed else None, round(time.monotonic() - began, 1))

    def _without_mutant(self, paths: tuple[str, ...]) -> list[str]:
        if paths not in self.failing:
            self.failing[paths] = run_tests(self.tree, paths, first=False)
            for test in self.failing[paths]:
                print(f"left out, fails without a mutant: {test}", flush=True)
        return self.failing[paths]


def table(mutants: Sequence[Mutant], outcomes: Sequence[Outcome], before: dict[str, str | None]) -> str:
    """A Markdown table of all mutants, the survivors first, and how many were caught here and `before`."""
    by = {outcome.name: outcome.by for outcome in outcomes}
    rows = ["| mutant | room | change | caught by |", "|---|---|---|---|"]
    for mutant in sorted(mutants, key=lambda mutant: by[mutant.name] is not None):
        change = f"`{mutant.old}` -> `{mutant.new}`".replace("|", "\\|")
        rows.append(f"| {mutant.name} | {mutant.room} | {change} | {by[mutant.name] or '**survived**'} |")
    caught = sum(test is not None for test in by.values())
    rows.append(f"\n{caught} of {len(by)} caught")
    if before:
        both = [name for name in by if name in before]
        rows[-1] += f"; of the {len(both)} that were tried before, {sum(before[n] is not None for n in both)} then and "
        rows[-1] += f"{sum(by[n] is not None for n in both)} now"
        rows += [f"caught before, not now: {n}" for n in both if before[n] is not None and by[n] is None]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE, help="checkout whose code and tests are taken")
    parser.add_argument("--mutants", type=Path, default=HERE / "scripts" / "mutants.yaml", help="file of mutants")
    parser.add_argument("--only", nargs="+", default=None, help="names of mutants; all if left out")
    parser.add_argument("--out", type=Path, default=None, help="JSON file of outcomes; none if left out")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that are in --out already")
    parser.add_argument("--against", type=Path, default=None, help="such a file of another checkout, to compare with")
    args = parser.parse_args()
    mutants = read(args.mutants)
    unknown = sorted(set(args.only or ()) - {mutant.name for mutant in mutants})
    if unknown:
        raise ValueError(f"mutant {unknown[0]!r} is not in {args.mutants}")
    mutants = [mutant for mutant in mutants if args.only is None or mutant.name in args.only]
    for mutant in mutants:  # all, before the first test runs
        locate(mutant, args.root)
    outcomes: dict[str, Outcome] = {}
    if args.resume and args.out is not None and args.out.exists():
        outcomes = {entry["name"]: Outcome(**entry) for entry in json.loads(args.out.read_text())}

    def run(mutant: Mutant, paths: tuple[str, ...]) -> None:
        outcome = outcomes[mutant.name] = bench(mutant, paths)
        print(f"{outcome.seconds:6.1f} s  {mutant.name}: {outcome.by or 'SURVIVED'}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps([asdict(entry) for entry in outcomes.values()], indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(args.root.resolve(), Path(folder))
        for mutant in mutants:
            if mutant.name not in outcomes:
                run(mutant, (*NEAR[mutant.room], f"flowrl/{mutant.room}"))
        for mutant in mutants:
            if outcomes[mutant.name].by is None:
                run(mutant, WIDE)
    earlier = [] if args.against is None else json.loads(args.against.read_text())
    print(table(mutants, list(outcomes.values()), {entry["name"]: entry["by"] for entry in earlier}))
    return int(any(outcome.by is None for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
