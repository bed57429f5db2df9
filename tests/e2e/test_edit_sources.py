"""A run of edits from its list to its report, its votes and its pairs: the source goes everywhere."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrl.apps.gallery.builder import build
from flowrl.apps.gallery.runs import load_run
from flowrl.apps.voting.ballot import Ballot
from flowrl.apps.voting.pairs import Finished, load_pairs
from flowrl.core.files import file_sha256
from flowrl.media import media
from flowrl.run.people.votes import VoteBook
from tests.apps.folders import Page
from tests.e2e.conftest import inside, train
from tests.e2e.test_bad_input import command
from tests.edits import MODEL, write_edits, write_model

REWARDS = "rewards=[{name: shapes_edit, outputs: {edit_partial: 1}}]"
DATA = "data={prompts: edits/edits.jsonl, eval_prompts: edits/edits.jsonl}"
SMALL = ("eval={num_inference_steps: 2, batch_size: 4, save_images: 6, every: 1, rewards: [{name: shapes_edit}]}",)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run of an untrained model of edits on 7 edits; one of them knows its result."""
    folder = tmp_path_factory.mktemp("edits")
    with inside(folder):
        records = write_edits(folder / "edits", 7)
        records[1]["reference"] = "right-1.png"
        records[2]["reference"] = "no file"
        (folder / "edits" / "edits.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        write_model(folder / "kontext")
        assert train("iterations=2", MODEL, DATA, REWARDS, *SMALL)["status"] == "finished"
        yield folder


def test_the_run_keeps_the_sources_of_the_prompts_whose_images_it_saves(edited):
    run, kept = load_run(edited / "runs" / "run"), edited / "runs" / "run" / "eval" / "sources"
    assert sorted(file.name for file in kept.iterdir()) == [
        *["00000-0.png", "00001-0.png", "00001-reference.png", "00002-0.png", "00003-0.png", "00004-0.png"],
        "00005-0.png",
    ]
    assert torch.equal(media.read(kept / "00003-0.png"), media.read(edited / "edits" / "source-3.png"))
    assert torch.equal(media.read(kept / "00001-reference.png"), media.read(edited / "edits" / "right-1.png"))
    assert run.base is not None
    assert list(run.base.given(1)) == ["source", "reference"]
    assert run.base.given(6) == {}


def test_the_report_shows_the_source_of_every_tile_also_where_the_list_is_gone(edited, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(edited / "runs" / "run", moved)
    page = Page(build([moved]))
    cards = page.source.split("<figure")[1:]
    shown = [card for card in cards if 'class="two"' in card]
    assert len(shown) > 6
    assert all(
        card.index('class="given"') < card.index('class="two"') for card in shown if "no image saved" not in card
    )
    assert sum("<small>reference</small>" in card for card in shown) >= 1
    assert "<kbd>d</kbd> changes against the source" in page.source
    film = page.source[page.source.index('<table class="film">') :]
    assert 'alt="source: ' in film[: film.index("</table>")]


def test_voters_see_the_source_and_their_pairs_have_it(edited, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(edited / "runs" / "run", run)
    with VoteBook(run / "votes", "here") as book:
        ballot = Ballot(Finished(load_pairs(run)), book)
        asked = ballot.ask("ann")["pair"]
        (source,) = asked["sources"]
        data, kind = ballot.image(source.removeprefix("image/")) or (b"", "")
        (tmp_path / f"seen.{kind}").write_bytes(data)
        pair = ballot.shown("ann")
        assert pair is not None
        assert torch.equal(media.read(tmp_path / f"seen.{kind}"), media.read(pair.sources[0]))
        ballot.vote("ann", asked["token"], "left")
        assert ballot.image(source.removeprefix("image/")) is None
        assert [vote.sources for vote in book.votes.values()] == [(f"images/{file_sha256(pair.sources[0])[:24]}.png",)]
    shutil.move(run / "votes", tmp_path / "votes")
    require_sources(tmp_path / "votes", 1)
    require_sources(tmp_path / "votes" / "strengths.jsonl", 1)


def test_an_evaluation_of_the_run_keeps_the_sources_and_a_diagnosis_reads_it(edited, monkeypatch, capsys):
    code, said = command(monkeypatch, capsys, "eval", "runs/run", "--out", "again", "eval.save_images=2")
    assert code == 0, said
    assert "edit_strict: " in said
    names = [file.name for file in sorted(Path("again/eval/sources").iterdir())]
    assert names == ["00000-0.png", "00001-0.png", "00001-reference.png"]
    code, said = command(monkeypatch, capsys, "diagnose", "runs/run")
    assert code == 0, said


def require_sources(path: Path, count: int) -> None:
    """Every pair of a set has its source, in the set."""
    from flowrl.data.options import PreferenceOptions
    from flowrl.data.preferences import load_preferences

    pairs = load_preferences(str(path), "x", PreferenceOptions(source="source"))
    assert len(pairs) == count
    for k in range(count):
        (file,) = pairs.read(k).prompt.images
        assert media.read(Path(file)).shape == (3, 32, 32)
        assert (path if path.is_dir() else path.parent).resolve() in Path(file).resolve().parents


def test_pairs_of_edits_can_be_moved_and_trained_on(edited, monkeypatch, capsys):
    words = ("pairs", "run.yaml", MODEL, DATA, REWARDS, "rollout.num_inference_steps=2", "--out", "made")
    code, said = command(monkeypatch, capsys, *words, "--count", "3", "--per-prompt", "3")
    assert code == 0, said
    assert "data.pairs.records.source=source" in said
    lines = [json.loads(line) for line in Path("made/pairs.jsonl").read_text().splitlines()]
    for line in lines:
        number = line["drawn"]["prompt"]
        assert line["source"] == f"images/{file_sha256(edited / 'edits' / f'source-{number}.png')[:24]}.png"
        assert line["operation"]
        assert "images" not in line
    shutil.move("made", "moved")
    require_sources(Path("moved"), 3)
    code, said = command(
        *(monkeypatch, capsys, "score", "--pairs", "moved", "--reward", "shapes_edit"),
        *("--set", "records.source=source"),
    )
    assert code == 0, said
    told = json.loads(said.splitlines()[said.splitlines().index(next(x for x in said.splitlines() if x[0] == "{"))])
    assert told["chosen"]["edit_partial"] > told["rejected"]["edit_partial"]
    data = "data={pairs: {path: moved, per_iteration: 2, flip: false, records: {source: source}}}"
    learned = train(
        *("name=learned", MODEL, data, "rewards=[]", "algorithm={name: diffusion_dpo, beta: 10}", "eval.every=0"),
        *("rollout={num_inference_steps: 2, batch_size: 2}", "iterations=1"),
    )
    assert learned["status"] == "finished"
    (edited / "named.jsonl").write_text('{"prompt": "x", "image": "edits/source-0.png", "source": "web"}\n')
    code, said = command(monkeypatch, capsys, *words[:-1], "other", "data={prompts: named.jsonl}")
    assert code == 2
    assert "has 'source', a key of the pairs that are written; rename it" in said
