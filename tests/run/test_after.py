"""What comes after a run: nothing for a library, the report, the cause and the card for the command."""

import json
from pathlib import Path

import pytest

from flowrl.core.files import json_ready
from flowrl.run.report import Finished
from tests.e2e.conftest import inside, train
from tests.e2e.test_bad_input import command

CONSTANT = "def score(images, prompts, metadata):\n    return [0.5] * len(prompts)\n"
WORDS = (
    *("rewards=[{path: same.py}]", "rollout.num_inference_steps=2", "algorithm.sde_steps=[0]", "iterations=2"),
    *("data.max_eval_prompts=4", "checkpoint.every=99"),
)
RUN = Path("runs/run")
PAGE, CARD = RUN / "gallery/index.html", RUN / "adapter/README.md"
TOLD = ("paired difference", "report: ", "likely cause: ")


def said() -> str:
    return (RUN / "train.log").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that does not learn, which a library has trained."""
    folder = tmp_path_factory.mktemp("after")
    with inside(folder):
        Path("same.py").write_text(CONSTANT)
        train(*WORDS)
    return folder


def test_a_library_trains_without_a_page_a_card_and_a_diagnosis(place, monkeypatch):
    monkeypatch.chdir(place)
    assert json.loads((RUN / "summary.json").read_text())["status"] == "finished"
    assert not [*RUN.rglob("*.html"), *RUN.rglob("*.md")]
    assert [word in said() for word in TOLD] == [True, False, False]


def test_what_comes_after_has_the_end_and_a_failure_in_it_does_not_spoil_the_run(place, monkeypatch):
    monkeypatch.chdir(place)
    told = list[Finished]()

    def fails(run: Finished) -> None:
        raise ValueError("no page today")

    with pytest.raises(ValueError, match="no page today"):
        train(*WORDS, resume=True, after=[told.append, fails, told.append])
    assert "ValueError: no page today" in said()
    kept = json.loads((RUN / "summary.json").read_text())
    assert kept["status"] == "finished"
    assert train(*WORDS, resume=True, after=[told.append])["status"] == "finished"
    first, second = told
    assert (first.folder.resolve(), first.summary["status"]) == (RUN.resolve(), "finished")
    assert json_ready(second.summary["difference"]) == kept["difference"]


def test_the_command_writes_the_page_and_the_card_and_names_the_cause(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *WORDS, "--resume")
    assert code == 0, printed
    assert PAGE.is_file()
    assert CARD.is_file()
    places = [printed.index(word) for word in TOLD]
    assert places == sorted(places)
