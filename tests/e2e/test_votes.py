"""A run that trains on votes: its scores, a resume, a stop, its time limit, two processes, and what it never asks."""

import json
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.apps.gallery.runs import load_run
from flowrl.core.errors import ConfigError, RewardError, RewardFailure, Stopped
from flowrl.run import desk as requests
from flowrl.run.people import asking as waiting
from flowrl.run.people import polls
from flowrl.run.people.votes import FOLDER, VoteBook, read_votes
from flowrl.training.metrics import repeatable
from tests.e2e.conftest import digest, finish, inside, start, train
from tests.tiny_rewards.votes import brightness, vote_for_bright, voting_for_bright

SMALL = (
    *("iterations=2", "rollout.num_inference_steps=2", "algorithm.sde_steps=[0]", "optim.updates_per_iteration=1"),
    *("data.max_eval_prompts=2", "eval.rewards=[{name: jpeg}]", "model.lora={rank: 4, alpha: 8}", "checkpoint.every=1"),
)
ASK = "rewards=[{name: votes, votes_per_sample: 3, grace: 0, time_limit: 100}]"
"""Every pair, so that the scores do not depend on when the run looks; limited, so that a lost voter ends the test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    with inside(tmp_path_factory.mktemp("votes")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "LOOK_S", 0.01)
        with voting_for_bright(Path("runs/voted")):
            train("name=voted", *SMALL, ASK)
        yield Path("runs")


def rows(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


def records(run: str, iteration: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(question, its scores) of an iteration."""
    found = []
    for file in sorted(Path(f"runs/{run}/votes/iteration-{iteration:06d}").glob("slot-????.json")):
        found.append((json.loads(file.read_text()), json.loads(file.with_suffix(".closed.json").read_text())))
    return found


def test_the_scores_are_the_order_of_the_voter_and_the_row_counts_them(folder):
    for iteration in (1, 2):
        asked = records("voted", iteration)
        assert len(asked) == 2
        for question, closed in asked:
            light = [brightness(folder / "voted/votes" / image) for image in question["images"]]
            assert np.argsort(closed["scores"]).tolist() == np.argsort(light).tolist()
            assert sum(closed["scores"]) == pytest.approx(0, abs=1e-9)
            assert closed["missing"] == [0] * 4
    found = rows("voted")
    assert [row["reward/votes_missing_mean"] for row in found] == [0.0] * 2
    assert all(row["reward/masked"] == 0 and row["reward/group_std"] > 0 for row in found)
    assert len(read_votes(folder / "voted/votes")[0]) == 2 * 2 * 6


def test_evaluations_ask_nobody_and_the_result_is_of_what_they_score(folder):
    run = load_run(folder / "voted")
    assert run.base is not None
    assert list(run.base.scores) == ["jpeg_kb"]
    assert run.summary["primary"] == "jpeg_kb"
    assert sorted(file.name for file in (folder / "voted/votes").glob("iter*")) == [
        "iteration-000001",
        "iteration-000002",
    ]


def test_a_resume_repeats_the_scores_without_anybody_voting(folder):
    """Iteration 2 is made again from iteration 1, with nobody there: its questions were counted."""
    again = Path(shutil.copytree(folder / "voted", folder / "again"))
    shutil.rmtree(again / "checkpoints/iteration-000002")
    config = (again / "config.yaml").read_text()
    (again / "config.yaml").write_text(config.replace("name: voted", "name: again"))
    train("name=again", *SMALL, ASK, resume=True)
    assert digest("again", 2) == digest("voted", 2)
    kept = [[repeatable(row) for row in rows(run)] for run in ("again", "voted")]
    assert kept[0] == kept[1]


