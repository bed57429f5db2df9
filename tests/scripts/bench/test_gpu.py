"""`scripts.bench gpu`, `ceilings`, `attention` and `profile` on the CPU."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError
from scripts.bench.gpu import ceilings, phases, profile
from scripts.bench.gpu.clock import WARMUPS, Clock, timed
from scripts.bench.gpu.commands import gpu
from scripts.bench.gpu.records import Records
from scripts.bench.gpu.session import Bench, opened
from tests.gpu import checks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return opened(checks.RECIPE, checks.SMALL, random=True)


def test_a_result_is_written_at_once_and_a_failure_is_a_result(tmp_path: Path):
    records = Records(tmp_path / "new" / "out.jsonl", card="none")
    assert records.attempt(lambda: {"ms": 1.0}, what="a")
    assert not records.attempt(lambda: {"ms": float(torch.zeros(2) @ torch.zeros(3))}, what="b")
    rows = [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()]
    assert [row["what"] for row in rows] == ["a", "b"]
    assert rows[0]["card"] == rows[1]["card"] == "none"
    assert rows[1]["error"].startswith("RuntimeError: ")
    assert records.succeeded


def test_marks_and_calls_are_counted():
    calls = []
    assert len(timed(lambda: calls.append(1), CPU, 4)) == 4
    assert len(calls) == 4 + WARMUPS
    clock = Clock(CPU)
    assert clock.spans() == []


def test_ceilings_leave_out_what_a_cpu_has_not():
    records = Records(None)
    ceilings.measure(CPU, 32, 1, 2, records)
    found = {row["kind"]: row for row in records.rows}
    assert {kind for kind, row in found.items() if "error" in row} == {"tf32", "float8"}
    assert min(found["float32"]["tflops"], found["device to device"]["gbs"]) > 0


def test_a_step_of_the_rollout_is_one_forward_of_the_batch_doubled_by_guidance(bench):
    found, each = phases.rollout(bench, 2), bench.flop()
    assert each is not None
    assert found["rows"] == 8
    assert found["tflop"] == pytest.approx(8 * each.forward / 1e12, rel=1e-3)
    assert found["ms_per_forward"] > 0


def test_prompts_begin_again_where_an_iteration_has_more_slots(tmp_path):
    file = tmp_path / "two.txt"
    file.write_text("a red circle\na blue square\n")
    history = "algorithm.advantages={name: batch, history: {buffer_size: 4, min_count: 2}}"
    words = [*checks.SMALL, "rollout.prompts_per_iteration=3", f"data.prompts={file}", history]
    with opened(checks.RECIPE, words, random=True) as small:
        assert [prompt.text for prompt in small.prompts] == ["a red circle", "a blue square", "a red circle"]
        own, credit = small.scored(small.draw(small.ids()))
        assert credit.valid.shape == (len(own.prompts), 4) == (3, 4)


@pytest.mark.slow
def test_an_update_is_counted_by_its_training_forwards(bench):
    found, each = phases.update(bench, 1), bench.flop()
    assert each is not None
    assert found["rows"] == found["trained_rows"] == 8
    assert found["tflop"] == pytest.approx(8 * (each.forward + each.backward) / 1e12, rel=1e-3)


def test_an_optimizer_step_is_timed_by_itself_whatever_the_forwards_take(bench, monkeypatch):
    """The clock is counted. Forwards of 1000, 900 ms and so on would leave less than 0, were their times subtracted."""
    now, left, optimizer = [0.0], itertools.count(1000, -100), bench.session.parts.learner.optimizer
    method, adam = bench.context.method, optimizer.adam
    loss, step = method.loss, adam.step

    def forward(*given: Any) -> Any:
        now[0] += next(left) / 1000
        return loss(*given)

    def stepped() -> None:
        now[0] += 7 / 1000
        step()

    monkeypatch.setattr("scripts.bench.gpu.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(method, "loss", forward)
    monkeypatch.setattr(adam, "step", stepped)
    found = phases.update(bench, 2)
    assert found["ms_per_optimizer_step"] == pytest.approx(7)
    # After the three of the warm-up: 700, 600, 500 and 400, 300, 200.
    assert found["ms_per_microbatch"] == pytest.approx((600 + 300) / 2)


def test_decoding_noise_and_checkpoint_are_measured(bench):
    found = phases.decode(bench, 1)
    assert found["ms_per_sample"] > 0
    assert found["most_levels"] == 0
    bench.first[bench.batch] += 2 / 255
    found = phases.decode(bench, 1)
    assert (found["mean_levels"], found["most_levels"]) == pytest.approx((2, 2), rel=1e-2)
    found = phases.noise(bench, 1)
    assert (found["samples"], found["values"]) == (4, 4 * 8 * 8)
    assert found["reference_ms"] > 0
    saved = phases.saved(bench, 1)
    assert saved["mb"] > 0
    assert saved["save_s"] > 0


@pytest.mark.slow
def test_a_profile_names_the_largest_costs_of_a_step_and_of_an_update(bench, tmp_path):
    found = profile.both(bench)
    assert set(found) == {"rollout step", "update"}
    for name, each in found.items():
        costs = each.costs()
        assert sum(cost["share"] for cost in costs) == pytest.approx(1)
        assert costs[0]["share"] == max(cost["share"] for cost in costs)
        assert any(cost["op"] in ("aten::addmm", "aten::mm") for cost in costs[:6])
        assert len(profile.report(name, each).splitlines()) == 4 + profile.SHOWN
    for file in profile.write(found, tmp_path / "trace.json"):
        assert json.loads(file.read_text())["traceEvents"]


def test_events_of_the_profiler_are_no_operators():
    def event(key: str, kind: str, device_us: float) -> SimpleNamespace:
        device = SimpleNamespace(name=kind)
        return SimpleNamespace(
            key=key, device_type=device, count=1, self_device_time_total=device_us, self_cpu_time_total=1.0
        )

    events = [
        event("aten::mm", "CPU", 3000.0),
        event("Command Buffer Full", "CPU", 9000.0),
        event("aten::mul", "CPU", 1000.0),
        event("gemm_kernel", "CUDA", 3000.0),
    ]
    costs = profile.Found(SimpleNamespace(key_averages=lambda: events), 5.0, True).costs()
    assert [(cost["op"], cost["share"]) for cost in costs] == [("aten::mm", 0.75), ("aten::mul", 0.25)]


@pytest.mark.slow
def test_the_command_measures_each_variant_and_keeps_what_fails(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    gpu(checks.RECIPE, [*checks.SMALL], True, "rollout,decode", "2", "now,checkpointing", 1, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["what"], row["variant"]) for row in rows] == [
        ("rollout", "now"),
        ("decode", "now"),
        ("rollout", "checkpointing"),
        ("decode", "checkpointing"),
    ]
    assert all(row["batch"] == 2 and "error" not in row for row in rows)
    assert "| what | variant |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu(checks.RECIPE, [*checks.SMALL, "model.height=7"], True, "rollout", "", "now", 1, out)
    assert "model.height=7" in json.loads(out.read_text().splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"what": "rolout"}, "--what rolout: did you mean 'rollout'"),
        ({"variants": "fast"}, "--variants fast: .*there are: now, "),
        ({"batches": "0"}, "--batches 0: give whole numbers"),
    ],
)
def test_an_unknown_word_is_refused_before_anything_is_loaded(words, match):
    with pytest.raises(ConfigError, match=match):
        gpu(checks.RECIPE, **words)


def test_a_method_on_given_images_is_refused():
    with pytest.raises(ConfigError, match=r"data\.pairs: what is measured here"):
        opened("configs/sd3/diffusion_dpo-pickapic.yaml", [], random=True)
