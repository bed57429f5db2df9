"""The cells of a sweep, recipes x methods x seeds: their record, their order, their runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, Fault
from flowrl.core.files import damaged, read_object, write_atomically
from flowrl.data.contents import fingerprint
from flowrl.run import status

FILE = "sweep.json"
_SET = {"name": "leave it out", "output": "give --out", "seed": "give --seeds"}
"""Options that a sweep sets itself -> the remedy."""


class SweepFailed(Fault, RuntimeError):
    """Cells of a sweep have failed; the others were run."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep."""

    run: str
    """Name of the run, a folder next to sweep.json."""
    recipe: str
    """CONFIG as it was given."""
    method: str | None
    """Method in place of the recipe's own; null: that of the recipe."""
    seed: int
    words: tuple[str, ...]
    """Overrides of the command line."""
    config: str
    """Fingerprint of the recipe with the overrides."""
    status: str = "waiting"
    """waiting, running, finished, failed or stopped."""
    exit_code: int | None = None

    @property
    def changes(self) -> list[str]:
        """The overrides that all seeds share."""
        return [*self.words, *([] if self.method is None else [f"algorithm={{name: {self.method}}}"])]

    def arguments(self, folder: Path) -> list[str]:
        """The overrides of its run."""
        return [*self.changes, f"name={self.run}", f"output={folder}", f"seed={self.seed}"]

    @property
    def identity(self) -> dict[str, Any]:
        return {key: value for key, value in _plain(self).items() if key not in ("status", "exit_code")}


def _plain(cell: Cell) -> dict[str, Any]:
    return asdict(cell) | {"words": list(cell.words)}


def cells(recipes: Sequence[str], methods: Sequence[str], seeds: Sequence[int], words: Sequence[str]) -> list[Cell]:
    """The cells in their order: recipe by recipe, method by method, seed by seed. All are validated.

    Raises ConfigError: a fault in a configuration, an option that the sweep sets, or two runs of one name.
    """
    from flowrl.config.extends import load_layers
    from flowrl.config.load import load_config, resolve
    from flowrl.core.strict import overridden

    for word in words:
        key = word.partition("=")[0]
        if key in _SET:
            raise ConfigError(f"{word}: the sweep sets {key} itself; {_SET[key]}")
        if methods and key.partition(".")[0] == "algorithm":
            raise ConfigError(
                f"{word}: --methods sets the method, and its options are not those of another; write a recipe with it "
                "(extends: ...) and name both recipes"
            )
    result: list[Cell] = []
    for recipe in recipes:
        plain = load_config(recipe, list(words))
        for method in methods or (None,):
            # A method that is the recipe's own keeps its options there.
            own = method is None or method == plain.algorithm.get("name", "flow_grpo")
            name = plain.name if method is None else f"{plain.name}-{method}"
            first = Cell(name, recipe, None if own else method, seeds[0], tuple(words), "")
            try:
                resolve(load_config(recipe, first.changes))
            except Fault as error:
                raise ConfigError.about(error, f"{recipe}{'' if own else f' with {method}'}: ") from error
            config = fingerprint(overridden(load_layers(recipe).tree, words))
            result += [replace(first, run=f"{name}-s{seed}", seed=seed, config=config) for seed in seeds]
    names = [cell.run for cell in result]
    doubled = next((cell for cell in result if names.count(cell.run) > 1), None)
    if doubled is not None:
        raise ConfigError(
            f"two cells are called {doubled.run!r}: recipes, methods and seeds are to differ; give the recipes other "
            "names (`name` in their files)"
        )
    return result


def recorded(folder: Path, asked: Sequence[Cell]) -> list[Cell]:
    """The asked cells with the recorded status; cells may be added to a sweep.

    Raises ConfigError: the folder is another sweep's, or holds something else; the record is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: it is not empty and has no {FILE}; choose another folder")
        return list(asked)
    remedy = "choose another --out"
    try:
        old = {one["run"]: Cell(**one | {"words": tuple(one["words"])}) for one in read_object(file, remedy)["cells"]}
    except (KeyError, TypeError) as error:
        raise damaged(file, error, remedy) from error
    new = {cell.run: cell for cell in asked}
    other = sorted(old.keys() - new.keys())
    if other:
        raise ConfigError(
            f"--out {folder}: it holds another sweep, with the cells {', '.join(other)}; choose another folder, or "
            "give its recipes, methods and seeds too"
        )
    for name, cell in old.items():
        changed = [f"{k} was {v!r}, now {new[name].identity[k]!r}" for k, v in cell.identity.items()
                   if new[name].identity[k] != v]  # fmt: skip
        if changed:
            raise ConfigError(
                f"--out {folder}: its cell {name} is another one: {'; '.join(changed)}. Choose another folder"
            )
    return [old.get(cell.run, cell) for cell in asked]


def save(folder: Path, made: Sequence[Cell], comparison: str | None = None) -> None:
    """Write sweep.json."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"cells": [_plain(cell) for cell in made], "comparison": comparison}
    write_atomically(folder / FILE, json.dumps(record, indent=1) + "\n")


Train = Callable[[Sequence[str]], int]
"""Runs `flowrl train` with these arguments; its exit code."""


def run(folder: Path, made: list[Cell], flags: Sequence[str], train: Train) -> Iterator[tuple[int, Cell]]:
    """Run the cells that are not finished, one after the other; (number, cell) before and after each run.

    The cells in `made` are replaced as they end. After a signal the rest waits.
    """
    for number, cell in enumerate(made):
        at = folder / cell.run
        if status.read(at).get("status") in status.ENDED:
            made[number] = replace(cell, status="finished", exit_code=0)
            continue
        made[number] = replace(cell, status="running", exit_code=None)
        save(folder, made)
        yield number, made[number]
        resumed = ["--resume"] if (at / "config.yaml").is_file() else []
        code = train(["train", cell.recipe, *cell.arguments(folder), *resumed, *flags])
        ended = "finished" if code == 0 else "stopped" if code < 0 or code >= 128 else "failed"
        made[number] = replace(cell, status=ended, exit_code=code)
        save(folder, made)
        yield number, made[number]
        if ended == "stopped":
            return


def trained(arguments: Sequence[str]) -> int:
    """`flowrl train` in a process of its own; Ctrl-C reaches it through the terminal, SIGTERM through this one."""
    from flowrl.run.launch import PACKAGE_ROOT

    paths = filter(None, [os.environ.get("PYTHONPATH"), PACKAGE_ROOT])
    # -P: a user's types.py in the working directory would end Python itself.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "flowrl", *arguments], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number)),
    }
    try:
        return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
