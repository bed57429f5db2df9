"""What only a card can show: bash scripts/gpu_day/tests.sh."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.gpu import attention
from scripts.bench.gpu.records import Records
from tests.e2e.conftest import ROOT, finish, start, train
from tests.gpu import checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
]
HALF = ("bfloat16", "float16")
SD35 = "configs/sd3/flow_grpo-pickscore.yaml"


# ---- the same forward in rollout and training


@pytest.mark.parametrize("dtype", HALF)
def test_the_rollouts_own_batches_replay_without_any_change(dtype):
    found = checks.gate_of(f"model.dtype={dtype}")
    assert found["same_no_grad"] == 0
    assert found["same_grad"] == 0, "another kernel runs with gradient than without"
    assert max(found["other_grad"], found["partial_grad"]) <= found["allowed"]


@pytest.mark.parametrize("dtype", HALF)
def test_a_replay_at_the_real_size_stays_within_the_gate(dtype):
    from scripts.bench.gpu import gate
    from scripts.bench.gpu.session import opened

    with opened(SD35, [f"model.dtype={dtype}", "rollout.num_inference_steps=4"], random=True) as bench:
        found = gate.measure(bench, 1)
    assert found["same_no_grad"] == found["same_grad"] == 0
    assert max(found["other_grad"], found["partial_grad"]) <= found["allowed"]


# ---- determinism


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(dtype):
    assert checks.equal(*checks.resumed(f"model.dtype={dtype}"))


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_a_microbatch_has_the_same_gradient_twice(dtype):
    first, second = checks.gradients(f"model.dtype={dtype}")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_images_are_those_of_the_cpu(tmp_path: Path):
    """Rollouts of one seed differ between devices by rounding alone."""
    code = "import sys, torch; from tests.gpu import checks; torch.save(checks.images(), sys.argv[1])"
    file = tmp_path / "images.pt"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code, str(file)], env=hidden, cwd=ROOT, check=True)
    assert float((checks.images() - torch.load(file)).abs().mean()) < 1e-2


# ---- memory


def test_the_plans_memory_is_that_of_the_card():
    for phase, ratio in checks.memory_ratios(SD35, "rollout.num_inference_steps=4", random=True).items():
        assert ratio == pytest.approx(1, abs=0.1), phase


# ---- attention


@pytest.mark.parametrize("shape", [attention.SHAPES[0], attention.SHAPES[-1]], ids=["sd3", "qwen, masked"])
def test_the_default_attention_is_right_and_the_same_with_and_without_gradient(shape):
    records = Records(None)
    device = torch.device("cuda")
    smaller = shape.smaller(4)
    for backend in attention.BACKENDS:
        records.attempt(lambda b=backend: attention.of_backend(smaller, b, device, torch.bfloat16, 1), backend=backend)
    errors = {row["backend"]: row["deviation"] for row in records.rows if "forward_ms" in row}
    assert "default" in errors
    assert max(errors.values()) <= 1e-2
    found = attention.of_default(smaller, device, torch.bfloat16)
    assert found["same_output"]
    assert found["strict_gradients_equal"] is True


# ---- other ways to compute the same


def test_compiled_blocks_compute_the_same():
    plain, compiled = (
        checks.losses("model.dtype=bfloat16"),
        checks.losses("model.dtype=bfloat16", "model.compile=blocks"),
    )
    assert compiled[0] == pytest.approx(plain[0], abs=2e-2)
    assert checks.distance(compiled[1], plain[1]) < 5e-2


def test_checkpointed_updates_have_the_same_gradient():
    plain, again = checks.losses(), checks.losses("model.gradient_checkpointing=true")
    assert checks.distance(again[1], plain[1]) < 1e-4


def test_weights_in_eight_bits_train():
    plain = checks.losses("model.dtype=bfloat16")
    cast = checks.losses("model.dtype=bfloat16", "model.memory.layerwise_casting=float8_e4m3fn")
    assert checks.distance(cast[1], plain[1]) < 0.5


def test_weights_quantised_by_torchao_train():
    pytest.importorskip("torchao", reason="torchao is not installed")
    quantised = checks.losses("model.dtype=bfloat16", "model.memory.quantize=int8")
    assert all(bool(g.isfinite().all()) for g in quantised[1])


def test_an_offloaded_vae_makes_the_same_images():
    assert torch.equal(checks.images(), checks.images("model.memory.group_offload=[vae]"))


# ---- two processes on one card


def test_two_processes_on_one_card_roll_out_the_same_rewards(place: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("iterations=1", "optim.updates_per_iteration=1")
    train("name=one", *words)
    monkeypatch.setenv("FLOWRL_BACKEND", "gloo")
    code, output = finish(start("train", "run.yaml", "name=two", *words, "--processes", "2"))
    assert code == 0, output
    rows: list[dict[str, Any]] = [json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in ("one", "two")]
    assert rows[0]["reward/total_mean"] == pytest.approx(rows[1]["reward/total_mean"], abs=1e-4)
    assert rows[0]["grad/norm"] == pytest.approx(rows[1]["grad/norm"], rel=1e-2)
