"""assets/tiny-judge: loads as declared and agrees with the verifier. And what it is trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flowrl.rewards.latent_judge import CARD, Config, build
from flowrl.rewards.shapes import Found

from flowrl import shapes
from flowrl.reward import LatentReward
from scripts.pretraining import clip, judge
from scripts.pretraining.clip_measure import auc
from scripts.pretraining.judge_measure import agreement
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "assets" / "tiny-judge"
LIMIT = 6_500_000
SETTINGS = judge.Settings(output=Path("unused"), model=ROOT / "assets" / "tiny-sd3")


@pytest.fixture(scope="module")
def world() -> judge.World:
    return judge.opened(SETTINGS)


@pytest.fixture(scope="module")
def reward() -> LatentReward:
    return build(Config())


# ---- the asset


def test_it_is_small_and_holds_no_pickle():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} == {".safetensors", ".json", ".md"}


def test_it_is_of_tiny_sd3s_latents(world: judge.World, reward: LatentReward):
    assert (reward.card, reward.shape) == (CARD, world.model.latent_shape)


def test_it_prefers_the_true_caption_of_unseen_scenes_to_near_misses(world: judge.World, reward: LatentReward):
    """Rendered pictures of held-out captions through the VAE; 0.5 is chance."""
    rng, scenes = np.random.default_rng(0), [shapes.parse(caption) for caption in shapes.prompts("heldout")[:96]]
    scenes = [scene for scene in scenes if clip.near_misses(scene)]
    latents = world.encoded(torch.from_numpy(np.stack([shapes.draw(scene, rng) for scene in scenes])))
    near = [clip.near_misses(scene)[0].caption for scene in scenes]
    true, false = (
        reward.value(latents, torch.zeros(len(latents)), world.cond(captions))
        for captions in ([scene.caption for scene in scenes], near)
    )
    assert len(scenes) > 60
    assert float((true > false).double().mean()) > 0.9


def test_it_agrees_with_the_verifier_on_samples_of_the_base_and_says_so(world: judge.World, reward: LatentReward):
    captions = shapes.prompts("heldout")[:144]
    pool = world.drawn(world.model.adapter, captions, seed=3)
    values = reward.value(pool.x0, torch.zeros(len(captions)), world.cond(captions))
    told = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    claimed = told["samples of the base"]["0.0"]["auc"]
    assert claimed > 0.94
    # Over 144 samples an AUC of .95 has a standard error of .018.
    assert abs(auc(values.numpy(), pool.strict) - claimed) < 0.06


# ---- its training


def test_no_held_out_caption_is_trained_on():
    rng, held_out = np.random.default_rng(0), set(shapes.prompts("heldout"))
    assert held_out.isdisjoint(judge.training_captions(3000, rng))
    assert held_out.isdisjoint(clip.known())


def seen(*objects: tuple[str, str]) -> list[Found]:
    return [Found(shape, color, 8.0 + 12 * place, 16.0, 4.0) for place, (shape, color) in enumerate(objects)]


def test_a_step_has_its_shares_and_the_verifiers_labels(world: judge.World):
    """Latents say which row they are."""
    pair = seen(("circle", "red"), ("square", "blue"))
    base = judge.Pool(torch.zeros(2, 4, 8, 8), ["a red circle", "a red circle and a blue square"], [pair, pair])
    scenes = judge.Pool(torch.ones(1, 4, 8, 8), ["a red circle"], [seen(("circle", "red"))])
    climbed = judge.Pool(torch.full((1, 4, 8, 8), 2.0), ["a red circle"], [seen(("blob", "red"))])
    assert (base.strict.tolist(), climbed.strict.tolist(), climbed.true) == ([0.0, 1.0], [0.0], [])
    lessons = judge.Lessons(base, scenes, climbed, SETTINGS)
    x0, cond, labels = lessons.batch(world, judge.Stage(steps=1, rate=0.1, climbed=0.25))
    kinds = x0[:, 0, 0, 0]
    assert [int((kinds == kind).sum()) for kind in (0, 1, 2)] == [96 - 24 - 15, 15, 24]
    assert len(cond) == len(labels) == 96
    # Of 29 by what they show, every second is true; of the base's own captions about half, of the climbed none.
    assert labels[kinds == 2].sum() == 0
    assert labels[kinds == 1].sum() == 8
    assert 7 < labels[kinds == 0].sum() < 50


@pytest.mark.parametrize("count", [0, 5])
def test_no_caption_is_true_of_nothing_or_of_a_crowd(count: int):
    pool = judge.Pool(torch.zeros(1, 4, 8, 8), ["a red circle"], [seen(*[("circle", "red")] * count)])
    assert pool.true == []


def test_agreement_is_that_of_logits_with_labels():
    found = [seen(("circle", "red")), seen(("square", "red"))] * 2
    pool = judge.Pool(torch.zeros(4, 4, 8, 8), ["a red circle"] * 2 + ["a red square"] * 2, found)
    facts = agreement(np.asarray([3.0, 1.0, 2.0, 0.0]), pool)
    assert (facts["strict"], facts["auc"], facts["within captions"]) == (0.5, 0.5, 0.5)


@pytest.mark.slow
def test_a_run_that_climbs_it_raises_its_score_and_is_given_at_its_looks(world: judge.World, reward: LatentReward):
    captions = shapes.prompts("train")[:64]
    cond, level = world.cond(captions), torch.zeros(64)
    before = reward.value(world.drawn(world.model.adapter, captions, 1).x0, level, cond)
    found = []
    for update, adapter in judge.climb(FOLDER, 5, 8, (4, 8)):
        found.append((update, reward.value(world.drawn(adapter, captions, 1).x0, level, cond).mean()))
    assert [update for update, _ in found] == [4, 8]
    assert before.mean() < found[0][1] < found[1][1]
