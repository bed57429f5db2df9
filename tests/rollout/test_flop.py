"""Useful operations of a row: the same however the forward is made."""

from functools import partial

import pytest
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.types import Condition
from flowrl.models.memory.meter import Meter
from flowrl.models.pipelines.skeletons import skeleton
from flowrl.planning import forwards
from flowrl.rollout.flop import RowFlop, row_flop
from flowrl.rollout.library import load_model
from flowrl.rollout.policy import Policy
from flowrl.samplers.ode import Ode
from tests.toys import ToyAdapter

SMALL = "model.lora={rank: 4, alpha: 8}"
TOKENS = 21  # tiny-sd3's: 12 of CLIP and 9 of T5
TEXTS = Condition({"prompt_embeds": torch.zeros(2, TOKENS, 128), "pooled": torch.zeros(2, 128)})


def measured(cond: Condition, unconditional: Condition | None, *words: str) -> RowFlop | None:
    """Operations of a row of the lab's recipe; of its policy only the guidance and the empty text count."""
    run = resolve(load_config("configs/lab/flow_grpo.yaml", [*words, SMALL]))
    adapter, model = ToyAdapter(), run.model
    adapter.unconditional = unconditional
    policy = Policy(adapter, Ode(), run.run.rollout.guidance_scale)
    return row_flop(partial(skeleton, model.name, model.module), model.config, policy, cond, frozen=False)


def of(*words: str) -> RowFlop:
    found = measured(TEXTS, TEXTS.index(torch.zeros(1, dtype=torch.int64)), *words)
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


def test_a_model_without_embedded_configuration_is_not_counted(monkeypatch):
    monkeypatch.setattr("flowrl.models.pipelines.skeletons.config_folder", lambda path: None)
    assert measured(TEXTS, None) is None


def test_the_counts_of_a_native_and_of_an_entered_model_stay():
    """They are those of earlier versions, so that `perf/tflops` of runs can be compared."""
    native, entered = of("rollout.guidance_scale=3.0"), "model={name: generic, path: tiny-sd3}"
    assert native == RowFlop(74_412_544, 74_573_056)
    found = measured(Condition({"0.0": torch.zeros(2, 268, 128), "0.2": torch.zeros(2, 128)}), None, entered)
    assert found == RowFlop(707_870_720, 988_971_008)
