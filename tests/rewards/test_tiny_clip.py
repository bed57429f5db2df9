"""assets/tiny-clip: loads anywhere, agrees with the verifier, and can be fooled. And how it is trained and measured."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards.shapes import Found, score_scene
from torch.testing import assert_close

from flowrl import shapes
from scripts.pretraining import clip
from scripts.pretraining import clip_measure as measure
from tests.tiny_sd3 import ROOT

FOLDER = ROOT / "assets" / "tiny-clip"
LIMIT = 8_000_000
OFFLINE = """\
import socket, sys
def refuse(*args, **options):
    raise AssertionError("loading must not open a connection")
socket.socket.connect = socket.create_connection = refuse
import open_clip, torch
name = "local-dir:" + sys.argv[1]
model = open_clip.create_model(name, require_pretrained=True).eval()
texts = open_clip.get_tokenizer(name)(["a red circle", "a red circle left of a blue square"])
print(texts.shape[1], int((texts[0] == texts[0].max()).nonzero()[0]), model.encode_text(texts).isfinite().all().item())
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return clip.load(FOLDER)


def held_out(count: int, seed: int = 0) -> tuple[list[shapes.Scene], torch.Tensor]:
    """Held-out scenes with a picture each."""
    rng = np.random.default_rng(seed)
    scenes = [shapes.parse(caption) for caption in shapes.prompts("heldout")[:count]]
    return scenes, torch.from_numpy(np.stack([shapes.draw(scene, rng) for scene in scenes]))


# ---- the asset


def test_it_is_small_and_holds_no_pickle():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md"}


@pytest.mark.slow
def test_open_clip_loads_the_folder_in_a_fresh_process_without_a_network(tmp_path: Path):
    """From another working directory, model and tokenizer; the end of the text is the largest id and is pooled."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", OFFLINE, str(FOLDER)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "4", "True"]


def test_it_prefers_the_true_caption_of_unseen_scenes_to_near_misses(loaded: tuple[Any, Any]):
    """Rendered pictures; 0.5 is chance. The first near miss has another colour, shape or number."""
    scenes, images = held_out(128)
    near = [clip.near_misses(scene) for scene in scenes]  # trained scenes; those of a few are all held out
    rows = [i for i, found in enumerate(near) if found]
    assert len(rows) > 96
    with torch.no_grad():
        right = clip.cosines(*loaded, images[rows], [scenes[i].caption for i in rows])
        other = clip.cosines(*loaded, images[rows], [near[i][0].caption for i in rows])
    assert float((right > other).float().mean()) > 0.8


def test_the_reward_clip_score_gives_its_cosine(loaded: tuple[Any, Any]):
    """At 32 px nothing is resized, so float tensors agree to rounding, and 8 bits nearly."""
    from flowrl.rewards.clip_score import Config, build

    scenes, images = held_out(4)
    captions = [scene.caption for scene in scenes]
    expected = clip.cosines(*loaded, images, captions)
    for preprocess in ("fast", "exact"):
        reward = build(Config(model="tiny-clip", preprocess=preprocess, device="cpu"))
        tolerance = 1e-5 if preprocess == "fast" else 1e-2
        assert_close(reward.score(images, captions, [{}] * 4), expected, rtol=0, atol=tolerance)


def test_its_record_says_that_it_is_good_and_not_perfect():
    facts = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    for part in ("train", "heldout"):
        within = facts["base samples of tiny-sd3"][part]["within groups"]
        assert 0.65 < within["auc of strict"]["low"] < within["auc of strict"]["high"] < 0.95
        assert within["spearman with partial"]["low"] > 0.1


def test_it_can_be_fooled_by_its_own_gradient(loaded: tuple[Any, Any]):
    """From the empty picture to scores above those of the true picture, with nothing that the verifier accepts."""
    scenes, truth = held_out(8)
    captions = [scene.caption for scene in scenes]
    fooled = measure.ascend(*loaded, torch.full_like(truth, shapes.BACKGROUND), captions, 30, measure.ASCENT_RATE)
    assert float(fooled.min()) >= 0
    assert float(fooled.max()) <= 1
    with torch.no_grad():
        honest = clip.cosines(*loaded, truth, captions).mean()
        assert clip.cosines(*loaded, fooled, captions).mean() > honest
    assert measure.verify(truth, captions)[:, 0].mean() == 1
    assert measure.verify(fooled, captions)[:, 0].mean() == 0


# ---- training


def test_no_held_out_scene_is_trained_on_and_every_scene_has_a_near_miss():
    held = {scene.caption for scene in shapes.split("heldout")}
    trained = list(itertools.chain.from_iterable(clip.training_scenes().values()))
    assert not held & {scene.caption for scene in trained}
    assert len(trained) + len(held) == sum(map(len, shapes.scenes().values()))
    for scene in trained:
        near = {other.caption for other in clip.near_misses(scene)}
        assert near
        assert scene.caption not in near
        assert not near & held


def test_true_captions_are_those_that_the_verifier_accepts():
    """Every plain caption of a sample of pictures, by the verifier's own judgement of the true objects."""
    rng = np.random.default_rng(0)
    world = [scene for group in shapes.scenes().values() for scene in group]
    for group in shapes.scenes().values():
        for scene in (group[rng.integers(len(group))] for _ in range(2)):
            placed = shapes.place(scene, rng)
            found = [Found(p.shape, p.color, p.x, p.y) for p in placed]
            accepted = {other.caption for other in world if score_scene(other, found)[0] == 1}
            assert clip.true_captions(placed) >= accepted
            # What it names beyond the world, such as "a red circle and a red circle", is nobody's caption.
            assert clip.true_captions(placed) & {other.caption for other in world} == accepted


