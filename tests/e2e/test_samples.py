"""Methods on finished samples on a real pipeline: resumed runs, processes, and the adapter that is saved."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import digest, train

TIMES = "times: {name: permutation, count: 2, fraction: 1.0}"
# Those whose options or state the lab's recipes do not have; test_lab_recipes.py resumes and shares the others.
METHODS = {
    # A role that lags, samples of another network than the policy, and a state: from step 2 on the average draws.
    "dgpo": f"algorithm={{name: dgpo, {TIMES}, sample_average_from: 2}}",
    "awm": f"algorithm={{name: awm, {TIMES}, solver: sa, solver_noise: 0.4, off_policy: true}}",
    "diffusion_nft": f"algorithm={{name: diffusion_nft, {TIMES}, old: {{slope: 0.1}}}}",
    # Refreshed at every iteration, so that the second one draws with another network than the first.
    "online_dpo": f"algorithm={{name: online_dpo, {TIMES}, beta: 10, behaviour: lagged, ref_update: 2}}",
    "raft": f"algorithm={{name: raft, {TIMES}}}",
    "rwr": f"algorithm={{name: rwr, {TIMES}}}",
}
SLOW = [name if name == "dgpo" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("name", SLOW)
def test_interrupted_and_resumed_training_is_bitwise_the_uninterrupted_one(place: Path, name: str):
    words = ("rollout.sampler=null", METHODS[name], "model.lora={rank: 4, alpha: 8}", "data.max_eval_prompts=2")
    train("name=whole", "iterations=2", *words)
    train("name=parts", "iterations=1", *words)
    train("name=parts", "iterations=2", *words, resume=True)
    assert digest("parts", 2) == digest("whole", 2) != digest("whole", 1)
    rows = [json.loads(line) for line in Path("runs/parts/metrics.jsonl").read_text().splitlines()]
    assert all(row["grad/norm"] > 0 and row["matching/error"] > 0 for row in rows)


# ---- exploration

NFT = (METHODS["diffusion_nft"], "rollout.sampler=null", "model.lora={rank: 4, alpha: 8}", "data.max_eval_prompts=2")


def told(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_pool_of_the_groups_size_trains_the_plain_run(place: Path):
    train("name=plain", "iterations=1", *NFT)
    train("name=pool", "iterations=1", *NFT, "rollout.exploration={pool: 4, check_prompts: 0}")
    assert digest("pool", 1) == digest("plain", 1)
    (row,) = told("pool")
    assert row["exploration/rank_correlation"] == 1  # the same draws, scored twice
    assert row["nfe/explore"] == row["nfe/rollout"] == 3


def test_an_exploring_run_trains_on_others_and_resumes_bitwise(place: Path):
    words = (*NFT, "rollout.exploration={pool: 10, network: bfloat16, least_hit_rate: 0.0}")
    train("name=plain", "iterations=1", *NFT)
    train("name=whole", "iterations=2", *words)
    train("name=parts", "iterations=1", *words)
    train("name=parts", "iterations=2", *words, resume=True)
    assert digest("parts", 2) == digest("whole", 2)
    assert digest("whole", 1) != digest("plain", 1)
    # 10 candidates for 4 samples, 3 steps each; at first the check too, which draws all 10 in full.
    assert [(row["nfe/explore"], row["nfe/rollout"]) for row in told("whole")] == [(15, 3), (7.5, 3)]
    # Best and worst of a larger pool differ more.
    assert told("whole")[0]["reward/group_std"] > told("plain")[0]["reward/group_std"]


@pytest.mark.slow
def test_a_look_that_finds_too_little_is_given_up_with_a_warning(place: Path, capsys):
    train("name=plain", "iterations=1", *NFT)
    look = "rollout.exploration={pool: 12, num_inference_steps: 2, network: bfloat16, least_hit_rate: 1.0}"
    train("name=poor", "iterations=1", *NFT, look)
    printed = capsys.readouterr().out
    if "the run goes on without it" in printed:
        assert digest("poor", 1) == digest("plain", 1)
        assert "the first look finds" in printed
    else:  # a look that found every one of them is kept
        assert "finds 100%" in printed


def test_a_method_with_log_probs_does_not_explore(place: Path):
    from flowrl.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"rollout\.exploration: flow_grpo compares all samples"):
        train("rollout.exploration={pool: 8}")


# ---- retired prompts


@pytest.mark.slow
def test_a_solved_prompt_is_drawn_no_more_and_a_run_without_prompts_ends(place: Path):
    (place / "solved.py").write_text(
        "import torch\n\n\ndef score(images, prompts, metadata):\n"
        "    solved = torch.tensor([p.startswith('easy') for p in prompts])\n"
        "    return torch.where(solved, 0.95, images.mean(dim=(1, 2, 3)))\n"
    )
    (place / "three.txt").write_text("easy one\na red circle\na blue square\n")
    (place / "easy.txt").write_text("easy one\neasy two\n")
    words = [*NFT[1:], "data.eval_prompts=null", "rewards=[{path: solved.py}]", "rollout.prompts_per_iteration=3"]
    filtered = "filter: {least_std: 1.0e-6, retire: true}"
    words.append(f"algorithm={{name: diffusion_nft, {TIMES}, {filtered}}}")
    train("name=whole", "iterations=3", *words, "data.prompts=three.txt")
    train("name=parts", "iterations=1", *words, "data.prompts=three.txt")
    train("name=parts", "iterations=3", *words, "data.prompts=three.txt", resume=True)
    dead = [row["advantage/dead_group_share"] for row in told("whole")]
    assert dead == [pytest.approx(1 / 3), 0, 0]
    state = json.loads(Path("runs/whole/checkpoints/iteration-000003/state.json").read_text())
    assert state["source"]["retired"] == [0]
    assert digest("parts", 3) == digest("whole", 3)

    summary = train("name=done", "iterations=5", *words, "data.prompts=easy.txt", "rollout.prompts_per_iteration=2")
    assert (summary["status"], summary["iterations"]) == ("finished", 1)


@pytest.mark.slow
def test_a_resumed_run_draws_by_the_same_priority(place: Path):
    texts = ["a red circle", "a blue square", "two green circles", "three red squares", "a green triangle"]
    lines = [json.dumps({"prompt": text, "task": text.split()[0]}) for text in texts]
    (place / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    words = ["data.prompts=tasks.jsonl", "data.eval_prompts=null", "rollout.prompts_per_iteration=2"]
    words.append("data.priority={by: ucb, group: task}")
    train("name=whole", "iterations=3", *words)
    train("name=parts", "iterations=1", *words)
    train("name=parts", "iterations=3", *words, resume=True)
    assert digest("parts", 3) == digest("whole", 3)
    whole, parts = (
        json.loads(Path(f"runs/{name}/checkpoints/iteration-000003/state.json").read_text())["source"]
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert len(whole["seen"]) == 3  # kinds: a, two, three
    assert sum(whole["seen"]) == 3 * 2 * 4
