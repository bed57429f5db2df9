"""configs/proxy and scripts/proxy_against_gold.py: what the recipes share, and what the page says of their cells."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.evaluation.results import Evaluation
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


@pytest.fixture(scope="module")
def proxy() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import proxy_against_gold

        return proxy_against_gold


@pytest.fixture
def files(proxy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's files in another place; every recipe and its code are as they were."""
    for name, file in (("PAGES", ""), ("NUMBERS", "proxy.json"), ("IMAGE", "proxy.svg"), ("PAGE", "proxy.md")):
        monkeypatch.setattr(proxy, name, tmp_path / file)
    now = proxy.lab.Fingerprints("recipe", "code")
    monkeypatch.setattr(proxy.lab, "fingerprints", lambda recipe: now)
    return tmp_path


def cell(strict: list[float], gain: float = 0.1, code: str = "code") -> dict[str, Any]:
    """Evaluated every 25 iterations, the proxy rising by 0.1 each time."""
    interval = {"mean": gain, "low": gain - 0.02, "high": gain + 0.02, "n": 512}
    rows = [
        {"iteration": 25 * i, "clip_cos": 0.5 + 0.1 * i, "shapes_strict": value, "shapes_partial": value}
        for i, value in enumerate(strict)
    ]
    summary = {"seconds": 200.0, "difference": {"clip_cos": interval, "shapes_strict": interval}}
    return {"recipe": "recipe", "code": code, "summary": summary, "curve": rows}


def evaluation(tag: str, iteration: int, strict: list[float]) -> Evaluation:
    table = np.asarray(strict)[:, None]
    scores = {"clip_cos": 2 * table, "shapes_strict": table, "shapes_partial": table}
    return Evaluation(tag, iteration, 1.0, 6, tuple("abcdef"[: len(strict)]), 1, scores)


# ---- the recipes


def test_every_recipe_of_the_folder_is_on_the_page(proxy):
    assert set(proxy.recipes()) == {file.stem for file in FOLDER.glob("*.yaml")} == set(NAMES)


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
def test_three_iterations_of_a_recipe_give_a_curve(proxy, name, tmp_path: Path):
    from flowrl.run.trainer import Trainer

    words = [*SMALL, f"output={tmp_path}", "name=run"]
    assert Trainer(resolve(load_config(FOLDER / f"{name}.yaml", words))).fit()["status"] == "finished"
    rows = proxy.curve(tmp_path / "run" / "eval", 2)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    # What the page takes of a run, as the lab keeps it.
    assert {"clip_cos", "shapes_strict"} <= proxy.lab.measured(tmp_path / "run")["summary"]["difference"].keys()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("grad/norm", 0.0) for row in metrics) > 0
    assert metrics[0]["eval/clip_cos"] == pytest.approx(rows[1]["clip_cos"], abs=1e-5)


# ---- curves, picture, page


def test_a_curve_takes_the_same_captions_everywhere(proxy, tmp_path: Path):
    """Base and result hold more captions than the evaluations on the way."""
    parts = [
        ("base", 0, [0.0, 1.0, 1.0, 1.0]),
        ("iteration-000025", 25, [1.0, 1.0]),
        ("tuned", 50, [0.0, 0.0, 1.0, 1.0]),
    ]
    for tag, iteration, strict in parts:
        evaluation(tag, iteration, strict).save(tmp_path)
    rows = proxy.curve(tmp_path, 2)
    assert [(row["iteration"], row["shapes_strict"], row["clip_cos"]) for row in rows] == [
        (0, 0.5, 1.0),
        (25, 1.0, 2.0),
        (50, 0.0, 0.0),
    ]


def test_the_mean_curve_is_over_seeds_and_refuses_other_iterations(proxy):
    curves = [cell([0.3, 0.5])["curve"], cell([0.5, 0.9])["curve"]]
    assert proxy.mean_curve(curves)["shapes_strict"] == pytest.approx([0.4, 0.7])
    with pytest.raises(ValueError, match="other iterations"):
        proxy.mean_curve([*curves, cell([0.3])["curve"]])


def test_the_page_tells_the_fall_after_the_best_and_what_was_not_run(proxy, files):
    cells = {"flow_grpo/0": cell([0.3, 0.6, 0.2], 0.1), "flow_grpo/2": cell([0.3, 0.4, 0.2], -0.1, code="old")}
    table = proxy.summary_table(cells)
    assert table[2] == ("| flow_grpo | 2 of 3 | 0.500 -> 0.700 | 30.0 | 50.0 (25) | 20.0 | -30.0 | +0.0, -12.0 |")
    assert all("not run" in line for line in table[3:])
    rows = proxy.cells_table(cells)
    assert rows[2].endswith("| 200 | fresh |")
    assert rows[3].endswith("| 200 | stale: code |")
    facts = json.loads(proxy.PRETRAINING.read_text(encoding="utf-8"))
    assert proxy.page({}, facts).count("not run") == len(NAMES)
    assert "proxy.svg" not in proxy.page({}, facts)
    assert "proxy.svg" in proxy.page(cells, facts)


