"""Methods on trees, on a real pipeline: resuming, processes, sharding, and what does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from tests import ranks
from tests.e2e.conftest import digest, finish, start, train
from tests.e2e.test_sharded import ROOT, SHARD, assert_same_update

DANCE, CLIP = "rollout.sampler={name: dance_sde, eta: 0.7}", "algorithm.clip_range=1e-3"
# Method -> its words, for three denoising steps; a tree has four leaves, of TP-GRPO two.
METHODS = {
    "branch_grpo": ("algorithm={name: branch_grpo, splits: [0, 1]}", DANCE),
    "tree_grpo": ("algorithm={name: tree_grpo, children: 2, window: 2}",),
    "tempflow_grpo": ("algorithm={name: tempflow_grpo, children: 2}",),
    "g2rpo": ("algorithm={name: g2rpo, children: 2, strides: [1, 2], steps: [0]}",),
    "tp_grpo": ("algorithm={name: tp_grpo, window: 1}",),
}
PATHS = "algorithm.path_weight=1.0"
# An eps of the gradients' size: with its default AdamW turns the last digits of a tiny gradient into its sign.
BRIEF = ("eval.num_inference_steps=1", "data.max_eval_prompts=2", "optim.eps=1e-3")
ONE_UPDATE = ("iterations=1", "optim.updates_per_iteration=1", *BRIEF)
# Three trees of one prompt: one here and two there, of which a batch holds one.
THREE = ("rollout.prompts_per_iteration=1", "rollout.group_size=12", "rollout.batch_size=4")
# Advantages of a step sum to 0, so a gradient is far less than the edges' own, whose last digits depend on batches.
TOLERANCE = 1e-4
SLOW = [name for name in METHODS if name != "branch_grpo"]
LATER = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


def on_two(*jobs: list[str]) -> None:
    """Train all jobs in one group of two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        ranks.run([["run.yaml", *words] for words in jobs])


# ---- resuming


@pytest.mark.parametrize("name", ["branch_grpo", *LATER])
def test_interrupted_and_resumed_training_is_bitwise_the_uninterrupted_one(place: Path, name: str):
    words = (*METHODS[name], CLIP, *BRIEF)
    train("name=whole", *words, "iterations=2")
    train("name=parts", *words, "iterations=1")
    train("name=parts", *words, "iterations=2", resume=True)
    assert digest("parts", 2) == digest("whole", 2) != digest("parts", 1)


# ---- processes


def test_two_processes_take_the_update_of_one_with_weights_by_path_whether_or_not_they_share_the_network(place: Path):
    """The one with fewer trees keeps step in every forward, and credit needs the log-probs of the other's trees."""
    # Over all trees of the prompt: of two nodes alone the one is at +0.707 whatever the weights.
    words = (*METHODS["branch_grpo"], CLIP, PATHS, "algorithm.scale={pool: prompt}", *ONE_UPDATE, *THREE)
    on_two(["name=two", *words], ["name=shared", *words, SHARD])
    train("name=one", *words)
    assert_same_update("one", "two", TOLERANCE)
    assert_same_update("one", "shared", TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_processes_take_the_update_of_one(place: Path, name: str):
    """Two trees of one prompt, one on each; or three, by a network that the two share."""
    words = (*METHODS[name], CLIP, *ONE_UPDATE, *THREE)
    jobs = {"pair": (*words, "rollout.group_size=8"), "shared": (*words, SHARD)}
    on_two(*([f"name={job}-2", *own] for job, own in jobs.items()))
    for job, own in jobs.items():
        train(f"name={job}-1", *(word for word in own if word != SHARD))
        assert_same_update(f"{job}-1", f"{job}-2", TOLERANCE)


@pytest.mark.slow
def test_pruned_and_mixed_trees_and_a_reference_agree_on_two_processes(place: Path):
    words, kl = (*METHODS["branch_grpo"], CLIP, *ONE_UPDATE, *THREE), "algorithm.kl.coef=0.1"
    jobs = {
        "top": ("algorithm.splits=[0]", "algorithm.prune=parent_top1", SHARD),
        "extremes": ("algorithm.splits=[0]", "algorithm.prune=extremes", "algorithm.keep=1", SHARD),
        "recompute": ("algorithm.old_log_prob=recompute", kl, SHARD),
        "floor": ("algorithm.scale={pool: prompt, floor: 0.5}",),
    }
    on_two(*([f"name={job}-2", *words, *own] for job, own in jobs.items()))
    for job, own in jobs.items():
        train(f"name={job}-1", *words, *(word for word in own if word != SHARD))
        assert_same_update(f"{job}-1", f"{job}-2", TOLERANCE)


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_ends_bitwise_where_the_whole_one_ends(place: Path):
    words = (*METHODS["branch_grpo"], CLIP, PATHS, *BRIEF, *THREE, "optim.updates_per_iteration=3")
    on_two(
        ["name=whole", *words, "iterations=2"],
        ["name=parts", *words, "iterations=1"],
        ["name=parts", *words, "iterations=2", "--resume"],
    )
    assert digest("parts", 2) == digest("whole", 2)


# ---- what does not fit


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("branch_grpo", ["rollout.group_size=6"], "has 4 here; use a multiple of 4"),
        ("tree_grpo", ["rollout.group_size=2"], "has 4 here; use a multiple of 4"),
        ("tempflow_grpo", ["rollout.group_size=10"], "has 4 here; use a multiple of 4"),
        ("g2rpo", ["rollout.group_size=3"], "has 4 here; use a multiple of 4"),
        ("tp_grpo", ["rollout.group_size=2"], "raise it to at least 4"),
        (
            "branch_grpo",
            ["optim.updates_per_iteration=4"],
            "does not divide the 2 trees .* that do: 1, 2",
        ),
    ],
)
def test_wrong_group_sizes_are_refused_with_the_remedy(place: Path, name: str, changes: list[str], remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        resolve(load_config("run.yaml", [*METHODS[name], CLIP, *changes]))


@pytest.mark.slow
def test_more_processes_than_trees_are_refused_before_anything_is_trained(place: Path):
    words = (*METHODS["branch_grpo"], CLIP, *ONE_UPDATE, "rollout.prompts_per_iteration=1", "--processes", "2")
    code, output = finish(start("train", "run.yaml", "name=few", *words))
    assert code == 2, output
    assert "4 samples in trees of 4 cannot keep 2 processes busy" in output
    assert not list(Path("runs/few").glob("checkpoints/*"))
