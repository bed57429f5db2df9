"""`flowrl sweep`: its cells, its record, resumption, failures, and whose folder it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowrl.apps import sweep as _sweep
from flowrl.core.errors import ConfigError
from tests.e2e.conftest import BASE, BRIGHTNESS


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    monkeypatch.chdir(tmp_path)
    return "run.yaml"


class Trains:
    """Stands in for `flowrl train`: leaves a summary, and ends with the given codes."""

    def __init__(self, codes: dict[str, int]) -> None:
        self.codes, self.calls = codes, list[list[str]]()

    def __call__(self, arguments) -> int:
        self.calls.append(list(arguments))
        values = dict(word.split("=", 1) for word in arguments if "=" in word)
        code = self.codes.get(values["name"], 0)
        folder = Path(values["output"], values["name"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("")
        (folder / "summary.json").write_text(json.dumps({"status": "failed" if code else "finished"}))
        return code


def test_cells_are_recipes_by_methods_by_seeds(recipe):
    made = _sweep.cells([recipe], ["flow_grpo", "ddpo"], [0, 3], ["iterations=2"])
    assert [cell.run for cell in made] == ["run-flow_grpo-s0", "run-flow_grpo-s3", "run-ddpo-s0", "run-ddpo-s3"]
    assert made[0].method is None  # its own method keeps its options
    words = ["iterations=2", "algorithm={name: ddpo}", "name=run-ddpo-s3", "output=out", "seed=3"]
    assert made[3].arguments(Path("out")) == words


def test_a_failed_cell_does_not_end_it_and_the_same_command_goes_on(recipe, tmp_path):
    out, asked = tmp_path / "out", _sweep.cells([recipe], [], [0, 1, 2], [])
    first = Trains({"run-s1": 1})
    made = _sweep.recorded(out, asked)
    told = [(number, cell.status) for number, cell in _sweep.run(out, made, [], first)]
    assert told == [(0, "running"), (0, "finished"), (1, "running"), (1, "failed"), (2, "running"), (2, "finished")]
    record = json.loads((out / _sweep.FILE).read_text())["cells"]
    assert [(one["status"], one["exit_code"]) for one in record] == [("finished", 0), ("failed", 1), ("finished", 0)]
    more = _sweep.cells([recipe], [], [0, 1, 2, 3], [])
    second = Trains({})
    made = _sweep.recorded(out, more)
    list(_sweep.run(out, made, ["--processes", "2"], second))
    assert [("--resume" in call, call[-1]) for call in second.calls] == [(True, "2"), (False, "2")]
    assert {cell.status for cell in made} == {"finished"}


def test_a_signal_ends_it(recipe, tmp_path):
    made = _sweep.cells([recipe], [], [0, 1], [])
    trains = Trains({"run-s0": 130})
    list(_sweep.run(tmp_path / "out", made, [], trains))
    assert [cell.status for cell in made] == ["stopped", "waiting"]


def test_another_sweeps_folder_is_refused_by_name(recipe, tmp_path):
    out, asked = tmp_path / "out", _sweep.cells([recipe], [], [0, 1], [])
    _sweep.save(out, asked)
    with pytest.raises(ConfigError, match="another sweep, with the cells run-s1"):
        _sweep.recorded(out, asked[:1])
    with pytest.raises(ConfigError, match=r"its cell run-s0 is another one: words was \[\], now"):
        _sweep.recorded(out, _sweep.cells([recipe], [], [0, 1], ["iterations=2"]))
    (tmp_path / recipe).write_text(yaml.safe_dump(BASE | {"iterations": 9}))
    with pytest.raises(ConfigError, match="run-s0 is another one: config was"):
        _sweep.recorded(out, _sweep.cells([recipe], [], [0, 1], []))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"not empty and has no sweep\.json"):
        _sweep.recorded(tmp_path / "full", asked)


@pytest.mark.parametrize(
    ("methods", "words", "said"),
    [
        ([], ["seed=3"], "give --seeds"),
        ([], ["output=x"], "give --out"),
        (["awm"], ["algorithm.kl.coef=1"], "--methods sets the method"),
        (["awn"], [], "run.yaml with awn: .*did you mean 'awm'"),
    ],
)
def test_what_it_sets_itself_and_bad_cells_are_refused_before_a_run(recipe, methods, words, said):
    with pytest.raises(ConfigError, match=said):
        _sweep.cells([recipe], methods, [0], words)


def test_two_recipes_of_one_name_are_refused(recipe):
    with pytest.raises(ConfigError, match="two cells are called 'run-s0'"):
        _sweep.cells([recipe, f"./{recipe}"], [], [0], [])


@pytest.mark.slow
def test_a_sweep_ends_in_one_comparison(recipe, tmp_path):
    words = [sys.executable, "-P", "-m", "flowrl", "sweep", recipe, "iterations=1", "--seeds", "0,1", "--out", "out"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/comparison/index.html").is_file()
    assert {one["status"] for one in json.loads((tmp_path / "out/sweep.json").read_text())["cells"]} == {"finished"}
    made = _sweep.recorded(Path("out"), _sweep.cells([recipe], [], [0, 1], ["iterations=1"]))
    assert list(_sweep.run(Path("out"), made, [], Trains({}))) == []