def test_the_loss_leaves_out_other_true_pairs():
    """Against sums written out; a huge logit of another true pair changes nothing."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    true = torch.eye(4, dtype=torch.bool)
    true[0, 2] = true[3, 1] = True
    expected = 0.0
    for i in range(4):
        row = sum(math.exp(logits[i, j]) for j in range(4) if i == j or not true[i, j])
        column = sum(math.exp(logits[j, i]) for j in range(4) if i == j or not true[j, i])
        expected += (math.log(row) + math.log(column) - 2 * float(logits[i, i])) / 8
    assert float(clip.contrastive_loss(logits, true)) == pytest.approx(expected, rel=1e-5)
    logits[0, 2] = logits[3, 1] = 50.0
    assert float(clip.contrastive_loss(logits, true)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_seed_gives_the_same_weights(tmp_path: Path):
    states = []
    for name in ("a", "b"):
        settings = clip.Settings(seed=3, output=tmp_path / name, steps=3, families=4, images_per_scene=1)
        clip.train(settings)
        states.append(clip.load(tmp_path / name)[0].state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# ---- measuring


def test_the_area_under_the_curve_counts_pairs():
    rng = np.random.default_rng(0)
    values, hits = rng.integers(0, 4, 20).astype(float), rng.integers(0, 2, 20)
    pairs = [(a > b) + 0.5 * (a == b) for a in values[hits == 1] for b in values[hits == 0]]
    assert measure.auc(values, hits) == pytest.approx(np.mean(pairs))
    assert math.isnan(measure.auc(values, np.ones(20)))


def test_groups_that_show_nothing_are_left_out():
    """The first group ranks rightly, the second wrongly, the third has only hits: two prompts count, mean 0.5."""
    proxy = np.asarray([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    strict = np.asarray([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    found = measure.agreement(proxy, strict, strict)
    assert (found["auc of strict"]["mean"], found["auc of strict"]["n"]) == (0.5, 2)
    assert found["spearman with partial"]["mean"] == pytest.approx(0, abs=1e-12)
