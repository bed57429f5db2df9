"""What `flowrl bench overhead` counts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from flowrl.commands.bench import Stopwatch, _watched, overhead_share


def wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_time_is_added_up_by_name_and_taken_once():
    watch = Stopwatch()
    first, second = watch.timed("a", wait), watch.timed("a", wait)
    first(0.01)
    second(0.02)
    taken = watch.take()
    assert taken.keys() == {"a"}
    assert taken["a"] >= 0.03
    assert watch.take() == {}


def test_a_failing_part_is_timed_and_still_fails():
    def fail() -> None:
        wait(0.01)
        raise RuntimeError("broken")

    watch = Stopwatch()
    with pytest.raises(RuntimeError, match="broken"):
        watch.timed("a", fail)()
    assert watch.take()["a"] >= 0.01


def test_forward_and_backward_are_network_time_and_everything_is_put_back():
    trainer = SimpleNamespace(
        adapter=SimpleNamespace(predict=lambda: wait(0.02), decode=lambda: wait(0.01)),
        texts=SimpleNamespace(lookup=lambda: None),
        scorer=SimpleNamespace(score=lambda: None),
        optimizer=SimpleNamespace(step=lambda: None),
    )
    kept, backward = trainer.adapter.predict, torch.Tensor.backward
    watch = Stopwatch()
    with _watched(trainer, watch):
        trainer.adapter.predict()
        after_forward = watch.seconds["network"]
        weight = torch.ones(1, requires_grad=True)
        (3 * weight).sum().backward()
        trainer.adapter.decode()
    assert weight.grad == 3
    taken = watch.take()
    assert taken["network"] > after_forward >= 0.02
    assert taken["VAE"] >= 0.01
    assert (trainer.adapter.predict, torch.Tensor.backward) == (kept, backward)


def test_overhead_is_what_is_left_of_an_iteration():
    row = {"iteration": 2.0, "network": 1.0, "VAE": 0.2, "text encoder": 0.1, "reward": 0.4, "optimizer": 0.2}
    assert overhead_share(row) == pytest.approx(0.15)
    assert overhead_share({"iteration": 1.0}) == 1.0
