"""`gradient_checkpointing: auto`: by the estimate against the device, the same on all processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.config.resolved import Resolved
from flowrl.display.console import log
from flowrl.models.pipelines.skeletons import UnknownModel
from flowrl.planning import checkpointing
from flowrl.planning.checkpointing import (
    MARGIN,
    Choice,
    available,
    choice,
    decided,
    threshold,
    update_bytes,
    with_checkpointing,
)
from flowrl.planning.out_of_memory import planned
from flowrl.training.world import ALONE
from tests.planning.test_memory import resolved


@pytest.fixture(scope="module")
def auto() -> Resolved:
    return resolved("tiny-sd3", {"gradient_checkpointing": "auto", "lora": {"rank": 4}})


def test_a_device_that_holds_the_update_with_a_margin_recomputes_nothing(auto, monkeypatch):
    # A plan of `auto` is of the update without.
    result = planned(auto, 1)
    needed = update_bytes(result, auto, 1)
    assert needed is not None
    seen = []
    monkeypatch.setattr(checkpointing, "planned", lambda run, processes: seen.append(run) or result)
    enough = round(needed * MARGIN) + 1
    assert not choice(auto, enough, 1).on
    tight = choice(auto, enough - 2, 1)
    assert tight.on
    assert "by flowrl plan" in tight.reason
    assert "more than the device's" in tight.reason
    assert [run.model.config.gradient_checkpointing for run in seen] == [False, False]
    assert threshold(result, auto).endswith("on a smaller one it is that of true")


def test_sharded_weights_need_less_on_each_of_several_processes(auto):
    config = replace(auto.model.config, shard=True, lora=None)
    run = replace(auto, model=replace(auto.model, config=config))
    result = planned(run, 2)
    whole = next(phase.peak for phase in result.phases if phase.name == "update")
    assert update_bytes(result, run, 1) == whole
    assert update_bytes(result, run, 2) == (whole or 0) - result.spared(2, full=True)


def test_all_processes_take_the_choice_of_the_smallest_device(auto, monkeypatch):
    taken = iter([[Choice(False, "it fits"), Choice(True, "it does not")], [Choice(False, "it fits")] * 2])

    class Pair:
        device, size = torch.device("cpu"), 2

        def agree(self, work: Any) -> list[Choice]:
            assert isinstance(work(), Choice)
            return next(taken)

    monkeypatch.setattr(checkpointing, "choice", lambda *_: Choice(False, "it fits"))
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lambda text, *args: lines.append(text % args))
    pair: Any = Pair()
    assert decided(auto, pair).model.config.gradient_checkpointing is True
    assert decided(auto, pair).model.config.gradient_checkpointing is False
    assert lines == [
        "model.gradient_checkpointing=auto: true, it does not",
        "model.gradient_checkpointing=auto: false, it fits",
    ]
    fixed = with_checkpointing(auto, on=True)
    assert decided(fixed, ALONE) is fixed


def test_a_model_that_cannot_be_measured_recomputes(auto, monkeypatch):
    def unknown(*_: object) -> None:
        raise UnknownModel("no files")

    monkeypatch.setattr(checkpointing, "planned", unknown)
    assert choice(auto, 1 << 60, 1) == Choice(True, "since the memory of updates is not known: no files")


def test_processes_that_share_a_machine_or_a_card_share_its_memory(monkeypatch):
    whole = available(torch.device("cpu"))
    assert whole > 1 << 28
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert available(torch.device("cuda")) == 80 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available(torch.device("cpu")) == whole // 4
    assert available(torch.device("cuda")) == 40 << 30
