"""Recipes of real models that learn from given pairs: published values, geometry, memory on one device."""

from __future__ import annotations

import pytest
import torch

from flowrl.commands.plan import PROCESSES, geometry, step_plan
from flowrl.core.types import SampleId
from flowrl.models.classes import choose
from flowrl.planning import memory
from flowrl.samplers.ode import Ode
from tests.recipes import PAIRED, at, recipe

# forward_process 4.1 and 4.2: beta, and GB of one device.
MODELS = {"sd": (5000.0, 12), "sdxl": (5000.0, 24), "sd3": (100.0, 24)}


def test_there_is_one_for_every_model_asked_for():
    assert {name.partition("/")[0] for name in PAIRED if "/diffusion_dpo-" in name} == set(MODELS)


@pytest.mark.parametrize("name", PAIRED)
def test_it_is_what_its_name_says_with_the_values_of_the_paper(name):
    run, (model, rest) = recipe(name), name.split("/")
    tree = run.tree()
    assert (run.model.name, run.algorithm.name, rest.split("-")[1]) == (model, rest.split("-")[0], "pickapic")
    assert choose(run.model.config.path).name == model  # its name could be left out
    assert run.algorithm.config.beta == MODELS[model][0]
    expected = {
        "data.pairs.caption_dropout": 0.2,
        "data.pairs.crop": "center",
        "data.pairs.flip": True,
        "data.cache_text": None,
    }
    assert {key: at(tree, key) for key in expected} == expected
    assert tree["rewards"] == []
    assert at(tree, "optim.max_grad_norm") == 1.0  # train.py clips with Adafactor too: only its flag would stop it
    if model != "sd3":
        assert run.run.iterations * run.run.optim.updates_per_iteration == 2000
        assert at(tree, "optim.weight_decay") == 1e-2
    plan = step_plan(run, None)
    for processes in PROCESSES:
        counts = geometry(run, plan, processes, extra=1, terms=1)
        assert counts.rollout_forwards == 0, "nothing is drawn"
        assert counts.frozen_forwards == counts.update_forwards > 0


@pytest.mark.slow  # whole networks on fake tensors
@pytest.mark.parametrize("name", PAIRED)
def test_times_are_those_of_training_and_the_run_fits_its_device(name):
    run = recipe(name)
    model = memory.skeleton(run)
    grid = model.schedule(run.run.rollout.num_inference_steps)
    algorithm = run.algorithm.build()
    ids = [SampleId(slot, sample) for slot in range(400) for sample in (0, 1)]
    times = algorithm.times(grid, ids, 1, 0).timestep
    assert torch.equal(times[::2], times[1::2]), "both of a pair"
    if run.model.name == "sd3":
        assert 300 < float(times.mean()) < 900
    else:
        assert algorithm.config.times.name == "timesteps"
        # Uniform over 0..999: the mean of 400 has a std of 288 / 20.
        assert abs(float(times.mean()) - 499.5) < 4 * 14.4
    result = memory.estimate(run, model, algorithm.plan(grid, Ode(), 1, 0), prompts=100)
    assert [phase.name for phase in result.phases] == ["encode", "pictures", "evaluation", "update"]
    assert not result.unknown
    assert result.rollout_flop == 0
    assert result.embeddings == 0, "captions are embedded when drawn"
    # What is not in the estimate takes 10 to 20 %, and the CUDA context half a GB.
    assert 1.15 * result.peak.peak + 5e8 < MODELS[run.model.name][1] * 1e9
