"""The lab without training: what a replay decides, runs that are interrupted, the page."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flowrl.config.load import load_config
from flowrl.core import registry
from scripts.lab import cells, compare, long, recipes, runs, steps
from scripts.lab.long import FACTOR, long_run, verdict
from scripts.lab.page import MOTION, Entry, at_best, over_seeds, page, reached
from scripts.lab.runs import REPLAYED, curve, first_rows
from scripts.lab.videos import videos_section
from tests import toys
from tests.tiny_sd3 import ROOT

RECIPE = """\
# A comment.
name: tiny
model: {name: net, path: tiny-net}
rollout: {sampler: {name: noisy}}
algorithm: {name: method}
rewards: [{name: score}]
eval: {num_inference_steps: 2}
"""
FILES = {"configs/quickstart.yaml": RECIPE, "flowrl/algorithms/method.py": 'LEVEL = "tested"\n'}
ORIGIN = {"commit": "0123456789 with uncommitted changes", "date": "2026-01-02", "processor": "x"}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, at work on a repository of a few files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    docs = tmp_path / "docs"
    for place in (cells, recipes, runs, compare):
        monkeypatch.setattr(place, "ROOT", tmp_path)
    for name in ("RESULTS", "PAGE", "CURVES", "LONG_RESULTS", "STEPS_RESULTS", "PICTURE"):
        monkeypatch.setattr(cells, name, docs / vars(cells)[name].relative_to(ROOT / "docs"))
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    return cells


def accuracy(mean: float) -> dict:
    return {"shapes_strict": {"mean": mean, "low": mean - 0.03, "high": mean + 0.03, "n": 512}}


def cell(gain: float = 0.1) -> dict:
    rows = [{"iteration": i, "reward/total_mean": 0.4 + i, "grad/norm": 0.01, "eval/x": None} for i in (1, 2, 3)]
    summary = {
        "seconds": 100.0,
        "cpu_seconds": 190.0,
        "iterations": 50,
        "base": accuracy(0.4),
        "base_best_guidance": accuracy(0.4) | {"guidance_scale": 1.0},
        "tuned": accuracy(0.4 + gain),
        "difference": accuracy(gain),
        "evaluations": {"rollout": 5.0, "train": 0.1},
    }
    return ORIGIN | {"summary": summary, "start": rows}


def replayed(cell: dict, **changes: float) -> dict:
    """A replay that repeats the cell but for changed metrics of iteration 2."""
    rows = copy.deepcopy(cell["start"])
    rows[1] |= changes
    base = {key: copy.deepcopy(cell["summary"][key]) for key in ("base", "base_best_guidance")}
    return base | {"start": rows}


@pytest.fixture
def code(lab: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the code is, as a list that a test changes."""
    now = ["one"]
    for place in (runs, steps):
        monkeypatch.setattr(place, "code_now", lambda: now[0])
    return now


def check(lab: ModuleType, monkeypatch: pytest.MonkeyPatch, **changes: float) -> tuple[int, list[str]]:
    """Exit code of a check whose replays repeat the cells but for the changes, and the runs that were replayed."""
    replays: list[str] = []

    def replay(run: Any) -> dict:
        replays.append(run.name)
        return replayed(cell(), **changes)

    monkeypatch.setattr(lab, "replay", replay)
    monkeypatch.setattr(sys, "argv", ["lab", "--check"])
    return lab.main(), replays


def test_a_check_replays_seed_0_and_says_which_numbers_moved(lab, monkeypatch, capsys):
    assert check(lab, monkeypatch) == (1, [])
    assert "quickstart: not run, nothing to compare with" in capsys.readouterr().out
    lab.write_results({f"quickstart/{seed}": cell() for seed in (0, 1)})
    before = lab.RESULTS.read_text()
    assert check(lab, monkeypatch) == (0, ["quickstart-seed0"])
    assert "quickstart: the same numbers" in capsys.readouterr().out
    assert check(lab, monkeypatch, **{"grad/norm": 0.0100002}) == (1, ["quickstart-seed0"])
    told = capsys.readouterr().out
    assert "other numbers than at 0123456789 with uncommitted changes on x, here " in told
    assert "iteration 2 grad/norm: 0.01 recorded, 0.0100002 now" in told
    assert "python -m scripts.lab --again quickstart --seeds 0" in told
    assert lab.RESULTS.read_text() == before, "a check keeps nothing"
    assert not lab.PAGE.exists()


