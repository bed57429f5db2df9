"""Components by folder, dotted path or file."""

import sys
from pathlib import Path

import pytest

from flowrl.core import registry


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """A folder on sys.path; modules imported from it are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("kind", sorted(registry.FOLDERS))
def test_names_are_the_files_of_the_folder_without_helpers(kind):
    found = registry.names(kind)
    assert found == sorted(found)
    assert found
    assert not [name for name in found if name.startswith("_") or name in ("base", "weights")]
    for name in found:
        module = registry.load(kind, name)
        assert module.__name__ == f"{registry.FOLDERS[kind]}.{name}"
        assert Path(str(module.__file__)).is_file()


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list():
    with pytest.raises(registry.UnknownName) as caught:
        registry.load("samplers", "flow_sd")
    message = str(caught.value)
    assert "name='flow_sd'" in message
    assert "did you mean 'flow_sde'?" in message
    assert all(name in message for name in registry.names("samplers"))
    assert registry.suggest("zzzzzz", ["flow_sde", "ode"]) == ""
    assert registry.suggest("flow_sd", ["flow_sde", "ode"]) == "did you mean 'flow_sde'? "


@pytest.mark.parametrize("name", ["base", "_hidden", "", "nowhere_at_all.reward", "tests.missing", "gone.py"])
def test_helpers_and_what_is_not_there_are_no_components(name):
    with pytest.raises(registry.UnknownName) as caught:
        registry.load("samplers", name)
    assert repr(name) in str(caught.value)


def package(folder: Path, name: str, module: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / f"{module}.py").write_text(text)


def test_a_dotted_path_loads_a_module_of_another_package(importable):
    package(importable, "my_package", "my_reward", "VALUE = 3\n")
    assert registry.load("rewards", "my_package.my_reward").VALUE == 3


@pytest.mark.parametrize("missing", ["not_installed_anywhere", "gadget"])
def test_a_dotted_module_whose_own_import_fails_is_not_called_unknown(importable, missing):
    """Also where the missing module's name begins like the component's."""
    package(importable, "gadget_reward", "mine", f"import {missing}\n")
    with pytest.raises(ModuleNotFoundError, match=missing) as caught:
        registry.load("rewards", "gadget_reward.mine")
    assert not isinstance(caught.value, registry.UnknownName)


def test_a_file_loads_by_path_and_two_files_of_one_name_stay_apart(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"VALUE = {value}\n")
    first = registry.load("rewards", str(tmp_path / "a" / "mine.py"))
    second = registry.load("rewards", str(tmp_path / "b" / "mine.py"))
    assert (first.VALUE, second.VALUE) == (1, 2)


def test_dataclasses_work_in_a_file_loaded_by_path(tmp_path):
    """They look their module up in sys.modules."""
    file = tmp_path / "with_config.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\nclass Config:\n    level: float = 0.5\n"
    )
    assert registry.load("rewards", str(file)).Config().level == 0.5
