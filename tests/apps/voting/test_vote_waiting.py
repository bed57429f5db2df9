"""`flowrl vote` on a run that waits: whom it asks what, until when a vote counts, and what is refused."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.apps.voting.pairs import Finished, load_pairs
from flowrl.apps.voting.waiting import schedule, waits
from flowrl.core.errors import ConfigError
from flowrl.core.polls import Closed, Question
from flowrl.media import media
from flowrl.run.people import polls
from flowrl.run.people.votes import FOLDER, keep_image, read_votes
from tests.apps.folders import change, make_run, write_run
from tests.apps.voting.test_vote import Page, vote, voting

GROUP = "iteration-000001-slot-0000"


def ask(run: Path, *levels: float, iteration: int = 1, slot: int = 0, votes_per_sample: int = 2) -> Question:
    """What the reward writes."""
    names = []
    for level in levels:
        file = media.write(torch.full((3, 16, 16), level), run / "sample")
        names.append(keep_image(run / FOLDER, file.read_bytes(), file.suffix))
    question = Question(
        iteration=iteration,
        slot=slot,
        prompt=f"a red circle, {slot}",
        samples=tuple(range(len(levels))),
        images=tuple(names),
        votes_per_sample=votes_per_sample,
    )
    polls.put(run / FOLDER, question)
    return question


def close(run: Path, question: Question) -> None:
    count = len(question.images)
    result = Closed(scores=(0.0,) * count, missing=(0,) * count, votes=0)
    with polls.turn(run / FOLDER):
        polls.close(run / FOLDER, question, result)


# ---- what is asked


@pytest.mark.parametrize("count", range(1, 9))
def test_all_pairs_come_once_and_the_first_ones_share_the_images_out(count):
    question = Question(
        iteration=1, slot=0, prompt="", samples=(), images=tuple(map(str, range(count))), votes_per_sample=2
    )
    pairs = list(schedule(question))
    assert sorted(map(sorted, pairs)) == [list(pair) for pair in itertools.combinations(range(count), 2)]
    for first, each in ((count // 2, 1), (count, 2)):
        seen = [image for pair in pairs[:first] for image in pair]
        if count > 2 and (each == 2 or count % 2 == 0):
            assert sorted(seen) == sorted(list(range(count)) * each)
    assert pairs == list(schedule(question))
    if count > 5:
        assert pairs != list(schedule(replace(question, slot=1)))


def test_a_prompt_takes_as_many_votes_as_it_has_samples_and_sides_are_mixed(waiting_run):
    question = ask(waiting_run, *(level / 10 for level in range(8)))
    with voting(waiting_run) as server:
        page, sides, given = Page(server), set(), 0
        while page.state()["pair"]:
            shown = server.ballot.shown("ann")
            assert shown is not None
            sides.add(shown.second_left)
            page.vote("left")
            given += 1
        assert (given, sides) == (8, {True, False})
        assert not question.missing(server.ballot.book.votes.values()).any()
        assert page.state()["progress"] == "The run counts the votes"
        close(waiting_run, question)
        assert page.state()["progress"] == "The run draws its next samples"
        assert page.state()["waits"]


def test_a_question_about_an_edit_shows_its_source_and_its_votes_keep_it(waiting_run):
    question = ask(waiting_run, 0.1, 0.5)
    file = media.write(torch.full((3, 16, 16), 0.9), waiting_run / "source")
    name = keep_image(waiting_run / FOLDER, file.read_bytes(), file.suffix)
    polls.put(waiting_run / FOLDER, replace(question, sources=(name,)))
    with voting(waiting_run) as server:
        page = Page(server)
        (source,) = page.state()["pair"]["sources"]
        assert page.ask("GET", "/" + source)[0] == 200
        page.vote("left")
        assert [vote.sources for vote in server.ballot.book.votes.values()] == [(name,)]
        assert read_votes(waiting_run / FOLDER)[0] == server.ballot.book.votes
    pairs = (waiting_run / FOLDER / "pairs.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in pairs] == [name]


def test_new_questions_come_to_the_page_and_the_numbers_tell_what_is_missing(waiting_run):
    with voting(waiting_run) as server:
        page = Page(server)
        assert page.state()["pair"] is None
        ask(waiting_run, 0.1, 0.5)
        ask(waiting_run, 0.2, 0.6, 0.9, slot=1)
        state = page.state()
        assert (state["pair"]["prompt"], state["progress"]) == (
            "a red circle, 0",
            "Iteration 1: 4 votes missing, on 2 prompts",
        )
        assert page.vote("tie")["pair"]["prompt"] == "a red circle, 1"
        assert page.state()["progress"] == "Iteration 1: 3 votes missing, on 1 prompt"


def test_two_voters_share_a_prompt_and_a_skip_leaves_it_to_the_other(waiting_run):
    question = ask(waiting_run, 0.1, 0.5, 0.9)
    with voting(waiting_run) as server:
        ann, bob = Page(server), Page(server, "bob")
        assert ann.state()["pair"]
        assert bob.state()["pair"]
        assert server.ballot.shown("ann") != server.ballot.shown("bob")
        while ann.state()["pair"]:
            ann.vote("skip")
        assert question.missing(server.ballot.book.votes.values()).tolist() == [2, 2, 2]
        while bob.state()["pair"]:
            bob.vote("right")
        assert not question.missing(server.ballot.book.votes.values()).any()


# ---- until when a vote counts


def test_undo_works_until_the_votes_are_counted_and_then_it_is_refused_by_name(waiting_run):
    question = ask(waiting_run, 0.1, 0.5, 0.9)
    with voting(waiting_run) as server:
        page = Page(server)
        shown = page.state()["pair"]["prompt"], server.ballot.shown("ann")
        page.vote("left")
        assert page.post("undo")[1]["answered"] == 0
        assert (page.state()["pair"]["prompt"], server.ballot.shown("ann")) == shown
        assert page.vote("left")["undoable"]
        late = page.state()["pair"]["token"]
        close(waiting_run, question)
        counted = "Iteration 1 has counted the votes on its prompt 1, and trains on them: none is added or taken back"
        for code, answer in (page.post("vote", pair=late, choice="left"), page.post("undo")):
            assert (code, answer["problem"][: len(counted)]) == (409, counted)
        state = page.state()
        assert (state["pair"], state["undoable"]) == (None, False)
    assert len(read_votes(waiting_run / FOLDER)[0]) == 1


def test_samples_that_were_drawn_anew_take_no_votes_on_the_old_ones(waiting_run):
    ask(waiting_run, 0.1, 0.5)
    with voting(waiting_run) as server:
        page = Page(server)
        old = page.state()["pair"]["token"]
        ask(waiting_run, 0.2, 0.6)
        code, answer = page.post("vote", pair=old, choice="left")
        assert (code, "has drawn other samples since" in answer["problem"]) == (409, True)
        page.vote("left")


def test_a_vote_for_a_run_that_has_ended_is_refused_with_the_remedy(waiting_run):
    ask(waiting_run, 0.1, 0.5)
    with voting(waiting_run) as server:
        page = Page(server)
        token = page.state()["pair"]["token"]
        (waiting_run / "summary.json").write_text('{"status": "finished"}')
        code, answer = page.post("vote", pair=token, choice="left")
        assert (code, "it has finished; end flowrl vote and start it again" in answer["problem"]) == (409, True)
        assert "it has finished" in page.state()["progress"]
    assert not read_votes(waiting_run / FOLDER)[0]


def test_a_run_that_was_stopped_or_died_is_refused_with_the_command_that_goes_on(waiting_run, tmp_path):
    other = write_run(tmp_path / "other", {"rewards": [{"name": "votes"}]})
    with pytest.raises(ConfigError, match=r"waits for no votes: the run has not begun"):
        waits(other)
    ends = (
        ("stopped", r"was stopped: asked .*Go on with: flowrl train \.\./other --resume\. Start"),
        ("running", r"the run died: it was killed"),
    )
    for state, said in ends:
        told = {"status": state, "reason": "asked for by ann", "command": "flowrl train ../other --resume"}
        (other / "summary.json").write_text(json.dumps(told))
        with pytest.raises(ConfigError, match=said):
            waits(other)
    code, said = vote(str(other))
    assert (code, said.count("\n")) == (2, 1)


def test_other_runs_and_finished_ones_compare_base_and_tuned(tmp_path):
    finished = make_run(tmp_path / "run", num_prompts=2, iterations=20)
    assert not waits(finished)
    change(finished / "config.yaml", rewards=[{"name": "votes"}])
    assert not waits(finished)
    known: Any = Finished(load_pairs(finished)).refusal(GROUP)
    assert "one of the training" in known
