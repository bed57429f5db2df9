"""Times and refusals of the methods on a noise-prediction model; that they replay and train: the laws of methods."""

from typing import Any

import pytest

from flowrl.algorithms.base import EdgeMethod, SampleMethod
from flowrl.core import registry
from flowrl.core.types import SampleId
from flowrl.samplers import ddim
from tests import native
from tests import tiny_pipelines as tiny
from tests.toys import Session, algorithms, roll_out

# Methods that are defined on flows only -> what their refusal tells to use instead.
UNDEFINED = {"mix_grpo_flash": r"predicts noise \(VP\); use mix_grpo"}
SAMPLES = algorithms(SampleMethod)


def build(name: str, **options: Any) -> Any:
    module = registry.load("algorithms", name)
    return module.build(module.Config(**options))


def adapter() -> Any:
    return native.adapter("sd", tiny.make("sd"), (16, 16))


def session_of(name: str, num_steps: int = 6, **options: Any) -> Session:
    sampler = ddim.build(ddim.Config())
    build(name, **options).config.check(sampler, num_steps)
    return roll_out(adapter(), algorithm=build(name, **options), sampler=sampler, num_steps=num_steps)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_method_on_samples_trains_at_its_own_times(name):
    session = session_of(name, 8)
    # What the network is fed fits the noise, also where it is no node of the grid.
    times = session.algorithm.times(session.adapter.schedule(8), [SampleId(0, k) for k in range(4)], 1, 0)
    table = session.plan.schedule.table
    assert table is not None
    log_snr = (times.sigma.double().square() / (1 - times.sigma.double().square())).log()
    place = times.timestep.round().long()
    near = [((1 - table) / table).log()[(place + k).clamp(0, 999)] for k in (-1, 1)]
    assert bool(((near[0] <= log_snr + 1e-4) & (log_snr <= near[1] + 1e-4)).all())


@pytest.mark.parametrize("name", UNDEFINED)
def test_a_method_for_flows_only_says_what_to_use(name):
    assert name in algorithms(EdgeMethod)
    with pytest.raises(ValueError, match=UNDEFINED[name]):
        session_of(name)


def test_the_sa_solver_says_what_to_use_on_a_grid_that_ends_above_zero():
    with pytest.raises(ValueError, match=r"ends at 0\.0292; try algorithm\.solver=ode algorithm\.solver_noise=0\.0$"):
        session_of("awm", 8, solver="sa")
