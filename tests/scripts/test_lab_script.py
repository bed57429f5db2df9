"""scripts/lab.py without training: fingerprints, what a replay decides, numbers of the page."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RECIPE = """\
# A comment.
name: tiny
model: {name: net, path: tiny-net}
rollout: {sampler: {name: noisy}}
algorithm: {name: method}
rewards: [{name: score}]
eval: {num_inference_steps: 2}
"""
FILES = {
    "configs/quickstart.yaml": RECIPE,
    "docs/lab/notes.md": "## Notes\n",
    "flowrl/run/trainer.py": "from flowrl.training import metrics\nfrom flowrl.rollout.loop import run\n",
    "flowrl/rollout/loop.py": "def run():\n    from flowrl.diffusion.process import path\n",
    "flowrl/diffusion/process.py": "path = 1\n",
    "flowrl/training/metrics.py": "log = 1\n",
    "flowrl/credit/tree_credit.py": "unused = 1\n",
    "flowrl/models/net.py": "",
    "flowrl/samplers/noisy.py": "",
    "flowrl/samplers/other.py": "",
    "flowrl/algorithms/method.py": 'LEVEL = "tested"\n',
    "rewards/score.py": "",
    "assets/tiny-net/net/weights.safetensors": "weights",
    "assets/tiny-net/net/config.json": "{}",
    "assets/tiny-net/pretraining.json": "{}",
}
MACHINE = {"processor": "x", "torch": "1"}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, at work on a repository of a few files."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("scripts_lab", SCRIPTS / "lab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for place in (module, importlib.import_module("_lab_fingerprints")):
        monkeypatch.setattr(place, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "docs" / "lab" / "results.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "lab.md")
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    return module


def accuracy(mean: float) -> dict:
    return {"shapes_strict": {"mean": mean, "low": mean - 0.03, "high": mean + 0.03, "n": 512}}


def cell(lab: ModuleType, gain: float = 0.1) -> dict:
    """As measured with the files as they are."""
    rows = [{"iteration": i, "reward/total_mean": 0.4 + i, "grad/norm": 0.01, "eval/x": None} for i in (1, 2, 3)]
    summary = {
        "seconds": 100.0,
        "iterations": 50,
        "base": accuracy(0.4),
        "base_best_guidance": accuracy(0.4) | {"guidance_scale": 1.0},
        "tuned": accuracy(0.4 + gain),
        "difference": accuracy(gain),
        "evaluations": {"rollout": 5.0, "train": 0.1},
        "commit": "0123456789 with uncommitted changes",
    }
    now = asdict(lab.fingerprints(lab.recipes()["quickstart"]))
    return now | {"summary": summary, "replay": {"machine": MACHINE, "rows": rows}}


def replayed(cell: dict, **changes: float) -> dict:
    """A replay that repeats the cell but for changed metrics of iteration 2."""
    rows = copy.deepcopy(cell["replay"]["rows"])
    rows[1] |= changes
    base = {key: copy.deepcopy(cell["summary"][key]) for key in ("base", "base_best_guidance")}
    return base | {"rows": rows, "machine": MACHINE, "commit": "fedcba9876"}


def touch(lab: ModuleType, name: str, text: str | None = None) -> None:
    """Append to a file: another statement of code, or a comment elsewhere."""
    file = lab.ROOT / name
    if text is None:
        text = f"more_{len(file.read_text())} = 1\n" if name.endswith(".py") else "# Another comment.\n"
    file.write_text(file.read_text() + text)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("flowrl/diffusion/process.py", {"code"}),  # imported by what the trainer imports, inside a function
        ("flowrl/samplers/noisy.py", {"code"}),
        ("flowrl/algorithms/method.py", {"code"}),
        ("rewards/score.py", {"code"}),
        ("flowrl/training/metrics.py", set()),
        ("flowrl/credit/tree_credit.py", set()),
        ("flowrl/samplers/other.py", set()),
        ("assets/tiny-net/net/weights.safetensors", {"recipe"}),
        ("assets/tiny-net/net/config.json", {"recipe"}),
        ("assets/tiny-net/pretraining.json", set()),
        ("configs/quickstart.yaml", set()),  # a comment
    ],
)
def test_a_changed_file_changes_the_fingerprint_it_belongs_to(lab: ModuleType, name: str, changed: set[str]):
    recipe = lab.recipes()["quickstart"]
    before = asdict(lab.fingerprints(recipe))
    touch(lab, name)
    after = asdict(lab.fingerprints(recipe))
    assert {key for key in before if before[key] != after[key]} == changed


@pytest.mark.parametrize(
    "text",
    [
        "# A comment.\n",
        "import os\n",
        '"""A docstring."""\n',
        'LEVEL = "experimental"\n',
        "\n\n",
        "x = (1 +  # one\n    2)\n",
    ],
)
def test_what_only_a_reader_sees_is_not_in_the_fingerprint(lab: ModuleType, text: str):
    recipe = lab.recipes()["quickstart"]
    file = lab.ROOT / "flowrl" / "diffusion" / "process.py"
    file.write_text("x = 1 + 2\ny = 3\n")
    before = lab.fingerprints(recipe)
    file.write_text(text + ("y = 3\n" if text.startswith("x") else "x = 1 + 2\ny = 3\n"))
    assert lab.fingerprints(recipe) == before


def test_a_module_that_moves_is_the_same_code(lab: ModuleType):
    recipe, old = lab.recipes()["quickstart"], lab.ROOT / "flowrl" / "diffusion" / "process.py"
    before = lab.fingerprints(recipe)
    old.rename(lab.ROOT / "flowrl" / "diffusion" / "paths.py")
    user = lab.ROOT / "flowrl" / "rollout" / "loop.py"
    user.write_text(user.read_text().replace("flowrl.diffusion.process", "flowrl.diffusion.paths"))
    assert lab.fingerprints(recipe) == before
    touch(lab, "flowrl/diffusion/paths.py")
    assert lab.fingerprints(recipe) != before


def test_the_real_quickstart_depends_on_the_loop_and_not_on_the_gallery(lab: ModuleType, monkeypatch):
    import _lab_fingerprints

    for place in (lab, _lab_fingerprints):
        monkeypatch.setattr(place, "ROOT", SCRIPTS.parent)
    tree = lab.read_recipe(lab.recipes()["quickstart"])
    found = {str(file.relative_to(SCRIPTS.parent)) for file in _lab_fingerprints.code_files(tree)}
    wanted = (
        "credit/advantages",
        "config/schema",
        "training/learner",
        "training/optim",
        "rollout/loop",
        "samplers/ode",
        "algorithms/flow_grpo",
        "models/weights",
    )
    assert {f"flowrl/{name}.py" for name in wanted} | {"rewards/shapes.py", "flowrl/samplers/flow_sde.py"} <= found
    assert not any("gallery" in name or "metrics" in name or "cps" in name for name in found)
    assert sum(file.suffix == ".safetensors" for file in _lab_fingerprints.model_files(tree)) == 5


def check(lab: ModuleType, results: dict, monkeypatch: pytest.MonkeyPatch, **changes: float) -> tuple[bool, list[int]]:
    """Check with a replay that repeats the cells but for the changes; the verdict, and the seeds that were replayed."""
    seeds: list[int] = []

    def replay(name: str, recipe: Path, seed: int) -> dict:
        seeds.append(seed)
        return replayed(results[f"{name}/{seed}"], **changes)

    monkeypatch.setattr(lab, "replay", replay)
    return lab.check_recipe("quickstart", lab.recipes()["quickstart"], results, list(lab.SEEDS)), seeds


def states(lab: ModuleType, results: dict) -> list[str]:
    now = lab.fingerprints(lab.recipes()["quickstart"])
    return [lab.state(results.get(f"quickstart/{seed}"), now) for seed in lab.SEEDS]


def test_a_replay_with_the_same_numbers_makes_the_cells_fresh_until_the_code_changes_again(lab, monkeypatch, capsys):
    results = {f"quickstart/{seed}": cell(lab) for seed in (0, 1)}
    touch(lab, "flowrl/diffusion/process.py")
    before = copy.deepcopy(results)
    assert check(lab, results, monkeypatch, **{"grad/norm": 0.0100002}) == (False, [0])
    assert "iteration 2 grad/norm: 0.01 recorded, 0.0100002 now" in capsys.readouterr().out
    assert results == before
    assert states(lab, results) == ["stale: code", "stale: code", "not run"]
    assert check(lab, results, monkeypatch) == (True, [0])
    assert states(lab, results) == ["replayed", "replayed", "not run"]
    assert results["quickstart/0"]["code"] == before["quickstart/0"]["code"]
    touch(lab, "flowrl/diffusion/process.py")
    assert states(lab, results) == ["stale: code", "stale: code", "not run"]
    results["quickstart/1"]["code"] = "measured with another"
    assert check(lab, results, monkeypatch) == (True, [0, 1])
    touch(lab, "assets/tiny-net/net/weights.safetensors")
    assert check(lab, results, monkeypatch) == (False, [])
    assert states(lab, results) == ["stale: recipe", "stale: recipe", "not run"]


def test_what_counts_as_a_difference(lab):
    recorded = cell(lab)
    assert lab.differences(recorded, replayed(recorded)) == []
    assert lab.differences(recorded, replayed(recorded, **{"grad/norm": 0.01 + 5e-8, "policy/new": 1.0})) == []
    now = replayed(recorded)
    now["base"]["shapes_strict"]["mean"] += 1 / 1024
    del now["rows"][2]["grad/norm"]
    now["rows"][2]["eval/x"] = 0.5
    assert lab.differences(recorded, now) == [
        "base shapes_strict mean: 0.4 recorded, 0.4009765625 now",
        "iteration 3 grad/norm: 0.01 recorded, missing now",
        "iteration 3 eval/x: None recorded, 0.5 now",
    ]


def test_first_rows_are_whole_and_without_times(lab, tmp_path):
    assert lab.first_rows(tmp_path) == []
    lines = [json.dumps({"iteration": i, "grad/norm": 1.0, "time/update_s": 0.1}) + "\n" for i in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    assert lab.first_rows(tmp_path) == [{"iteration": i, "grad/norm": 1.0} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert len(lab.first_rows(tmp_path)) == lab.REPLAYED


@pytest.mark.parametrize("same", [True, False])
def test_a_run_folder_is_resumed_by_the_same_code_only(lab, monkeypatch, same):
    recipe, commands = lab.recipes()["quickstart"], []
    monkeypatch.setattr(lab.subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr(lab, "measured", lambda folder: {})
    for _ in range(2):
        lab.run_cell("quickstart", recipe, 0, lab.fingerprints(recipe))
        (lab.RUNS / "quickstart-seed0" / "left.txt").touch()
        if not same:
            touch(lab, "flowrl/diffusion/process.py")
    assert ["--resume" in command for command in commands] == [False, same]


def test_the_curve_ends_with_the_tuned_model_on_the_captions_of_the_way(lab, tmp_path):
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True)
    rows = [{"iteration": k, "time/iteration_s": 2.0} for k in (1, 2, 3)]
    assert lab.curve(folder, rows) == []
    rows[1]["eval/shapes_strict"] = 0.4
    (folder / "eval" / "iteration-000002.json").write_text(json.dumps({"prompts": ["a", "b"]}))
    scores = [[1.0, 0.0], [None, 1.0], [0.0, 0.0]]
    (folder / "eval" / "tuned.json").write_text(json.dumps({"scores": {"shapes_strict": scores}}))
    assert lab.curve(folder, rows) == [[4.0, 0.4], [6.0, pytest.approx(2 / 3)]]


@pytest.mark.parametrize(
    ("accuracies", "seconds"),
    [([0.1, 0.6, 0.2, 0.6], 40), ([0.1, 0.55, 0.45, 0.6], 20), ([0.6, 0.3, 0.3, 0.4], None), ([0.5, 0.5, 0, 0], 10)],
)
def test_one_lucky_evaluation_does_not_reach_the_goal(lab, accuracies, seconds):
    from _lab_page import reached

    assert reached([[10 * (k + 1), value] for k, value in enumerate(accuracies)], 0.5) == seconds


def test_an_interval_over_seeds_is_students(lab):
    from _lab_page import over_seeds

    # 4.3027 standard errors on either side, of a mean of 0.4 with the std 0.1 of three values.
    assert over_seeds([0.3, 0.4, 0.5]) == ("0.40", "0.15 to 0.65")
    assert over_seeds([0.3, None, 0.5]) == ("-", "-")


def test_the_page_and_the_file_of_results_are_written(lab, monkeypatch):
    results = {f"quickstart/{seed}": cell(lab, gain) for seed, gain in ((0, 0.1), (1, 0.2))}
    lab.write_results(results)
    assert json.loads(lab.RESULTS.read_text()) == results
    lab.write_page(results)
    row = "| quickstart | tested | +15.0 | +7.0 | 2 of 3 | 50 | 5.00 + 0.10 | 100 | fresh, not run |"
    assert row in lab.PAGE.read_text()
    touch(lab, "flowrl/diffusion/process.py")
    lab.write_page(results)
    assert f"| `{results['quickstart/0']['code'][:8]}` stale (code) |" in lab.PAGE.read_text()
