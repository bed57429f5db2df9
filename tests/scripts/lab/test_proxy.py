"""configs/proxy and `python -m scripts.lab proxy`: what the recipes share, and what the page says of their cells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.evaluation.results import Evaluation
from scripts.lab import proxy
from scripts.lab.cells import write_results
from scripts.lab.runs import mean_scores, measured
from tests import toys
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "configs" / "proxy"
NAMES = ("flow_grpo", "flow_grpo_kl", "grpo_guard", "multi_reward")
SMALL = (
    "iterations=3",
    "data.max_eval_prompts=3",
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "checkpoint={every: 9, keep: 1}",
    "eval.every=1",
    "eval.periodic_prompts=2",
    "eval.samples_per_prompt=1",
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's files in another place."""
    for name, file in (("PAGES", ""), ("NUMBERS", "proxy.json"), ("IMAGE", "proxy.svg"), ("PAGE", "proxy.md")):
        monkeypatch.setattr(proxy, name, tmp_path / file)
    return tmp_path


def cell(strict: list[float], gain: float = 0.1, commit: str = "0123456789") -> dict[str, Any]:
    """Evaluated every 25 iterations, the proxy rising by 0.1 each time."""
    interval = {"mean": gain, "low": gain - 0.02, "high": gain + 0.02, "n": 512}
    rows = [
        {"iteration": 25 * i, "clip_cos": 0.5 + 0.1 * i, "shapes_strict": value, "shapes_partial": value}
        for i, value in enumerate(strict)
    ]
    summary = {"seconds": 200.0, "cpu_seconds": 380.0, "difference": {"clip_cos": interval, "shapes_strict": interval}}
    return {"commit": commit, "summary": summary, "curve": rows}


def evaluation(tag: str, iteration: int, strict: list[float]) -> Evaluation:
    table = np.asarray(strict)[:, None]
    scores = {"clip_cos": 2 * table, "shapes_strict": table, "shapes_partial": table}
    return toys.evaluation(tag, iteration, 1.0, 6, tuple("abcdef"[: len(strict)]), 1, scores)


# ---- the recipes


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_differs_from_the_first_only_where_it_says(name):
    """And is resolved with the embedded proxy, both metrics evaluated on the way."""
    trees = [yaml.safe_load((FOLDER / f"{file}.yaml").read_text(encoding="ascii")) for file in ("flow_grpo", name)]
    changed = {key for key in trees[0].keys() | trees[1].keys() if trees[0].get(key) != trees[1].get(key)}
    inside = {"flow_grpo": set(), "flow_grpo_kl": {"algorithm"}, "grpo_guard": {"algorithm"}}
    inside["multi_reward"] = {"algorithm", "rewards", "eval"}
    assert changed - {"name"} == inside[name]
    resolved = resolve(load_config(FOLDER / f"{name}.yaml"))
    assert resolved.rewards[0].config.model == "tiny-clip"
    assert "shapes" in {plan.name for plan in (*resolved.rewards, *resolved.eval_rewards)}
    assert resolved.run.iterations % resolved.run.eval.every == 0
    weights = {plan.name: plan.entry.weight for plan in resolved.rewards}
    assert weights == ({"clip_score": 0.8, "shapes": 0.2} if name == "multi_reward" else {"clip_score": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_iterations_of_a_recipe_give_a_curve(name, tmp_path: Path):
    from flowrl.run.trainer import Trainer

    words = [*SMALL, f"output={tmp_path}", "name=run"]
    assert Trainer(resolve(load_config(FOLDER / f"{name}.yaml", words))).fit()["status"] == "finished"
    rows = mean_scores(tmp_path / "run", 2, proxy.METRICS)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    # What the page takes of a run, as the lab keeps it.
    assert {"clip_cos", "shapes_strict"} <= measured(tmp_path / "run")["difference"].keys()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("grad/norm", 0.0) for row in metrics) > 0
    assert metrics[0]["eval/clip_cos"] == pytest.approx(rows[1]["clip_cos"], abs=1e-5)


# ---- curves, picture, page


def test_a_curve_takes_the_same_captions_everywhere(tmp_path: Path):
    """Base and result hold more captions than the evaluations on the way."""
    parts = [
        ("base", 0, [0.0, 1.0, 1.0, 1.0]),
        ("iteration-000025", 25, [1.0, 1.0]),
        ("tuned", 50, [0.0, 0.0, 1.0, 1.0]),
    ]
    for tag, iteration, strict in parts:
        evaluation(tag, iteration, strict).save(tmp_path / "eval")
    rows = mean_scores(tmp_path, 2, proxy.METRICS)
    assert [(row["iteration"], row["shapes_strict"], row["clip_cos"]) for row in rows] == [
        (0, 0.5, 1.0),
        (25, 1.0, 2.0),
        (50, 0.0, 0.0),
    ]


def test_the_mean_curve_is_over_seeds_and_refuses_other_iterations():
    curves = [cell([0.3, 0.5])["curve"], cell([0.5, 0.9])["curve"]]
    assert proxy.mean_curve(curves)["shapes_strict"] == pytest.approx([0.4, 0.7])
    with pytest.raises(ValueError, match="other iterations"):
        proxy.mean_curve([*curves, cell([0.3])["curve"]])


def test_only_missing_cells_are_run_and_others_if_asked_to(files, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def run_cell(run: Any) -> dict[str, Any]:
        ran.append(run.name)
        return cell([0.3, 0.4])

    monkeypatch.setattr(proxy.runs, "run_cell", run_cell)
    monkeypatch.setattr(proxy.runs, "mean_scores", lambda folder, captions, metrics: [captions])
    names = ["flow_grpo", "grpo_guard"]
    old = {f"{name}/{seed}": cell([0.3, 0.6]) for name in names for seed in (0, 1)}
    write_results(old, proxy.NUMBERS)
    assert proxy.run_missing(proxy.jobs(names, [0, 1, 2]), proxy.NUMBERS)
    assert ran == ["proxy-flow_grpo-seed2", "proxy-grpo_guard-seed2"]
    kept = proxy.load(proxy.NUMBERS)
    assert kept == old | {f"{name}/2": cell([0.3, 0.4]) | {"curve": [128]} for name in names}
    assert proxy.run_missing(proxy.jobs(names[:1], [0]), proxy.NUMBERS, again=True)
    assert ran[2:] == ["proxy-flow_grpo-seed0"]


def test_the_page_and_the_picture_are_made_of_the_cells(files):
    cells = {"flow_grpo/0": cell([0.3, 0.6, 0.2], 0.1), "flow_grpo/2": cell([0.3, 0.4, 0.2], -0.1, commit="fedcba9876")}
    table = proxy.summary_table(cells)
    assert table[2] == ("| flow_grpo | 2 of 3 | 0.500 -> 0.700 | 30.0 | 50.0 (25) | 20.0 | -30.0 | +0.0, -12.0 |")
    assert all("not run" in line for line in table[3:])
    facts = json.loads(proxy.PRETRAINING.read_text(encoding="utf-8"))
    assert proxy.page(cells, facts).count("| `fedcba98` |") == 1
    proxy.draw(cells, files / "a.svg")
    assert (files / "a.svg").stat().st_size > 1000
