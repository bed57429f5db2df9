"""Following remedies: provoke a fault, do each of its remedies to the letter, and see that it is gone."""

import copy
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flowrl.config.extends import load_layers
from flowrl.config.load import load_config, resolve
from flowrl.core import errors
from flowrl.core.errors import Advised, Fault, Remedy
from flowrl.core.strict import overridden
from tests.remedies.source import ROOT, places


def numbered(place: str) -> list[str]:
    """`config/checks.py:check 1 3` -> the places of the first and the third remedy of that function.

    A path that begins with neither `flowrl/` nor `rewards/` is in `flowrl/`.
    """
    name, *numbers = place.split()
    name = name if name.startswith(("flowrl/", "rewards/")) else f"flowrl/{name}"
    return [name if number == "1" else f"{name}#{number}" for number in numbers or ["1"]]


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The places of the remedies that are made inside the block."""
    made, build = set[str](), Remedy.__init__

    def init(self: Remedy, *arguments: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == errors.__file__ and frame.f_back is not None:  # of settings in an error
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        first, last, left, right = (each or 0 for each in list(frame.f_code.co_positions())[frame.f_lasti // 2])
        if file.is_relative_to(ROOT):
            made.update(places(file).get((first, last, left, right), [""]))
        build(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remedy, "__init__", init)
        yield made


def provoked(act: Callable[[], object], claimed: Sequence[str]) -> Advised:
    """The exception of `act`, whose remedies are of the claimed places."""
    with recorded() as made, pytest.raises(Advised) as caught:
        act()
    assert caught.value.remedies, str(caught.value)
    assert set(claimed) <= made, f"made at {sorted(made)}: {caught.value}"
    return caught.value


def each_ends(act: Callable[[Remedy], object], place: str) -> None:
    """`act` raises after an empty remedy, and not after any that the exception gives."""
    fault = provoked(lambda: act(Remedy()), numbered(place))
    for remedy in fault.remedies:
        act(remedy)


def stand_in(**fields: Any) -> Any:
    """An object with these attributes, in the place of a larger one."""
    return SimpleNamespace(**fields)


def words_of(remedy: Remedy) -> list[str]:
    """The settings of a remedy as a shell reads them from the message."""
    return shlex.split(str(remedy))


# ---- configurations


def recipe(name: str) -> dict[str, Any]:
    """Plain data of a recipe of the lab."""
    return load_layers(ROOT / f"configs/lab/{name}.yaml").tree


def loaded(folder: Path, tree: dict[str, Any], words: Sequence[str], *, deep: bool = False) -> None:
    """Check a configuration as `flowrl plan` does; deep: on the model without its weights."""
    from flowrl.commands.plan import step_plan, transition_std
    from flowrl.config.checks import check_model
    from flowrl.planning.memory import skeleton

    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    resolved = resolve(load_config(file, list(words)))
    if deep:
        adapter = skeleton(resolved)
        check_model(resolved, adapter)
        transition_std(resolved, adapter, step_plan(resolved, adapter))


def removed(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """A tree without a dotted key."""
    result = copy.deepcopy(tree)
    *way, last = key.split(".")
    part: Any = result
    for step in way:
        part = part[int(step) if isinstance(part, list) else step]
    del part[int(last) if isinstance(part, list) else last]
    return result


def follow_settings(
    check: Callable[[dict[str, Any], Sequence[str]], object], tree: dict[str, Any], words: Sequence[str], fault: Advised
) -> None:
    """Do each remedy of a configuration's fault, and check that it is valid then."""
    for remedy in fault.remedies:
        try:
            if remedy.settings:
                check(tree, [*words, *words_of(remedy)])
            elif remedy.without:
                check(removed(overridden(copy.deepcopy(tree), words), remedy.without), [])
            else:
                require_package(remedy)
        except Fault as error:
            raise AssertionError(f"{fault}\n{remedy} does not end it: {error}") from error


def require_package(remedy: Remedy, *missing: str) -> None:
    """Check the command of a remedy that installs something: each extra is declared, and brings what is missing."""
    program, action, *wanted = shlex.split(remedy.command)
    assert (program, action) == ("pip", "install"), remedy
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    brought = [name for word in wanted for name in (extras[word[7:-1]] if word.startswith("flowrl[") else [word])]
    assert set(missing) <= {re.split(r"[^\w-]", name)[0] for name in brought}, remedy


# ---- commands


def command_fault(words: Sequence[str]) -> None:
    """`flowrl WORDS` in this process; its Fault is raised."""
    import flowrl.cli

    def handle(error: BaseException) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flowrl", *words])
        patch.setattr(flowrl.cli, "handle", handle)
        with pytest.raises(SystemExit) as left:
            flowrl.cli.main()
    assert left.value.code in (0, None), f"flowrl {shlex.join(words)}: exit code {left.value.code}"


def with_remedy(words: Sequence[str], remedy: Remedy) -> list[str]:
    """The words of a command after a remedy is done, or those of the command that it names."""
    if remedy.command:
        program, *result = shlex.split(remedy.command)
        assert program == "flowrl", remedy
        return result
    if remedy.settings:
        return [*words, *words_of(remedy)]
    if remedy.flag:
        return [*words, *shlex.split(remedy.flag)]
    left = list(words)
    for word in shlex.split(remedy.without):
        assert word in left, f"{remedy}: {shlex.join(left)}"
        while word in left:
            place = left.index(word)
            del left[place : place + (2 if _takes_value(words[0], word) else 1)]
    return left


def _takes_value(command: str, word: str) -> bool:
    import typer.main

    import flowrl.cli

    app: Any = typer.main.get_command(flowrl.cli.app)
    parameters = app.commands[command].params
    return any(word in each.opts and not each.is_flag for each in parameters if each.param_type_name == "option")


def goes_further(words: Sequence[str], fault: Advised) -> bool:
    """Whether `flowrl WORDS` comes past the line that raised the fault; it may fail later, without a model or run."""
    try:
        command_fault(words)
    except Fault as error:
        return raised_at(error) != raised_at(fault)
    return True


def raised_at(error: BaseException) -> tuple[str, int]:
    """(file, line) that raised an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno or 0
