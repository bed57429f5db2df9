"""Best-of curves of stored scores: who chooses, who judges, and where there is none."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.evaluation import best_of
from flowrl.reward import Card, Reward
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.evaluation.test_evaluate import record


def reward(*outputs: str, weight: float = 1.0, shares: dict[str, float] | None = None, **card) -> WeightedReward:
    known = Card(outputs=outputs, **card)
    return WeightedReward(
        outputs[0], Reward(lambda images, prompts, metadata: torch.zeros(0), known), weight, shares or {}
    )


def tables(seed: int) -> dict[str, list]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(12, 4)).tolist() for name in ("a", "b", "judge")}


BASE, TUNED = record("base", **tables(0)), record("tuned", **tables(1))
TRAINED = Scorer([reward("a"), reward("b", weight=0.5, less_is_better=("b",)), reward("unused", weight=0.0)])


def test_the_weighted_training_rewards_choose_and_the_other_metric_judges():
    found = best_of.facts(BASE, TUNED, TRAINED)
    assert found is not None
    assert found["by"] == "a + b"
    value = found["judges"]["judge"]
    assert not value["chose"]
    for name, of in (("base", BASE), ("tuned", TUNED)):
        total = of.scores["a"] - 0.5 * of.scores["b"]
        for k in range(1, 5):
            rows = [
                np.mean([of.scores["judge"][p][max(some, key=lambda s: total[p, s])] for some in sets])
                for p, sets in enumerate([list(itertools.combinations(range(4), k))] * 12)
            ]
            assert value[name][k - 1]["mean"] == pytest.approx(np.mean(rows))
    one = value["tuned"][0]["mean"]
    assert one == pytest.approx(TUNED.scores["judge"].mean())
    for k, rival in enumerate(value["rival"]):
        assert rival["mean"] == pytest.approx(one - value["base"][k]["mean"])
        assert rival["low"] < rival["mean"] < rival["high"]
    said = best_of.sentence(found["by"], "judge", value)
    assert "chosen by a + b and judged by judge: base" in said
    assert f"best of 4, 4 times the network evaluations: {value['rival'][3]['mean']:+.4g} (" in said


def test_a_score_that_was_not_trained_on_judges_and_only_without_one_those_that_chose():
    found = best_of.facts(BASE, TUNED, Scorer([reward("a", "b", shares={"b": 1.0})]))
    assert found is not None
    assert [name for name, value in found["judges"].items() if not value["chose"]] == ["a", "judge"]
    own = replace(BASE, scores={"a": BASE.scores["a"]})
    found = best_of.facts(own, own, Scorer([reward("a")]))
    assert found is not None
    value = found["judges"]["a"]
    means = [entry["mean"] for entry in value["base"]]
    assert value["chose"]
    assert means == sorted(means)


def test_nothing_is_told_of_one_seed_without_a_chooser_or_of_a_choice_that_no_image_has_alone():
    one = replace(BASE, seeds=1, scores={name: table[:, :1] for name, table in BASE.scores.items()})
    assert best_of.facts(one, one, TRAINED) is None
    assert best_of.facts(BASE, TUNED, None) is None
    assert best_of.facts(BASE, TUNED, Scorer([reward("a", needs_groups=True)])) is None
