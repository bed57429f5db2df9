"""The parity gate and recomputed log-probs: with gradients, as training, and one graph at a time."""

import logging
import re
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.flow_grpo import Config, build
from flowrl.core.errors import ParityError
from flowrl.samplers import flow_sde
from flowrl.training.edge_batches import EdgeBatches
from flowrl.training.replay_gate import pass_gate, tolerance
from tests.toys import ToyAdapter, replay_of, roll_out

REWARDS = torch.arange(6.0).reshape(1, 2, 3)
F32 = torch.float32


def work_of(adapter: ToyAdapter, **options: Any) -> EdgeBatches:
    """Two prompts of three samples with six steps in one share; forwards of four, the last of two."""
    return replay_of(roll_out(adapter, Config(sde_steps=[1, 3, 4], **options)), REWARDS, updates=1)


def spoil(monkeypatch: pytest.MonkeyPatch, adapter: ToyAdapter, shift: Any) -> None:
    """Add `shift(x)` to every output from here on."""
    predict = adapter.predict
    monkeypatch.setattr(adapter, "predict", lambda x, *given: predict(x, *given) + shift(x))


def numbers(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The four deviations in the log: with gradients, in the smallest batch, without, at the rollout's batches."""
    (text,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("parity")]
    found = [float(word) for word in re.findall(r"\d\.\d+e[+-]\d+|inf", text)]
    return [found[0], *found[2:]]


@pytest.mark.parametrize(
    ("shift", "place"),
    [
        (lambda x: 0.1 * torch.is_grad_enabled(), 0),
        (lambda x: 0.1 * (torch.is_grad_enabled() and len(x) == 2), 1),
        (lambda x: torch.nan if torch.is_grad_enabled() else 0.0, 0),
    ],
    ids=["gradients", "partial", "nan"],
)
def test_what_training_meets_decides(shift, place, caplog, monkeypatch):
    adapter = ToyAdapter()
    work = work_of(adapter)
    spoil(monkeypatch, adapter, shift)
    with caplog.at_level(logging.INFO, "flowrl"), pytest.raises(ParityError, match=r"by (\d|inf).* at step [134],"):
        pass_gate(work, F32)
    found = numbers(caplog)
    assert len(found) == 4
    assert found[place] > 1e-3
    assert max(found[2:]) < 1e-5


def test_what_training_does_not_meet_is_reported_alone(caplog, monkeypatch):
    adapter = ToyAdapter()
    work = work_of(adapter)
    spoil(monkeypatch, adapter, lambda x: 0.1 * (not torch.is_grad_enabled()))
    with caplog.at_level(logging.INFO, "flowrl"):
        pass_gate(work, F32)
    found = numbers(caplog)
    assert max(found[:2]) < 1e-5
    assert min(found[2:]) > 1e-3


def test_it_is_exactly_zero_at_the_rollouts_own_batches(caplog):
    with caplog.at_level(logging.INFO, "flowrl"):
        pass_gate(work_of(ToyAdapter()), F32)
    assert numbers(caplog)[3] == 0


@pytest.mark.parametrize(("clip", "single", "half"), [(1e-4, 1e-5, 1e-5), (1e-2, 1e-5, 1e-3), (0.5, 1e-5, 2e-3)])
def test_the_tolerance_is_a_tenth_of_the_clip_range_and_capped(clip, single, half):
    algorithm, sampler = build(Config(clip_range=clip)), flow_sde.build(flow_sde.Config())
    assert tolerance(algorithm, sampler, F32) == pytest.approx(single)
    assert tolerance(algorithm, sampler, torch.bfloat16) == pytest.approx(half)


def test_recomputed_log_probs_are_those_of_forwards_with_gradients(monkeypatch):
    """So the first ratio is 1 where they differ from those without."""
    adapter = ToyAdapter()
    work = work_of(adapter, old_log_prob="recompute")
    spoil(monkeypatch, adapter, lambda x: 0.1 * torch.is_grad_enabled())
    pass_gate(work, F32)
    work.prepare()
    assert not work.rollout.edges.old_log_prob.requires_grad
    for batch, _ in work.batches(0):
        method, networks = work.context.method, work.context.networks
        ratio = method.log_ratio(networks.transition(batch), batch, networks.policy.sampler)
        assert float(ratio.detach().abs().max()) == 0


class Held(torch.autograd.Function):
    """The identity; its node is alive as long as its graph."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Held.alive.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_graph_is_freed_before_the_next_forward(monkeypatch):
    adapter, before = ToyAdapter(), []
    work = work_of(adapter, old_log_prob="recompute")
    predict = adapter.predict

    def watched(*given: Any) -> Tensor:
        before.append(len(Held.alive))
        return Held.apply(predict(*given))

    monkeypatch.setattr(adapter, "predict", watched)
    pass_gate(work, F32)
    work.prepare()
    assert len(before) > 6
    assert set(before) == {0}
