"""Fixed-seed evaluation and its statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config.schema import EvalConfig
from flowrl.core.errors import Abandoned, ConfigError
from flowrl.data.prompts import Prompt, distinct_numbers, identity
from flowrl.evaluation.evaluator import Evaluator, Setting
from flowrl.evaluation.results import Agreement, Evaluation
from flowrl.evaluation.statistics import accuracy, difference, format_interval, summary, win_rate
from flowrl.media import digests
from flowrl.reward import Card, Reward
from flowrl.run.report import format_win_rate
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from flowrl.statistics.intervals import interval
from flowrl.training.signals import Stop
from tests import toys
from tests.toys import ALONE, OneOf, ToyAdapter, nudge, sampling_of

NAN = float("nan")
CPU = torch.device("cpu")


# ---- evaluations


def record(tag: str, **scores) -> Evaluation:
    tables = {name: np.asarray(table, dtype=np.float64) for name, table in scores.items()}
    count = len(next(iter(tables.values())))
    seeds = next(iter(tables.values())).shape[1]
    return toys.evaluation(tag, 0, 1.0, 10, tuple(f"prompt {k}" for k in range(count)), seeds, tables)


def test_a_summary_averages_seeds_first_and_prompts_then():
    """A prompt with one scored seed counts as much as one with two."""
    found = summary(record("base", a=[[0.0, 1.0], [NAN, 2.0], [NAN, NAN]]))["a"]
    assert found["mean"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["n"] == 2


def test_pairing_removes_what_both_evaluations_share():
    rng = np.random.default_rng(0)
    prompts, gain = 10 * rng.normal(size=(200, 1)), 0.1
    base, tuned = prompts + 0.1 * rng.normal(size=(200, 2)), prompts + gain + 0.1 * rng.normal(size=(200, 2))
    found = difference(record("base", a=base), record("tuned", a=tuned))["a"]
    # Each prompt's mean difference scatters by 0.1: the mean of 200 by 0.007, though the scores do by 10.
    assert found["mean"] == pytest.approx(gain, abs=4 * 0.1 / np.sqrt(200))
    assert found["high"] - found["low"] < 0.04
    assert found["low"] > 0


def test_a_seed_that_failed_on_either_side_leaves_the_pair_out():
    base = record("base", a=[[0.0, 100.0], [1.0, 1.0], [NAN, NAN]])
    tuned = record("tuned", a=[[1.0, NAN], [3.0, 3.0], [5.0, 5.0]])
    found = difference(base, tuned)["a"]
    assert found["mean"] == pytest.approx((1.0 + 2.0) / 2)
    assert found["n"] == 2


def test_only_metrics_of_both_sides_are_compared():
    base, tuned = record("base", a=[[0.0]], b=[[0.0]]), record("tuned", b=[[1.0]], c=[[1.0]])
    assert list(difference(base, tuned)) == ["b"]


@pytest.mark.parametrize("compare", [difference, lambda one, other: win_rate(one, other, "a")])
@pytest.mark.parametrize(("shape", "words"), [((2, 2), "same prompts"), ((3, 1), "same seeds")])
def test_evaluations_of_other_prompts_or_seeds_cannot_be_paired(compare, shape, words):
    with pytest.raises(ValueError, match=words):
        compare(record("base", a=np.zeros((3, 2))), record("tuned", a=np.zeros(shape)))


def duplicated(evaluation: Evaluation, copies: int) -> Evaluation:
    """Every prompt so many times, in a list that is gone through anew."""
    scores = {name: np.concatenate([table] * copies) for name, table in evaluation.scores.items()}
    marks = np.concatenate([evaluation.digests] * copies)
    known = {"prompts": evaluation.prompts * copies, "distinct": evaluation.distinct * copies, "digests": marks}
    return replace(evaluation, scores=scores, **known)


def test_a_prompt_that_stands_in_the_list_several_times_counts_once():
    rng = np.random.default_rng(0)
    base = record("base", a=(rng.random((50, 2)) < 0.4).astype(float))
    tuned = record("tuned", a=(rng.random((50, 2)) < 0.6).astype(float))
    for of in (lambda one, other: summary(other)["a"], lambda one, other: difference(one, other)["a"]):
        once, often = of(base, tuned), of(duplicated(base, 4), duplicated(tuned, 4))
        assert (often["n"], often["low"], often["high"]) == (50, once["low"], once["high"])
        assert often["mean"] == pytest.approx(once["mean"])
    once, often = win_rate(base, tuned, "a"), win_rate(duplicated(base, 4), duplicated(tuned, 4), "a")
    assert [often[k] for k in ("rate", "low", "high")] == [once[k] for k in ("rate", "low", "high")]
    assert often["n"] == 4 * once["n"]  # images


def test_without_duplicates_the_prompts_are_resampled_as_they_stand_and_failed_ones_count_in_none():
    table = np.random.default_rng(0).normal(size=(40, 2))
    table[3] = NAN
    assert summary(record("base", a=table))["a"] == interval((table[:, 0] + table[:, 1]) / 2)
    found = record("base", a=[[0.0], [NAN], [1.0], [NAN]])
    assert summary(replace(found, distinct=(0, 1, 0, 1)))["a"]["n"] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"digests": [["0"], ["1"]]}, "is damaged .*cannot reshape"),
        ({"distinct": [0]}, "is damaged .*distinct has 1 numbers for 3 prompts"),
        ({"made_with": ...}, "has no 'made_with': it is damaged, or of another version of flowrl; restore it"),
    ],
)
def test_a_file_that_lacks_something_or_of_another_version_is_refused(tmp_path, values, message):
    record("base", a=[[0.5], [NAN], [1.0]]).save(tmp_path)
    known = json.loads((tmp_path / "base.json").read_text()) | values
    (tmp_path / "base.json").write_text(json.dumps({key: value for key, value in known.items() if value is not ...}))
    with pytest.raises(ConfigError, match=message):
        Evaluation.load(tmp_path / "base.json")


def test_an_evaluation_is_read_back_as_it_was_written(tmp_path):
    before = record("tuned", a=[[1 / 3, NAN], [-2.0, 1e3]], b=[[0.0, 1.0], [1.0, 0.0]])
    before = replace(before, distinct=(0, 0))
    before.save(tmp_path)
    text = (tmp_path / "tuned.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    found = Evaluation.load(tmp_path / "tuned.json")
    for name in ("a", "b"):
        np.testing.assert_array_equal(found.scores[name], before.scores[name])
    assert (found.tag, found.prompts, found.num_inference_steps) == ("tuned", before.prompts, 10)
    assert found.groups.tolist() == [0, 0]
    assert json.loads(text)["seeds"] == [0, 1]


# ---- the evaluator on the toy


def score(images, prompts, metadata) -> dict[str, torch.Tensor]:
    bonus = torch.tensor([float(m.get("bonus", 0.0)) for m in metadata])
    return {"light": images.mean((1, 2, 3)) + bonus, "corner": images[:, 0, 0, 0]}


def evaluator(folder: Path, adapter: ToyAdapter, *, world=None, sharded: bool = False, **options) -> Evaluator:
    prompts = tuple(Prompt(f"prompt {k}", {"bonus": k}) for k in range(5))
    reward = Reward(score=score, card=Card(outputs=("light", "corner")))
    options = {"samples_per_prompt": 2, "save_images": None, "batch_size": 6} | options
    return Evaluator(
        sampling=sampling_of(adapter, prompts, world=world or ALONE, sharded=sharded),
        scorer=Scorer([WeightedReward("toy", reward)]),
        folder=folder,
        prompts=prompts,
        options=EvalConfig(**options),
        seed=3,
    )


def call(which: Evaluator, tag: str = "base", **options) -> Evaluation:
    setting = {"guidance_scale": 1.0, "num_inference_steps": 4}
    setting |= {name: options.pop(name) for name in ("guidance_scale", "limit", "save") if name in options}
    return which(Setting(tag, 0, **setting), **options)


def test_an_evaluation_repeats_bitwise_and_moves_with_the_weights(tmp_path):
    adapter = ToyAdapter()
    first, second = (call(evaluator(tmp_path, adapter)) for _ in range(2))
    for name in ("light", "corner"):
        assert first.scores[name].shape == (5, 2)
        np.testing.assert_array_equal(first.scores[name], second.scores[name])
    np.testing.assert_equal(difference(first, second)["light"], {"mean": 0.0, "low": np.nan, "high": np.nan, "n": 5})
    assert np.all(digests.same(first.digests, second.digests))
    nudge(adapter.network)
    other = call(evaluator(tmp_path, adapter))
    assert np.abs(other.scores["light"] - first.scores["light"]).min() > 0
    assert not np.any(digests.same(first.digests, other.digests))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("limit", [None, 2])
def test_the_scores_of_a_prompt_depend_neither_on_the_batch_size_nor_on_later_prompts(tmp_path, batch_size, limit):
    whole, counts = call(evaluator(tmp_path, ToyAdapter())), []
    which = evaluator(tmp_path, ToyAdapter(), batch_size=batch_size)
    split = call(which, limit=limit, progress=counts.append)
    assert split.prompts == whole.prompts[:limit]
    assert sum(counts) == 2 * len(split.prompts)
    for name in ("light", "corner"):
        np.testing.assert_allclose(split.scores[name], whole.scores[name][:limit], rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_processes_share_out_the_prompts_and_find_the_same_scores(tmp_path, size):
    whole = call(evaluator(tmp_path, ToyAdapter())).scores["light"]
    found = [call(evaluator(tmp_path, ToyAdapter(), world=OneOf(r, size, CPU))) for r in range(size)]
    parts = np.stack([each.scores["light"] for each in found])
    assert ((~np.isnan(parts)).sum(axis=0) == 1).all()
    np.testing.assert_allclose(np.nansum(parts, axis=0), whole, rtol=0, atol=2e-6)
    for each, part in zip(found, parts, strict=True):
        np.testing.assert_array_equal(each.digests != "", ~np.isnan(part))


def test_scores_belong_to_their_prompts_and_their_metadata(tmp_path):
    found = call(evaluator(tmp_path, ToyAdapter()))
    assert found.prompts == tuple(f"prompt {k}" for k in range(5))
    # The image's light is in [0, 1]: the whole part is the prompt's bonus.
    assert np.floor(found.scores["light"]).tolist() == [[float(k)] * 2 for k in range(5)]


def test_prompts_are_the_same_by_text_and_images_alone(tmp_path):
    which = evaluator(tmp_path, ToyAdapter())
    records = (("a", ()), ("b", ()), ("a", ()), ("a", ("x.png",)))
    prompts = tuple(Prompt(text, {"bonus": k}, images) for k, (text, images) in enumerate(records))
    assert call(replace(which, prompts=prompts[:3]), limit=3).distinct == (0, 1, 0)
    assert distinct_numbers([identity(prompt) for prompt in prompts]) == [0, 1, 0, 2]


def test_seeds_of_a_prompt_differ_and_do_not_depend_on_how_many_there_are(tmp_path):
    two = call(evaluator(tmp_path, ToyAdapter())).scores["light"]
    three = call(evaluator(tmp_path, ToyAdapter(), samples_per_prompt=3)).scores["light"]
    assert (two[:, 0] != two[:, 1]).all()
    np.testing.assert_allclose(three[:, :2], two, rtol=0, atol=2e-6)


def test_guidance_reaches_the_model(tmp_path):
    plain, guided = (call(evaluator(tmp_path, ToyAdapter()), guidance_scale=s) for s in (1.0, 4.0))
    assert np.abs(plain.scores["light"] - guided.scores["light"]).min() > 0
    assert guided.guidance_scale == 4.0


def test_the_images_of_the_first_prompts_are_kept_by_prompt_and_seed(tmp_path):
    call(evaluator(tmp_path, ToyAdapter(), save_images=2), tag="tuned")
    names = {p.name for p in (tmp_path / "eval" / "tuned").iterdir()}
    assert names == {f"{prompt:05d}-{seed}.png" for prompt in (0, 1) for seed in (0, 1)}
    assert Evaluation.load(tmp_path / "eval" / "tuned.json").tag == "tuned"


def test_a_trial_leaves_nothing_behind_and_only_the_first_process_writes_the_scores(tmp_path):
    call(evaluator(tmp_path, ToyAdapter()), save=False)
    assert not (tmp_path / "eval").exists()
    call(evaluator(tmp_path, ToyAdapter(), world=OneOf(1, 2, CPU)))
    assert not (tmp_path / "eval" / "base.json").exists()


class Counted(ToyAdapter):
    """Notes how many images are decoded at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def decode(self, latents):
        self.sizes.append(len(latents))
        return super().decode(latents)


