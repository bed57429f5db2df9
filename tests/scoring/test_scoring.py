"""Composition beyond weights, the search for bad samples, the cache, and what is counted."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flowrl.core.errors import ConfigError
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.cache import Folder, Memory, ScoreCache
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.options import Gate
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward

NAN = math.nan


def entry(score, name="mine", card=None, **options) -> WeightedReward:
    return WeightedReward(name, Reward(score, Card(**{"outputs": (name,), **(card or {})})), **options)


def fixed(*values: float) -> Any:
    return lambda images, prompts, metadata: list(values)


def scored(*entries: WeightedReward, count: int = 4, **options):
    images = torch.arange(count).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2) / 1000
    return Scorer(entries, **options).score(images, [f"p{i}" for i in range(count)], [{} for _ in range(count)])


def values(*entries: WeightedReward) -> list[float]:
    return scored(*entries).values[0].tolist()


# ---- transforms and gates


@pytest.mark.parametrize(
    ("higher", "options", "expected"),
    [
        (True, {}, [-1.0, 0.0, 1.0, 3.0]),
        (True, {"scale": 2.0}, [0.0, 4.0, 8.0, 16.0]),
        (True, {"offset": 3.0}, [3.0, 5.0, 7.0, 11.0]),
        (True, {"scale": 1.0, "offset": 0.0}, [0.0, 2.0, 4.0, 8.0]),
        (True, {"clip": (-0.5, 0.5)}, [-0.5, 0.0, 0.5, 0.5]),
        # Of the negative, where less is better.
        (False, {}, [-1.0, -2.0, -3.0, -5.0]),
        (False, {"scale": 2.0, "offset": 1.0}, [1.0, -3.0, -7.0, -15.0]),
    ],
)
def test_the_declared_transform_holds_until_the_entry_sets_one_and_raw_is_logged(higher, options, expected):
    card = {"transform": (0.5, -1.0), "higher_is_better": higher}
    found = scored(entry(fixed(0.0, 2.0, 4.0, 8.0), card=card, **options))
    assert found.values[0].tolist() == expected
    assert found.raw["mine"].tolist() == [0.0, 2.0, 4.0, 8.0]


def test_an_output_of_which_less_is_better_counts_negated_whatever_the_others_do():
    def both(images, prompts, metadata):
        return {"strict": torch.tensor([1.0, 0.0]), "flicker": torch.tensor([0.5, 0.25])}

    card = Card(outputs=("strict", "flicker"), less_is_better=("flicker",))
    two = WeightedReward("mine", Reward(both, card).prefixed("b"), outputs={"b_strict": 1.0, "b_flicker": 2.0})
    assert scored(two, count=2).values[0].tolist() == [0.0, -0.5]
    assert (two.reward.card.lower, two.reward.card.prefers_more("b_strict")) == (("b_flicker",), True)
    with pytest.raises(ValueError, match=r"less_is_better names 'x', which is not among the outputs \['a'\]"):
        Card(outputs=("a",), less_is_better=("x",))


@pytest.mark.parametrize("outputs", [{"shapes_motion_flicker": -1.0}, {"shapes_motion_strict": -0.5}])
def test_a_share_below_0_would_train_towards_what_is_worse_and_is_refused(outputs):
    with pytest.raises(ConfigError, match=r"outputs\.shapes_motion_\w+=-[\d.]+ must not be below 0.*less_is_better"):
        reward_plan({"name": "shapes_motion", "outputs": outputs}, "rewards.0")


@pytest.mark.parametrize(
    ("gate", "easy", "hard", "expected"),
    [
        # The last one: nobody knows whether the gate is open.
        ({"at_least": 0.5, "floor": -1.0}, [5.0, 6.0, 7.0, 8.0], [0.2, 0.5, 0.9, NAN], [-1.0, 6.0, 7.0, NAN]),
        # It looks at the raw value, though less of it is better.
        ({"at_most": 20.0}, [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 21.0, 30.0], [1.0, 2.0, 0.0, 0.0]),
        # What a shut gate hides may have failed, and what an open one shows may not.
        ({"at_least": 0.5}, [NAN, NAN, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [0.0, NAN, 0.0, 1.0]),
    ],
)
def test_a_gate_lets_the_easy_reward_count_only_where_the_hard_one_passes(gate, easy, hard, expected):
    card = {"outputs": ("kb",), "higher_is_better": "at_least" in gate}
    gated = entry(fixed(*easy), "easy", gate=Gate(output="kb", **gate), weight=2.0)
    found = scored(gated, entry(fixed(*hard), "hard", card=card, weight=0.0))
    assert found.values[0].tolist() == pytest.approx(expected, nan_ok=True)
    assert found.total.tolist() == pytest.approx([2 * value for value in expected], nan_ok=True)
    assert found.raw["easy"].tolist() == pytest.approx(easy, nan_ok=True), "raw values stay as they were"


def test_a_gate_on_an_output_that_there_is_not_and_one_of_two_bounds_are_refused():
    with pytest.raises(ValueError, match=r"gate of 'mine' names the output 'x'; there are \['mine'\]"):
        Scorer([entry(fixed(0.0), gate=Gate(output="x", at_least=0.0))])
    for bounds in ({}, {"at_least": 0.0, "at_most": 1.0}):
        with pytest.raises(ValueError, match="either at_least or at_most"):
            Gate(output="x", **bounds)


# ---- failures


class Picky:
    """Raises for a batch that holds one of the bad pictures, and counts."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.sizes = set(bad), []

    def __call__(self, images, prompts, metadata):
        self.sizes.append(len(prompts))
        numbers = [round(float(image.mean()) * 1000) for image in images]
        if self.bad & set(numbers):
            raise ValueError("cannot decode")
        return [float(n) for n in numbers]


