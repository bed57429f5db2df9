"""What judges are asked and how their answers become scores: rubrics, pairs, UnifiedReward's and EditScore's forms."""

import dataclasses
import hashlib
import itertools
import math

import pytest
import torch
from flowrl.rewards._judges import backends, rubrics
from flowrl.rewards.unified_reward import grades
from flowrl.rewards.vlm_judge import win_rates
from PIL import Image
from torch.testing import assert_close

from flowrl.core import registry
from flowrl.reward import RewardError
from flowrl.rewards import edit_score, unified_reward, vlm_judge, vqa_score
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.tables import table
from tests.tiny_rewards import scored
from tests.tiny_rewards.edit_score import save_source
from tests.tiny_rewards.judges import Scripted, brightness, grey

# ---- every reward


@pytest.mark.parametrize("name", ["vlm_judge", "vqa_score", "unified_reward", "edit_score"])
def test_the_card_is_known_without_weights_and_kept_by_the_default_build(name, monkeypatch):
    monkeypatch.setattr(backends.Backend, "load", lambda self, reward, default: Scripted())
    module = registry.load("rewards", name)
    built = module.build(module.Config()).card
    assert dataclasses.replace(built, version="1", memory_gib=module.CARD.memory_gib) == module.CARD


def test_the_version_of_a_card_tells_judges_and_rubrics_apart(scripted, tmp_path):
    rubric = tmp_path / "mine.yaml"
    seen = set()
    for text in ("Is it a {prompt}?", "Is it no {prompt}?"):
        rubric.write_text(f"scale: yes_no\nquestion: '{text}'\n")
        for options in ({}, {"local": {"model": "other"}}, {"backend": "http", "http": {"model": "a"}}):
            plan = reward_plan({"name": "vlm_judge", "rubric": str(rubric), **options}, "rewards[0]")
            seen.add(plan.build().reward.card.version)
    assert len(seen) == 6


PAPER, LATER = (f'Does this figure show "{{}}"? Please answer {words}.' for words in ("yes or no", "Yes or No"))
IMAGE = 'Does this image show "{}"? Answer the question with Yes or No'


@pytest.mark.parametrize(
    ("family", "question"),
    [
        ("llava", PAPER),
        ("llava_next", PAPER),
        ("llava-hf/llava-1.5-7b-hf", PAPER),
        ("llava_onevision", IMAGE),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", IMAGE),
        ("mllama", IMAGE),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", IMAGE),
        ("qwen3_vl", LATER),
        ("Qwen/Qwen3-VL-8B-Instruct", LATER),
        ("internvl", LATER),
        ("gpt-4o", LATER),
        ("", LATER),
    ],
)
def test_vqa_score_asks_each_family_in_its_published_words_and_in_the_users_where_given(scripted, family, question):
    """linzhiqiu/t2v_metrics:t2v_metrics/models/vqascore_models."""
    scripted.probabilities, scripted.family, seen = lambda q: 0.5, family, set()
    for config, expected in ((vqa_score.Config(), question), (vqa_score.Config(question="A {}?"), "A {}?")):
        reward = vqa_score.build(config)
        reward.score(grey(51), ["{a cat}"], [{}])
        assert scripted.asked.pop().text == expected.replace("{}", "{a cat}")
        seen.add(reward.card.version)
    assert len(seen) == 2, "a cache must tell the questions apart"


# ---- rubrics


@pytest.mark.parametrize("name", rubrics.built_in())
def test_every_built_in_rubric_loads_and_shows_the_prompt(name):
    rubric = rubrics.load(name, "x")
    record = {field: "{prompt} and more" for field in rubric.fields}
    text = rubric.ask('a {strange} "prompt"', record)
    assert 'a {strange} "prompt"' in text
    assert text.count("{prompt}") == len(record), "a record's text stays as it is"
    last = list(rubric.axes)[-1] if rubric.axes else ""
    ends = {
        "yes_no": "Yes or No.",
        "expectation": "(perfectly).",
        "pairwise": "A or B.",
        "score": f"{last}.",
        "written": "sentence.",
    }
    assert text.endswith(ends[rubric.scale])


def test_a_rubric_shows_fields_of_the_record_and_takes_whole_numbers_alone(scripted):
    form = '{"consistency": %s, "realism": 1, "aesthetic_quality": 0}'
    answers = iter([form % 1.5, form % 2])
    scripted.words = lambda question: next(answers)
    reward = vlm_judge.build(vlm_judge.Config(rubric="wise_legacy"))
    assert reward.card.requires == ("explanation",)
    values = reward.score(grey(51), ["the flower of mothers"], [{"explanation": "a carnation"}])
    assert scripted.counters.values()["reasks"] == 1
    assert 'What the prompt means: "a carnation"' in scripted.asked[0].text
    assert isinstance(values, dict)
    assert float(values["vlm_judge"]) == pytest.approx(0.7 * 2 + 0.2 * 1 + 0.1 * 0)
    with pytest.raises(RewardError, match="shows 'explanation' of a sample's record, and that of 'x' has None"):
        reward.score(grey(51), ["x"], [{}])


