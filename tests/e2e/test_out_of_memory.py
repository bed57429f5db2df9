"""Out of memory in any phase: which one, what was planned for it, what lowers it; exit code 1 and no traceback."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import OutOfMemory, RewardError
from flowrl.display.phases import out_of_memory, phase
from flowrl.models.sd3 import Sd3
from flowrl.planning.out_of_memory import explained
from flowrl.scoring.attempts import Attempts, Counts
from flowrl.scoring.surroundings import Batch
from flowrl.training.world import World
from tests.e2e.conftest import train
from tests.e2e.test_bad_input import command

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 3.1 GiB. If reserved ...")
# One prompt is evaluated and two are trained on: eight samples, four to a batch.
SMALL = ("iterations=1", "data.max_eval_prompts=1", "rollout.num_inference_steps=2", "optim.updates_per_iteration=1")


def failing(method: Any, when: Callable[..., bool]) -> Any:
    """Once: the estimate calls it too."""
    left = [CUDA]

    def replaced(self: Any, x: Any, *rest: Any) -> Any:
        if left and when(x):
            raise left.pop()
        return method(self, x, *rest)

    return replaced


PHASES: dict[str, tuple[str, Callable[..., bool], tuple[str, ...]]] = {
    "loading": ("encode", lambda x: True, ("model.dtype=bfloat16", "smaller model.height")),
    "evaluation": ("predict", lambda x: len(x) == 1, ("eval.batch_size=4", "vae_slicing=true")),
    "rollout": ("predict", lambda x: len(x) == 4 and not torch.is_grad_enabled(), ("rollout.batch_size=2",)),
    "decode": ("decode", lambda x: len(x) == 4, ("rollout.batch_size=2", "vae_tiling=true")),
    "update": (
        *("predict", lambda x: torch.is_grad_enabled()),
        ("optim.batch_size=2", "model.gradient_checkpointing=true"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "update" else pytest.mark.slow) for name in PHASES]
)
def test_the_phase_the_peak_the_estimate_and_the_options_are_told(place, monkeypatch, capsys, name):
    method, when, options = PHASES[name]
    monkeypatch.setattr(Sd3, method, failing(getattr(Sd3, method), when))
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *SMALL)
    assert code == 1, printed
    assert f"flowrl: out of memory in the phase {name}: CUDA out of memory. Tried to allocate 2.00 GiB. GPU" in printed
    assert "If reserved" not in printed
    assert "Traceback" not in printed
    estimated = {"loading": "encode"}.get(name, name)
    for words in (*options, "Peak of this process: ", f"flowrl plan estimates: {estimated} ", "--resume"):
        assert words in printed


REWARD = """
import torch
def score(images, prompts, metadata):
    if len(images) == {count}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return images.mean(dim=(1, 2, 3))
"""


@pytest.mark.parametrize(
    ("count", "where"),
    [
        (4, "reward 'big'"),  # tried before anything is trained
        pytest.param(8, "reward 'big'", marks=pytest.mark.slow),
        pytest.param(2, "reward 'big' (evaluation)", marks=pytest.mark.slow),
    ],
)
def test_a_rewards_own_is_neither_masked_nor_called_a_broken_contract(place, monkeypatch, capsys, count, where):
    (place / "big.py").write_text(REWARD.format(count=count))
    held_out = "data.max_eval_prompts=3" if count == 2 else SMALL[1]
    words = (*SMALL, held_out, "rewards=[{path: big.py}]", "eval.batch_size=2")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *words)
    assert code == 1, printed
    assert f"out of memory in the phase {where}: CUDA out of memory" in printed
    assert "the reward's own options" in printed
    assert "Traceback" not in printed


def test_a_reward_is_not_tried_again_without_memory():
    calls = []

    def once(*_: object) -> dict:
        calls.append(1)
        raise CUDA

    kept: dict[str, Any] = {"cache": None, "counts": Counts(), "report": lambda text: None}
    attempts = Attempts(name="big", once=once, outputs=["big"], retries=2, isolate=True, **kept)
    with pytest.raises(OutOfMemory, match="reward 'big'"):
        attempts(Batch(torch.zeros(2, 3, 4, 4), ["a", "b"], [{}, {}]))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (CUDA, True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RewardError("the server said: CUDA out of memory"), False),
        (ValueError("out"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_failures(error, found):
    assert out_of_memory(error) is found
    with pytest.raises(OutOfMemory if found else type(error)), phase("update"):
        raise error


def test_the_innermost_phase_is_told():
    with pytest.raises(OutOfMemory) as caught, phase("iteration"), phase("rollout"), phase("decode"):
        raise CUDA
    assert caught.value.phases == ["decode", "rollout", "iteration"]


def test_what_cannot_be_estimated_is_still_told(place, monkeypatch):
    monkeypatch.setattr("flowrl.planning.out_of_memory.planned", lambda *_: 1 / 0)
    resolved, alone = resolve(load_config("run.yaml")), World(0, 1, torch.device("cpu"))
    text = str(explained(OutOfMemory("no more", ["update"]), resolved, alone))
    assert "flowrl plan has no estimate of it (division by zero)" in text
    other = KeyError("a")
    assert explained(other, resolved, alone) is other


def test_the_peak_of_a_gpu_is_told(monkeypatch):
    from flowrl.planning.out_of_memory import _peak

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4 * 2**30))
    assert _peak(torch.device("cuda", 1)) == "Peak 3.00 GiB of 4.00 GiB on cuda:1"


@pytest.mark.slow
def test_a_run_goes_on_with_smaller_batches(place):
    train(*SMALL)
    smaller = ("rollout.batch_size=2", "optim.batch_size=2", "eval.batch_size=4", "model.gradient_checkpointing=true")
    train(*SMALL, "iterations=2", *smaller, resume=True)
    log = (place / "runs/run/train.log").read_text()
    assert "rollout.batch_size was 4, now 2: the result is right but not bitwise the same" in log
