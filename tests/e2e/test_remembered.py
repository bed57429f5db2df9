"""What a method remembers of earlier iterations is in the checkpoint: a prompt's rewards (DDPO), transitions (DPOK)."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import assert_same_gradient, digest, finish, start, train

DDPO = (
    "algorithm={name: ddpo, clip_range: 1.0e-3, advantages: {name: batch, history: {buffer_size: 6, min_count: 4}}}",
    "rollout.group_size=2",
)
DPOK = (
    "algorithm={name: dpok, clip_range: 1.0e-3, buffer: 10, batch: 6, policy_steps: 2, critic: {batch_size: 8}}",
    "rollout.group_size=2",
    "optim.updates_per_iteration=1",
)
SMALL = (
    *("rollout.sampler=null", "data.max_prompts=2", "data.max_eval_prompts=1", "model.lora=null"),
    "eval={batch_size: 1, num_inference_steps: 1, save_images: 0}",
)


def state(run: str, iteration: int) -> dict:
    file = Path("runs") / run / "checkpoints" / f"iteration-{iteration:06d}" / "state.json"
    return json.loads(file.read_text())["algorithm"]


@pytest.mark.parametrize("method", [DDPO, DPOK], ids=["ddpo", "dpok"])
def test_a_run_goes_on_bitwise_with_what_it_remembers(place: Path, method: tuple[str, ...]):
    """Both prompts are drawn in every iteration, so the third one needs the memory of the first two."""
    train(*SMALL, *method, "iterations=3")
    whole = state("run", 3), digest("run", 3)
    shutil.rmtree(Path("runs/run/checkpoints/iteration-000003"))
    train(*SMALL, *method, "iterations=3", resume=True)
    assert (state("run", 3), digest("run", 3)) == whole
    if method is DDPO:
        (first, second) = state("run", 3)["history"]
        assert len(first[2]) == len(second[2]) == 6
        assert state("run", 1) != state("run", 3)
    else:
        assert len(state("run", 3)["prompts"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", [DDPO, DPOK], ids=["ddpo", "dpok"])
def test_two_processes_remember_and_learn_what_one_does(place: Path, method: tuple[str, ...]):
    words = (*SMALL, *method, "iterations=1", "optim.updates_per_iteration=1")
    words = tuple(word.replace("policy_steps: 2", "policy_steps: 1") for word in words)
    # The first step alone: at the second one, where little noise is left, other batches move the ratio by 4.7e-5.
    words = tuple(word.replace("clip_range", "sde_steps: [0], clip_range") for word in words)
    train(*words, "name=one")
    code, output = finish(start("train", "run.yaml", *words, "name=two", "--processes", "2"))
    assert code == 0, output
    one, two = state("one", 1), state("two", 1)
    if method is DPOK:
        assert one == two
    else:
        assert [row[:2] for row in one["history"]] == [row[:2] for row in two["history"]]
        for mine, theirs in zip(one["history"], two["history"], strict=True):
            assert mine[2] == pytest.approx(theirs[2], abs=1e-4)
    assert_same_gradient("one", "two")
