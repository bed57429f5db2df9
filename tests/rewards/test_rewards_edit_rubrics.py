"""Rubrics of edits: the source beside the result, Edit-R1's digits, RationalRewards' written grades."""

import math

import pytest
import torch
from flowrl.rewards._judges import rubrics
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import vlm_judge
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.tiny_rewards import scored
from tests.tiny_rewards.edit_score import save_source
from tests.tiny_rewards.judges import brightness, grey

RATIONAL = rubrics.load("rational_edit", "x")
AXES = ("text_faithfulness", "image_faithfulness", "physical_and_visual_quality", "text_rendering")
NAMES = ("Text Faithfulness", "Image Faithfulness", "Physical and Visual Quality", "Text Rendering")


def answer(*grades: object, heading: str = "{0}. {1}", score: str = "## Score: {}") -> str:
    parts = [
        f"{heading.format(place, name)}\n## Justification: it is so.\n{score.format(grade)}"
        for place, (name, grade) in enumerate(zip(NAMES, grades, strict=False), 1)
    ]
    return "\n".join(["# User Request Analysis: change it.", "# Detailed Judgement", *parts, "# Summary: fine."])


GOOD = answer(3.5, 4, 2, "N/A")


# ---- written grades


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.lower(),
        answer("3.50", "4.0", 2.0, "n/a", heading="**{0}. {1}** (how well?)", score="## **Score**: {}."),
        answer(3.5, 4, 2, "NA", heading="### {1}:"),
        # Grades of the plan, of the summary and after it do not count.
        GOOD.replace("# Detailed", "## Score: 1\n# Detailed") + "\n1. Text Faithfulness\n## Score: 1",
        GOOD.replace("# Detailed", "I look at\n1. Text Faithfulness\n2. Image Faithfulness\n# Detailed"),
        # A number of the reasons is none of the line.
        GOOD.replace("it is so", "the sign says 1, text faithfulness is low: 1"),
    ],
)
def test_the_four_grades_are_read_and_not_applicable_ones_left_out(text):
    found = RATIONAL.read(text)
    assert found is not None
    assert tuple(found) == AXES
    assert_close(torch.tensor(list(found.values())), torch.tensor([3.5, 4.0, 2.0, math.nan]), equal_nan=True)
    assert RATIONAL.total(found) == pytest.approx((3.5 + 4 + 2) / 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot judge this.",
        answer(4, 4, 4),  # an axis is missing
        answer("N/A", "N/A", "N/A", "N/A"),
        *(answer(3, other, 3, 3) for other in ("3/4", "4 out of 4", "four", "", "4, or 2", "nan", "inf", "1e3", "3 4")),
        # Two grades of one axis, as of a picture whose text orders a grade and a judge that repeats it.
        GOOD.replace("## Justification", "## Score: 4\n## Justification", 1),
        GOOD.replace("# Summary", "1. Text Faithfulness\n## Score: 4\n# Summary"),
        "# Summary: fine.\n" + GOOD,  # all of it after the summary
        GOOD.replace("## Score", "## Grade"),
        "## Score: 4\n" * 4,
    ],
)
def test_an_answer_that_cannot_be_read_is_none(text):
    assert RATIONAL.read(text) is None


@pytest.mark.parametrize(("given", "value"), [("9", 4), ("1000", 4), ("0", 1), ("-3", 1), ("4.01", 4)])
def test_a_grade_outside_the_range_counts_as_its_end_and_weighs_no_more_than_it(given, value):
    found = RATIONAL.read(answer(given, 1, 1, 1))
    assert found is not None
    assert RATIONAL.total(found) == pytest.approx((value + 3) / 4)


def test_rational_rewards_see_source_and_result_and_mask_what_they_cannot_read(scripted, tmp_path):
    source = save_source(tmp_path)
    scripted.words = lambda q: {10: GOOD, 20: "no", 30: None, 40: answer(1, 1, 1, 1)}[brightness(q)[1]]
    reward = vlm_judge.build(vlm_judge.Config(rubric="rational_edit"))
    card = reward.card
    assert card.outputs == ("vlm_judge", *(f"vlm_judge_{axis}" for axis in AXES))
    assert (card.modality, card.requires, card.low, card.high) == ("edit", ("images",), 1, 4)
    values = scored(reward, grey(10, 20, 30, 40), ["make it bright"] * 4, [source] * 4)
    assert_close(values["vlm_judge"], torch.tensor([9.5 / 3, math.nan, math.nan, 1.0]), equal_nan=True)
    assert_close(values["vlm_judge_text_rendering"], torch.tensor([math.nan] * 3 + [1.0]), equal_nan=True)
    # Of these one failed at the judge, which counts it; nothing is asked twice.
    assert scripted.counters.values()["failures"] == 1
    assert [brightness(q) for q in scripted.asked] == [[77, value] for value in (10, 20, 30, 40)]
    assert "make it bright" in scripted.asked[0].text
    assert {writing.max_tokens for writing in scripted.writings} == {2048}
    entry = WeightedReward("vlm_judge", reward, scale=card.transform[0], offset=card.transform[1])
    scores = Scorer([entry], max_failed_share=0.7).score(grey(10, 20, 30, 40), ["x"] * 4, [source] * 4)
    assert_close(
        scores.values[0], torch.tensor([(9.5 / 3 - 1) / 3, math.nan, math.nan, 0.0]), equal_nan=True, atol=1e-6, rtol=0
    )


def test_a_tuned_judge_is_asked_in_its_own_words(scripted, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "scale: written\nquestion: 'Rate {prompt}'\nending: false\nlow: 1\nhigh: 4\naxes: {look: {about: how}}\n"
    )
    scripted.words = lambda q: "1. Look\n## Score: 2.5"
    reward = vlm_judge.build(vlm_judge.Config(rubric=str(tmp_path / "own.yaml")))
    assert scored(reward, grey(10), ["a cat"])["vlm_judge"].tolist() == [2.5]
    assert scripted.asked[0].text == "Rate a cat"
    assert reward.card.modality == "image"


# ---- Edit-R1


def test_the_digits_of_an_edit_see_source_result_instruction_and_requirement(scripted, tmp_path):
    source = save_source(tmp_path)
    # The digit 5 with 3/4 and 4 with 1/4 of what the six digits have; all else is left out.
    scripted.probabilities = lambda q: {"5": 0.6, "4": 0.2} if brightness(q)[1] == 200 else {"0": 0.4}
    reward = vlm_judge.build(vlm_judge.Config(rubric="edit_digits"))
    records = [source | {"requirement": "only the sky"}, source]
    values = scored(reward, grey(200, 77), ["make it bright", "make it dark"], records)
    assert_close(values, torch.tensor([4.75 / 5, 0.0]))
    assert [brightness(q) for q in scripted.asked] == [[77, 200], [77, 77]]
    assert '"only the sky"' in scripted.asked[0].text
    assert "nothing else is changed" in scripted.asked[1].text
    assert (reward.card.modality, reward.card.requires) == ("edit", ("images",))


@pytest.mark.parametrize("rubric", ["edit_digits", "rational_edit"])
def test_an_edit_without_its_one_source_stops_with_the_remedy(scripted, rubric):
    reward = vlm_judge.build(vlm_judge.Config(rubric=rubric))
    for record in ({}, {"images": ["a", "b"]}):
        with pytest.raises(RewardError, match="reward 'vlm_judge' needs the one image that was edited"):
            reward.score(grey(1), ["x"], [record])
    assert not scripted.asked
