"""The plan of the first iteration, refused before the base evaluation where the model's grid does not have it."""

import pytest

from flowrl.algorithms import awm, dgpo, diffusion_nft, fpo
from flowrl.core.errors import ConfigError
from flowrl.diffusion.schedules import Schedule
from flowrl.samplers.ode import Ode
from flowrl.training.kinds import training_of
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
        training_of(algorithm).first_plan(grid, Ode(), vp.process, 0)
    training_of(algorithm).first_plan(flow.schedule(10), Ode(), flow.process, 0)


def test_rules_on_the_grid_and_on_sigma_are_accepted_on_a_noise_process():
    adapter = ToyAdapter(vp=True)
    rules = (diffusion_nft.build(diffusion_nft.Config()), dgpo.build(dgpo.Config()), fpo.build(fpo.Config()))
    for algorithm in rules:
        training_of(algorithm).first_plan(adapter.schedule(10), Ode(), adapter.process, 0)
