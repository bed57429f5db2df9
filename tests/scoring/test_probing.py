"""The probe of a run: a score that is not its sample's own ends the run before training, with both values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError, RewardError
from flowrl.data.prompts import Prompt
from flowrl.reward import Card, Reward, unscored
from flowrl.scoring import probing
from flowrl.scoring.cache import Memory, ScoreCache
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.probing import probe, probe_batch
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.steadiness import difference
from flowrl.scoring.weighted import WeightedReward

ONE = [Prompt("a red circle")]


def entry(score, *, cache: ScoreCache | None = None, **card: Any) -> WeightedReward:
    return WeightedReward("mine", Reward(score, Card(outputs=("mine",), **card)), cache=cache)


def tried(*entries: WeightedReward, frames: int = 1, known: Scorer | None = None, prompts=ONE) -> None:
    adapter: Any = SimpleNamespace(height=8, width=8, num_frames=frames)
    probe(Scorer(entries), prompts, adapter, known)


def means(images, prompts=(), metadata=()):
    return torch.stack([image.mean() for image in images])


BY_BATCH = {
    "standardised": lambda m: (m - m.mean()) / (m.std(correction=0) + 1e-6),
    "centred": lambda m: m - m.mean(),
    "around the median": lambda m: m - m.median(),
    "share of the best": lambda m: m / m.max(),
    "above the worst": lambda m: m - m.min(),
    "rank": lambda m: m.argsort().argsort().float(),
    "softmax": lambda m: m.softmax(dim=0),
    "small": lambda m: (m - m.mean()) * 1e-4,
}


@pytest.mark.parametrize("how", BY_BATCH)
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("prompts", [ONE, [Prompt("a"), Prompt("b")]], ids=len)
def test_a_reward_that_depends_on_its_batch_is_refused_unless_it_needs_groups(how, frames, prompts):
    def score(images, prompts, metadata):
        return BY_BATCH[how](means(images))

    with pytest.raises(
        RewardError, match=r"depends on its batch: 'mine' of probe .* among 4 and .* alone; .*needs_groups"
    ):
        tried(entry(score, modality="any"), frames=frames, prompts=prompts)
    tried(entry(score, modality="any", needs_groups=True), frames=frames, prompts=prompts)


def test_both_values_are_shown_and_exit_code_2_says_that_nothing_was_trained():
    with pytest.raises(RewardError, match=r"is 4 among 4 and 1 alone; .*nothing was trained") as left:
        tried(entry(lambda images, prompts, metadata: [float(len(prompts))] * len(prompts)))
    assert left.value.exit_code == 2
    calls: list[int] = []

    def counts(images, prompts, metadata):
        calls.append(len(prompts))
        return [float(len(calls))] * len(prompts)

    with pytest.raises(
        RewardError,
        match=r"from call to call: .* is 1 in one and 2 in the next; .*Card\(outputs=\('mine',\), repeatable=False",
    ):
        tried(entry(counts))
    calls.clear()
    tried(entry(counts, repeatable=False))
    assert calls == [4], "what it declares is not tried"


def test_a_missing_score_is_a_difference_and_its_reason_is_told():
    def needs_two(images, prompts, metadata):
        if len(prompts) == 1:
            unscored("one is too few")
            return [float("nan")]
        return means(images)

    with pytest.raises(RewardError, match=r"among 4 and nan alone \(one is too few\); "):
        tried(entry(needs_two))


def test_two_more_calls_no_cache_and_none_of_what_was_tried_with_other_prompts():
    calls: list[int] = []

    def score(images, prompts, metadata):
        calls.append(len(prompts))
        return means(images)

    one = entry(score, cache=ScoreCache(Memory(), "x"))
    tried(one)
    assert calls == [4, 4, 1]
    tried(one, known=Scorer([one]))
    assert calls == [4, 4, 1, 4]
    kept = ScoreCache(Memory(), "x")
    drawn = torch.Generator().manual_seed(0)
    with pytest.raises(RewardError, match="from call to call"):
        tried(entry(lambda i, p, m: torch.rand(len(p), generator=drawn), cache=kept))


def rounded(size: float, off: float):
    """Scores around `size` that are `off` of it larger alone, as where a kernel is chosen by the batch."""

    def score(images, prompts, metadata):
        return (means(images) + size) * (1 + (off if len(prompts) == 1 else 0.0))

    return score


@pytest.mark.parametrize("size", [0.5, 20.0])
def test_rounding_is_no_difference_and_that_of_half_precision_is_only_named_on_a_gpu(size, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tried(entry(rounded(size, 2**-20)))
    assert not caplog.text
    in_half = rounded(size, 2**-8)  # half a step of bfloat16; one of TF32 is 2^-10
    with pytest.raises(RewardError, match="half_precision=True"):
        tried(entry(in_half))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tried(entry(in_half))
    assert "depends on its batch: 'mine' of probe" in caplog.text
    assert "half_precision=True" in caplog.text
    caplog.clear()
    tried(entry(in_half, half_precision=True))
    assert not caplog.text
    with pytest.raises(RewardError, match="depends on its batch"):
        tried(entry(rounded(size, 0.1)))


def test_of_several_outputs_the_one_that_differs_is_found_though_the_first_is_constant():
    card = Card(outputs=("one", "rank", "large"))

    def score(images, prompts, metadata):
        m = means(images)
        large = 1000.0 + (3.0 if len(prompts) == 1 else 0.0)  # rounding of half precision, and the larger difference
        return {"one": torch.ones(len(m)), "rank": 1e-3 * m.argsort().argsort().float(), "large": large + 0 * m}

    with pytest.raises(RewardError, match="depends on its batch: 'rank'"):
        tried(WeightedReward("mine", Reward(score, card)))


@pytest.mark.parametrize(
    ("first", "second", "by"),
    [
        ([1.0, -2.0], [1.0, -2.5], 0.25),
        ([0.5, 0.0], [0.5, 0.25], 0.25),
        ([1e-5, 0.0], [1e-5, 1e-6], 1e-4),  # a tenth of the largest score, where ALONE ends
        ([0.0, float("nan")], [0.0, float("nan")], 0.0),
        ([0.0, float("nan")], [0.0, 1.0], float("inf")),
        ([0.0], [0.0], 0.0),
    ],
)
def test_differences_are_relative_to_one_to_the_score_or_to_small_scores(first, second, by):
    found = difference({"a": torch.tensor(first)}, {"a": torch.tensor(second)})
    assert found == pytest.approx(by, rel=1e-6)


def test_probe_images_differ_each_prompt_has_its_turn_and_large_videos_are_few(monkeypatch):
    batch = probe_batch([Prompt("a"), Prompt("b", {"k": 1})], 8, 8, 1)
    assert (list(batch.prompts), list(batch.metadata)) == (["a", "b"] * 2, [{}, {"k": 1}] * 2)
    images: Any = batch.images
    assert images.shape == (4, 3, 8, 8)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    apart = torch.pdist(images.mean(dim=(2, 3)))
    assert float(apart.min()) > 0.05, "what is taken over a batch is none of its images'"
    monkeypatch.setattr(probing, "FLOATS", 5 * 3 * 8 * 8)
    assert len(probe_batch(ONE, 8, 8, 5).images) == 3


def test_a_function_without_a_card_is_for_images_until_it_says_otherwise(tmp_path):
    """`image[0] - image[2]` is red minus blue of an image, and the first minus the third frame of a video."""
    from flowrl.scoring.build import require_modality

    file = tmp_path / "warm.py"
    text = "def score(images, prompts, metadata):\n    return [float((i[0] - i[2]).mean()) for i in images]\n"
    file.write_text(text)
    plan = reward_plan({"path": str(file)}, "rewards.0")
    assert plan.card is not None
    assert plan.card.modality == plan.build().reward.card.modality == "image"
    with pytest.raises(
        ConfigError, match=r"'warm' judges images.*CARD = flowrl.Card\(outputs=\('warm',\), modality='any'"
    ):
        require_modality("warm", plan.card, videos=True)
    file.write_text("import flowrl\nCARD = flowrl.Card(outputs=('warm',), modality='any')\n" + text)
    require_modality("warm", reward_plan({"path": str(file)}, "rewards.0").build().reward.card, videos=True)