def test_no_more_images_are_decoded_at_once_than_a_batch_has(tmp_path):
    """Though the samples of a prompt, which are scored together, are more."""
    adapter = Counted()
    few = call(evaluator(tmp_path, adapter, samples_per_prompt=5, batch_size=2))
    assert set(adapter.sizes) == {1, 2}
    many = call(evaluator(tmp_path, ToyAdapter(), samples_per_prompt=5, batch_size=64))
    for name in ("light", "corner"):
        np.testing.assert_allclose(few.scores[name], many.scores[name], rtol=0, atol=2e-6)


def test_an_evaluation_that_is_stopped_gives_up_without_scores(tmp_path):
    done: list[int] = []
    stop = Stop(in_step=lambda: len(done) == 2)
    with pytest.raises(Abandoned):
        call(evaluator(tmp_path, ToyAdapter(), batch_size=2), progress=done.append, stop=stop)
    assert done == [2, 2]
    assert not (tmp_path / "eval" / "base.json").exists()


# ---- the win rate


def test_wins_and_losses_are_of_the_same_prompt_and_seed_and_ties_are_apart():
    base = record("base", a=[[0.1, 0.5], [0.3, 0.3], [0.2, NAN]])
    tuned = record("tuned", a=[[0.2, 0.5], [0.1, 0.4], [0.9, 0.9]])
    found = win_rate(base, tuned, "a")
    assert (found["wins"], found["losses"], found["ties"], found["n"]) == (3, 1, 1, 4)
    assert found["rate"] == 0.75
    assert found["tie_rate"] == pytest.approx(1 / 5)
    assert found["low"] <= 0.75 <= found["high"]
    turned = win_rate(base, tuned, "a", higher_is_better=False)
    assert (turned["wins"], turned["losses"], turned["rate"]) == (1, 3, 0.25)


