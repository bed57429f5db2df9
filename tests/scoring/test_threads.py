"""A time limit for rewards of this process: the same numbers, one call at a time, and no hang."""

import contextvars
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.time_limits import Ambient, TimeLimit
from flowrl.scoring.weighted import WeightedReward

SOON, WAIT_S = 0.05, 60.0
B = 6
IMAGES = torch.rand(B, 3, 4, 4, generator=torch.Generator().manual_seed(0))
BATCH = IMAGES, [""] * B, [{}] * B
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def means(images, prompts, metadata):
    return torch.stack([image.mean() for image in images])


class Hangs:
    """Its first call waits until it is released; it knows how many calls are under way at once."""

    def __init__(self) -> None:
        self.release, self.calls, self.at_once, self.most = threading.Event(), 0, 0, 0

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if self.calls == 1:
            assert self.release.wait(WAIT_S)
        self.at_once -= 1
        return means(images, prompts, metadata) * self.calls


@pytest.fixture
def hung():
    score = Hangs()
    yield score
    score.release.set()


def given_up(score) -> Any:
    """A `TimeLimit` whose first call has been given up; later ones may take their time."""
    limit = TimeLimit(score, SOON)
    with pytest.raises(TimeoutError, match=r"no scores within timeout=0.05 s"):
        limit(*BATCH)
    limit.limit_s = WAIT_S
    return limit


def surroundings(*batch) -> Any:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        VARIABLE.get(),
    )


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("cast", [False, True])
def test_a_timed_call_runs_in_the_callers_surroundings(around, cast):
    token = VARIABLE.set("mine")
    with around(), torch.autocast("cpu", dtype=torch.float16, enabled=cast):
        found, expected = TimeLimit(surroundings, WAIT_S)(*BATCH), surroundings()
    VARIABLE.reset(token)
    assert found == expected
    assert expected[2:] == (cast, torch.float16, "mine")


def test_the_surroundings_of_one_thread_serve_several_at_once():
    both, ambient = threading.Barrier(2), Ambient()

    def meets():
        both.wait(WAIT_S)
        return VARIABLE.get()

    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ambient.run(meets))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == ["none"] * 2


def test_the_numbers_are_bitwise_those_without_a_limit():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def score(images, prompts, metadata):
        return network(images)[:, 0]

    plain = Scorer([WeightedReward("a", Reward(score, Card(outputs=("a",))))], batch_size=4).score(*BATCH)
    timed = Reward(TimeLimit(score, WAIT_S), Card(outputs=("a",)))
    found = Scorer([WeightedReward("a", timed)], batch_size=4).score(*BATCH)
    assert torch.equal(found.raw["a"], plain.raw["a"])
    assert torch.equal(found.total, plain.total)


def test_a_hung_batch_follows_the_failure_policy_and_no_second_call_is_made_beside_it(hung):
    told: list[str] = []
    reward = Reward(TimeLimit(hung, SOON), Card(outputs=("a",)))
    with pytest.raises(RewardError, match=r"6 of 6 samples could not be scored.*still runs; no other is made"):
        Scorer([WeightedReward("a", reward)], on_error=told.append).score(*BATCH)
    assert hung.calls == 1
    assert "TimeoutError: it gave no scores within timeout=0.05 s; the call goes on" in told[0]
    assert len(told) == 3 + 6, "three tries, and a search that gives up after 2 log2(6) failures"
    good = WeightedReward("good", Reward(means, Card(outputs=("good",))))
    watched = Scorer([WeightedReward("b", reward, weight=0.0), good]).score(*BATCH)
    assert watched.raw["a"].isnan().all(), "a reward that is only looked at ends nothing"


def test_it_is_waited_for_once_more_and_after_that_tries_fail_at_once(hung, monkeypatch):
    limit = given_up(hung)

    waits: list[float] = []
    monkeypatch.setattr(limit._late.ended, "wait", lambda seconds: waits.append(seconds))
    for _ in range(3):
        with pytest.raises(TimeoutError, match="still runs"):
            limit(*BATCH)
    assert waits == [WAIT_S, 0, 0]


def test_a_late_call_that_ends_makes_room_and_its_result_is_dropped(hung):
    limit = given_up(hung)
    hung.release.set()
    assert torch.equal(limit(*BATCH), 2 * means(*BATCH)), "the second call's own numbers"
    assert (hung.calls, hung.most) == (2, 1)
    assert torch.equal(limit(*BATCH), 3 * means(*BATCH))


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_call_raises_reaches_the_caller(error):
    def raises(images, prompts, metadata):
        raise error

    with pytest.raises(type(error)) as caught:
        TimeLimit(raises, WAIT_S)(*BATCH)
    assert caught.value is error


def test_pictures_that_ask_for_their_gradient_are_scored_here_without_a_limit():
    seen: list[int] = []

    def score(images, prompts, metadata):
        seen.append(threading.get_ident())
        return means(images, prompts, metadata)

    images = IMAGES.clone().requires_grad_()
    limit: Any = TimeLimit(score, WAIT_S)
    limit(images, *BATCH[1:]).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().min() > 0
    limit(*BATCH)
    assert seen[0] == threading.get_ident() != seen[1]


def test_the_entrys_option_sets_it_and_must_be_above_0():
    built = reward_plan({"name": "jpeg", "timeout": 2}, "rewards.0").build()
    assert isinstance(built.reward.score, TimeLimit)
    assert built.reward.score.limit_s == 2.0
    assert not isinstance(reward_plan({"name": "jpeg"}, "rewards.0").build().reward.score, TimeLimit)
    for value in (0, -1.0):
        with pytest.raises(ConfigError, match="must be above 0"):
            reward_plan({"name": "jpeg", "timeout": value}, "rewards.0")


@pytest.mark.slow
def test_a_process_ends_though_its_reward_still_hangs(tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import threading\ndef score(images, prompts, metadata):\n    threading.Event().wait()\n"
    )
    from flowrl.media import media

    media.write(IMAGES[0], tmp_path / "one")
    words = ["score", str(tmp_path), "--reward", str(tmp_path / "hangs.py"), "--set", "timeout=0.2"]
    done = subprocess.run([sys.executable, "-m", "flowrl", *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stderr
    assert '"hangs": null' in done.stdout
    assert "gave no scores within timeout=0.2 s" in done.stderr
