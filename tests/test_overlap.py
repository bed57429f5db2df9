"""Scoring beside sampling: the same scores, tries and masks, and really at the same time."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from flowrl.collect import Abandoned, Collector
from flowrl.metrics import Timer
from flowrl.overlap import Ahead
from flowrl.plan import deterministic
from flowrl.prompts import Prompt, Texts
from flowrl.reward import Card, Reward, RewardError, Scorer, WeightedReward
from flowrl.rollout import Evaluations, Noise, Policy
from flowrl.samplers.ode import Ode
from tests.toys import ALONE, SHAPE, ToyAdapter

B, GROUP = 12, 4
PROMPTS = [Prompt(f"prompt {k}", {"k": k}) for k in range(B // GROUP)]
WAIT_S = 60.0


def brightness(images, prompts, metadata):
    # Picture by picture: a mean over a batch may differ in its last bit with the size of the batch.
    return torch.stack([image.mean() + 10 * record["k"] for image, record in zip(images, metadata, strict=True)])


def of_groups(images, prompts, metadata):
    assert len(prompts) == B, "a part of the groups"
    return {"spread": images.mean(dim=(1, 2, 3)) - images.mean()}


def entry(score, name="mine", **card) -> WeightedReward:
    return WeightedReward(name, Reward(score, Card(**({"outputs": (name,)} | card))))


def collector(scorer: Scorer, signalled=lambda: False) -> Collector:
    """One that draws toys, four a batch."""
    adapter = ToyAdapter()
    found = Collector.__new__(Collector)
    found.parts = SimpleNamespace(
        scorer=scorer,
        texts=Texts(adapter, PROMPTS, cache=True),
        policy=Policy(adapter, Ode(), 1.0),
        adapter=adapter,
        sharded=False,
        world=ALONE,
    )
    found.config = SimpleNamespace(rollout=SimpleNamespace(batch_size=4))
    found.world, found.signalled, found.evaluations = ALONE, signalled, Evaluations(adapter.network)
    return found


def draw(scorer: Scorer, signalled=lambda: False):
    noise = Noise(0, "rollout", 1, SHAPE)
    plan = deterministic(ToyAdapter().schedule(3))
    return collector(scorer, signalled)._draw("", PROMPTS, GROUP, plan, noise, Timer(), {})


def same(first, second) -> bool:
    raw = first.scores.raw.keys() == second.scores.raw.keys() and all(
        torch.equal(value.nan_to_num(-1e9), second.scores.raw[name].nan_to_num(-1e9))
        for name, value in first.scores.raw.items()
    )
    return raw and torch.equal(first.images, second.images) and torch.equal(first.scores.weights, second.scores.weights)


def test_scores_pictures_and_their_order_are_those_of_scoring_afterwards():
    def both(overlap: bool):
        entries = [
            entry(of_groups, "spread", needs_groups=True, overlap=overlap),
            entry(brightness, overlap=overlap),
            entry(lambda images, prompts, metadata: 2 * brightness(images, prompts, metadata), "late"),
        ]
        return draw(Scorer(entries))

    beside, afterwards = both(True), both(False)
    assert same(beside, afterwards)
    assert list(beside.scores.raw) == ["spread", "mine", "late"]
    assert beside.scores.raw["mine"].unique().numel() == B


def test_a_batch_is_scored_while_the_next_one_is_sampled():
    """The second batch is not sampled before the first is being scored: one after the other would wait for ever."""
    scoring, sampled = threading.Event(), []

    def tells(images, prompts, metadata):
        scoring.set()
        return brightness(images, prompts, metadata)

    def signalled() -> bool:  # asked after each batch
        sampled.append(scoring.wait(WAIT_S))
        return False

    draw(Scorer([entry(tells, overlap=True)]), signalled)
    assert sampled == [True] * 3


def test_without_such_a_reward_everything_is_scored_at_the_end_in_one_piece():
    sizes = []

    def counts(images, prompts, metadata):
        sizes.append(len(images))
        return brightness(images, prompts, metadata)

    draw(Scorer([entry(counts)]))
    assert sizes == [B]
    draw(Scorer([entry(counts, overlap=True)]))
    assert sizes == [B, 4, 4, 4]


def test_tries_and_masks_are_those_of_the_scorer():
    def odd(images, prompts, metadata):
        if any(record["k"] == 1 for record in metadata):
            raise ConnectionError("server is away")
        return brightness(images, prompts, metadata)

    told = []
    found = draw(Scorer([entry(odd, overlap=True)], on_error=told.append))
    assert found.scores.raw["mine"].isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert found.scores.failures == 4
    assert any("ConnectionError: server is away (try 3 of 3)" in text for text in told)


def test_too_many_failures_and_a_broken_contract_end_the_rollout():
    def raises(images, prompts, metadata):
        raise ConnectionError("server is away")

    with pytest.raises(RewardError, match=r"12 of 12 samples could not be scored.*server is away"):
        draw(Scorer([entry(raises, overlap=True)]))
    with pytest.raises(RewardError, match="returned shape"):
        draw(Scorer([entry(lambda images, prompts, metadata: torch.zeros(1), overlap=True)]))


def test_a_signal_leaves_the_rollout_without_waiting_for_a_slow_reward():
    release, calls = threading.Event(), []

    def slow(images, prompts, metadata):
        calls.append(len(images))
        assert release.wait(WAIT_S)
        return brightness(images, prompts, metadata)

    asked = []

    def signalled() -> bool:
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(Abandoned):
        draw(Scorer([entry(slow, overlap=True)]), signalled)
    release.set()
    assert len(calls) <= 1, "what waited is not scored"


def test_rewards_that_overlap_do_not_wait_for_each_other():
    both = threading.Barrier(2)

    def meets(images, prompts, metadata):
        both.wait(WAIT_S)
        return brightness(images, prompts, metadata)

    entries = [entry(meets, "first", overlap=True), entry(meets, "second", overlap=True)]
    assert not draw(Scorer(entries)).scores.total.isnan().any()


def test_the_pieces_do_not_depend_on_how_fast_a_reward_is():
    scorer = Scorer([entry(brightness, overlap=True)])
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    ahead = Ahead(scorer, [""] * 6, [{"k": k} for k in range(6)])
    for start, stop in ((0, 1), (1, 5), (5, 6)):
        ahead.add(images[start:stop])
    found = ahead.scores(images)
    ahead.close()
    assert torch.equal(found.raw["mine"], scorer.score(images, [""] * 6, [{"k": k} for k in range(6)]).raw["mine"])
    assert math.isfinite(float(found.total.sum()))
