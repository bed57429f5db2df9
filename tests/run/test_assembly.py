"""What only a model and a number of processes show, refused before the base evaluation."""

from __future__ import annotations

import pytest
import torch

from flowrl.algorithms import awm, dgpo, diffusion_nft, fpo
from flowrl.core.errors import ConfigError
from flowrl.diffusion.schedules import Schedule
from flowrl.run.assembly import _require_plan, _require_whole_groups
from flowrl.samplers.ode import Ode
from flowrl.training.kinds import training_of
from flowrl.training.world import World
from tests.toys import ToyAdapter


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (fpo.build(fpo.Config()), "times.name=uniform: .* try algorithm.times.name=discrete, or "),
        (awm.build(awm.Config(solver="sa")), "SA-Solver needs a grid .* ends at sigma 0"),
    ],
    ids=["times", "solver"],
)
def test_what_a_noise_process_cannot_give_is_refused(algorithm, words):
    """Without its table of alphas_cumprod only the nodes of its grid are known, which ends above sigma 0."""
    vp, flow = ToyAdapter(vp=True), ToyAdapter()
    grid = Schedule(vp.schedule(10).sigmas, vp.schedule(10).timesteps)
    with pytest.raises(ConfigError, match=words):
        _require_plan(training_of(algorithm), Ode(), grid, vp, 0)
    _require_plan(training_of(algorithm), Ode(), flow.schedule(10), flow, 0)


def test_rules_on_the_grid_and_on_sigma_are_accepted_on_a_noise_process():
    adapter = ToyAdapter(vp=True)
    rules = (diffusion_nft.build(diffusion_nft.Config()), dgpo.build(dgpo.Config()), fpo.build(fpo.Config()))
    for algorithm in rules:
        _require_plan(training_of(algorithm), Ode(), adapter.schedule(10), adapter, 0)


def test_a_method_on_whole_groups_needs_a_prompt_for_every_process():
    world = World(0, 3, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"prompts_per_iteration=2: .* one of 3 processes; try .*=3"):
        _require_whole_groups(dgpo.build(dgpo.Config()), 2, world)
    _require_whole_groups(dgpo.build(dgpo.Config()), 3, world)
    _require_whole_groups(awm.build(awm.Config()), 2, world)
