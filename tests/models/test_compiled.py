"""Compiled blocks: the same numbers in every mode, few graphs, plain names, and no silent way back to eager."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.models.memory import compiled
from flowrl.models.memory.blocks import repeated
from flowrl.models.memory.compiled import Block, compile_blocks, probe, require_compiler
from flowrl.models.weights.roles import Weights
from tests import native, tiny_sd3
from tests import tiny_pipelines as tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and run as they are, without the seconds of a C++ compiler: tests/e2e/test_compiled.py."""
    captured = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda forward, *, options, **how: captured(forward, **how))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def ready(**options: Any) -> tuple[Any, Weights]:
    """A tiny adapter with a LoRA, compiled and tried."""
    model = tiny_sd3.adapter(**options)
    weights = tiny_sd3.lora(model, noise=0.1)
    compile_blocks(model.network)
    _, timesteps, cond = native.point(model)
    probe(model, cond, timesteps[:1], 1.0, list(weights.parameters.values()))
    return model, weights


def in_every_mode(model: Any, weights: Weights) -> list[Tensor]:
    """Predictions of the policy without and with gradient, of the reference, and the gradients."""
    x, timestep, cond = native.point(model)
    with torch.no_grad():
        rollout = model.predict(x, timestep, cond, 1.0)
        with weights.using("reference"):
            reference = model.predict(x, timestep, cond, 1.0)
    training = model.predict(x, timestep, cond, 1.0)
    training.square().sum().backward()
    assert not rollout.requires_grad
    found = [p.grad for p in weights.parameters.values() if p.grad is not None]
    for p in weights.parameters.values():
        p.grad = None
    return [rollout, training.detach(), reference, *found]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(
            {"gradient_checkpointing": 2, "dtype": "bfloat16", "precision": "autocast"}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "checkpointed", "bfloat16"],
)
def test_numbers_and_names_are_those_of_the_network_and_no_mode_compiles_twice(options):
    plain = tiny_sd3.adapter(**options)
    expected = in_every_mode(plain, tiny_sd3.lora(plain, noise=0.1))
    model, weights = ready(**options)
    assert all(p.grad is None for p in weights.parameters.values())
    tried = graphs()
    # Kinds of blocks: the first, whose inputs have no gradient, others, and the last, without a text output.
    assert 0 < tried <= 3
    found = in_every_mode(model, weights)
    assert torch.equal(found[0], found[1])
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    # The reference takes graphs of its own, once; a rollout takes those of training.
    assert graphs() <= 2 * tried
    before = graphs()
    for role in ("policy", "reference", "policy"):
        with torch.no_grad(), weights.using(role):
            x, timestep, cond = native.point(model)
            model.predict(x, timestep.flip(0), cond, 1.0)
    in_every_mode(model, weights)
    assert graphs() == before
    # Names and copies are those of a plain network.
    assert list(model.network.state_dict()) == list(plain.network.state_dict())
    other = copy.deepcopy(model.network)
    for mine, theirs in zip(repeated(model.network), repeated(other), strict=True):
        assert isinstance(vars(mine)["forward"], Block)
        assert not isinstance(theirs.forward, Block)
        assert theirs.forward.__self__ is theirs


class _Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("a graph break")
        return x + 1


class _Grows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class _Net(nn.Module):
    _repeated_blocks = ("_Breaks", "_Grows")

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.usefixtures("traced")
def test_a_block_that_would_run_uncompiled_is_refused():
    net = _Net(_Breaks())
    compile_blocks(net)
    with pytest.raises(ModelError, match=r"model\.compile=blocks: _Breaks cannot be compiled whole \("):
        net(torch.ones(2))
    grows = _Net(_Grows())
    compile_blocks(grows)
    with dynamo.patch(recompile_limit=3):
        for length in (2, 3, 4):
            grows(torch.ones(length))
        with pytest.raises(ModelError, match=r"_Grows was compiled 64 times, .* fewer batch sizes"):
            grows(torch.ones(5))


@pytest.mark.usefixtures("traced")
def test_both_degrees_of_deterministic_mode_share_a_graph():
    net, before = _Net(_Grows()), torch.get_deterministic_debug_mode()
    compile_blocks(net)
    try:
        for degree in (1, 2, 1):  # warns, refuses
            torch.set_deterministic_debug_mode(degree)
            net(torch.ones(2))
            assert torch.get_deterministic_debug_mode() == degree
    finally:
        torch.set_deterministic_debug_mode(before)
    assert graphs() == 1


def test_a_network_without_blocks_and_a_machine_without_a_compiler_are_refused(monkeypatch):
    with pytest.raises(ModelError, match=r"Linear does not declare its blocks .*; try model\.compile=null"):
        compile_blocks(nn.Linear(2, 2))
    missing = pytest.raises(ModelError, match=r"needs a C\+\+ compiler on the CPU, and there is none: install g\+\+")
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), missing:
        require_compiler(CPU)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(ModelError, match="needs triton on cuda, and there is none that works"):
        require_compiler(torch.device("cuda"))
    off = pytest.raises(ModelError, match="TORCH_COMPILE_DISABLE=1 in the environment")
    with dynamo.patch(disable=True), off:
        require_compiler(CPU)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", ["flux", "sd", "wan"])
def test_the_generic_adapter_compiles_too(case):
    pipe = tiny.make(case)
    model = native.beside(pipe, tiny.CASES[case].sizes[0])
    expected = native.output(model, 3.0)
    compile_blocks(model.network)
    assert_close(native.output(model, 3.0), expected, atol=1e-5, rtol=1e-4)
    assert graphs() > 0
    assert graphs() <= compiled.LIMIT
