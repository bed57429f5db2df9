"""Methods on trees, on a real pipeline: processes, sharding, and what does not fit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from tests import ranks
from tests.e2e.conftest import digest, finish, inside, start, train
from tests.e2e.test_sharded import SHARD, assert_same_update

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


# ---- processes

BRANCH, KL = (*METHODS["branch_grpo"], CLIP, *ONE_UPDATE, *THREE), "algorithm.kl.coef=0.1"
# Weights by path over all trees of the prompt: of two nodes alone the one is at +0.707 whatever the weights. The
# process with fewer trees keeps step in every forward, and credit needs the log-probs of the other's trees.
BY_PATH = (*BRANCH, PATHS, "algorithm.scale={pool: prompt}")
JOBS = {
    "path": BY_PATH,
    "path-shared": (*BY_PATH, SHARD),
    # Two trees of one prompt, one on each; or three, by a network that the two share.
    **{f"{name}-pair": (*METHODS[name], CLIP, *ONE_UPDATE, *THREE, "rollout.group_size=8") for name in SLOW},
    **{f"{name}-shared": (*METHODS[name], CLIP, *ONE_UPDATE, *THREE, SHARD) for name in SLOW},
    "top": (*BRANCH, "algorithm.splits=[0]", "algorithm.prune=parent_top1", SHARD),
    "extremes": (*BRANCH, "algorithm.splits=[0]", "algorithm.prune=extremes", "algorithm.keep=1", SHARD),
    "recompute": (*BRANCH, "algorithm.old_log_prob=recompute", KL, SHARD),
    "floor": (*BRANCH, "algorithm.scale={pool: prompt, floor: 0.5}"),
}
RESUMED = (*METHODS["branch_grpo"], CLIP, PATHS, *BRIEF, *THREE, "optim.updates_per_iteration=3")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder where all jobs have run in one group of two processes."""
    folder = tmp_path_factory.mktemp("two")
    resumed = [
        ["name=whole", *RESUMED, "iterations=2"],
        ["name=parts", *RESUMED, "iterations=1"],
        ["name=parts", *RESUMED, "iterations=2", "--resume"],
    ]
    jobs = [[f"name={job}-2", *words] for job, words in JOBS.items()]
    with inside(folder):
        ranks.run([["run.yaml", *words] for words in (*jobs, *resumed)], timeout_s=1800)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.usefixtures("two")
def test_two_processes_take_the_update_of_one(job: str):
    train(f"name={job}-1", *(word for word in JOBS[job] if word != SHARD))
    assert_same_update(f"{job}-1", f"{job}-2", TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("two")
def test_a_resumed_run_of_two_processes_ends_bitwise_where_the_whole_one_ends():
    assert digest("parts", 2) == digest("whole", 2)


# ---- what does not fit


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("branch_grpo", ["rollout.group_size=6"], "has 4 here; try rollout.group_size=8"),
        ("tree_grpo", ["rollout.group_size=2"], "has 4 here; try rollout.group_size=4"),
        ("tempflow_grpo", ["rollout.group_size=10"], "has 4 here; try rollout.group_size=12"),
        ("g2rpo", ["rollout.group_size=3"], "has 4 here; try rollout.group_size=4"),
        ("tp_grpo", ["rollout.group_size=2"], "try rollout.group_size=4"),
        (
            "branch_grpo",
            ["optim.updates_per_iteration=4"],
            "does not divide the 2 trees .*; try .*updates_per_iteration=1, or .*updates_per_iteration=2",
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
