"""The reward of votes: Bradley-Terry within a prompt, what is masked, the time limit, a stop, and a second asking."""

import json
import math
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards.votes import Config, build, scored

from flowrl.core.errors import Abandoned, RewardError
from flowrl.core.polls import Question, Vote
from flowrl.media import media
from flowrl.reward import REASONS
from flowrl.run.people import asking as waiting
from flowrl.run.people import polls
from flowrl.run.people.asking import Reminder
from flowrl.run.people.votes import FOLDER, LOG, VoteBook
from flowrl.statistics.bradley_terry import strengths
from tests.tiny_rewards.votes import asking, occasion, vote_for_bright, voting_for_bright

NAMES = ("a.png", "b.png", "c.png")
PROMPTS = ("a cat", "a dog", "a cat", "a dog")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_S", 0.005)


def question(*images: str, votes_per_sample: int = 2) -> Question:
    return Question(
        iteration=3,
        slot=0,
        prompt="a cat",
        samples=tuple(range(len(images))),
        images=images,
        votes_per_sample=votes_per_sample,
    )


def vote(first: str, second: str, choice: str = "first", group: str = "iteration-000003-slot-0000") -> Vote:
    return Vote(voter="ann", group=group, prompt="a cat", first=first, second=second, choice=choice)


def images(*levels: float) -> torch.Tensor:
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 8, 8).clone()


def score(run: Path, given: torch.Tensor, *, iteration: int = 1, **config: Any) -> dict[str, list[float]]:
    options: dict[str, Any] = {"grace": 0.0} | config
    with asking(occasion(run, PROMPTS[: len(given)], iteration)):
        found = build(Config(**options)).score(given, PROMPTS[: len(given)], [{}] * len(given))
    assert isinstance(found, dict)
    return {name: value.tolist() for name, value in found.items()}


# ---- the scores of a question


def test_scores_are_bradley_terry_strengths_and_votes_of_others_do_not_count():
    votes = [vote("a.png", "b.png"), vote("b.png", "a.png", "tie"), vote("b.png", "c.png", "second")]
    votes += [
        vote("a.png", "c.png", "skip"),
        vote("a.png", "z.png"),
        vote("c.png", "a.png", group="prompt-00000-seed-0"),
    ]
    found = scored(question(*NAMES), votes, 0.5)
    wins = np.array([[0, 1.5, 0], [0.5, 0, 0], [0, 1, 0]])
    assert found.scores == tuple(strengths(wins, 0.5))
    assert (found.missing, found.votes) == ((0, 0, 1), 3)


def test_a_sample_that_nobody_compared_has_no_score_and_its_votes_are_missing():
    found = scored(question(*NAMES), [vote("a.png", "b.png")], 0.5)
    assert [math.isnan(value) for value in found.scores] == [False, False, True]
    assert found.missing == (1, 1, 2)


def test_equal_images_are_one_sample_and_alone_there_is_nothing_to_choose():
    found = scored(question("a.png", "b.png", "a.png"), [vote("a.png", "b.png")], 0.5)
    assert found.scores[0] == found.scores[2] == -found.scores[1] > 0
    assert found.missing == (0, 0, 0), "a person sees their one pair once"
    assert scored(question("a.png", "a.png"), [], 0.5).scores == (0.0, 0.0)
    assert math.isnan(scored(question("a.png"), [], 0.5).scores[0])


# ---- a call


def test_a_call_waits_for_its_votes_and_gives_the_order_of_the_voter(tmp_path):
    with voting_for_bright(tmp_path):
        found = score(tmp_path, images(0.1, 0.9, 0.6, 0.3))
    log_odds = strengths(np.array([[0, 1], [0, 0]])).tolist()
    assert found["votes"] == pytest.approx([log_odds[1], log_odds[0], log_odds[0], log_odds[1]])
    assert found["votes_missing"] == [0.0] * 4


def test_what_was_counted_stands_bitwise_with_nobody_there_and_no_votes_left(tmp_path):
    with voting_for_bright(tmp_path):
        first = score(tmp_path, images(0.1, 0.9, 0.6, 0.3))
    (tmp_path / FOLDER / LOG).unlink()
    assert score(tmp_path, images(0.1, 0.9, 0.6, 0.3), time_limit=None) == first


def test_other_images_are_asked_anew_and_the_scores_of_the_old_ones_are_dropped(tmp_path):
    with voting_for_bright(tmp_path):
        score(tmp_path, images(0.1, 0.9, 0.6, 0.3))
    found = score(tmp_path, images(0.1, 0.9, 0.7, 0.3), time_limit=0.02)
    assert [math.isnan(value) for value in found["votes"]] == [True, False, True, False], "the dogs are the same images"


def test_at_the_time_limit_samples_without_a_vote_are_nan_and_the_reason_names_the_remedy(tmp_path):
    token = REASONS.set([])
    try:
        found = score(tmp_path, images(0.1, 0.9, 0.6, 0.3), time_limit=0.02)
        said = REASONS.get()
    finally:
        REASONS.reset(token)
    assert all(math.isnan(value) for value in found["votes"])
    assert found["votes_missing"] == [1.0] * 4
    assert said is not None
    assert (
        "4 samples of iteration 1 were not compared by anybody (time_limit=0.02); vote with "
        f"`flowrl vote {shlex.quote(str(tmp_path))}" in said[0]
    )