def test_scores_that_went_through_a_file_are_still_ties(tmp_path):
    before, after = record("base", a=[[1 / 3], [2 / 3]]), record("tuned", a=[[1 / 3], [2 / 3]])
    before.save(tmp_path)
    assert win_rate(Evaluation.load(tmp_path / "base.json"), after, "a")["ties"] == 2
    assert win_rate(record("base", a=[[0.333333], [0.666667]]), after, "a")["ties"] == 2


def test_the_interval_of_a_win_rate_resamples_prompts_and_not_pictures():
    """Ten seeds that always agree are one observation: the interval is that of the prompts."""
    outcome = np.where(np.arange(100) < 70, 1.0, -1.0)
    one, ten = outcome[:, None], np.repeat(outcome[:, None], 10, axis=1)
    single, many = (win_rate(record("base", a=0 * table), record("tuned", a=table), "a") for table in (one, ten))
    assert single["n"] == 100
    assert many["n"] == 1000
    assert (many["low"], many["high"]) == (single["low"], single["high"])
    # Binomial: 0.7 +- 1.96 sqrt(0.7 * 0.3 / 100) = 0.61 to 0.79.
    assert (single["low"], single["high"]) == pytest.approx((0.61, 0.79), abs=0.015)


def test_one_prompt_has_no_interval_and_the_lines_say_so():
    base, tuned = record("base", a=[[0.25, 0.5]]), record("tuned", a=[[0.5, 0.25]])
    assert format_interval(summary(base)["a"], ".2f") == "no interval"
    assert "no interval" in format_win_rate("a", win_rate(base, tuned, "a"))
    assert format_interval({"low": 0.1, "high": 0.25}, ".2f") == "95 % interval 0.10 to 0.25"


