"""The checks of test_on_gpu.py on the CPU, so that none of them fails there by a mistake of its own."""

import pytest
import torch

from scripts.bench.gpu import attention
from tests.gpu import checks


@pytest.mark.slow
def test_the_rollouts_own_batches_replay_without_any_change():
    found = checks.gate_of()
    assert found["same_no_grad"] == found["same_grad"] == 0
    assert max(found["other_grad"], found["partial_grad"]) <= found["allowed"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_replay_in_half_precision_stays_within_the_gate(dtype):
    found = checks.gate_of(f"model.dtype={dtype}")
    assert found["same_no_grad"] == 0
    assert found["other_no_grad"] <= found["allowed"]


@pytest.mark.slow
def test_a_microbatch_has_the_same_gradient_twice_and_a_resumed_run_the_same_bits():
    first, second = checks.gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first
    assert checks.equal(*checks.resumed())


@pytest.mark.slow
def test_the_plans_memory_is_that_of_the_storages_that_a_phase_makes():
    ratios = checks.memory_ratios(checks.RECIPE, *checks.SMALL, random=False)
    assert ratios["update"] == pytest.approx(1, abs=0.1)


def test_attention_is_measured_and_its_default_named():
    shape, cpu = attention.SHAPES[-1].smaller(128), torch.device("cpu")
    found = attention.of_backend(shape, "default", cpu, torch.float32, 1)
    assert found["deviation"] < 1e-5
    default = attention.of_default(shape, cpu, torch.float32)
    assert default["same_output"]
    assert default["strict_gradients_equal"] is True


@pytest.mark.slow
def test_other_ways_compute_the_same():
    plain = checks.losses()
    assert checks.distance(checks.losses("model.gradient_checkpointing=true")[1], plain[1]) < 1e-5
    cast = checks.losses("model.dtype=bfloat16", "model.memory.layerwise_casting=float8_e4m3fn")
    assert checks.distance(cast[1], plain[1]) < 0.5
    assert checks.images().shape == (4, 3, 32, 32)