@pytest.mark.parametrize(
    "bad", [(0,), (63,), (37,), (5, 41), (0, 1), tuple(range(0, 64, 9)), range(24), range(0, 64, 4)]
)
def test_bad_samples_are_masked_alone_and_every_other_keeps_its_own_score(bad):
    score = Picky(*bad)
    found = scored(entry(score), count=64, retries=1).raw["mine"]
    assert found.isnan().nonzero().flatten().tolist() == sorted(bad)
    assert found[~found.isnan()].tolist() == [float(n) for n in range(64) if n not in bad]
    assert len(score.sizes) <= 2 + 2 * 64
    if len(bad) == 1:
        assert len(score.sizes) == 2 + 2 * 6, "two tries, then two halves a level"


def test_where_nothing_succeeds_the_search_ends_early():
    score = Picky(*range(64))
    with pytest.raises(RewardError, match=r"64 of 64 samples.*cannot decode"):
        scored(entry(score), count=64, retries=2)
    assert len(score.sizes) == 3 + 2 * 6


def test_the_tries_and_the_search_are_the_entrys_to_set():
    score = Picky(3)
    found = scored(entry(score, retries=4, isolate=False, max_failed_share=1.0), retries=0)
    assert found.raw["mine"].isnan().all()
    assert score.sizes == [4] * 5


def test_a_group_wise_reward_is_never_given_a_part_of_its_batch():
    score = Picky(3)
    with pytest.raises(RewardError):
        scored(entry(score, card={"needs_groups": True}), retries=0)
    assert score.sizes == [4]


def test_the_masked_sample_is_told_with_its_prompt():
    told: list[str] = []
    scored(entry(Picky(2)), retries=0, on_error=told.append)
    (found,) = [text for text in told if "a part of 1 " in text]
    assert found.startswith("reward 'mine' raised ValueError: cannot decode (test_scoring.py:")
    assert found.endswith("), a part of 1 of its batch for the prompt 'p2'")


def test_an_entry_may_allow_more_or_less_to_fail_than_the_rest():
    half = fixed(NAN, NAN, NAN, 1.0)
    assert scored(entry(half, max_failed_share=0.75)).failures == 3
    with pytest.raises(RewardError, match=r"3 of 4 samples have no value of reward 'mine'.*max_failed_share=0.5"):
        scored(entry(half, max_failed_share=0.5))
    with pytest.raises(RewardError, match=r"1 of 4 samples.*max_failed_share=0.0"):
        scored(entry(fixed(NAN, 0.0, 0.0, 0.0), max_failed_share=0.0))
    with pytest.raises(RewardError, match="more than the allowed share"):
        scored(entry(half, "other"), entry(fixed(1.0, 1.0, 1.0, 1.0), max_failed_share=0.0))
    assert scored(entry(half, max_failed_share=0.0, weight=0), entry(fixed(*[1.0] * 4), "b")).failures == 3


def test_entries_of_one_reward_cannot_be_tried_differently():
    reward = Reward(fixed(0.0), Card(outputs=("mine",)))
    with pytest.raises(ValueError, match="cannot differ in retries"):
        Scorer([WeightedReward("a", reward, retries=1), WeightedReward("a", reward, retries=2)])