def test_in_short_names_the_recipe_that_falls_furthest_and_the_one_that_falls_least(proxy):
    cells = {"flow_grpo/0": cell([0.3, 0.6, 0.2]), "grpo_guard/0": cell([0.3, 0.4, 0.5])}
    cells["flow_grpo_kl/1"] = cell([0.3, 0.4, 0.3])
    first, furthest, least, last = proxy.in_short(cells)
    assert first == "3 of 12 cells have been run."
    assert furthest == (
        "With `flow_grpo` (1 of 3 seeds) the proxy goes from 0.500 to 0.700 in 50 iterations; of the pictures, 30.0 % "
        "pass the verifier before, 60.0 % at the best evaluation (iteration 25) and 20.0 % at the end."
    )
    assert least.startswith("With `grpo_guard` (1 of 3 seeds)")
    assert "50.0 % at the best evaluation (iteration 50) and 50.0 % at the end" in least
    assert "too high" in last
    assert len(proxy.in_short({"flow_grpo/0": cells["flow_grpo/0"]})) == 3, "one recipe is told once"
    assert proxy.in_short({}) == ["0 of 12 cells have been run."]


def test_the_rewards_page_shows_the_curves_with_what_they_say_in_short(proxy, files, monkeypatch):
    script, cells = proxy.make_rewards_doc, {"flow_grpo/0": cell([0.3, 0.6, 0.2])}
    facts = json.loads(proxy.PRETRAINING.read_text(encoding="utf-8"))
    monkeypatch.setattr(script, "PROXY", proxy.PAGE)
    proxy.PAGE.write_text(proxy.page(cells, facts), encoding="utf-8")
    shown = script.example()
    assert "(rewards/proxy.svg)" in shown
    assert "(rewards/proxy.md)" in shown
    assert shown.endswith("\n" + "\n".join(proxy.in_short(cells)) + "\n")
    assert "An open_clip" not in shown


def test_the_picture_has_a_line_a_seed_and_their_mean_in_both_panels(proxy, files):
    cells = {f"flow_grpo/{seed}": cell([0.3, 0.6, 0.2]) for seed in (0, 1)}
    proxy.draw(cells, files / "a.svg")
    proxy.draw(cells, files / "b.svg")
    text = (files / "a.svg").read_text(encoding="utf-8")
    assert text == (files / "b.svg").read_text(encoding="utf-8")
    # Two panels x two seeds and a mean, and the mean's line in the legend.
    drawn = [e.get("style", "") for e in ElementTree.fromstring(text).iter() if e.tag.endswith("path")]
    assert sum(proxy.COLORS["flow_grpo"] in style for style in drawn) == 2 * 3 + 1


def test_only_missing_cells_are_run_and_stale_ones_if_asked_to(proxy, files, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, int]] = []

    def run_cell(name: str, recipe: Path, seed: int) -> dict[str, Any]:
        ran.append((name, seed))
        return cell([0.3, 0.4])

    monkeypatch.setattr(proxy, "run_cell", run_cell)
    cells = {"flow_grpo/0": cell([0.3, 0.6]), "flow_grpo/1": cell([0.3, 0.6], code="old")}
    proxy.run_missing(["flow_grpo"], cells, [0, 1, 2], stale=False)
    assert ran == [("flow_grpo", 2)]
    assert json.loads(proxy.NUMBERS.read_text(encoding="utf-8")) == cells
    proxy.run_missing(["flow_grpo"], cells, [0, 1, 2], stale=True)
    assert ran[1:] == [("flow_grpo", 1)]


def test_a_cell_is_trained_as_the_lab_does_and_keeps_its_curve(proxy, files, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def train(name: str, recipe: Path, seed: int, now: Any) -> dict[str, Any]:
        seen.append(f"{name} {recipe.name} {seed}")
        folder = files / f"{name}-seed{seed}" / "eval"
        folder.mkdir(parents=True)
        for tag, iteration in (("base", 0), ("tuned", 3)):
            evaluation(tag, iteration, [0.0, 1.0]).save(folder)
        return {"recipe": now.recipe, "code": now.code}

    monkeypatch.setattr(proxy.lab, "run_cell", train)
    monkeypatch.setattr(proxy.lab, "RUNS", files)
    result = proxy.run_cell("grpo_guard", FOLDER / "grpo_guard.yaml", 1)
    assert seen == ["proxy-grpo_guard grpo_guard.yaml 1"]
    assert (result["recipe"], [row["iteration"] for row in result["curve"]]) == ("recipe", [0, 3])
