"""What `flowrl bench overhead` counts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from flowrl.commands.bench import (
    MARKS,
    Stopwatch,
    _reentry_text,
    _watched,
    median_interval,
    overhead_share,
    paired,
    put_between,
    reentry_cost,
)


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


# ---- re-entry


def test_pairs_keep_their_order_while_the_calls_take_turns():
    called: list[str] = []
    rows = paired(lambda: called.append("a"), lambda: (called.append("b"), wait(0.002)), 6)
    assert len(rows) == 6
    assert all(second > first for first, second in rows)
    assert "".join(called[:4]) == "baab"


def test_the_interval_of_a_median_holds_it():
    middle, low, high = median_interval([3.0, 1.0, 2.0, 9.0, 4.0] * 20)
    assert low <= middle <= high
    assert (low, high) != (1.0, 9.0)


def test_native_and_generic_are_timed_on_the_same_prediction_and_the_result_is_put_in_its_place(tmp_path):
    found = reentry_cost(10, 1, 4.5)
    assert set(found) == {"rollout", "training, forward"}
    assert all(len(rows) == 10 and min(min(row) for row in rows) > 0 for rows in found.values())
    text = _reentry_text(found, 1, 4.5, 1)
    assert "Medians of 10 pairs, batch 1, guidance 4.5" in text
    file = tmp_path / "performance.md"
    file.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    put_between(file, text)
    assert file.read_text() == f"before\n{MARKS[0]}\n{text}\n{MARKS[1]}\nafter\n"
    file.write_text("no place")
    with pytest.raises(SystemExit, match="has no place for the result"):
        put_between(file, text)
