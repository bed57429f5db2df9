"""Useful operations of a row: the same however the forward is made."""

from __future__ import annotations

import pytest
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.types import Condition
from flowrl.planning import forwards
from flowrl.planning.flop import RowFlop, row_flop
from flowrl.planning.meter import Meter
from flowrl.rollout.library import load_model

SMALL = ("model.lora={rank: 4, alpha: 8}",)


TOKENS = 21  # tiny-sd3's: 12 of CLIP and 9 of T5


def of(*words: str) -> RowFlop:
    run = resolve(load_config("configs/lab/flow_grpo.yaml", [*SMALL, *words]))
    cond = Condition({"prompt_embeds": torch.zeros(2, TOKENS, 128), "pooled": torch.zeros(2, 128)})
    found = row_flop(run, cond, cond.index(torch.zeros(1, dtype=torch.int64)))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain() -> RowFlop:
    return of()


def test_a_row_is_counted_as_the_real_forward_and_backward_are(plain):
    adapter = load_model("tiny-sd3", max_sequence_length=9, lora={"rank": 4, "alpha": 8}).adapter
    assert adapter.condition_shapes()["prompt_embeds"][0] == TOKENS
    with torch.no_grad(), Meter() as once:
        forwards.predict(adapter, 3, 1.0)
    with Meter() as both:
        forwards.loss(adapter, 3, 1.0, False).backward()
    assert plain.forward == pytest.approx(once.flop / 3)
    assert plain.backward == pytest.approx((both.flop - once.flop) / 3)
    assert plain.of(5, 2) == 5 * plain.forward + 2 * plain.backward


def test_what_is_computed_twice_counts_once_and_guidance_only_adds_rows(plain):
    found = of("model.gradient_checkpointing=true", "rollout.guidance_scale=4.5")
    assert (found.forward, found.backward) == pytest.approx((plain.forward, plain.backward))


def test_a_model_without_embedded_configuration_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.planning.memory.config_folder", lambda path: None)
    run = resolve(load_config("configs/lab/flow_grpo.yaml", []))
    cond = Condition({"prompt_embeds": torch.zeros(1, 86, 128), "pooled": torch.zeros(1, 128)})
    assert row_flop(run, cond, None) is None