def test_questions_that_lacked_votes_are_opened_again_and_the_others_stay_closed(tmp_path):
    score(tmp_path, images(0.1, 0.9, 0.6, 0.3), time_limit=0.02)
    votes = tmp_path / FOLDER
    groups = [f"iteration-000001-slot-000{slot}" for slot in range(2)]
    assert [polls.is_closed(votes, group) for group in groups] == [True, True]
    polls.reopen(votes, 1, [1])
    assert [polls.is_closed(votes, group) for group in groups] == [True, False]
    with VoteBook(votes, "a test") as book:
        vote_for_bright(book)
    assert [math.isnan(value) for value in score(tmp_path, images(0.1, 0.9, 0.6, 0.3))["votes"]] == [True, False] * 2
    polls.reopen(votes, 1, [0, 1])
    assert [polls.is_closed(votes, group) for group in groups] == [False, True]


def test_an_earlier_iteration_takes_back_what_a_later_one_asked(tmp_path):
    score(tmp_path, images(0.1, 0.9, 0.6, 0.3), iteration=2, time_limit=0.02)
    polls.reopen(tmp_path / FOLDER, 2, [0, 1])
    assert len(polls.open_questions(tmp_path / FOLDER)) == 2
    score(tmp_path, images(0.1, 0.9, 0.6, 0.3), iteration=1, time_limit=0.02)
    assert polls.open_questions(tmp_path / FOLDER) == []


def test_an_image_that_is_not_finite_is_neither_asked_nor_scored(tmp_path):
    given = images(0.1, 0.9, 0.6, 0.3)
    given[0, 0, 0, 0] = math.nan
    with voting_for_bright(tmp_path):
        found = score(tmp_path, given)
    assert [math.isnan(value) for value in found["votes"]] == [True, False, True, False]
    record = json.loads((tmp_path / FOLDER / "iteration-000001/slot-0000.json").read_text())
    assert (record["samples"], record["prompt"]) == ([1], "a cat")


def test_videos_are_shown_at_the_frame_rate_of_the_model(tmp_path):
    moving = torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (asked,) = occasion(tmp_path, ["a"] * 2, fps=8.0).questions(moving, ["a"] * 2, 2)
    assert [media.facts(tmp_path / FOLDER / name) for name in asked.images] == [(3, 8.0)] * 2


def test_a_question_about_an_edit_has_its_source(tmp_path):
    source = media.write(torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)), tmp_path / "source")
    records = [{"images": [str(source)]}] * 2
    (asked,) = occasion(tmp_path, ["a"] * 2).questions(images(0.1, 0.9), ["a"] * 2, 2, records)
    assert [(tmp_path / FOLDER / name).read_bytes() for name in asked.sources] == [source.read_bytes()]
    assert polls.put(tmp_path / FOLDER, asked) is None
    assert polls.open_questions(tmp_path / FOLDER) == [asked]


def test_the_last_vote_can_be_taken_back_for_a_moment(tmp_path):
    """Undone within the grace and cast otherwise, it counts as it was cast last."""
    run_ended = threading.Event()

    def vote_twice() -> None:
        votes = tmp_path / FOLDER
        while len(polls.open_questions(votes)) < 2:
            assert not run_ended.wait(0.005)
        with VoteBook(votes, "a test") as book:
            vote_for_bright(book)
            with polls.turn(votes):
                taken = book.undo("ann")
                assert taken is not None
                book.add(replace(taken, choice="tie"))

    thread = threading.Thread(target=vote_twice)
    thread.start()
    found = score(tmp_path, images(0.1, 0.9, 0.6, 0.3), grace=0.5)
    run_ended.set()
    thread.join()
    assert found["votes"][2] > found["votes"][0]
    assert found["votes"][1] == found["votes"][3] == 0.0


def test_a_stop_ends_the_wait(tmp_path):
    now = occasion(tmp_path, PROMPTS, stop=lambda: True)
    with asking(now), pytest.raises(Abandoned):
        build(Config()).score(images(0.1, 0.9, 0.6, 0.3), PROMPTS, [{}] * 4)


def test_without_a_training_nobody_is_asked_and_a_damaged_log_is_named(tmp_path):
    with pytest.raises(RewardError, match="asks people about the samples of a training iteration"):
        build(Config()).score(images(0.5), ["a cat"], [{}])
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / LOG).write_text("no vote\n")
    with pytest.raises(RewardError, match=r"votes.jsonl:1 is damaged"):
        score(tmp_path, images(0.1, 0.9, 0.6, 0.3))


def test_what_is_missing_is_said_at_once_and_then_once_a_minute(tmp_path, monkeypatch):
    said: list[str] = []
    now = occasion(tmp_path, PROMPTS)
    polls.put(now.votes, replace(question(*NAMES), iteration=1))
    remind = Reminder(now, lambda text, *given: said.append(text % given))
    for _ in range(3):
        remind(())
    assert said == [f"iteration 1 waits for people: 3 votes missing, on 1 prompt; vote with: flowrl vote {tmp_path}"]
    monkeypatch.setattr(remind, "every_s", 0.0)
    remind((vote("a.png", "b.png", group="iteration-000001-slot-0000"),))
    assert "2 votes missing" in said[1]
