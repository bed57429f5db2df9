"""Look and save on demand: a run that is asked is bitwise the run that is not, and every request has an answer."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from flowrl.apps.gallery.runs import load_run
from flowrl.commands import ask
from flowrl.core.errors import Abandoned, ConfigError, Stopped
from flowrl.models.memory import encoders
from flowrl.run import checkpoint, status
from flowrl.run import desk as requests
from flowrl.run.requests import Desk
from flowrl.run.session import Session
from flowrl.run.state import Saver
from flowrl.training.metrics import repeatable
from flowrl.training.signals import Signals
from flowrl.training.world import join
from tests.e2e.conftest import digest, finish, inside, start, train

SMALL = (
    *(
        "iterations=3",
        "data.max_eval_prompts=4",
        "rollout.group_size=2",
        "rollout.num_inference_steps=2",
        "algorithm.sde_steps=[0]",
        "optim.updates_per_iteration=1",
        "model.lora={rank: 4, alpha: 8}",
    ),
    *("eval.every=2", "eval.batch_size=4", "checkpoint.every=3", "checkpoint.keep=1"),
    # A guard that may end the run looks at what is evaluated by the schedule alone.
    *("eval.rewards=[{name: jpeg}]", "guard={mode: stop, patience: 9, diversity: null, degeneracy: null}"),
)
PROMPTS = ["a red circle", "a blue square"]
OWN = f"eval.preview_prompts={json.dumps(PROMPTS)}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    with inside(tmp_path_factory.mktemp("ask")):
        train("name=plain", *SMALL)
        yield Path("runs")


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """asking(run, {2: [("save", {})]}): requests that come while iteration 2 is under way."""
    step = Session.step

    def plan(run: str, wanted: dict[int, list[tuple[Any, dict[str, Any]]]]) -> None:
        def stepped(self: Session, iteration: int) -> dict[str, Any]:
            for word, options in wanted.get(iteration, ()):
                requests.submit(Path("runs") / run, word, options)
            return step(self, iteration)

        monkeypatch.setattr(Session, "step", stepped)

    return plan


def answers(run: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(Path(f"runs/{run}/asked").glob("*.json"))]


def rows(run: str) -> list[dict[str, Any]]:
    return [repeatable(json.loads(line)) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def asked(folder: Path, asking: Callable[..., None]) -> Path:
    """A run that was asked for everything but its end."""
    if not (folder / "asked").is_dir():
        # Its text encoders were freed at the start: they are loaded again for the prompt that the run does not know.
        sample = {"prompts": [PROMPTS[0], "a cat"], "steps": 2, "seed": 1}
        asking("asked", {1: [("save", {}), ("evaluate", {}), ("sample", {}), ("sample", sample)]})
        train("name=asked", *SMALL, OWN)
    return folder / "asked"


def test_a_run_with_asks_and_previews_is_bitwise_the_run_without(asked):
    assert digest("asked", 3) == digest("plain", 3)
    assert rows("asked") == rows("plain")
    states = [checkpoint.path_of(Path("runs", run, "checkpoints"), 3) / "state.json" for run in ("asked", "plain")]
    looks = [json.loads(state.read_text())["guard"] for state in states]
    assert looks[0] == looks[1]
    assert (looks[0]["looks"], looks[0]["looked"]) == (1, 2)
    for tag in ("base", "iteration-000002", "tuned"):
        files = [json.loads(Path(f"runs/{run}/eval/{tag}.json").read_text()) for run in ("asked", "plain")]
        assert files[0]["scores"] == files[1]["scores"]


def test_each_request_has_its_files_and_an_answer(asked):
    found = answers("asked")
    assert [one["state"] for one in found] == ["done"] * 4, found
    for one in found:
        for path in (p for p in one["paths"].values() for p in (p if isinstance(p, list) else [p])):
            assert (asked / path).exists(), path
    assert (asked / "checkpoints/iteration-000001").is_dir()  # keep=1, and one came later
    assert not (asked / "requests").exists()
    assert not (asked / requests.TAKES).exists()
    curve = load_run(asked)
    assert [each.iteration for each in curve.during] == [1, 2]


def test_the_same_weights_draw_the_same_images_and_a_seed_others(asked):
    first, other = (asked / f"asked/iteration-000001{end}" for end in ("", "-2"))
    assert Image.open(first / "00000-0.png").tobytes() != Image.open(other / "00000-0.png").tobytes()
    assert (other / "00001-0.png").is_file()


def test_a_stop_ends_the_run_as_a_signal_does_and_a_resume_is_bitwise(folder, asking):
    asking("stopped", {2: [("sample", {}), ("stop", {})]})
    with pytest.raises(Stopped) as caught:
        train("name=stopped", *SMALL)
    assert caught.value.number == signal.SIGTERM
    summary = status.read(folder / "stopped")
    assert summary["status"] == "stopped"
    assert summary["reason"].startswith("asked for by ")
    assert {one["word"]: one["state"] for one in answers("stopped")} == {"stop": "done", "sample": "dropped"}
    train("name=stopped", *SMALL, resume=True)
    assert digest("stopped", 3) == digest("plain", 3)
    assert rows("stopped") == rows("plain")


def test_what_was_asked_for_and_fails_does_not_end_the_run(folder, asking, monkeypatch):
    monkeypatch.setattr(encoders, "available_bytes", lambda: 1000)
    asking("failed", {1: [("sample", {}), ("sample", {"prompts": ["a cat"]}), ("dance", {})]})
    train("name=failed", *SMALL, "iterations=1", "eval.every=0", "guard.mode=off")
    found = answers("failed")
    assert [one["state"] for one in found] == ["failed"] * 3
    assert "--prompt TEXT" in found[0]["text"]
    assert "of host memory next to the training, and 1.0 KiB are free" in found[1]["text"]
    assert "flowrl sample RUN" in found[1]["text"]
    assert "save, sample, evaluate, stop" in found[2]["text"]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BAD_REQUESTS = {
    "deep": "[" * 200_000,
    "options too deep to be written": '{"word": "save", "options": ' + nested(900) + "}",
    "word of two": '{"word": ["stop"]}',
    "no object": "[1]",
    "not text": "\0",
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_file_that_is_no_request_is_taken_and_answered(tmp_path, name):
    """It neither raises nor stays to meet the next resume."""
    (tmp_path / requests.WAITING).mkdir()
    (tmp_path / requests.WAITING / "one.json").write_text(BAD_REQUESTS[name])
    assert isinstance(requests.peek(tmp_path, "one").get("word", ""), str)
    taken = requests.take(tmp_path, "one")
    assert taken is not None
    assert isinstance(taken["word"], str)
    requests.answer(tmp_path, "one", "failed", "no request")
    assert requests.waiting(tmp_path) == []
    assert requests.answer_to(tmp_path, "one") is not None


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("sve", {}, "did you mean 'save'"),
        ("save", {"seed": 1}, "--seed: for sample alone; leave out --seed"),
        ("save", {}, "has finished: flowrl sample"),
    ],
)
def test_bad_input_of_ask_is_named(folder, word, options, message):
    with pytest.raises(ConfigError, match=message):
        ask.command(folder / "plain", word, **options)


def test_ask_says_that_a_folder_is_no_run_or_its_run_takes_no_requests(folder, tmp_path):
    from flowrl.run.folder import RunFolder

    with pytest.raises(ConfigError, match=r"it has no config\.yaml"):
        ask.command(tmp_path, "save")
    with pytest.raises(ConfigError, match="no such folder"):
        ask.command(tmp_path / "none", "save")
    other = RunFolder(folder / "plain")
    other.lock()
    try:
        with pytest.raises(ConfigError, match="takes no requests: it is another command"):
            ask.command(folder / "plain", "save")
    finally:
        other.unlock()


def test_requests_that_a_killed_run_left_are_told_and_removed(tmp_path):
    from flowrl.run.folder import RunFolder

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: run\n")
    (run / "summary.json").write_text('{"status": "running"}')
    folder_of = RunFolder(run)
    folder_of.lock()
    requests.open_desk(run)
    left = requests.submit(run, "save", {})
    ask.command(run, "evaluate", no_wait=True)
    folder_of.unlock()  # as a kill does
    assert "Go on with --resume" in ask.answered(run, left, "save")["text"]
    requests.open_desk(run)
    assert not requests.someone_waits(run)
    dropped = [json.loads(file.read_text()) for file in (run / "asked").glob("*.json")]
    assert [one["state"] for one in dropped] == ["dropped"]  # the first was withdrawn


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a cat", " "], "prompt 2 is empty"),
        (["a cat", "a cat"], "is prompt 1 again"),
        ([str(k) for k in range(65)], "more than 64"),
        (["a " + 40 * "very "], "is too long"),
        ("none.txt", "there is no such file"),
    ],
)
def test_preview_prompts_that_cannot_be_drawn_are_named(folder, given, message):
    with pytest.raises(ConfigError, match=message):
        train("name=refused", *SMALL, f"eval.preview_prompts={json.dumps(given)}")


@pytest.mark.slow
def test_two_processes_agree_on_what_is_asked(folder, tmp_path):
    words = [*SMALL, OWN, "iterations=2", "eval.every=0", "guard.mode=off", "checkpoint.every=1"]
    code, output = finish(start("train", "run.yaml", "name=two", *words, "--processes", "2"))
    assert code == 0, output
    process = start("train", "run.yaml", "name=two-asked", *words, "--processes", "2")
    run = folder / "two-asked"
    while not requests.is_open(run):
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    for word in ("save", "sample", "evaluate"):
        requests.submit(run, word, {})
    code, output = finish(process)
    assert code == 0, output
    assert digest("two-asked", 2) == digest("two", 2)
    assert rows("two-asked") == rows("two")
    assert [one["state"] for one in answers("two-asked")] == ["done"] * 3
    for k in range(2):  # whatever process drew them
        tag = f"previews/base/{k:05d}-0.png"
        assert (run / tag).read_bytes() == (folder / "two" / tag).read_bytes()


@pytest.mark.slow
def test_ask_waits_for_a_run_and_stops_it(folder):
    process = start("train", "run.yaml", "name=long", *SMALL, OWN, "iterations=500", "eval.every=0", "guard.mode=off")
    run = folder / "long"
    while not requests.is_open(run):
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    code, output = finish(start("ask", str(run), "sample", "--steps", "2"))
    assert code == 0, output
    assert "00001-0.png" in output
    code, output = finish(start("ask", str(run), "stop"))
    assert code == 0, output
    assert "the run was stopped after iteration" in output
    assert finish(process)[0] == 128 + signal.SIGTERM


def test_a_stop_that_comes_after_the_processes_agreed_on_none_is_left_for_their_next_look(tmp_path: Path):
    signals = Signals()
    desk = Desk(tmp_path, join(), signals)
    desk.open(launched=False)
    assert not signals.honour(desk.world, desk.waits())
    name = requests.submit(tmp_path, "stop", {})
    desk.serve(cast(Session, None), cast(Saver, SimpleNamespace(settle=lambda: None)), last=True)
    assert requests.waiting(tmp_path) == [name]
    with pytest.raises(Abandoned):
        signals.honour(desk.world, desk.waits())