@pytest.mark.parametrize(
    ("text", "message"),
    table(__file__, "refused_rubrics"),
)
def test_a_wrong_rubric_is_refused_with_the_key(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RewardError, match=message):
        rubrics.load(str(file), "x")


def test_an_unknown_rubric_lists_what_there_is(tmp_path):
    with pytest.raises(RewardError, match="rubric='nice' is unknown; there are: alignment, alignment_digits"):
        rubrics.load("nice", "x")
    with pytest.raises(RewardError, match=r"rubric '.*none\.yaml' cannot be read"):
        rubrics.load(str(tmp_path / "none.yaml"), "x")


def test_a_rubric_of_ones_own_sets_axes_weights_and_range(scripted, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "scale: score\nquestion: 'Judge {prompt}.'\nlow: 0\nhigh: 10\n"
        "axes: {fur: {about: how soft, weight: 3}, eyes: {about: how bright}}\n"
    )
    scripted.words = lambda q: '{"fur": 10, "eyes": 2.0}'
    reward = vlm_judge.build(vlm_judge.Config(rubric=str(file), max_tokens=77))
    assert (reward.card.low, reward.card.high) == (0, 10)
    values = scored(reward, grey(1), ["a cat"])
    assert {name: value.tolist() for name, value in values.items()} == {
        "vlm_judge": [8.0],
        "vlm_judge_fur": [10.0],
        "vlm_judge_eyes": [2.0],
    }
    text = scripted.asked[0].text
    assert "Judge a cat." in text
    assert "from 0 (worst) to 10 (best)" in text
    assert "- fur: how soft" in text
    assert scripted.writings[0].max_tokens == 77


# ---- pairs


def naive_win_rates(table: torch.Tensor) -> list[float]:
    """The rule, pair by pair."""
    rates = []
    for i in range(len(table)):
        outcomes = []
        for j in range(len(table)):
            here, there = float(table[i, j]), 1 - float(table[j, i])
            if i == j or math.isnan(here) or math.isnan(there):
                continue
            if here > 0.5 and there > 0.5:
                outcomes.append(1.0)
            elif here < 0.5 and there < 0.5:
                outcomes.append(0.0)
            else:
                outcomes.append((here + there) / 2)
        rates.append(sum(outcomes) / len(outcomes) if 2 * len(outcomes) >= len(table) - 1 else math.nan)
    return rates


def test_win_rates_equal_their_rule_and_sum_to_half_the_pairs():
    for seed in range(20):
        table = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rates = win_rates(table)
        assert rates.tolist() == pytest.approx(naive_win_rates(table))
        assert float(rates.sum()) == pytest.approx(3.0), "what one wins another loses"