def test_a_stop_ends_the_wait_and_a_question_that_was_counted_keeps_its_scores(folder):
    """Stopped with one question counted and one open; resumed, it is the undisturbed run."""
    run = folder / "stopped"

    def stop() -> None:
        while len(polls.open_questions(run / FOLDER)) < 2:
            time.sleep(0.01)
        with VoteBook(run / FOLDER, "a test") as book:
            vote_for_bright(book, at_most=1)
        while len(polls.open_questions(run / FOLDER)) > 1:
            time.sleep(0.01)
        requests.submit(run, "stop", {})

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        train("name=stopped", *SMALL, ASK, "iterations=1")
    thread.join()
    (open_one,) = polls.open_questions(run / FOLDER)
    with VoteBook(run / FOLDER, "a test") as book:
        vote_for_bright(book)
        assert {vote.group for vote in list(book.votes.values())[-6:]} == {open_one.group}
    train("name=stopped", *SMALL, ASK, "iterations=1", resume=True)
    assert digest("stopped", 1) == digest("voted", 1)


def test_samples_without_a_vote_are_masked_at_the_time_limit_and_trained_without(folder):
    few = "rewards=[{name: votes, time_limit: 0.05, max_failed_share: 1.0}, {name: jpeg, weight: 0}]"
    train("name=few", *SMALL, few, "iterations=1", "eval.rewards=[]")
    row = rows("few")[0]
    assert (row["reward/masked"], row["reward/votes_masked"]) == (8, 8)
    assert row["reward/votes_missing_mean"] == 2.0
    assert row["reward/jpeg_kb_mean"] > 0
    assert [closed["scores"] for _, closed in records("few", 1)] == [[None] * 4] * 2


def test_too_many_without_a_vote_end_the_run_with_the_remedy_and_a_resume_asks_again(folder):
    hurried = ("name=hurried", *SMALL, ASK.replace("100", "0.05"), "iterations=1")
    with pytest.raises(
        RewardFailure, match=r"8 of 8 samples .*; reward .votes.: 8 samples .*`flowrl vote runs/hurried`"
    ):
        train(*hurried)
    assert len(polls.open_questions(folder / "hurried" / FOLDER)) == 2
    with VoteBook(folder / "hurried" / FOLDER, "a test") as book:
        vote_for_bright(book)
    train(*hurried, resume=True)
    assert digest("hurried", 1) == digest("voted", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("eval.rewards=[{name: votes}]", "rewards=[{name: jpeg}]"),
            r"eval.rewards.0: votes asks .*flowrl vote.*; leave out eval.rewards.0",
        ),
        (("rollout.exploration={pool: 8}", ASK), r"rollout.exploration looks at more candidates"),
        (("rollout.group_size=1", "algorithm.advantages={name: batch}", ASK), r"group_size=1: votes compares"),
        (("rewards=[{name: votes, timeout: 5}]",), r"timeout=5 ends a call that hangs"),
        (("rewards=[{name: votes, cache: memory}]",), r"cache='memory': its score depends"),
        (("rewards=[{name: votes, time_limit: 0}]",), r"time_limit=0.0 must be above 0"),
        (("eval.rewards=[]", "eval.best_guidance=[1.0, 2.0]", ASK), r"eval.best_guidance: evaluations do not ask"),
        (("guard={mode: stop, metric: votes_missing}", "eval.every=1", ASK), r"no reward of the run has that output"),
    ],
)
def test_where_people_cannot_be_asked_the_run_does_not_start(folder, words, message):
    with pytest.raises((ConfigError, RewardError), match=message):
        train("name=refused", *SMALL, *words)


@pytest.mark.slow
def test_two_processes_wait_for_each_others_votes(folder, monkeypatch):
    """Scores by identity are those of one process, also where the votes on one process's group come late."""
    process = start("train", "run.yaml", "name=two", *SMALL, ASK, "iterations=1", "--processes", "2")
    with voting_for_bright(folder / "two"):
        code, output = finish(process)
    assert code == 0, output
    for (mine, own), (theirs, other) in zip(records("two", 1), records("voted", 1), strict=True):
        assert mine["prompt"] == theirs["prompt"]
        assert np.argsort(own["scores"]).tolist() == np.argsort(other["scores"]).tolist()
