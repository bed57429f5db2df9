"""The contract of a reward: what is checked, what is masked, what stops the run."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.one_call import score_once
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch
from flowrl.scoring.weighted import WeightedReward

B = 8
BASE = torch.arange(B) / 10
IMAGES = BASE.reshape(B, 1, 1, 1).expand(B, 3, 2, 2)
PROMPTS = [f"prompt {i}" for i in range(B)]
METADATA: list[dict] = [{"row": i} for i in range(B)]


def brightness(images, prompts, metadata) -> Tensor:
    """0, 0.1, 0.2 ... for the pictures above."""
    return images.mean(dim=(1, 2, 3))


def two_outputs(images, prompts, metadata) -> dict[str, Tensor]:
    value = brightness(images, prompts, metadata)
    return {"a": value, "b": 10 * value}


def constant(value):
    return lambda images, prompts, metadata: value


def entry(score, name="mine", declared=("mine",), card=None, **options) -> WeightedReward:
    return WeightedReward(name, Reward(score, Card(outputs=declared, **(card or {}))), **options)


def scored(*entries: WeightedReward, **options):
    return Scorer(entries, **options).score(IMAGES, PROMPTS, METADATA)


def test_a_score_does_not_depend_on_the_autocast_of_who_asks():
    def product(images, prompts, metadata) -> Tensor:
        return images.flatten(1) @ torch.full((12,), 1 / 12)

    here = scored(entry(product)).raw["mine"]
    with torch.autocast("cpu", torch.bfloat16):
        there = scored(entry(product)).raw["mine"]
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(here, there)


class Flaky:
    """Raises on its first calls, and ever after for pictures brighter than `limit`."""

    def __init__(self, failing_calls: int = 0, limit: float = math.inf) -> None:
        self.calls, self.failing_calls, self.limit = 0, failing_calls, limit

    def __call__(self, images, prompts, metadata) -> Tensor:
        self.calls += 1
        if self.calls <= self.failing_calls or images.max() > self.limit:
            raise ConnectionError("server is away")
        return brightness(images, prompts, metadata)


def test_raw_values_are_logged_and_the_transform_makes_the_training_value():
    scores = scored(entry(brightness, scale=2.0, offset=-0.3, clip=(0.0, 0.9), weight=3.0))
    assert_close(scores.raw["mine"], BASE)
    expected = torch.tensor([0.0, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9])
    assert_close(scores.values, expected[None])
    assert_close(scores.total, 3 * expected)
    assert scores.failures == 0


def test_the_first_output_is_trained_on_unless_shares_say_otherwise():
    assert_close(scored(entry(two_outputs, declared=("a", "b"))).values[0], BASE)
    assert_close(scored(entry(two_outputs, declared=("b", "a"))).values[0], 10 * BASE)
    shared = scored(entry(two_outputs, declared=("a", "b"), outputs={"a": 0.25, "b": 0.5}))
    assert_close(shared.values[0], 0.25 * BASE + 0.5 * 10 * BASE)
    assert list(shared.raw) == ["a", "b"]


def test_the_clip_holds_for_each_output_before_the_shares():
    clipped = entry(two_outputs, declared=("a", "b"), outputs={"a": 1.0, "b": 1.0}, clip=(0.0, 0.5))
    assert_close(scored(clipped).values[0], BASE.clamp(0, 0.5) + (10 * BASE).clamp(0, 0.5))


def test_rewards_are_summed_by_weight_and_a_weight_of_zero_only_looks():
    first = entry(brightness, weight=2)
    second = entry(two_outputs, "other", ("a", "b"), outputs={"b": 1.0}, weight=-0.5)
    watched = entry(constant([math.nan] + [5.0] * 7), "watched", ("w",), weight=0)
    scores = scored(first, second, watched)
    assert_close(scores.values[:2], torch.stack([BASE, 10 * BASE]))
    # The unscored sample of the watched reward is told but masks nothing that is trained on.
    assert_close(scores.total, 2 * BASE - 0.5 * 10 * BASE)
    assert scores.failures == 1
    blind = entry(constant([math.nan] * 8), "watched", ("w",), weight=0)
    assert scored(first, blind).failures == 8, "counted, and the run goes on"


@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_masks_its_sample_and_is_counted(broken, clip):
    scores = scored(entry(constant([0.5, broken] + [0.5] * 6), clip=clip), entry(brightness, "b", ("b",)))
    for values in (scores.raw["mine"], scores.values[0], scores.total):
        assert values.isnan().tolist() == [False, True] + [False] * 6
    assert scores.failures == 1


SHAPE = r"'mine' returned shape .* shape \(8,\)"
NUMBER = r"not one number a sample.*is NaN"
OTHERS = r"declares the outputs \['a', 'b'\] but returned"
RANGE = "outside its declared range"


@pytest.mark.parametrize(
    ("value", "card", "message"),
    [
        *((value, {}, SHAPE) for value in (torch.zeros(B + 1), torch.zeros(B, 1), torch.zeros(()), [0.0] * 7, 1.0)),
        *((value, {}, NUMBER) for value in (None, "high", [None] * B, [[0.0], [1.0, 2.0]])),
        *(
            (dict.fromkeys(names, BASE), {"outputs": ("a", "b")}, OTHERS)
            for names in (("a",), ("a", "b", "c"), ("other",))
        ),
        ([0.5] * 7 + [1.1], {"high": 1.0}, RANGE),
        ([0.5] * 7 + [-0.1], {"low": 0.0}, RANGE),
        ([0.5] * 7 + [11], {"low": 0, "high": 10}, RANGE),
    ],
)
def test_a_broken_contract_stops_at_the_first_try(value, card, message):
    calls = Flaky()

    def score(images, prompts, metadata):
        calls(images, prompts, metadata)
        return value

    with pytest.raises(RewardError, match=message):
        scored(WeightedReward("mine", Reward(score, Card(**({"outputs": ("mine",)} | card)))))
    assert calls.calls == 1


def test_the_declared_range_allows_for_rounding_and_nan():
    values = [0.0, 1.0, 1.00001, -0.00001, math.nan, 0.5, 0.5, 0.5]
    assert scored(entry(constant(values), card={"low": 0.0, "high": 1.0})).failures == 1


def test_an_exception_is_retried_and_told():
    told: list[str] = []
    flaky = Flaky(failing_calls=2)
    scores = scored(entry(flaky), retries=2, on_error=told.append)
    assert_close(scores.raw["mine"], BASE)
    assert (flaky.calls, scores.failures) == (3, 0)
    line = Flaky.__call__.__code__.co_firstlineno + 3
    assert [text.split(" raised ")[1] for text in told] == [
        f"ConnectionError: server is away (test_reward.py:{line}), try {number} of 3" for number in (1, 2)
    ]


def test_after_the_last_try_only_the_failing_samples_are_masked():
    flaky = Flaky(limit=0.55)
    scores = scored(entry(flaky), entry(brightness, "b", ("b",)), retries=1, batch_size=2, max_failed_share=0.25)
    assert scores.raw["mine"].isnan().tolist() == [False] * 6 + [True] * 2
    assert scores.total.isnan().tolist() == [False] * 6 + [True] * 2
    assert_close(scores.raw["b"], BASE)
    # Three chunks at once, the fourth twice, and then each of its two samples alone.
    assert (flaky.calls, scores.failures) == (3 + 2 + 2, 2)


def test_above_the_allowed_share_of_failures_the_run_stops_and_names_the_error():
    with pytest.raises(RewardError, match=r"2 of 8 samples.*'mine' raised ConnectionError: server is away"):
        scored(entry(Flaky(limit=0.55)), batch_size=2, max_failed_share=0.24)
    with pytest.raises(RewardError, match=r"5 of 8 samples.*returned NaN"):
        scored(entry(constant([math.nan] * 5 + [0.0] * 3)))
    assert scored(entry(constant([math.nan] * 4 + [0.0] * 4))).failures == 4


def test_a_users_interrupt_is_not_swallowed():
    def score(images, prompts, metadata):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(entry(score))


def test_two_rewards_with_the_same_output_are_refused():
    with pytest.raises(ValueError, match=r"'mine' is produced by 'mine' and by 'again'.*prefix: a makes it a_mine"):
        Scorer([entry(brightness), entry(brightness, "again")])


def shared(score, *options: dict, **card) -> list[WeightedReward]:
    """Entries of one reward with the outputs a and b."""
    reward = Reward(score, Card(outputs=("a", "b"), **card))
    return [WeightedReward("mine", reward, **each) for each in options]


def test_entries_of_one_reward_make_a_value_each_from_one_pass_over_every_chunk():
    seen: list[int] = []

    def counted(images, prompts, metadata):
        seen.append(len(prompts))
        return two_outputs(images, prompts, metadata)

    first, second = shared(counted, {"outputs": {"a": 1.0}}, {"outputs": {"b": 2.0}, "weight": -0.5, "clip": (0, 4)})
    # Another reward between them: values keep the entries' order, raw outputs appear once, in the order of rewards.
    scorer = Scorer([first, entry(brightness, "other", ("c",)), second], batch_size=3)
    scores = scorer.score(IMAGES, PROMPTS, METADATA)
    assert seen == [3, 3, 2]
    assert scorer.outputs == tuple(scores.raw) == ("a", "b", "c")
    assert_close(scores.values, torch.stack([BASE, BASE, 2 * (10 * BASE).clamp(0, 4)]))
    assert_close(scores.weights, torch.tensor([1.0, 1.0, -0.5]))


def test_entries_of_one_reward_score_what_each_scores_alone_bitwise():
    options = {"outputs": {"a": 0.3, "b": 0.7}, "scale": 0.1, "offset": 0.2}, {"outputs": {"b": 1.0}, "weight": 3.0}
    both = shared(two_outputs, *options)
    together, alone = scored(*both, batch_size=3), [scored(each, batch_size=3) for each in both]
    assert torch.equal(together.values, torch.cat([one.values for one in alone]))
    assert all(torch.equal(together.raw[name], alone[0].raw[name]) for name in ("a", "b"))


def test_a_failure_of_a_shared_reward_is_tried_and_counted_once_and_masks_what_uses_the_output():
    flaky = Flaky(limit=0.55)
    options = {"outputs": {"a": 1}, "isolate": False}, {"outputs": {"b": 1}, "isolate": False}
    entries = shared(lambda *batch: {"a": flaky(*batch), "b": BASE[:2]}, *options)
    scores = scored(*entries, retries=1, batch_size=2)
    assert (flaky.calls, scores.failures) == (3 + 2, 2)
    assert scores.values.isnan().tolist() == [[False] * 6 + [True] * 2] * 2  # an exception loses every output
    half = shared(constant({"a": [math.nan] + [0.0] * 7, "b": [0.0] * 8}), {"outputs": {"a": 1}}, {"outputs": {"b": 1}})
    assert scored(*half).values.isnan().sum(dim=1).tolist() == [1, 0]


def test_a_share_of_an_unknown_output_is_refused_and_without_rewards_every_sample_has_the_value_0():
    with pytest.raises(ValueError, match=r"'mine' has no output 'x'; it has \['mine'\]"):
        Scorer([entry(brightness, outputs={"x": 1.0})])
    scores = Scorer(()).score(torch.rand(3, 3, 4, 4), [""] * 3, [{}] * 3)
    assert (scores.raw, scores.total.tolist()) == ({}, [0.0] * 3)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_every_sample_meets_its_own_prompt_and_metadata_whatever_the_chunk(batch_size):
    def rows(images, prompts, metadata):
        own = [
            int(p.split()[1]) == m["row"] == round(float(i.mean()) * 10)
            for i, p, m in zip(images, prompts, metadata, strict=True)
        ]
        assert all(own)
        return [m["row"] for m in metadata]

    assert scored(entry(rows), batch_size=batch_size).raw["mine"].tolist() == list(range(B))


def test_only_a_reward_that_needs_whole_groups_gets_the_batch_in_one_piece():
    def size(images, prompts, metadata):
        return [len(prompts)] * len(prompts)

    scores = scored(entry(size, card={"needs_groups": True}), entry(size, "b", ("b",)), batch_size=3)
    assert scores.raw["mine"].tolist() == [8.0] * 8
    assert scores.raw["b"].tolist() == [3.0] * 6 + [2.0] * 2


def test_no_samples_give_no_scores():
    scores = Scorer([entry(brightness)]).score(IMAGES[:0], [], [])
    assert scores.raw["mine"].shape == scores.total.shape == (0,)
    assert scores.values.shape == (1, 0)


def test_one_pass_returns_float32_without_gradient():
    images = IMAGES.double().requires_grad_()
    value = score_once(entry(brightness), Batch(images, PROMPTS, METADATA))["mine"]
    assert value.dtype == torch.float32
    assert not value.requires_grad
