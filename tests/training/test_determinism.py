"""Deterministic mode: strict where gradients are made, lenient where a reward works."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.training.determinism import prepare, strict
from flowrl.training.metrics import Sums
from tests.toys import ToyAdapter, draw_advantages, learner_of, roll_out, rollout_of


def degree() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warns" if torch.is_deterministic_algorithms_warn_only_enabled() else "strict"


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic mode of the process."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    memory.fill_uninitialized_memory = fill


def test_it_is_prepared_for_cuda_and_fills_no_memory(mode):
    assert (degree(), os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ("warns", ":4096:8")
    memory: Any = torch.utils.deterministic
    assert not memory.fill_uninitialized_memory
    assert not bool(torch.empty(1000).isnan().all())


def test_it_is_strict_inside_the_block_alone_and_off_where_it_was_off(mode):
    with strict():
        assert degree() == "strict"
        with strict():
            pass
        assert degree() == "strict"
    assert degree() == "warns"
    torch.use_deterministic_algorithms(False)
    with strict():
        assert degree() == "off"
    assert degree() == "off"


def put() -> None:
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def multiply() -> None:
    """As on a GPU without the workspace that cuBLAS needs."""
    raise RuntimeError("Deterministic ..., but this operation is not deterministic because it uses CuBLAS and you have")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (put, "deterministic=true: the operation put_ has no .*deterministic=false"),
        (multiply, "CUBLAS_WORKSPACE_CONFIG=:4096:8; leave that out .* :4096:8; with deterministic=false"),
    ],
)
def test_an_operation_without_a_deterministic_kernel_is_named_with_the_remedy(mode, operation, message):
    with pytest.raises(ConfigError, match=message), strict():
        operation()
    assert degree() == "warns"


def test_other_errors_are_left_alone(mode):
    with pytest.raises(RuntimeError, match=r"^another$"), strict():
        raise RuntimeError("another")


def test_forward_and_backward_of_an_update_are_strict(mode, monkeypatch):
    session, degrees = roll_out(ToyAdapter()), []
    rewards = torch.arange(6.0).reshape(1, 2, 3)
    loss = session.algorithm.loss

    def watched(batch, networks):
        output = loss(batch, networks)
        output.loss.register_hook(lambda gradient: degrees.append(degree()))
        degrees.append(degree())
        return output

    monkeypatch.setattr(session.algorithm, "loss", watched)
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner_of(session).update(1, rollout_of(session, rewards), credit, Sums(), gate=torch.float32)
    assert set(degrees) == {"strict"}
    assert degree() == "warns"


def test_a_microbatch_has_the_same_gradient_twice(mode):
    session = roll_out(ToyAdapter())
    advantage = draw_advantages(len(session.edges))
    with strict():
        first, second = session.gradient(advantage), session.gradient(advantage)
    assert all(torch.equal(first[name], second[name]) for name in first)
