"""Diversity of an evaluation: known values, what it draws, and that no score moves by it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.core.registry import load
from flowrl.evaluation import diversity
from flowrl.evaluation.results import Evaluation
from flowrl.media import digests
from flowrl.statistics.sets import log_det
from tests.evaluation.test_evaluate import CPU, call, evaluator, record
from tests.toys import OneOf, ToyAdapter


def test_equal_images_have_the_least_and_far_ones_the_most():
    same = np.tile(np.random.default_rng(0).random((1, 1, 2, 192)), (3, 4, 1, 1))
    np.testing.assert_allclose(log_det(same), math.log(5))
    far = 100 * np.eye(4)[None, :, None, :]
    np.testing.assert_allclose(log_det(far), 4 * math.log(2))
    some = np.random.default_rng(0).random((3, 4, 2, 192))
    levels = [log_det(same + share * (some - same)) for share in (0.0, 0.3, 1.0)]
    assert (np.diff(levels, axis=0) > 0).all()
    np.testing.assert_allclose(log_det(some[:, [2, 0, 3, 1]]), log_det(some))
    some[1, 2, 0, 5] = np.nan
    assert np.isnan(log_det(some)).tolist() == [False, True, False]


def test_it_is_what_the_reward_of_that_name_approximates():
    images = torch.rand(4, 3, 16, 16) * torch.tensor([0.2, 0.4, 0.7, 1.0])[:, None, None, None]
    waves = torch.nn.functional.normalize(load("rewards", "diversity").colour_waves(0.2)(list(images)).double())
    near = torch.logdet(waves @ waves.T + torch.eye(4).double())
    levels = (255 * images).round().byte()
    exact = log_det(np.stack([diversity.grid(each) for each in levels])[None])
    assert exact[0] == pytest.approx(float(near), abs=0.1)


@pytest.mark.parametrize("samples", [1, 3])
def test_missing_samples_are_drawn_and_move_no_score_file_or_count(tmp_path, samples):
    options = {"samples_per_prompt": samples, "batch_size": 5}
    plain = call(evaluator(tmp_path / "plain", ToyAdapter(), **options))
    counts = list[int]()
    found = call(evaluator(tmp_path / "more", ToyAdapter(), diversity=3, **options), progress=counts.append)
    for name, table in plain.scores.items():
        np.testing.assert_array_equal(found.scores[name], table)
    assert digests.same(found.digests, plain.digests).all()
    np.testing.assert_array_equal(found.sharpness, plain.sharpness)
    assert sum(counts) == 5 * samples
    files = [sorted(file.name for file in (tmp_path / name / "eval/base").iterdir()) for name in ("plain", "more")]
    assert files[0] == files[1]
    four = call(evaluator(tmp_path / "four", ToyAdapter(), samples_per_prompt=4))
    assert plain.diversity is None
    assert four.diversity is not None
    assert found.diversity is not None
    assert four.diversity.shape == (5,)
    np.testing.assert_allclose(found.diversity, four.diversity[:3], atol=1e-2)
    assert (found.diversity > math.log(5)).all()


def test_it_is_read_back_cut_with_its_prompts_and_gathered_from_all_processes(tmp_path):
    found = call(evaluator(tmp_path, ToyAdapter(), diversity=4))
    assert found.diversity is not None
    np.testing.assert_array_equal(Evaluation.load(tmp_path / "eval/base.json").diversity, found.diversity)
    rows = np.asarray([True, False, True, True, True])
    np.testing.assert_array_equal(found.of(rows).diversity, found.diversity[[0, 2, 3]])
    assert call(evaluator(tmp_path, ToyAdapter(), samples_per_prompt=4, diversity=0)).diversity is None
    few = call(evaluator(tmp_path, ToyAdapter(), diversity=4), limit=2).diversity
    assert few is not None
    assert few.shape == (2,)
    parts = [call(evaluator(tmp_path, ToyAdapter(), world=OneOf(rank, 2, CPU), diversity=4)) for rank in range(2)]
    # A prompt is whole on one process.
    known = [np.isfinite(part.diversity) for part in parts if part.diversity is not None]
    assert (known[0] ^ known[1]).all()


def test_the_tuned_model_stands_beside_its_base_where_both_were_measured():
    base, tuned = (record(tag, a=np.zeros((6, 1)).tolist()) for tag in ("base", "tuned"))
    assert diversity.facts(base, tuned) is None
    before, after = np.linspace(2, 2.5, 4), np.linspace(1.8, 2.0, 4)
    assert diversity.facts(replace(base, diversity=before), tuned) is None
    assert diversity.facts(replace(base, diversity=before), replace(tuned, diversity=after[:3])) is None
    found = diversity.facts(replace(base, diversity=before), replace(tuned, diversity=after))
    assert found is not None
    assert found["difference"]["mean"] == pytest.approx(-0.35)
    assert (found["base"]["mean"], found["tuned"]["n"]) == (pytest.approx(2.25), 4)
    said = diversity.sentence(found)
    assert "on 4 prompts: 1.900, the base's 2.250, so -0.350 (95 % interval -0." in said