def test_calls_failures_and_masked_samples_are_counted_and_taken_once():
    scorer = Scorer([entry(Picky(2)), entry(fixed(0.0, NAN, 0.0, 0.0), "b")], retries=1)
    images = torch.arange(4).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2) / 1000
    scorer.score(images, [""] * 4, [{}] * 4)
    expected = {"mine_calls": 2 + 4, "mine_failures": 2 + 2, "mine_masked": 1}
    assert scorer.take_counts() == expected | {"b_calls": 1, "b_failures": 0, "b_masked": 1}
    assert set(scorer.take_counts().values()) == {0}


# ---- the cache

IMAGE = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))


def test_the_key_tells_apart_whatever_can_change_a_score():
    cache = ScoreCache(Memory(), "a")
    base = cache.key(IMAGE, "p", {"text": "x"})
    changed = IMAGE.clone()
    changed[0, 0, 0] += 1e-7
    others = [
        cache.key(changed, "p", {"text": "x"}),
        cache.key(IMAGE.reshape(3, 5, 4), "p", {"text": "x"}),
        cache.key(IMAGE.double(), "p", {"text": "x"}),
        cache.key(IMAGE, "q", {"text": "x"}),
        cache.key(IMAGE, "p", {"text": "y"}),
        cache.key(IMAGE, "p", {}),
        ScoreCache(Memory(), "b").key(IMAGE, "p", {"text": "x"}),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert base == ScoreCache(Memory(), "a").key(IMAGE.clone(), "p", {"text": "x"})
    strided = IMAGE.transpose(1, 2).contiguous().transpose(1, 2)
    assert base == cache.key(strided, "p", {"text": "x"}), "the same values, however they lie in memory"
    assert cache.key(IMAGE, "p", {"object": object()}) is None


def test_the_source_picture_of_an_edit_is_part_of_the_key(tmp_path):
    file = tmp_path / "source.png"
    cache, record = ScoreCache(Memory(), "a", images=True), {"images": [str(file)]}
    keys = []
    for content in (b"one", b"two"):
        file.write_bytes(content)
        keys.append(cache.key(IMAGE, "p", record))
    assert keys[0] != keys[1]
    file.unlink()
    assert cache.key(IMAGE, "p", record) is None, "the reward is to say that it cannot be read"


def test_the_first_frame_of_a_video_is_part_of_its_key_too():
    for name, read in (("shapes_motion", True), ("shapes", False)):
        cache = reward_plan({"name": name, "cache": "memory"}, "rewards.0").build().cache
        assert cache is not None
        assert cache.images == read


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_known_samples_are_not_scored_again_and_nan_is(where, tmp_path):
    store = Memory() if where == "memory" else Folder(tmp_path)
    seen: list[list[str]] = []

    def score(images, prompts, metadata):
        seen.append(list(prompts))
        return {"a": [0.1 * int(p) for p in prompts], "b": [NAN if p == "2" else 1 / 3 for p in prompts]}

    one = entry(score, card={"outputs": ("a", "b")}, cache=ScoreCache(store, "x"))
    scorer = Scorer([one], batch_size=3)
    images = torch.rand(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def run(prompts: str):
        return scorer.score(images, list(prompts), [{}] * 5)

    first = run("01234")
    assert seen == [["0", "1", "2"], ["3", "4"]]
    again = run("01234")
    assert seen[2:] == [["2"]], "what failed is tried again"
    for name in ("a", "b"):
        assert torch.equal(again.raw[name].nan_to_num(-9), first.raw[name].nan_to_num(-9))
    other = run("01934")
    assert seen[3:] == [["9"]]
    assert other.raw["a"][2] == torch.tensor(0.1 * 9)
    assert scorer.take_counts()["a_cached"] == 4 + 4


def test_pictures_of_different_sizes_and_a_wanted_gradient():
    calls: list[int] = []

    def means(images, prompts, metadata):
        calls.append(len(prompts))
        return torch.stack([image.mean() for image in images])

    scorer = Scorer([entry(means, cache=ScoreCache(Memory(), "x"))], batch_size=3)
    images = [torch.full((3, 4 + i, 5), i / 10) for i in range(4)]
    for _ in range(2):
        assert scorer.score(images, ["p"] * 4, [{}] * 4).raw["mine"].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert calls == [3, 1]
    scorer.score([image.requires_grad_() for image in images], ["p"] * 4, [{}] * 4)
    assert calls == [3, 1] * 2, "a score that is to be differentiated is never looked up"


def test_the_memory_forgets_what_was_not_used_for_longest():
    memory = Memory(entries=2)
    memory.put("a", {"x": 1.0})
    memory.put("b", {"x": 2.0})
    assert memory.get("a") == {"x": 1.0}
    memory.put("c", {"x": 3.0})
    assert [memory.get(key) for key in "abc"] == [{"x": 1.0}, None, {"x": 3.0}]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"mine": null}', '{"mine": NaN}', '{"other": 1.0}'])
def test_a_file_that_holds_no_scores_is_scored_again(text, tmp_path):
    cache = ScoreCache(Folder(tmp_path), "x")
    key = cache.key(IMAGE, "p", {})
    cache.put(key, {"mine": 0.1})
    file = next(tmp_path.rglob("*.json"))
    assert json.loads(file.read_text()) == {"mine": 0.1}
    file.write_text(text)
    assert cache.get(key, ("mine",)) is None


def test_many_writers_of_one_folder_leave_whole_files_only(tmp_path):
    keys = [ScoreCache(Folder(tmp_path), "x").key(IMAGE, str(i), {}) for i in range(20)]

    def work() -> None:
        cache = ScoreCache(Folder(tmp_path), "x")
        for number, key in enumerate(keys):
            cache.put(key, {"mine": number / 3})
            assert cache.get(key, ("mine",)) == {"mine": number / 3}

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == [".json"] * 20


# ---- from the configuration


def plan(tmp_path, text: str = "return [0.0] * len(prompts)", **options):
    file = tmp_path / "mine.py"
    file.write_text(f"def score(images, prompts, metadata):\n    {text}\n")
    return reward_plan({"path": str(file), **options}, "rewards.0")


def test_an_entry_hands_its_options_to_the_reward(tmp_path):
    gate = {"output": "mine", "at_least": 0.5, "floor": -1.0}
    built = plan(tmp_path, gate=gate, cache="memory", retries=5, isolate=False, max_failed_share=0.1).build()
    assert built.gate == Gate(**gate)
    assert (built.retries, built.isolate, built.max_failed_share) == (5, False, 0.1)
    assert built.cache is not None
    assert isinstance(built.cache.store, Memory)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retries": -1}, "retries=-1"),
        ({"max_failed_share": 1.5}, "max_failed_share=1.5"),
        ({"cache": ""}, "no folder"),
        ({"gate": {"output": "mine"}}, "either at_least or at_most"),
        ({"gate": {"output": "mine", "at_lest": 1.0}}, "did you mean 'at_least'"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, **options)


def test_a_function_without_a_card_may_name_its_one_output_and_several_need_a_card(tmp_path):
    assert of(plan(tmp_path, "return {'scores': [0.5] * len(prompts)}")).raw["mine"].tolist() == [0.5] * 4
    two = plan(tmp_path, "return {'a': [0.5] * len(prompts), 'b': [0.0] * len(prompts)}")
    with pytest.raises(RewardError, match=r"in its card, outputs=\('a', 'b'\)"):
        of(two)


@pytest.mark.parametrize("arguments", ["images, prompts", "", "images, prompts, metadata, more"])
def test_a_function_that_takes_other_arguments_is_named_by_its_own_line(tmp_path, arguments):
    file = tmp_path / "mine.py"
    file.write_text(f"# mine\n\n\ndef score({arguments}):\n    return 0\n")
    with pytest.raises(
        RewardError, match=rf"score\({arguments}\) \(mine\.py:4\) must take \(images, prompts, metadata\)"
    ):
        reward_plan({"path": str(file)}, "rewards.0").build()


def test_training_values_beyond_float32_are_none_and_the_scale_is_named(tmp_path):
    scorer = Scorer([plan(tmp_path, "return [1e10] * len(prompts)", scale=1e30).build()])
    with pytest.raises(RewardError, match=r"4 of 4 .*training values of 'mine' are beyond float32; lower its scale"):
        scorer.score(GREY, [""] * 4, [{}] * 4)


def test_the_fingerprint_follows_a_users_source_and_a_rewards_options(tmp_path):
    def of(made) -> str:
        return made.fingerprint(made.build().reward.card)

    first = of(plan(tmp_path))
    assert of(plan(tmp_path, weight=2.0)) == first, "the entry's own options change no score"
    assert of(plan(tmp_path, "return [1.0] * len(prompts)")) != first
    jpegs = [of(reward_plan({"name": "jpeg", **own}, "rewards.0")) for own in ({}, {"quality": 95}, {"quality": 90})]
    assert jpegs[0] == jpegs[1] != jpegs[2]


def test_a_group_wise_reward_takes_no_cache():
    with pytest.raises(ConfigError, match=r"'diversity'.*depends on the other samples"):
        reward_plan({"name": "diversity", "cache": "memory"}, "rewards.0").build()


def test_entries_of_one_reward_share_their_cache(tmp_path):
    from flowrl.scoring.build import build_rewards

    options = {"name": "shapes", "cache": str(tmp_path)}
    plans = [
        reward_plan(options | {"outputs": {name: 1.0}}, "rewards.0") for name in ("shapes_strict", "shapes_partial")
    ]
    first, second = build_rewards(plans)
    assert first.cache is second.cache
    Scorer([first, second])


# ---- prefixes

SHIFTED = (
    "from dataclasses import dataclass\nfrom flowrl.reward import Card, Reward\n\n"
    "CARD = Card(outputs=('a', 'b'), low=0.0, modality='any')\ncalls = []\n\n"
    "@dataclass(frozen=True, kw_only=True)\nclass Config:\n    shift: float = 0.0\n\n"
    "def build(config):\n    def score(images, prompts, metadata):\n        calls.append(len(prompts))\n"
    "        light = [float(i.mean()) + config.shift for i in images]\n"
    "        return {'a': light, 'b': [10 * v for v in light]}\n    return Reward(score, CARD)\n"
)


def shifted(tmp_path, **options):
    file = tmp_path / "shifted.py"
    file.write_text(SHIFTED)
    return reward_plan({"path": str(file), **options}, "rewards.0")


GREY = torch.arange(4).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2) / 10


