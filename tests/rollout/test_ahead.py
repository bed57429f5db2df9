"""Noise drawn ahead in a thread: the same bits as drawn inline, and threads that end."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flowrl.algorithms import diffusion_nft, flow_grpo_fast, g2rpo
from flowrl.algorithms.base import Method
from flowrl.core.errors import Abandoned
from flowrl.diffusion.plan import StepPlan, solver_plan
from flowrl.rollout import ahead
from flowrl.rollout.ahead import Ahead
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.trajectories import Asked
from tests.toys import Session, ToyAdapter, bitwise, noising_of, roll_out

CPU = torch.device("cpu")


@pytest.fixture
def in_thread(monkeypatch) -> Iterator[None]:
    """A thread draws, as next to a GPU; none is left at the end."""
    monkeypatch.setattr(ahead, "ahead_of", lambda device: True)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("noise")]


def test_results_come_in_order_and_a_few_are_made_before_they_are_taken(in_thread):
    begun: list[int] = []

    def draw(k: int) -> Callable[[], int]:
        return lambda: (begun.append(k), k)[1]

    with Ahead((draw(k) for k in range(8)), CPU) as drawn:
        assert drawn.take() == 0
        assert drawn.take() == 1
        assert [drawn.take() for _ in range(6)] == list(range(2, 8))
        with pytest.raises(StopIteration):
            drawn.take()
    assert begun == list(range(8))


def test_on_the_cpu_a_draw_is_made_when_it_is_taken():
    begun: list[str] = []
    with Ahead([lambda: begun.append(threading.current_thread().name)] * 2, CPU) as drawn:
        drawn.take()
        assert begun == [threading.main_thread().name]


def test_a_failed_draw_fails_where_it_is_taken(in_thread):
    def fail() -> int:
        raise ValueError("no noise")

    with Ahead([lambda: 1, fail, lambda: 2], CPU) as drawn:
        assert drawn.take() == 1
        with pytest.raises(ValueError, match="no noise"):
            drawn.take()


def walked(session: Session, plan: StepPlan, **options: RunOptions) -> list[Tensor]:
    """The session's samples in small batches along a plan: x0 and the edges."""
    asked = Asked(session.ids, session.cond, session.rows)
    samples, edges = run(session.policy, plan, session.noise, asked, batch_size=4, **options)
    return [samples.x0, edges.nodes, edges.old_log_prob, edges.child]


METHODS: dict[str, Callable[[], Method | None]] = {
    "chains": lambda: None,
    "shared start": lambda: None,
    "branches": lambda: flow_grpo_fast.build(flow_grpo_fast.Config(branch=4, window_size=2, clip_range=1e-3)),
    "trees": lambda: g2rpo.build(g2rpo.Config(children=3, strides=[1, 2], steps=[1, 2], merge=2, clip_range=1e-3)),
    "stochastic solver": lambda: None,
}


@pytest.mark.parametrize("kind", METHODS)
def test_a_rollout_with_noise_drawn_ahead_is_bitwise_the_one_drawn_inline(kind, request):
    session = roll_out(ToyAdapter(), algorithm=METHODS[kind](), shared_start=kind == "shared start")
    plan = session.plan
    if kind == "stochastic solver":
        plan = solver_plan(session.adapter.schedule(6), "sa", 1.0)
        assert any(plan.noise_level)
    inline = walked(session, plan)
    request.getfixturevalue("in_thread")
    assert bitwise(walked(session, plan), inline)


def test_a_rollout_that_is_abandoned_ends_its_thread(in_thread):
    session, looks = roll_out(ToyAdapter()), iter([False, False, False, True])
    with pytest.raises(Abandoned):
        walked(session, session.plan, options=RunOptions(stop=lambda: next(looks)))


def test_noise_that_fails_in_the_thread_ends_the_rollout(in_thread, monkeypatch):
    session = roll_out(ToyAdapter())

    def broken(self: Noise, ids: object, index: int) -> Tensor:
        raise RuntimeError(f"step {index}")

    monkeypatch.setattr(Noise, "step", broken)
    with pytest.raises(RuntimeError, match="step 0"):
        walked(session, session.plan)


def test_training_noise_drawn_ahead_is_bitwise_the_one_drawn_inline(request):
    session = roll_out(ToyAdapter(), algorithm=diffusion_nft.build(diffusion_nft.Config()))
    rewards = torch.arange(6.0).reshape(1, 2, 3)

    def noise() -> list[Tensor]:
        work = noising_of(session, rewards)
        return [part for batch, _ in work.batches(0) for part in (batch.eps, batch.clean, batch.sigma)]

    inline = noise()
    assert len(inline) > 3
    request.getfixturevalue("in_thread")
    assert bitwise(noise(), inline)