def test_what_is_checked_by_default_are_cells_that_keep_their_start():
    kept = cells.load(cells.RESULTS)
    assert set(cells.CHECKED) < cells.recipes().keys()
    unproven = [name for name in cells.recipes() if f"{name}/0" not in kept]
    methods = [registry.load("algorithms", load_config(f"lab/{name}").algorithm["name"]) for name in unproven]
    assert all(method.LEVEL == "experimental" for method in methods)
    assert all(len(kept[f"{name}/0"]["start"]) == REPLAYED for name in cells.recipes() if name not in unproven)
    assert all({"commit", "date", "processor"} <= each.keys() for each in kept.values())


def test_what_counts_as_a_difference(lab):
    recorded = cell()
    assert lab.differences(recorded, replayed(recorded)) == []
    assert lab.differences(recorded, replayed(recorded, **{"grad/norm": 0.01 + 5e-8, "policy/new": 1.0})) == []
    now = replayed(recorded)
    now["base"]["shapes_strict"]["mean"] += 1 / 1024
    del now["start"][2]["grad/norm"]
    now["start"][2]["eval/x"] = 0.5
    assert lab.differences(recorded, now) == [
        "base shapes_strict mean: 0.4 recorded, 0.4009765625 now",
        "iteration 3 grad/norm: 0.01 recorded, missing now",
        "iteration 3 eval/x: None recorded, 0.5 now",
    ]


