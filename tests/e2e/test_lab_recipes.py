"""Every recipe of configs/lab trains on the embedded model: small, but through the real loop, and resumes bitwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import assert_same_gradient, digest, finish, start
from tests.e2e.test_preferences import make_pairs

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs" / "lab").glob("*.yaml"))
SMALL = (
    "data.max_eval_prompts=2",
    "rollout.batch_size=8",
    "optim.batch_size=16",  # a whole group, for the losses that need one
    "optim.schedule=constant",  # a linear one knows how many iterations there will be
    "checkpoint={every: 1, keep: 9}",
    "eval.num_inference_steps=2",
    "eval.samples_per_prompt=1",
    "eval.batch_size=2",
    "eval.every=0",
    "eval.save_images=0",
)


def small(recipe: Path) -> list[str]:
    """Overrides that make it so; given pairs are those of `make_pairs`."""
    if "pairs:" in recipe.read_text():
        return [*SMALL, "data.pairs.path=pairs", "data.pairs.per_iteration=2"]
    return [*SMALL, "rollout.prompts_per_iteration=2"]


def fit(recipe: Path, *overrides: str, resume: bool = False) -> dict:
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer

    return Trainer(resolve(load_config(recipe, [*small(recipe), *overrides]))).fit(resume=resume)


def each(*slow: str) -> list:
    """Every recipe; `slow` ones, whose code another walks too, wait for the long suite."""
    return [pytest.param(file, marks=pytest.mark.slow if file.stem in slow else (), id=file.stem) for file in RECIPES]


TREES = ("tree_grpo", "dynamic_tree_rpo", "tempflow_grpo", "g2rpo", "tp_grpo")


@pytest.mark.parametrize("recipe", each("ddpo-compressibility", "ddpo-incompressibility", *TREES))
def test_a_recipe_trains_and_goes_on_bitwise_after_an_interruption(place: Path, recipe: Path):
    make_pairs(place / "pairs", 4)
    whole = fit(recipe, "name=whole", "iterations=2")
    fit(recipe, "name=parts", "iterations=1")
    fit(recipe, "name=parts", "iterations=2", resume=True)
    assert whole["status"] == "finished"
    assert digest("parts", 2) == digest("whole", 2)
    rows = [json.loads(line) for line in Path("runs/whole/metrics.jsonl").read_text().splitlines()]
    # A group can be dead in so small a run, but not everywhere in both iterations: some update had a gradient.
    assert max(row.get("grad/norm", 0.0) for row in rows) > 0
    # FIND's network is frozen: its loss asks for no evaluation.
    assert all((row["nfe/train"] > 0) == (recipe.stem != "find") for row in rows)
    given = "pairs:" in recipe.read_text()
    assert all(("nfe/rollout" in row) != given for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_two_processes_take_the_first_update_of_one(place: Path, recipe: Path):
    make_pairs(place / "pairs", 4)
    words = ("iterations=1", "optim.updates_per_iteration=1")
    fit(recipe, "name=one", *words)
    code, output = finish(start("train", str(recipe), *small(recipe), *words, "name=two", "--processes", "2"))
    assert code == 0, output
    rows = [json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in ("one", "two")]
    metric = "reward/total_mean" if "reward/total_mean" in rows[0] else "matching/error"
    assert rows[0][metric] == pytest.approx(rows[1][metric], abs=1e-5)
    assert_same_gradient("one", "two")


def test_one_reward_in_two_entries_gives_separate_losses_from_one_pass(place: Path, monkeypatch: pytest.MonkeyPatch):
    from flowrl.reward import Reward
    from flowrl.rewards import shapes

    built, batches, build = [], [], shapes.build

    def counted(config):
        reward = build(config)
        built.append(config)

        def score(images, prompts, metadata):
            batches.append(len(prompts))
            return reward.score(images, prompts, metadata)

        return Reward(score, reward.card)

    monkeypatch.setattr(shapes, "build", counted)
    credits = watch_credit(monkeypatch)
    entries = "{name: shapes, outputs: {shapes_strict: 1}}, {name: shapes, weight: 2, outputs: {shapes_partial: 1}}"
    recipe = next(file for file in RECIPES if file.stem == "dance_grpo")
    two = fit(recipe, "name=two", "iterations=2", f"rewards=[{entries}]")
    assert two["status"] == "finished"
    assert len(built) == 1
    # Probe batches of training and held-out prompts, the base (2 pictures), 2 x 16 samples an iteration, the tuned one.
    assert batches == [2, 2, 2, 32, 32, 2]
    assert [tuple(values.shape) for values in credits] == [(2, 16, 2)] * 2
    rows = [json.loads(line) for line in Path("runs/two/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert {"reward/shapes_strict_mean", "reward/shapes_partial_mean"} <= set(row)
        total = row["reward/shapes_strict_mean"] + 2 * row["reward/shapes_partial_mean"]
        assert row["reward/total_mean"] == pytest.approx(total, abs=1e-5)
    assert max(row.get("grad/norm", 0.0) for row in rows) > 0
    assert set(two["base"]) == {"shapes_strict", "shapes_partial"}
    assert two["primary"] == "shapes_partial"


def watch_credit(monkeypatch: pytest.MonkeyPatch) -> list:
    """The advantages [P, G, R'] of every iteration, as dance_grpo gives them."""
    from flowrl.algorithms.dance_grpo import DanceGrpo

    seen, rule = [], DanceGrpo.advantages

    def watched(self, rewards, weights, prompts=()):
        credit = rule(self, rewards, weights, prompts)
        seen.append(credit.values)
        return credit

    monkeypatch.setattr(DanceGrpo, "advantages", watched)
    return seen