def test_the_margin_is_of_all_samples_of_the_base_whichever_prompts_count():
    """Of 0, 0, 4, 4 the std is 2; of the two prompts that count it is 0."""
    base, tuned = record("base", a=[[0.0], [0.0], [4.0], [4.0]]), record("tuned", a=[[0.9], [1.1], [4.0], [4.0]])
    found = win_rate(base, tuned, "a", tie=0.5, rows=np.asarray([True, True, False, False]))
    assert (found["margin"], found["tie"], found["same"]) == (1.0, 0.5, 0)
    assert (found["wins"], found["ties"]) == (1, 1)


def test_nothing_but_ties_has_no_rate():
    found = win_rate(record("base", a=[[1.0]]), record("tuned", a=[[1.0]]), "a")
    assert (found["n"], found["ties"], found["tie_rate"]) == (0, 1, 1.0)
    assert np.isnan(found["rate"])
    assert "all 1 images are tied" in format_win_rate("a", found)
    said = format_win_rate("a", found, noun="video")
    assert (said.count("image"), said.count("video")) == (0, 2)
    unscored = win_rate(record("base", a=[[1.0]]), record("tuned", a=[[NAN]]), "a")
    assert "no image has a score in both" in format_win_rate("a", unscored)


def test_an_evaluation_without_rewards_keeps_its_seeds_and_what_is_preferred(tmp_path):
    agreement = Agreement(np.asarray([1.0, 0.5, NAN]), np.asarray([0, 1, 0]))
    toys.evaluation("tuned", 3, 1.0, 10, ("a", "b"), 2, {}, agreement=agreement).save(tmp_path)
    back = Evaluation.load(tmp_path / "tuned.json")
    assert (back.seeds, back.scores, back.prompts) == (2, {}, ("a", "b"))
    assert back.agreement is not None
    np.testing.assert_array_equal(back.agreement.right, agreement.right)
    assert back.agreement.captions.tolist() == [0, 1, 0]


def test_the_interval_of_agreement_resamples_captions_and_not_pairs():
    """Ten pairs of one caption that always agree are one observation, and an unreadable one is none."""
    right = np.where(np.arange(100) < 70, 1.0, 0.0)
    single = accuracy(Agreement(right, np.arange(100)))
    assert single == interval(right)
    values, captions = np.append(np.repeat(right, 10), NAN), np.append(np.repeat(np.arange(100), 10), 100)
    many = accuracy(Agreement(values, captions))
    assert (many["mean"], many["n"]) == (pytest.approx(0.7), 1000)
    assert (many["low"], many["high"]) == pytest.approx((single["low"], single["high"]))
    assert accuracy(Agreement(np.repeat(right, 10), np.arange(1000)))["low"] > many["low"] + 0.04
