"""What a run shows: one folder, whose run goes on in three ways of showing it; then a terminal, and two processes."""

import json
import signal
from pathlib import Path

import pytest

from flowrl.commands.train import command
from flowrl.display.display import KINDS
from tests.e2e.conftest import inside
from tests.terminals import in_terminal

SMALL = ["rollout.num_inference_steps=2", "rollout.group_size=2", "algorithm.sde_steps=[0]", "data.max_eval_prompts=2"]


def shown(capsys: pytest.CaptureFixture[str], *words: str, quiet: bool = False, as_json: bool = False) -> list[str]:
    """The lines of `flowrl train`, and an error stream without another's."""
    command("run.yaml", [*SMALL, *words], resume=True, quiet=quiet, as_json=as_json)
    return capsys.readouterr().out.splitlines()


def test_json_then_quiet_then_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with inside(tmp_path):
        rows = [json.loads(line) for line in shown(capsys, "iterations=1", as_json=True)]
        kinds = [row["kind"] for row in rows if row["kind"] != "phase"]
        assert kinds == ["start", "evaluation", "iteration", "saved", "evaluation", "end"]
        assert {row["kind"] for row in rows} <= set(KINDS)
        start, base, iteration, saved, tuned, end = [row for row in rows if row["kind"] != "phase"]
        assert (start["run"], start["iterations"], start["finished"]) == ("runs/run", 1, 0)
        assert (base["tag"], tuned["tag"], tuned["iteration"]) == ("base", "tuned", 1)
        written = json.loads(Path("runs/run/metrics.jsonl").read_text())
        assert iteration == {"kind": "iteration"} | written
        assert Path(saved["folder"]).is_dir()
        assert (end["status"], end["exit_code"]) == ("finished", 0)
        assert end["tuned"] == json.loads(Path("runs/run/summary.json").read_text())["tuned"]
        assert "loading" in [row["phase"] for row in rows if row["kind"] == "phase"]

        verdict = shown(capsys, "iterations=2", quiet=True)
        log = Path("runs/run/train.log").read_text()
        assert verdict[0].startswith("base  brightness")
        assert verdict[-3].startswith("win rate by brightness")
        assert verdict[-2].endswith("of 255 levels.")
        assert verdict[-1].startswith("Sharpness, the mean difference of neighbouring pixels: ")
        assert "INFO iteration 1/1" in log
        assert "INFO iteration 2/2" in log

        lines = shown(capsys, "iterations=3")
        assert not any(not character.isprintable() for line in lines for character in line)
        assert sum(line.startswith("iteration 3/3  reward ") for line in lines) == 1
        assert [line for line in lines if line.startswith(("base  ", "win rate"))]


def test_what_ends_early_has_an_end_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with inside(tmp_path):
        with pytest.raises(ValueError, match="iterationz"):
            command("run.yaml", ["iterationz=3"], as_json=True)
        *_, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert (end["kind"], end["status"], end["exit_code"]) == ("end", "refused", 2)
        assert "iterationz" in end["reason"]
        with pytest.raises(ValueError, match="--quiet and --json"):
            command("run.yaml", [], quiet=True, as_json=True)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_terminal_shows_one_display_and_is_left_clean_by_ctrl_c(tmp_path: Path, processes: int):
    with inside(tmp_path):
        options = ["eval.every=1", "iterations=40", f"--processes={processes}", "--backend=gloo"]
        words = ["-m", "flowrl", "train", "run.yaml", *SMALL, *options]
        code, output = in_terminal(*words, columns=60, until="iteration 2/40 [")
    assert code == 128 + signal.SIGINT
    # The phases that take long enough to be drawn; the others are those of the board's own tests.
    for text in ("loading the libraries", "loading the model", "iteration 2/40 [", " left"):
        assert text in output
    assert "held-out brightness" in output
    assert "\x1b[?25l" not in output
    assert output.rsplit("\x1b", 1)[1].startswith("[J")  # nothing is drawn after the last line of the log
    assert "go on with" in output.rsplit("\x1b", 1)[1]
    drawn = [part.split("\x1b")[0].strip() for part in output.split("\r") if " [#" in part or " [." in part]
    assert max(map(len, drawn)) < 60
    # One display: its iterations never go back.
    counts = [int(part.split("/")[0].split()[1]) for part in drawn if part.startswith("iteration ") and "/40 [" in part]
    assert counts == sorted(counts)
