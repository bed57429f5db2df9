"""scripts/gpu_day: the steps name what there is, are done once, and all of them are rehearsed on tiny-sd3."""

import json
import subprocess
from importlib import import_module
from typing import Any

import pytest

from flowrl.config.load import load_config, resolve
from scripts.bench.gpu.session import VARIANTS
from tests.tiny_sd3 import ROOT

stage: Any = import_module("scripts.gpu_day.stage")
_steps: Any = import_module("scripts.gpu_day._steps")
STAGES, STEPS, Step = _steps.STAGES, _steps.STEPS, _steps.Step
FOLDER = ROOT / "scripts" / "gpu_day"
BENCHES = [step for step in STEPS if step.words[:2] == ("scripts.bench", "gpu")]


@pytest.mark.parametrize("step", BENCHES, ids=lambda step: step.name)
def test_the_options_of_a_step_are_valid(step: Any):
    end = step.words.index("--random")
    config, *words = step.words[2:end]
    variants = step.words[step.words.index("--variants") + 1].split(",") if "--variants" in step.words else ["now"]
    for variant in variants:
        resolve(load_config(config, [*words, *VARIANTS[variant]]))


def test_names_are_distinct_and_a_stage_can_hold_its_longest_step():
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert {step.stage for step in STEPS} == set(STAGES)
    assert max(step.limit_s for step in STEPS) < stage.STAGE_S


def test_a_step_is_done_once_and_one_that_fails_or_takes_too_long_stops_no_other(tmp_path, monkeypatch, capsys):
    timeit = ("timeit", "-n", "1", "-r", "1")
    steps = (
        Step(1, "fails", 30, ("flowrl.no_such_module",)),
        Step(1, "slow", 1, (*timeit, "import time; time.sleep(60)")),
        Step(1, "good", 30, (*timeit, "open('FOLDER/results.jsonl', 'a').write('{\"what\": \"x\", \"ms\": 2.5}\\n')")),
        Step(2, "later", 30, (*timeit, "pass")),
    )
    monkeypatch.setattr(stage, "STEPS", steps)
    day = stage.Day(tmp_path / "out", tmp_path / "none")
    stage.stages(day, [1], small=False, seconds=60)
    assert {row["step"]: row["status"] for row in day.rows("steps.jsonl")} == {
        "fails": "failed with 1",
        "slow": "time limit",
        "good": "done",
    }
    assert "x" in capsys.readouterr().out
    again = stage.Day(tmp_path / "again", tmp_path / "out")
    assert again.done == {"good"}
    stage.stages(again, [1], small=False, seconds=60)
    assert len(again.rows("results.jsonl")) == 1, "it is not done twice"
    stage.stages(again, [2], small=False, seconds=1, only=("good",))
    assert "later" not in capsys.readouterr().out
    stage.stages(again, [2], small=False, seconds=1)
    assert "later: no time left" in capsys.readouterr().out
    assert again.done == {"good"}


def test_a_line_that_a_time_limit_cut_off_is_left_out(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"what": "copy", "gbs": 4.25}\n{"what": "ma')
    rows = stage.Day(tmp_path, tmp_path / "none").rows("results.jsonl")
    assert rows == [{"what": "copy", "gbs": 4.25}]
    assert stage.summary(rows) == "copy  : gbs 4.25"


def test_the_shell_scripts_are_whole():
    for file in FOLDER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.slow
def test_the_whole_day_is_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    day = stage.Day(tmp_path, tmp_path / "none")
    stage.stages(day, STAGES, small=True, seconds=600)
    log = (tmp_path / "log.txt").read_text()
    assert {row["step"]: row["status"] for row in day.rows("steps.jsonl") if row["status"] != "done"} == {}, log[-3000:]
    rows = day.rows("results.jsonl")
    measured = {row["what"] for row in rows if "error" not in row}
    wanted = {"matmul", "copy", "attention", "attention default", "gate", "rollout", "update", "decode", "memory"}
    assert measured >= wanted | {"noise", "checkpoint"}
    assert {row.get("variant") for row in rows if row["what"] == "rollout"} >= {"now", "flow_grpo"}
    assert all(json.dumps(row) for row in rows)
    assert list(tmp_path.glob("trace*.json.gz"))


def test_all_stages_are_meant_where_none_is_named_and_unknown_names_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stage, "STEPS", (Step(2, "later", 30, ("timeit", "-n", "1", "-r", "1", "pass")),))
    monkeypatch.setenv("OUT", str(tmp_path))
    for words, code, text in (
        (["--only", "later"], 0, "later: done"),
        (["9"], 2, "no stage 9"),
        (["--only", "no"], 2, "no step 'no'"),
    ):
        monkeypatch.setattr("sys.argv", ["stage", *words])
        try:
            stage.main()
            found = 0
        except SystemExit as leaving:
            found = leaving.code
        said = capsys.readouterr()
        assert (found, text in said.out + said.err) == (code, True)
