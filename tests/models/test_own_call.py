"""Re-entry against the pipeline's own call, as a training compares them when it loads a class that no test knows."""

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flowrl.core.errors import ModelError
from flowrl.core.files import cache_folder
from flowrl.models.generic import own_call, reentry
from flowrl.models.generic.adapter import Generic
from flowrl.planning.parity import require_own_call
from flowrl.training.world import World
from tests import tiny_pipelines as tiny
from tests.contracts.test_models import GUIDED
from tests.native import entered

ALONE = World(0, 1, torch.device("cpu"))
EVERY = tiny.CASES | tiny.IMAGED


def around(name: str, made: Any = None, **options: Any) -> Generic:
    return entered(name, pipe=made, **options)


def drifting(by: float) -> Any:
    """A pipeline of a class that no test knows, whose prediction is `by` larger after its loop's first step."""
    made = unknown()
    forward = made.transformer.forward

    @functools.wraps(forward)
    def predict(*args: Any, **kwargs: Any) -> Any:
        (out,) = forward(*args, **kwargs)
        return ((1 + by) * out if made.scheduler.step_index else out,)

    made.transformer.forward = predict
    return made


def unknown(**always: Any) -> Any:
    """A pipeline of a class that no test knows, with further arguments of its own call."""
    made = tiny.make("sd3")
    own = inspect.unwrap(type(made).__call__)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **(kwargs | always))

    vars(call)["__signature__"] = inspect.signature(own)
    made.__class__ = type("LastWeeksPipeline", (type(made),), {"__call__": call})
    return made


# ---- the comparison


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.fast else pytest.mark.slow) for name, case in EVERY.items()]
)
def test_two_steps_of_every_tested_class_are_those_of_its_own_call(name):
    assert own_call.compare(around(name), GUIDED).relative <= 1e-4


def test_a_prediction_that_depends_on_the_steps_before_is_refused_with_both_numbers():
    model = around("sd3", drifting(0.01))
    found = own_call.compare(model, 1.0)
    assert found.own / found.ours == pytest.approx(1.01, rel=1e-4)
    assert found.relative == pytest.approx(0.01 / 1.01, rel=1e-3)
    text = own_call.refusal(model, 1.0)
    assert text is not None
    assert text.startswith(f"LastWeeksPipeline predicts {found.own:.6g} by its own call and {found.ours:.6g} when")
    assert own_call.refusal(around("sd3", drifting(0.0005)), 1.0) is None
    # Two thirds of the limit in half precision: rounding adds 2^-8 at most.
    assert own_call.refusal(around("sd3", drifting(0.03), dtype="bfloat16"), 1.0) is None
    assert own_call.refusal(around("sd3", drifting(0.1), dtype="bfloat16"), 1.0) is not None


def test_latents_that_the_loop_changes_between_its_steps_are_refused():
    shrunk = unknown(callback_on_step_end=lambda pipe, i, t, given: {"latents": 0.9 * given["latents"]})
    with pytest.raises(ModelError, match="LastWeeksPipeline changes the latents before its step 2"):
        own_call.compare(around("sd3", shrunk), 1.0)


def test_a_class_that_steps_a_second_tensor_is_refused_by_its_name(monkeypatch):
    words = "LTX2Pipeline steps more than one tensor, .*: it copies its scheduler"
    with pytest.raises(ModelError, match=words):
        around("ltx_2").latent_shape()

    def copies(self: Any, _: Any) -> Any:
        return reentry.copy.copy(self)

    # As one that makes its second scheduler otherwise: then its steps are counted.
    before = reentry._hooked_class

    @functools.cache
    def lenient(base: type) -> type:
        return type(base.__name__, (before(base),), {"__deepcopy__": copies})

    monkeypatch.setattr(reentry, "_hooked_class", lenient)
    words = r"LTX2Pipeline steps .*: it calls scheduler.step\(\) 4 times in 2 steps, for tensors of .* and "
    with pytest.raises(ModelError, match=words):
        own_call.compare(around("ltx_2"), 1.0)


# ---- before a training


def compared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The guidance scales of the comparisons to come."""
    scales, before = [], own_call.refusal

    def refusal(model: Generic, guidance_scale: float) -> str | None:
        scales.append(guidance_scale)
        return before(model, guidance_scale)

    monkeypatch.setattr(own_call, "refusal", refusal)
    return scales


def test_a_pass_is_kept_by_class_and_what_it_depends_on_and_a_refusal_is_not(monkeypatch):
    scales = compared(monkeypatch)
    require_own_call(around("sd3"), (1.0, GUIDED), ALONE)  # of the table
    assert scales == []
    for _ in range(2):
        require_own_call(around("sd3", unknown()), (1.0, 0.5), ALONE)  # both without guidance
    assert scales == [0.5]
    require_own_call(around("sd3", unknown()), (GUIDED,), ALONE)
    require_own_call(around("sd3", unknown(), dtype="bfloat16"), (1.0,), ALONE)
    assert scales == [0.5, GUIDED, 1.0]
    (cache_folder() / "own_calls").rename(cache_folder() / "elsewhere")
    for _ in range(2):
        with pytest.raises(ModelError, match="LastWeeksPipeline predicts"):
            require_own_call(around("sd3", drifting(0.01)), (1.0,), ALONE)
    assert scales == [0.5, GUIDED, 1.0, 1.0, 1.0]
    assert not (cache_folder() / "own_calls").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": true}', '{"question": {}, "passed": true}'])
def test_a_damaged_result_is_none(monkeypatch, text):
    require_own_call(around("sd3", unknown()), (1.0,), ALONE)
    (file,) = (cache_folder() / "own_calls").iterdir()
    whole = file.read_text()
    file.write_text(text)
    scales = compared(monkeypatch)
    require_own_call(around("sd3", unknown()), (1.0,), ALONE)
    assert scales == [1.0]
    assert json.loads(file.read_text()) == json.loads(whole)


def test_the_processes_have_one_verdict(monkeypatch):
    @dataclass(frozen=True)
    class Pair(World):
        """The first of two processes, of which the other says `theirs`."""

        theirs: str | None = None

        def any(self, flag: bool) -> bool:
            return flag or self.theirs is not None

        def gather(self, value: Any) -> list[Any]:
            return [value, self.theirs]

    require_own_call(around("sd3", unknown()), (1.0,), ALONE)
    scales, both = compared(monkeypatch), (0, 2, torch.device("cpu"))
    require_own_call(around("sd3", unknown()), (1.0,), Pair(*both))
    assert scales == []  # both have it
    with pytest.raises(ModelError, match="what the other says"):
        require_own_call(around("sd3", unknown()), (1.0,), Pair(*both, theirs="what the other says"))
    assert scales == [1.0]  # the other had no result