def of(*plans):
    return Scorer([plan.build() for plan in plans]).score(GREY, [""] * 4, [{}] * 4)


def test_a_prefix_names_every_output_everywhere_and_changes_no_number(tmp_path):
    plain = of(shifted(tmp_path, shift=0.5))
    found = of(
        shifted(tmp_path, gate={"output": "x_a", "at_least": 0.65, "floor": -1.0}),
        shifted(tmp_path, shift=0.5, prefix="x", outputs={"x_b": 2.0}, clip=[0.0, 7.5]),
    )
    assert list(found.raw) == ["a", "b", "x_a", "x_b"]
    assert all(torch.equal(found.raw[f"x_{name}"], plain.raw[name]) for name in ("a", "b"))
    assert found.values[0].tolist() == pytest.approx([-1.0, -1.0, 0.2, 0.3])
    assert found.values[1].tolist() == pytest.approx([10.0, 12.0, 14.0, 15.0])
    built = shifted(tmp_path, prefix="x").build()
    assert (built.name, built.reward.card.outputs, built.reward.card.low) == ("x_shifted", ("x_a", "x_b"), 0.0)
    with pytest.raises(ValueError, match=r"'x_shifted' has no output 'a'; it has \['x_a', 'x_b'\]"):
        of(shifted(tmp_path, prefix="x", outputs={"a": 1.0}))