def test_first_rows_are_whole_and_without_times(lab, tmp_path):
    assert first_rows(tmp_path) == []
    lines = [json.dumps({"iteration": i, "grad/norm": 1.0, "time/update_s": 0.1}) + "\n" for i in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    assert first_rows(tmp_path) == [{"iteration": i, "grad/norm": 1.0} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert len(first_rows(tmp_path)) == REPLAYED


# ---- runs


@pytest.mark.parametrize("change", ["nothing", "code", "words"])
def test_a_run_folder_is_resumed_by_the_same_code_and_words_only(lab, code, monkeypatch, change):
    """And what its parts have cost adds up, whenever one was killed."""
    recipe, commands = lab.recipes()["quickstart"], []

    def attend(command: list[str], ledger: runs.Ledger) -> int:
        commands.append(command)
        ledger.note(2.5)
        return 0

    monkeypatch.setattr(runs, "attend", attend)
    for place in range(2):
        words = ("iterations=9",) if change == "words" and place else ()
        folder, _ = runs.train(runs.Run("run", recipe, 0, words))
        if change == "code":
            code[0] = "two"
    assert ["--resume" in command for command in commands] == [False, change == "nothing"]
    costs = runs.costs(folder)
    assert (costs["cpu_seconds"], costs["parts"]) == ((5.0, 2) if change == "nothing" else (2.5, 1))


def test_a_cell_is_not_kept_if_it_failed_or_the_code_changed_under_it(lab, code, monkeypatch, capsys):
    codes = iter([1, 0, 0])

    def attend(command: list[str], ledger: runs.Ledger) -> int:
        if command[5].endswith("seed1"):
            code[0] = "two"
        return next(codes)

    monkeypatch.setattr(runs, "attend", attend)
    monkeypatch.setattr(runs, "measured", lambda folder: {"seconds": 1.0})
    monkeypatch.setattr(runs, "origin", lambda folder: ORIGIN)
    lab.write_results({"other/0": cell()})
    jobs = list(lab.cell_jobs(lab.recipes(), lab.SEEDS))
    assert [key for key, _ in jobs] == [f"quickstart/{seed}" for seed in lab.SEEDS]
    assert not lab.run_missing(jobs, lab.RESULTS)
    assert list(lab.load(lab.RESULTS)) == ["other/0", "quickstart/2"]
    assert "not kept: quickstart/0, quickstart/1" in capsys.readouterr().out
    assert {key: lab.load(lab.RESULTS)["quickstart/2"][key] for key in ORIGIN} == ORIGIN


def test_cells_that_are_there_run_again_by_name_only(lab, monkeypatch, capsys):
    ran: list[str] = []
    monkeypatch.setattr(lab, "make_cell", lambda run: ran.append(run.name) or cell(0.2))
    lab.write_results({f"quickstart/{seed}": cell() for seed in (0, 1)})

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lab", *words])
        return lab.main()

    assert run() == 0
    assert ran == ["quickstart-seed2"]
    assert run("--again", "quickstart", "--seeds", "0") == 0
    assert ran[1:] == ["quickstart-seed0"]
    assert lab.load(lab.RESULTS)["quickstart/0"] == cell(0.2)
    for words, why in ((["--again"], "wants the names"), (["gone"], "no recipe 'gone'")):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert why in capsys.readouterr().err


def test_the_code_is_what_is_committed_and_what_is_not(monkeypatch, tmp_path):
    """Of the folders that train; docs is none of them."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)

    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in (*runs.TRAINS, "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    first = runs.code_now()
    (tmp_path / "docs" / "file").write_text("two")
    assert runs.code_now() == first
    (tmp_path / "configs" / "file").write_text("two")
    second = runs.code_now()
    (tmp_path / "configs" / "file").write_text("three")
    assert len({first, second, runs.code_now()}) == 3
    git("commit", "-am", "two")
    committed = runs.code_now()
    (tmp_path / "docs" / "file").write_text("three")
    git("commit", "-am", "a page")
    assert runs.code_now() == committed != first


def test_a_stopped_lab_stops_its_run_once_and_counts_its_time(lab, monkeypatch, tmp_path):
    """The run saves on the first signal, and a second one would end it at once."""
    monkeypatch.setattr(runs, "POLLED_S", 0.05)
    log = tmp_path / "log"
    run = f"""
import signal, time
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
end = time.process_time() + 0.2
while time.process_time() < end: pass
open({str(log)!r}, "w").write("up")
while not signals: time.sleep(0.01)
time.sleep(0.2)
open({str(log)!r}, "w").write(str(len(signals)))
"""
    ledger = runs.Ledger(tmp_path, {"recipe": "x"})

    def stop() -> None:
        while not log.exists():
            time.sleep(0.01)
        for _ in range(2):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

    before, thread = signal.getsignal(signal.SIGTERM), threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit, match="143"):
        runs.attend([sys.executable, "-c", run], ledger)
    thread.join()
    assert log.read_text() == "1"
    assert signal.getsignal(signal.SIGTERM) == before
    assert 0.2 <= runs.costs(tmp_path)["cpu_seconds"] < 5


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_time_of_a_living_run_includes_its_processes(lab):
    loop = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {loop!r}])\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.29 <= runs.used(process.pid) < 5
        process.communicate(b"\n")
    assert runs.used(process.pid) == 0


def evaluated(folder: Path, tag: str, iteration: int, strict: list[float]) -> None:
    table = np.asarray(strict)[:, None]
    prompts = tuple(f"caption {k}" for k in range(len(strict)))
    toys.evaluation(tag, iteration, 1.0, 6, prompts, 1, {"shapes_strict": table}).save(folder / "eval")


def test_a_curve_is_on_the_same_captions_from_base_to_end(lab, tmp_path):
    evaluated(tmp_path, "base", 3, [0.0, 0.0, 1.0, 1.0])  # a resumed run says another iteration
    evaluated(tmp_path, "iteration-000001", 1, [1.0])  # too few captions to compare
    evaluated(tmp_path, "iteration-000002", 2, [0.0, 1.0, 1.0])
    evaluated(tmp_path, "tuned", 3, [1.0, 1.0, 0.0, 0.0])
    lines = [json.dumps({"iteration": k, "perf/cpu_s": 2.0}) + "\n" for k in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    points = [(p["iteration"], p["cpu_seconds"], p["shapes_strict"]) for p in curve(tmp_path, 2)]
    assert points == [(0, 0.0, 0.0), (2, 4.0, 0.5), (3, 6.0, 1.0)]


# ---- long runs


def test_the_luck_of_the_best_evaluation_is_not_in_the_fall(lab, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(long, "interval", lambda values, groups: {"mean": values.mean()})

    def falls(level: np.ndarray) -> float:
        found = []
        for _ in range(40):
            tables = (rng.random((len(level), 256, 2)) < level[:, None, None]).astype(float)
            prompts = tuple(map(str, range(256)))
            way = [
                toys.evaluation("x", k, 1.0, 6, prompts, 2, {"shapes_strict": table}) for k, table in enumerate(tables)
            ]
            result = long.fall(way)
            assert result is not None
            found.append(result["mean"])
        return float(np.mean(found))

    # Standard error 0.003; the best of the eighteen means alone would be 0.03 too high.
    assert abs(falls(np.full(20, 0.5))) < 0.012
    assert falls(np.linspace(0.8, 0.3, 20)) == pytest.approx(-17 * 0.5 / 19, abs=0.012)
    assert long.fall([]) is None


def long_cell(curve: list[float], **changes: object) -> dict:
    result = cell()
    points = [{"iteration": 10 * k, "cpu_seconds": 20.0 * k, "shapes_strict": v} for k, v in enumerate(curve)]
    result["summary"] |= {"curve": points}
    fall = {"mean": -0.1, "low": -0.2, "high": -0.01, "n": 256}
    return result | {"status": "finished", "iterations of the recipe": 10, "fall": fall} | changes


def test_long_runs_stand_on_the_page_with_their_verdict(lab):
    (lab.ROOT / "configs" / "quickstart.yaml").write_text(RECIPE + "iterations: 50\n")
    run = long_run("quickstart", lab.recipes()["quickstart"])
    assert run.words == (f"iterations={FACTOR * 50}", "eval.every=10", "eval.periodic_prompts=256")
    kept = long_cell([0.4, 0.5, 0.6, 0.7, 0.3])
    lab.write_results({"quickstart/0": kept, "gone/0": kept}, lab.LONG_RESULTS)
    lab.write_page()
    row = (
        "| +10.0 | +20.0 | -10.0 | +10.0 [+7.0, +13.0] | +20.0 (20) | -10.0 [-20.0, -1.0] | falls | 190 | `01234567+` |"
    )
    assert f"| quickstart | 10; 40 | not run {row}" in lab.PAGE.read_text()
    assert "gone" not in lab.PAGE.read_text()
    assert "quickstart" in lab.PICTURE.read_text()
    assert verdict(kept | {"fall": {"high": 0.01}}) == "holds"
    assert verdict(kept | {"status": "diverged"}) == "diverged at 51"


# ---- more steps


def test_more_steps_are_evaluated_of_a_finished_run_of_this_code_alone(lab, code, monkeypatch, tmp_path):
    recipe, asked = lab.recipes()["quickstart"], []
    recipe.write_text(recipe.read_text().replace("steps: 2", "steps: 6"))
    folder = tmp_path / "runs" / "quickstart-seed0"
    monkeypatch.setattr(steps, "origin", lambda folder: ORIGIN)
    monkeypatch.setattr(steps, "RUNS", tmp_path / "runs")

    def attend(command: list[str]) -> int:
        asked.append(command[4:6])
        evaluated(Path(command[-1]), "evaluation", 3, [1.0, 1.0] if str(folder) in command else [0.0, 1.0])
        return 0

    monkeypatch.setattr(steps, "attend", attend)
    with pytest.raises(runs.Failed, match="no finished run"):
        steps.measure(recipe)
    evaluated(folder, "base", 0, [0.0, 0.0])
    evaluated(folder, "tuned", 3, [0.0, 1.0])
    (folder / "summary.json").write_text('{"status": "finished"}')
    runs.Ledger(folder, runs.cell_run("quickstart", recipe, 0).mark(code[0])).note(1.0)
    kept = steps.measure(recipe)
    both = [str(recipe), str(folder)]
    assert asked == [[target, f"eval.num_inference_steps={k}"] for k in (10, 20) for target in both]
    assert [(values["base"]["mean"], values["difference"]["mean"]) for values in kept["rows"]] == [
        (0, 0.5),
        *[(0.5, 0.5)] * 2,
    ]
    steps.measure(recipe)
    assert len(asked) == 4, "what was evaluated is kept"
    lab.STEPS_RESULTS.write_text(json.dumps(kept))
    lab.write_page()
    assert "at 6 steps" in lab.PAGE.read_text()
    code[0] = "two"
    with pytest.raises(runs.Failed, match="no finished run"):
        steps.measure(recipe)


# ---- comparing with a commit


def test_a_recipe_that_fell_is_found(lab, monkeypatch):
    gains = {"a": (0.2, 0.15), "b": (0.2, 0.17), "c": (0.11, 0.09), "d": (0.2, 0.2), "e": (0.08, 0.06), "f": (0.1, 0.3)}
    then, now = ({f"{name}/0": cell(pair[k]) for name, pair in gains.items()} for k in (0, 1))
    now["new/0"] = cell()
    shown = subprocess.CompletedProcess([], 0, json.dumps(then), "")
    monkeypatch.setattr(compare.subprocess, "run", lambda *words, **options: shown)
    lines, good = compare.compare("abc", [*gains, "new", "none"], now)
    assert not good
    assert [line.split(" | ")[-1].removesuffix(" |") for line in lines[2:]] == [
        "FELL by more than its interval",
        "-",
        "UNDER +10",
        "not measured anew",
        "-",
        "-",
        "new",
        "not run",
    ]
    assert lines[2].startswith("| a | +20.0 +- 3.0 | +15.0 +- 3.0 | -5.0 +- 4.2 | 0 |")


# ---- the page


@pytest.mark.parametrize(
    ("accuracies", "seconds"),
    [([0.1, 0.6, 0.2, 0.6], 40), ([0.1, 0.55, 0.45, 0.6], 20), ([0.6, 0.3, 0.3, 0.4], None), ([0.5, 0.5, 0, 0], 10)],
)
def test_one_lucky_evaluation_does_not_reach_the_goal(lab, accuracies, seconds):
    assert reached([(10.0 * (k + 1), value) for k, value in enumerate(accuracies)], 0.5) == seconds


def test_an_interval_over_seeds_is_students(lab):
    # 4.3027 standard errors on either side, of a mean of 0.4 with the std 0.1 of three values.
    assert over_seeds([0.3, 0.4, 0.5]) == ("0.40", "0.15 to 0.65")
    assert over_seeds([0.3, None, 0.5]) == ("-", "-")


def test_the_page_and_the_file_of_results_are_written(lab, monkeypatch):
    results = {f"quickstart/{seed}": cell(gain) for seed, gain in ((0, 0.1), (1, 0.2))}
    lab.write_results(results)
    assert json.loads(lab.RESULTS.read_text()) == results
    quoting = lab.ROOT / "docs" / "algorithms" / "method.md"
    quoting.parent.mkdir()
    quoting.write_text("`configs/quickstart.yaml`, six steps:\n+1.0 to -2.0 points; `configs/x.yaml` +1.0 to +2.0")
    lab.write_page()
    # 12.706 standard errors of two values that differ by 10.
    row = "| quickstart | tested | +15.0 | -48.5 to +78.5 | +7.0 | 2 of 3 | 50 | 5.00 + 0.10 | 190 |"
    assert row in lab.PAGE.read_text()
    assert (
        quoting.read_text()
        == "`configs/quickstart.yaml`, six steps:\n+10.0 to +20.0 points; `configs/x.yaml` +1.0 to +2.0"
    )
    assert "| 50 | 5.00 + 0.10 | 190 | 100 | `01234567+` |" in lab.PAGE.read_text()
    assert "| quickstart | 2 |  |  |  |  |  |  |  |  |  |  | not run |" in lab.PAGE.read_text()


def test_a_row_says_by_which_rule_the_best_guidance_was_found():
    values = cell(0.1)["summary"]
    assert at_best(Entry("x", "tested", searched=False, cells={}), values) == "not searched"
    searched = Entry("x", "tested", searched=True, cells={})
    assert at_best(searched, values) == "old rule"
    values |= {
        "guidance_search": {},
        "tuned_best_guidance": {"guidance_scale": 2.0},
        "difference_best_guidance": {"shapes_strict": {"mean": 0.1015, "low": 0.05, "high": 0.15}},
    }
    assert at_best(searched, values) == "+10.2 [+5.0, +15.0] at 2"


def moving(gain: float, drawn: float) -> dict:
    """A cell of videos, whose first samples have a flicker of `drawn`."""
    result = cell(gain)
    for block in ("base", "tuned", "difference"):
        table = result["summary"][block]
        table["shapes_motion_strict"] = table.pop("shapes_strict")
        table["shapes_motion_flicker"] = {"mean": 0.02, "low": 0.01, "high": 0.03}
    for metrics in result["start"]:
        metrics["reward/shapes_motion_flicker_mean"] = drawn * metrics["iteration"] / 2
    return result


def test_videos_have_a_section_of_their_own_with_the_noise_of_the_samplers(lab):
    cells = {"": (0.12, 0.05), "-cps": (0.1, 0.0625)}
    entries = [
        Entry(f"video-sage_grpo{name}", "tested", False, {0: moving(*values)}, metric=MOTION)
        for name, values in cells.items()
    ]
    lines = videos_section(entries)
    assert "| video-sage_grpo | tested | +12.0 |  | +9.0 | 1 of 1 | 50 | 5.00 + 0.10 | 190 |" in lines
    assert "| `sage` | 0.66 | +12.0 [+9.0, +15.0] | 5.00 + 0.10 | 50.0 | 20.0 | 20.0 | +20.0 [+10.0, +30.0] |" in lines
    assert "| `cps` | 0.66 | +10.0 [+7.0, +13.0] | 5.00 + 0.10 | 62.5 | 20.0 | 20.0 | +20.0 [+10.0, +30.0] |" in lines
    assert videos_section([Entry("video-awm", "tested", False, {0: None}, metric=MOTION)]) == []
    image = Entry("quickstart", "tested", False, {0: cell()})
    first, _, last = page([image, *entries], lines).partition("## Every cell")
    # Means and races of images and of videos do not mix; the table of cells has both.
    assert first.count("| video-sage_grpo |") == 1
    assert "| video-sage_grpo-cps | 0 | 40.0 [37.0, 43.0] | not searched | 50.0 [47.0, 53.0] |" in last


def test_a_sampler_of_videos_is_measured_on_one_seed(lab, tmp_path):
    names = ("video-sage_grpo", "video-sage_grpo-cps", "video-branch_grpo", "sage_grpo")
    keys = [key for key, _ in lab.cell_jobs(dict.fromkeys(names, tmp_path), lab.SEEDS)]
    assert sorted(keys) == sorted(
        [f"{name}/{seed}" for name in ("video-sage_grpo", "sage_grpo") for seed in (0, 1, 2)]
        + ["video-sage_grpo-cps/0", "video-branch_grpo/0"]
    )