def test_win_rates_do_without_pairs_that_are_not_known():
    table = torch.rand(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table[0, 1] = table[3, 0] = table[4, 0] = math.nan
    rates = win_rates(table)
    assert rates.isnan().tolist() == [True, False, False, False, False]
    assert rates[1:].tolist() == pytest.approx(naive_win_rates(table)[1:])


def test_a_judge_that_follows_the_place_alone_gives_all_one_half():
    assert_close(win_rates(torch.full((4, 4), 0.9)), torch.full((4,), 0.5))


@pytest.fixture
def brighter(scripted):
    """A judge that prefers the brighter image of two."""
    scripted.probabilities = lambda q: 0.9 if brightness(q)[0] > brightness(q)[1] else 0.2
    return vlm_judge.build(vlm_judge.Config(rubric="preference"))


def test_pairs_are_compared_within_their_prompt_in_both_orders_wherever_they_stand(scripted, brighter):
    assert brighter.card.needs_groups
    images, prompts = grey(10, 200, 30, 20, 100), ["a", "b", "a", "a", "b"]
    assert brighter.score(images, prompts, [{}] * 5).tolist() == [0.0, 1.0, 1.0, 0.5, 0.0]
    put = [(q.text.split('"')[1], *brightness(q)) for q in scripted.asked]
    expected = [("a", *p) for p in itertools.permutations((10, 30, 20), 2)]
    assert sorted(put) == sorted([*expected, ("b", 200, 100), ("b", 100, 200)])
    assert brighter.score(images.flip(0), prompts[::-1], [{}] * 5).tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


def test_a_broken_image_is_left_out_of_the_pairs(scripted, brighter):
    images = grey(10, 200, 30).clone()
    images[1, 0, 0, 0] = math.nan
    values = brighter.score(images, ["a"] * 3, [{}] * 3)
    assert_close(values, torch.tensor([0.0, math.nan, 1.0]), equal_nan=True)
    assert len(scripted.asked) == 2


def test_a_prompt_with_one_image_has_no_pairs(brighter):
    with pytest.raises(RewardError, match=r"the prompt 'b' has one image.*take 2 or more"):
        brighter.score(grey(1, 2, 3), ["a", "b", "a"], [{}] * 3)


# ---- UnifiedReward


@pytest.mark.parametrize(
    ("version", "length", "digest"),
    [
        ("v1.5", 643, "9358a8ac59c4012fe81e8ef35c5fdc60e4def72734abe7676488888eaecaaed8"),
        ("v2.0", 741, "43d97dbf203e8df853adb7a93bbd60d7fa3ac32428adc186196c9742d93ac3f9"),
    ],
)
def test_the_texts_are_the_published_ones(version, length, digest):
    text = unified_reward.question(version, "a photo of a cat")
    assert len(text) == length
    assert hashlib.sha256(text.encode()).hexdigest() == digest


FORM = "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
GOOD = "Alignment Score (1-5): 2.69\nCoherence Score (1-5): 2.37\nStyle Score (1-5): 2.80"


READ = [(2.69 + 2.37 + 2.8) / 3, 2.69, 2.37, 2.8]


@pytest.mark.parametrize(
    ("version", "answer", "expected"),
    [
        *(("v2.0", answer, READ) for answer in (GOOD, GOOD.lower(), f"{FORM}\n\n{GOOD}")),
        ("v2.0", "**Alignment Score**: 4\n**Coherence Score (1-5):** 3\n- Style Score:5", [4, 4, 3, 5]),
        # What verl-omni would read as 1 and 5 out of "(1-5)".
        ("v2.0", FORM, None),
        *(
            ("v2.0", other, None)
            for other in ("Alignment Score (1-5): 4\nCoherence Score (1-5): 3", "I cannot say.", "")
        ),
        *(("v2.0", GOOD.replace("2.37", other), None) for other in ("5.2", "0.9", "-3", "45", "4/10", "4.5/10", "\n3")),
        *(("v1.5", answer, [4]) for answer in ("Final Score: 4", "Final Score: 2 would be harsh.\nFinal Score: 4")),
        ("v1.5", "It is fine.\nFinal Score: 3.5.", [3.5]),
        ("v1.5", "final score:2", [2]),
        *(
            ("v1.5", f"{other}", None)
            for other in ("Final Score: 45", "Final Score: 4/10", "Final Score: 0", "Score: 4")
        ),
    ],
)
def test_all_grades_of_a_version_are_required(version, answer, expected):
    found = grades(version, answer)
    assert found == (None if expected is None else pytest.approx(expected))


def test_unified_reward_reports_the_axes_and_masks_what_it_cannot_read(scripted):
    scripted.words = lambda q: {10: GOOD, 20: "no", 30: None}[brightness(q)[0]]
    reward = unified_reward.build(unified_reward.Config())
    values = scored(reward, grey(10, 20, 30), ["a cat"] * 3)
    for output, expected in zip(reward.card.outputs, READ, strict=True):
        assert_close(values[output], torch.tensor([expected, math.nan, math.nan]), equal_nan=True)
    # A failed question is counted where it fails; an unreadable answer here. Nothing is asked twice.
    assert scripted.counters.values()["failures"] == 1
    assert len(scripted.asked) == 3
    assert {(w.temperature, w.max_tokens) for w in scripted.writings} == {(0, 512)}
    entry = WeightedReward("unified_reward", reward, scale=reward.card.transform[0], offset=reward.card.transform[1])
    scores = Scorer([entry], max_failed_share=0.7).score(grey(10, 20, 30), ["a cat"] * 3, [{}] * 3)
    assert float(scores.values[0, 0]) == pytest.approx((READ[0] - 1) / 4)


def test_the_older_model_is_served_only_and_sees_a_square(scripted):
    with pytest.raises(RewardError, match=r"v1\.5 is a LLaVA checkpoint.*backend: http"):
        unified_reward.build(unified_reward.Config(version="v1.5"))
    scripted.words = lambda q: "Final Score: 4"
    reward = unified_reward.build(unified_reward.Config(version="v1.5", backend="http"))
    assert reward.card.outputs == ("unified_reward",)
    assert reward.card.transform == (0.2, 0.0)
    assert scored(reward, grey(10), ["a cat"])["unified_reward"].tolist() == [4.0]
    assert scripted.asked[0].images[0].shape == (512, 512, 3)


# ---- EditScore


@pytest.fixture
def source(tmp_path) -> dict:
    return save_source(tmp_path)


def graded(first: float, second: float) -> str:
    return f'{{"reasoning": "so", "score": [{first}, {second}]}}'


def test_edit_score_sees_source_edit_and_instruction_and_the_look_of_the_edit_alone(scripted, source):
    scripted.words = lambda q: graded(20, 10) if len(q.images) == 2 else graded(25, 22.5)
    reward = edit_score.build(edit_score.Config())
    values = scored(reward, grey(200), ["make it bright"], [source])
    expected = {"edit_score": 6.0, "edit_score_success": 8.0, "edit_score_kept": 4.0}
    for name, value in (expected | {"edit_score_sc": 4.0, "edit_score_pq": 9.0}).items():
        assert values[name].tolist() == pytest.approx([value])
    both, alone = scripted.asked
    assert (brightness(both), brightness(alone)) == ([77, 200], [200])
    assert "make it bright" in both.text
    assert "make it bright" not in alone.text
    assert reward.card.requires == ("images",)


def test_returning_the_source_and_painting_anew_show_in_their_parts(scripted, source):
    scripted.words = lambda q: (
        graded(25, 25) if len(q.images) == 1 else graded(0, 25) if brightness(q)[1] == 77 else graded(25, 0)
    )
    values = scored(edit_score.build(edit_score.Config()), grey(77, 200), ["x", "x"], [source] * 2)
    assert values["edit_score"].tolist() == [0, 0]
    assert values["edit_score_kept"].tolist() == [10, 0]
    assert values["edit_score_success"].tolist() == [0, 10]


def test_passes_are_averaged_and_each_has_its_seed(scripted, source):
    replies = iter([graded(25, 25), graded(25, 25), graded(4, 25), graded(25, 25), "no", "no", "no", "no"])
    scripted.words = lambda q: next(replies)
    values = scored(edit_score.build(edit_score.Config(num_pass=3)), grey(1), ["x"], [source])
    # The third pass failed; the others are sqrt(10 * 10) and sqrt(1.6 * 10).
    assert values["edit_score"].tolist() == pytest.approx([(10 + 4) / 2])
    assert [w.seed for w in scripted.writings] == [42, 42, 43, 43, 44, 44, 44, 44]
    assert {w.temperature for w in scripted.writings} == {0.7}


@pytest.mark.parametrize("bad", [graded(26, 3), graded(-1, 3), '{"reasoning": "", "score": [3]}', "[3, 4]"])
def test_grades_out_of_range_are_nan_and_never_a_middle_value(scripted, source, bad):
    scripted.words = lambda q: bad if len(q.images) == 2 else graded(25, 25)
    values = scored(edit_score.build(edit_score.Config()), grey(1), ["x"], [source])
    assert values["edit_score"].isnan().all()
    assert values["edit_score_sc"].isnan().all()
    assert values["edit_score_pq"].tolist() == [10]


def test_a_transparent_source_is_shown_on_white(scripted, tmp_path):
    Image.new("RGBA", (8, 6), (77, 77, 77, 0)).save(tmp_path / "source.png")
    scripted.words = lambda q: graded(25, 25)
    edit_score.build(edit_score.Config()).score(grey(1), ["x"], [{"images": [str(tmp_path / "source.png")]}])
    assert brightness(scripted.asked[0]) == [255, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *((record, "needs the one image that was edited") for record in ({}, {"images": []}, {"images": "a.png"})),
        ({"images": ["a", "b"]}, "needs the one image that was edited"),
        ({"images": ["/nowhere/gone.png"]}, r"cannot read the source image '.*gone\.png'"),
    ],
)
def test_a_sample_without_its_one_source_stops_with_the_remedy(scripted, record, message):
    with pytest.raises(RewardError, match=message):
        edit_score.build(edit_score.Config()).score(grey(1), ["x"], [record])


def test_the_published_texts_can_be_given(scripted, source, tmp_path):
    (tmp_path / "sc.txt").write_text('Rules {braces} "score" : [...]\nEditing instruction: <instruction>')
    (tmp_path / "pq.txt").write_text("Look.")
    scripted.words = lambda q: graded(25, 25)
    config = edit_score.Config(sc_prompt=str(tmp_path / "sc.txt"), pq_prompt=str(tmp_path / "pq.txt"))
    edit_score.build(config).score(grey(1), ["do it"], [source])
    texts = [q.text for q in scripted.asked]
    assert texts == ['Rules {braces} "score" : [...]\nEditing instruction: do it', "Look."]
    (tmp_path / "sc.txt").write_text("No place for it")
    with pytest.raises(RewardError, match="must hold <instruction>"):
        edit_score.build(config)
