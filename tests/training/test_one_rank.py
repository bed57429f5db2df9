"""FSDP2 on a mesh of one process: it gathers and splits as among many, and computes what the plain network does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights, trainable
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from flowrl.training.sharding import rows, split
from flowrl.training.world import World
from tests import native, tiny_sd3

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[World]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield World(0, 1, CPU)
    dist.destroy_process_group()


def stepped(lora: LoraSettings | None, world: World | None) -> tuple[Weights, list[Tensor]]:
    """Of two updates: predictions, gradients and weights after AdamW; at the end the prediction of the old policy."""
    model = tiny_sd3.adapter(lora=lora)
    weights = trainable(model, model.config, seed=0)
    if world is not None:
        split(model, weights, world, torch.float32)
    weights.snapshot("old")
    # An eps of the gradients' size: with its default AdamW turns the last digits of a tiny gradient into its sign.
    optimizer = Optimizer(weights, OptimConfig(learning_rate=0.1, eps=1e-3), 10)
    x, timestep, cond = native.point(model)
    found = []
    for _ in range(2):
        output = model.predict(x, timestep, cond, 3.0)
        output.square().sum().backward()
        values = zip(weights.gradients(), weights.values.values(), strict=True)
        gradients = [torch.zeros_like(value) if g is None else g.clone() for g, value in values]
        found += [output.detach(), *(g.clone() for g in gradients)]
        optimizer.step(gradients)
        found += [value.detach().clone() for value in weights.values.values()]
    with torch.no_grad(), weights.using("old"):
        found.append(model.predict(x, timestep, cond, 3.0))
    return weights, found


@pytest.mark.parametrize("lora", [LoraSettings(rank=4, alpha=8), None], ids=["LoRA", "all weights"])
def test_two_updates_and_the_roles_are_those_of_the_plain_network(lora, alone):
    plain, expected = stepped(lora, None)
    weights, found = stepped(lora, alone)
    assert weights.split is (lora is None)
    assert list(weights.parameters) == list(plain.parameters)
    assert all(span == (0, len(plain.values[name])) for name, span in rows(weights).items())
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(found[0], found[-1]), "the old policy is what it was"
    second = found[1 + 2 * len(plain.values)]
    assert not torch.allclose(second, found[0], atol=1e-3), "the updates moved the policy"
