"""Other optimizers than AdamW: resume, bytes, refusals."""

import importlib.util
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.models.weights.roles import Weights
from flowrl.training import optimizers
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig

CPU = torch.device("cpu")
INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
EIGHT = pytest.param("adamw_8bit", marks=pytest.mark.skipif(not INSTALLED, reason="bitsandbytes is not installed"))


def make(name: Any, **options: Any) -> tuple[Weights, Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(80, 60), nn.Linear(60, 70))  # two tensors above 4096 values, and small ones
    weights = Weights(module, None, (), 0)
    return weights, Optimizer(weights, OptimConfig(name=name, learning_rate=0.01, **options), 10)


def step(optimizer: Optimizer, seed: int) -> None:
    count = sum(p.numel() for p in optimizer.parameters)
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    optimizer.step(optimizer.pieces(gradient))


def flat(weights: Weights) -> Tensor:
    return torch.cat([value.detach().flatten() for value in weights.values.values()])


@pytest.mark.parametrize("name", ["adafactor", "muon", EIGHT])
def test_a_run_goes_on_bitwise_after_a_round_trip_through_a_file(tmp_path, name):
    weights, optimizer = make(name)
    start = flat(weights)
    for seed in range(3):
        step(optimizer, seed)
    assert not torch.equal(flat(weights), start)
    tensors, counters = optimizer.state()
    save_file(tensors, tmp_path / "optim.safetensors")
    again, its_optimizer = make(name)
    again.load_state({key: value.clone() for key, value in weights.state().items()})
    its_optimizer.load_state(load_file(tmp_path / "optim.safetensors"), counters)
    for seed in range(3, 6):
        step(optimizer, seed)
        step(its_optimizer, seed)
        assert torch.equal(flat(again), flat(weights))


def test_a_table_that_parameters_share_is_saved_for_each(tmp_path):
    _, optimizer = make("adafactor")
    step(optimizer, 0)
    table = torch.ones(4)
    for p in optimizer.parameters:
        optimizer.adam.state[p]["qmap1"] = table
    tensors, _ = optimizer.state()
    save_file(tensors, tmp_path / "optim.safetensors")
    assert all(torch.equal(value, table) for key, value in tensors.items() if key.endswith("/qmap1"))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", EIGHT])
def test_the_plans_bytes_are_those_of_the_state(name):
    weights, optimizer = make(name)
    step(optimizer, 0)
    kept = {key: value for key, value in optimizer.state()[0].items() if key.rpartition("/")[2] not in _CONSTANT}
    held = sum(value.numel() * value.element_size() for value in kept.values())
    assert optimizers.state_bytes(name, [p.shape for p in weights.parameters.values()]) == (held, 0)


_CONSTANT = {"step", "RMS", "qmap1", "qmap2"}
"""Single numbers, and tables that all tensors share."""


def test_paged_state_is_counted_apart_from_its_first_hundred_thousand_values_on():
    assert optimizers.state_bytes("paged_adamw", [(1000, 100), (10,)]) == (80, 800_000)


def test_what_cannot_work_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(ConfigError, match=r"this run is on cpu; try optim\.name=adamw_8bit"):
        optimizers.require("paged_adamw_8bit", CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes; run pip install 'flowrl\[quant\]'"):
        optimizers.require("adamw_8bit", CPU)
    with pytest.raises(ValueError, match="name=adafactor takes neither betas"):
        OptimConfig(name="adafactor", betas=[0.9, 0.95])


# ---- Muon


def moved(optimizer: Optimizer, weights: Weights, size: float) -> dict[str, Tensor]:
    """The change of every weight by one step on a normal gradient of this std."""
    before = {name: value.detach().clone() for name, value in weights.values.items()}
    count = sum(p.numel() for p in optimizer.parameters)
    optimizer.step(optimizer.pieces(size * torch.randn(count, generator=torch.Generator().manual_seed(3))))
    return {name: value.detach() - before[name] for name, value in weights.values.items()}


def test_muon_makes_a_matrix_step_orthogonal_in_adamws_unit_and_others_have_adamw():
    weights, optimizer = make("muon", weight_decay=0.0)
    change = moved(optimizer, weights, 1e-3)
    for name, value in change.items():
        if value.ndim == 2:
            singular = torch.linalg.svdvals(value) / (0.01 * 0.2 * max(value.shape) ** 0.5)
            assert float(singular.min()) > 0.5
            assert float(singular.max()) < 1.3
        else:
            assert_close(value.abs(), torch.full_like(value, 0.01), rtol=1e-2, atol=0)  # AdamW's first step
        assert 0.1 < float(value.square().mean().sqrt()) / 0.01 < 1.1, name


def test_a_gradient_below_the_floor_moves_nothing_and_a_muon_without_one_takes_a_full_step_of_noise():
    for floor, moves in ((None, False), (0.0, True)):
        weights, optimizer = make("muon", least_grad_norm=floor)
        change = moved(optimizer, weights, 1e-10)
        matrices = [value for value in change.values() if value.ndim == 2]
        assert all((float(value.abs().max()) > 1e-3) == moves for value in matrices)
        assert (optimizer.updates, optimizer.skipped) == (1, 0)
        assert bool(optimizer.state()[0]) == moves


def test_muon_on_convolutions_alone_is_refused_with_the_reason():
    module = nn.Conv2d(2, 3, 3)
    with pytest.raises(ConfigError, match=r"none of the 2 trained weights is one.*\[1, 4\].*optim\.name=adamw"):
        Optimizer(Weights(module, None, (), 0), OptimConfig(name="muon"), 10)
