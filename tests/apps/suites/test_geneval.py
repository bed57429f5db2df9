"""GenEval: its prompts, its official aggregation, its evaluator's folder."""

import hashlib
import json
import math
from collections import Counter

import pytest

from flowrl.apps.suites import geneval
from flowrl.core.errors import ConfigError
from tests.apps.suites.written import means, scored


def test_the_prompts_are_the_benchmarks_byte_for_byte(tmp_path):
    items = geneval.items(None)
    metadata = "\n".join(json.dumps(item.metadata) for item in items) + "\n"
    texts = "\n".join(item.text for item in items) + "\n"
    assert len(metadata) == 85209
    digest = "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"
    assert hashlib.sha256(metadata.encode()).hexdigest() == digest
    digest = "55b6e3650e980c13daf30569eb666e000faf19bfc2b7b4cbe999fcdb7aa9d680"
    assert digest in {hashlib.sha256(text.encode()).hexdigest() for text in (texts, texts.removesuffix("\n"))}
    counts = {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100}
    assert Counter(item.tags[0] for item in items) == counts
    assert [item.text for item in items[:1]] == ["a photo of a bench"]
    assert items[-1].text == "a photo of a blue pizza and a yellow baseball glove"
    (tmp_path / "evaluation_metadata.jsonl").write_text(metadata)
    assert geneval.items(tmp_path / "evaluation_metadata.jsonl") == items
    (tmp_path / "evaluation_metadata.jsonl").write_text(metadata.replace("bench", "boat", 1))
    with pytest.raises(ConfigError, match="makes its own prompts"):
        geneval.items(tmp_path / "evaluation_metadata.jsonl")


def rows_of(items, right):
    return scored(items, [right[item.id] for item in items], "geneval_official")


def test_the_overall_score_is_the_mean_of_the_tasks_and_not_of_the_images():
    every = geneval.items(None)
    items = [next(item for item in every if item.tags == (task,)) for task in geneval.TASKS]
    items.append([item for item in every if item.tags == ("counting",)][1])
    right: dict[str, tuple[int | None, ...]] = {item.id: (1, 1, 0, 0) for item in items}
    right[items[0].id] = (1, 1, 1, 1)
    right[items[2].id] = (0, 0, 0, 0)
    right[items[6].id] = (1, None, 0, 0)
    table = geneval.aggregate(rows_of(items, right), items)
    found = means(table)
    assert found["counting"] == pytest.approx(1 / 7)  # over images, of which one has no score
    assert found["overall"] == pytest.approx((1 + 1 / 7 + 4 * 0.5) / 6)
    assert found["correct images"] == pytest.approx((4 + 0 + 1 + 4 * 2) / 27)
    assert found["prompts with a correct image"] == pytest.approx(6 / 7)
    assert table.headline == "overall"
    overall = next(line for line in table.lines if line.name == "overall")
    assert (overall.n_prompts, overall.n_images, overall.n_scored) == (7, 28, 27)
    assert math.isnan(overall.low), "a task with one prompt says nothing of its spread"
    images = next(line for line in table.lines if line.name == "correct images")
    assert images.low < images.mean < images.high


def test_a_task_without_a_score_has_no_overall_score():
    every = geneval.items(None)
    items = [next(item for item in every if item.tags == (task,)) for task in geneval.TASKS]
    right = {item.id: (1, 0) for item in items} | {items[0].id: (None, None)}
    assert math.isnan(means(geneval.aggregate(rows_of(items, right), items))["overall"])


def test_the_evaluators_results_are_read(tmp_path):
    item = geneval.items(None)[3]
    names = [f"out/{geneval.layout(item, k)}" for k in range(2)]
    file = tmp_path / "results.jsonl"
    lines = [json.dumps({"filename": name, "tag": "x", "correct": k == 0}) for k, name in enumerate(names)]
    file.write_text("\n".join(lines))
    assert geneval.read_results(file, [item]) == {("00003", 0): {"correct": 1.0}, ("00003", 1): {"correct": 0.0}}


def test_a_prompt_whose_correct_image_may_be_the_one_without_a_score_is_not_counted():
    items = geneval.items(None)[:3]
    right = {items[0].id: (0, None), items[1].id: (None, 1), items[2].id: (0, 0)}
    line = geneval.aggregate(rows_of(items, right), items).lines[-1]
    assert (line.name, line.mean, line.n_scored, line.n_images) == ("prompts with a correct image", 0.5, 2, 3)


def test_the_best_image_of_a_judge_whose_scores_are_negative_is_one_that_it_scored():
    item = geneval.items(None)[0]
    line = geneval.aggregate(scored([item], [(-3.0, None, -2.0)], "taste"), [item]).lines[-1]
    assert (line.name, line.mean, line.n_scored) == ("best image of each prompt", -2.0, 1)
