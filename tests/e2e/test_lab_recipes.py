"""Every recipe of configs/lab trains on the embedded model: small, but through the real loop, and resumes bitwise."""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrl.edited_shapes import OPERATIONS
from flowrl.media import media
from scripts.pretraining.edit_prompts import write_pairs
from tests import ranks
from tests.e2e.conftest import ROOT, assert_same_gradient, digest, inside
from tests.e2e.test_preferences import make_pairs

RECIPES = sorted((ROOT / "configs" / "lab").glob("*.yaml"))
DRAFT = ROOT / "configs" / "lab" / "draft.yaml"
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
    "guard.mode=off",
    "eval.save_images=0",
)


def small(recipe: Path) -> list[str]:
    """Overrides that make it so; given pairs are those of `make_all_pairs`."""
    text = recipe.read_text()
    if "tiny-sd3-student" in text:  # it takes its own four steps
        return [*SMALL, "rollout.prompts_per_iteration=2", "eval.num_inference_steps=4"]
    if "pairs:" in text:
        folder = "videos" if "num_frames" in text else "edits" if "records: {source" in text else "pairs"
        source = ["data.pairs.records.source=image"] if folder == "edits" else []
        return [*SMALL, f"data.pairs.path={folder}", *source, "data.pairs.per_iteration=2"]
    return [*SMALL, "rollout.prompts_per_iteration=2"]


def make_all_pairs(folder: Path) -> None:
    """Sets of four pairs below a folder: `pairs` of images, `videos` of videos, bright ones preferred to dark ones.

    And `edits`, the right result preferred to the source.
    """
    make_pairs(folder / "pairs", 4)
    write_pairs(argparse.Namespace(out=folder / "edits", seed=0, operations=OPERATIONS, count=4))
    videos, lines, draws = folder / "videos", [], torch.Generator().manual_seed(0)
    videos.mkdir()
    for k in range(4):
        names = {side: f"{side}-{k}.webp" for side in ("chosen", "rejected")}
        for name, light in zip(names.values(), (200, 50), strict=True):
            levels = torch.randint(light - 50, light + 50, (9, 3, 32, 32), generator=draws)
            media.encode_video(videos / name, levels.to(torch.uint8), media.FPS)
        lines.append({"prompt": "a red circle moves left", **names})
    (videos / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fit(recipe: Path, *overrides: str, resume: bool = False) -> dict:
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer

    return Trainer(resolve(load_config(recipe, [*small(recipe), *overrides]))).fit(resume=resume)


QUICK = ("flow_grpo", "sd-ddpo", "branch_grpo", "diffusion_nft")
"""Chains on both kinds of process, trees, finished samples; pairs and noise: test_preferences.py, test_find.py."""


PULLED = ("algorithm.kl.coef=3", "iterations=2")
"""Of draft: no lab recipe on the gradient of rewards has a pull to the untouched network, and a first update none."""


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.slow, id=file.stem) for file in RECIPES],
)
def test_a_recipe_trains_and_goes_on_bitwise_after_an_interruption(place: Path, recipe: Path):
    make_all_pairs(place)
    pulled = PULLED[:1] if recipe.stem == "draft" else ()
    whole = fit(recipe, "name=whole", "iterations=2", *pulled)
    fit(recipe, "name=parts", "iterations=1", *pulled)
    fit(recipe, "name=parts", "iterations=2", *pulled, resume=True)
    assert whole["status"] == "finished"
    assert digest("parts", 2) == digest("whole", 2)
    rows = [json.loads(line) for line in Path("runs/whole/metrics.jsonl").read_text().splitlines()]
    # A group can be dead in so small a run, but not everywhere in both iterations: some update had a gradient.
    assert max(row.get("grad/norm", 0.0) for row in rows) > 0
    # FIND's network is frozen: its loss asks for no evaluation.
    assert all((row["nfe/train"] > 0) == (recipe.stem != "find") for row in rows)
    assert not pulled or rows[1]["policy/kl_reference"] > 0
    given = "pairs:" in recipe.read_text()
    assert all(("nfe/rollout" in row) != given for row in rows)


ONE_UPDATE = ("iterations=1", "optim.updates_per_iteration=1")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder where every recipe has run for one update, in one group of two processes."""
    folder = tmp_path_factory.mktemp("two")
    make_all_pairs(folder)
    with inside(folder):
        jobs = [[str(recipe), *small(recipe), *ONE_UPDATE, f"name={recipe.stem}-2"] for recipe in RECIPES]
        jobs.append([str(DRAFT), *small(DRAFT), *ONE_UPDATE, *PULLED, "name=pulled-2"])
        ranks.run(jobs, timeout_s=1800)
        yield


def own_of_a_process(metric: str) -> bool:
    """Whether a metric is another with more processes: time, memory and calls, which each of them makes."""
    return metric.startswith(("time/", "perf/", "memory/")) or metric.endswith("_calls")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
@pytest.mark.usefixtures("two")
def test_two_processes_take_the_first_update_of_one(recipe: Path):
    names = [f"{recipe.stem}-{count}" for count in (1, 2)]
    fit(recipe, f"name={names[0]}", *ONE_UPDATE)
    rows = [json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in names]
    # A value that is not known is null: of images, where a judge of latents alone is climbed.
    alone, both = ({k: math.nan if v is None else v for k, v in row.items() if not own_of_a_process(k)} for row in rows)
    # A judge's logits of +-12 cancel in their mean, of which a millionth of 12 is left.
    assert both == pytest.approx(alone, rel=1e-4, abs=1e-4, nan_ok=True)
    assert_same_gradient(names[0], names[1])


@pytest.mark.slow
@pytest.mark.usefixtures("two")
def test_two_processes_feel_the_pull_of_one():
    """Its second update is the first with one: the policy has left the reference."""
    fit(DRAFT, "name=pulled-1", *ONE_UPDATE, *PULLED)
    alone, both = (Path(f"runs/pulled-{count}/metrics.jsonl").read_text().splitlines() for count in (1, 2))
    for one, other in zip(map(json.loads, alone), map(json.loads, both), strict=True):
        shared = [{k: v for k, v in row.items() if not own_of_a_process(k)} for row in (one, other)]
        assert shared[1] == pytest.approx(shared[0], rel=1e-3, abs=1e-5)
    assert json.loads(both[1])["policy/kl_reference"] > 0
    assert_same_gradient("pulled-1", "pulled-2", 2)


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
    # The probe with training prompts, again, and one image alone; with held-out prompts; the base (2 pictures), 2 x 16
    # samples an iteration, the tuned one.
    assert batches == [4, 4, 1, 4, 2, 32, 32, 2]
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
