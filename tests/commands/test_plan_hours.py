"""Seconds of an iteration: the composition gives back what was measured, and nothing stands in for a measurement."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.commands import _plan_hours as hours
from flowrl.commands._plan_data import data_here
from flowrl.commands.plan import estimated, outline, step_plan
from flowrl.config.load import load_config, resolve
from flowrl.planning import memory

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "gpu_day"
FEW = ("rollout.prompts_per_iteration=2", "rollout.group_size=4", "data.max_eval_prompts=2")


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """Bytes are not what is looked at here, and measuring them takes seconds."""
    known = dict.fromkeys(("encode", "rollout", "decode", "images", "evaluation", "update"), 1)
    flop = ("forward_flop", "edge_flop", "fitted")
    monkeypatch.setattr(memory, "_measure", lambda *given, **named: (known | dict.fromkeys(flop, 1), {}))


def planned(*words: str) -> tuple[Any, Any, Any, Any]:
    resolved = resolve(load_config("lab/flow_grpo", [*FEW, *words]), offline=True)
    adapter = outline(resolved)[0]
    plan = step_plan(resolved, adapter)
    own, result = estimated(resolved, adapter, plan, data_here(resolved))
    return resolved, adapter, result, own


def table(own, *, update: bool = True, recomputes: bool = False, batch: int = 64):
    took = {"ms": 480.0, "rows": 32.0, "trained_rows": 16.0, "step_ms": 50.0, "recomputes": recomputes}
    row = {"card": "C", "batch": batch, "setting": own, "forward": {"ms": 160.0, "rows": 16.0}}
    return {"cards": {"C": 80.0}, "rows": [row | {"update": took if update else None}]}


def seconds(card: str, *run: Any) -> tuple[float, float | None, str]:
    """Those of a card that has a measurement."""
    found = hours.seconds(card, *run)
    assert found is not None
    return found


def test_rows_and_microbatches_are_counted_by_the_plan(monkeypatch):
    run = planned()
    monkeypatch.setattr(hours, "TABLE", table(run[3]))
    rollout, update, note = seconds("C", *run)
    samples, steps = 8, 6
    starts = 2 + samples * (steps - 1)  # shared noise: one forward of a prompt's start
    assert rollout == pytest.approx(starts * 0.010)
    # 10 ms of each of 16 frozen rows leave 320 ms for 16 trained ones; two updates; at the start one row a prompt.
    assert update == pytest.approx(run[2].rows[1] * 0.020 + 2 * 0.050)
    assert note == "measured at batch 64"


def test_a_frozen_role_and_a_recomputed_forward_each_add_a_forward(monkeypatch):
    for words, recomputes, each in (
        ((), False, 20),
        (("algorithm.kl.coef=0.1",), False, 30),
        (("model.gradient_checkpointing=true",), False, 30),
        (("model.gradient_checkpointing=true",), True, 20),
        (("model.gradient_checkpointing=auto",), True, 10),
    ):
        run = planned(*words)
        monkeypatch.setattr(hours, "TABLE", table(run[3], recomputes=recomputes))
        assert seconds("C", *run)[1] == pytest.approx(run[2].rows[1] * each / 1000 + 0.1), words


@pytest.mark.parametrize("words", [(), ("algorithm.kl.coef=0.1", "rollout.guidance_scale=4.0")])
def test_rows_of_given_images_are_trained_ones_without_a_frozen_role_or_guidance(monkeypatch, tmp_path, words):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "a.png"}\n')
    words += ("optim.updates_per_iteration=2",)
    anchor = f"data.anchor={{path: {tmp_path}, per_update: 5, times: {{name: subset, count: 3, fraction: 1}}}}"
    plain, anchored = planned(*words), planned(*words, anchor)
    monkeypatch.setattr(hours, "TABLE", table(plain[3]))
    rows = 5 * 3 * 2
    assert anchored[2].rows == (*plain[2].rows[:2], rows)
    assert seconds("C", *anchored)[1] == pytest.approx((seconds("C", *plain)[1] or 0) + rows * 0.020)
    assert anchored[2].update_flop == plain[2].update_flop + rows


def test_guidance_doubles_the_rows_and_a_smaller_batch_is_said(monkeypatch):
    run, guided = planned(), planned("rollout.guidance_scale=4.0", "rollout.batch_size=4")
    monkeypatch.setattr(hours, "TABLE", table(run[3]))
    one, two = seconds("C", *run), seconds("C", *guided)
    assert two[0] == pytest.approx(2 * one[0])
    assert "smaller one takes longer" in two[2]


@pytest.mark.parametrize("words", ["model.height=64 model.width=64", "model.dtype=bfloat16", "model.lora={rank: 4}"])
def test_another_size_or_arithmetic_is_no_measurement(monkeypatch, words):
    own = planned()[3]
    monkeypatch.setattr(hours, "TABLE", table(own))
    changed = [words] if "{" in words else words.split()
    other = planned(*changed)
    assert other[3] != own
    assert hours.seconds("C", *other) is None


def test_a_rollout_alone_gives_no_time_of_updates(monkeypatch):
    run = planned()
    monkeypatch.setattr(hours, "TABLE", table(run[3], update=False))
    assert seconds("C", *run)[1] is None


def test_the_composed_time_of_recomputing_is_what_a_card_took():
    """H100, SD3.5-M: 670.1 ms with checkpointing, where 16 rows were trained and 16 of a reference were not."""
    lines = [json.loads(line) for line in (FOLDER / "h100.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["what"] == "update" and line["config"].endswith("flow_grpo-pickscore.yaml")]
    took = {line["variant"]: line for line in own}
    row = next(row for row in hours.TABLE["rows"] if "H100" in row["card"] and row["setting"]["family"] == "sd3")
    forward, plain, again = row["forward"]["ms"], row["update"], took["checkpointing"]["ms_per_microbatch"]
    assert row["update"]["ms"] == took["now"]["ms_per_microbatch"]
    assert again == pytest.approx(plain["ms"] + plain["trained_rows"] * forward / row["forward"]["rows"], rel=0.01)


def test_the_table_has_each_card_and_setting_once():
    keys = [(row["card"], json.dumps(row["setting"])) for row in hours.TABLE["rows"]]
    assert len(keys) == len(set(keys))
    assert {card for card, _ in keys} == set(hours.TABLE["cards"])
