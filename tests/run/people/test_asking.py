"""Processes that wait for each other's votes: both go on together, and nobody waits for people once one has left."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.polls import OCCASION
from flowrl.core.types import SampleId
from flowrl.reward import Card, Reward
from flowrl.run.people import asking as people
from flowrl.run.people import polls
from flowrl.run.people.asking import People
from flowrl.run.people.votes import FOLDER
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.signals import NEVER, Stop
from flowrl.training.world import World

IDS = (SampleId(0, 0), SampleId(0, 1))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(people, "LOOK_S", 0.005)


def of(run: Path, rank: int = 0, size: int = 2, stop: Stop = NEVER) -> People:
    return People(run, World(rank, size, torch.device("cpu")), stop)


def alone(run: Path, rank: int, work: Callable[[], None], stop: Stop = NEVER) -> list[BaseException]:
    """What a process raises."""
    try:
        with people.Asking(of(run, rank, stop=stop), 1) as asking:
            asking.begin(IDS)
            work()
    except BaseException as error:  # Abandoned is none of the others
        return [error]
    return []


def test_a_process_with_its_votes_waits_for_the_other(tmp_path):
    order: list[str] = []
    release = threading.Event()

    def late() -> None:
        assert release.wait(20)
        order.append("late")

    thread = threading.Thread(target=lambda: order.append(f"late raised {alone(tmp_path, 1, late)}"))
    thread.start()
    threading.Timer(0.1, release.set).start()
    assert alone(tmp_path, 0, lambda: order.append("early")) == []
    thread.join()
    assert order[:2] == ["early", "late"]
    assert "late raised []" in order


@pytest.mark.parametrize("error", [ValueError("a bad reward"), Abandoned()])
def test_when_one_leaves_the_other_does_too_and_the_failure_is_shared_elsewhere(tmp_path, error):
    def fail() -> None:
        raise error

    assert alone(tmp_path, 1, fail) == [error]
    (raised,) = alone(tmp_path, 0, lambda: None)
    assert isinstance(raised, Abandoned)


def test_a_request_to_stop_that_one_process_sees_ends_the_wait_on_both(tmp_path):
    """The second waits for votes of its own, and hears of it by its occasion."""
    asked, raised = threading.Event(), list[BaseException]()

    def wait_for_votes() -> None:
        now = OCCASION.get()
        assert now is not None
        assert (now.iteration, now.ids, now.stop()) == (1, IDS, False)
        asked.set()
        while not now.stop():
            time.sleep(0.005)
        raise Abandoned

    thread = threading.Thread(target=lambda: raised.extend(alone(tmp_path, 1, wait_for_votes)))
    thread.start()
    raised += alone(tmp_path, 0, lambda: None, stop=Stop(here=asked.is_set))
    thread.join()
    assert [type(each) for each in raised] == [Abandoned, Abandoned]
    assert OCCASION.get() is None


def test_marks_of_an_earlier_call_are_removed_and_what_cannot_work_is_refused(tmp_path):
    reward = Reward(lambda images, prompts, metadata: torch.zeros(len(prompts)), Card(outputs=("a",), by_people=True))
    scorer, world = Scorer([WeightedReward("asked", reward)]), World(0, 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"asked asks people through the run's folder, and there is none here"):
        People.of(scorer, None, world, NEVER, 2)
    with pytest.raises(ConfigError, match=r"process 0 does not see .*all machines of the run share"):
        People.of(scorer, tmp_path, world, NEVER, 2)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"prompts_per_iteration=1: asked compares .*; try rollout.prompts_per_iteration=2$"
    ):
        People.of(scorer, tmp_path, world, NEVER, 1)
    mark = tmp_path / FOLDER / "iteration-000001/.left-1"
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert People.of(scorer, tmp_path, world, NEVER, 2) is not None
    assert not mark.exists()
    plain = Reward(reward.score, Card(outputs=("a",)))
    assert People.of(Scorer([WeightedReward("plain", plain)]), None, world, NEVER, 1) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_told_though_the_folder_of_votes_cannot_be_written(tmp_path, rank):
    """Reopening takes the lock: what it raises must neither hide the failure nor keep the others waiting."""
    error, work = ValueError("a bad reward"), list[str]()

    def fail() -> None:
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        (tmp_path / FOLDER / polls.TURN).mkdir()  # no file of a lock can be opened here
        work.append("done")
        raise error

    assert alone(tmp_path, rank, fail) == [error]
    assert work == ["done"]
    (raised,) = alone(tmp_path, 1 - rank, lambda: None)
    assert isinstance(raised, Abandoned)