def test_a_bare_score_function_takes_a_prefix_too(tmp_path):
    made = plan(tmp_path, prefix="x")
    assert made.outputs == ("x_mine",)
    assert of(made).raw["x_mine"].tolist() == [0.0] * 4


def test_the_counts_and_failures_of_a_reward_go_by_its_prefixed_name(tmp_path):
    scorer = Scorer([plan(tmp_path, "raise ValueError('no')", prefix="x", weight=0).build()], max_failed_share=1.0)
    assert scorer.score(GREY, [""] * 4, [{}] * 4).raw["x_mine"].isnan().all()
    assert scorer.take_counts()["x_mine_masked"] == 4


def test_a_cache_knows_scores_by_their_own_names_whatever_the_prefix(tmp_path):
    cache = {"cache": str(tmp_path / "kept")}
    first = of(shifted(tmp_path, **cache))
    made = shifted(tmp_path, prefix="x", **cache)
    again = of(made)
    assert made.module.calls == [], "everything was known"
    assert all(torch.equal(again.raw[f"x_{name}"], first.raw[name]) for name in ("a", "b"))
    other = shifted(tmp_path, prefix="x", shift=1.0, **cache)
    of(other)
    assert other.module.calls == [4], "other options are another scorer"
    assert set(json.loads(next((tmp_path / "kept").rglob("*.json")).read_text())) == {"a", "b"}


def test_outputs_that_differ_from_what_was_declared_are_refused_when_built(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SHIFTED.replace("return Reward(score, CARD)", "return Reward(score, Card(outputs=('a', 'c')))"))
    with pytest.raises(RewardError, match=r"has the outputs \['a', 'c'\], but declared \['a', 'b'\].*card_of"):
        reward_plan({"path": str(file)}, "rewards.0").build()
