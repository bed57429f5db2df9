"""The step plan: what it refuses, what it hands out, and the edge cases it alone decides."""

import pytest
import torch
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.diffusion.plan import StepPlan, solver_plan, window
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.diffusion.schedules import Schedule


def test_a_window_defaults_to_every_step_but_the_last():
    plan = window(flow_schedule(5), 0.7)
    assert plan.train == (0, 1, 2, 3)
    assert plan.noise_level == (0.7, 0.7, 0.7, 0.7, 0.0)
    assert plan.stochastic == (True, True, True, True, False)
    assert len(plan) == 5


def test_a_window_is_stochastic_and_trained_at_its_own_steps_only():
    plan = window(flow_schedule(6), 0.9, [1, 3])
    assert plan.train == (1, 3)
    assert plan.noise_level == (0.0, 0.9, 0.0, 0.9, 0.0, 0.0)


def test_a_deterministic_plan_has_no_noise_trains_nothing_and_takes_the_ode():
    plan = solver_plan(flow_schedule(3))
    assert plan.stochastic == (False, False, False)
    assert plan.train == ()
    assert plan.solver == window(flow_schedule(3), 0.7).solver == ("ode",) * 3


@pytest.mark.parametrize(
    ("num_steps", "steps", "level", "message"),
    [
        (5, [], 0.7, "window of stochastic steps is empty"),
        (5, [4], 0.7, r"trains the last step \(4\)"),
        (5, [5], 0.7, r"trains step 5, but there are only steps 0\.\.4"),
        (5, [-1], 0.7, "trains step -1"),
        *((5, [0], level, "trains step 0, which is deterministic") for level in (0.0, -0.1, float("nan"))),
        (1, None, 0.7, "at least 2 denoising steps"),
    ],
)
def test_a_window_refuses_what_cannot_be_trained(num_steps, steps, level, message):
    """No trained step with std 0, never the last step, never empty."""
    with pytest.raises(ValueError, match=message):
        window(flow_schedule(num_steps), level, steps)


@pytest.mark.parametrize(
    ("levels", "train", "solver", "message"),
    [
        ((0.7, 0.7), (), (), "2 noise levels for 3 steps"),
        ((0.7, 0.0, 0.0), (0,), ("ode", "dpm1"), "2 solvers for 3 steps"),
        ((0.7, 0.0, 0.0), (0,), ("ode", "ode", "dpm3"), "step 2 by 'dpm3'; there are ode, dpm1, dpm2_midpoint, dpm2_"),
        ((0.7, 0.0, 0.0), (0,), ("dpm1", "ode", "ode"), r"step 0 a noise level \(0\.7\) and the solver 'dpm1'"),
        ((0.4, 0.0, 0.0), (), ("dpm1",) * 3, "is a transition of the sampler"),
        ((0.0, 0.4, 0.4), (2,), ("sa",) * 3, "deterministic"),
    ],
)
def test_a_plan_refuses_levels_and_solvers_that_do_not_fit_its_steps(levels, train, solver, message):
    with pytest.raises(ValueError, match=message):
        StepPlan(flow_schedule(3), levels, train, solver)


def test_the_last_step_of_a_vp_grid_may_be_trained_because_it_ends_above_zero():
    """With the clamp the last step's variance is positive."""
    plan = window(vp_schedule(5), 1.0, range(5))
    assert plan.train == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("process", "schedule"), [(FlowProcess(), flow_schedule(4)), (VPProcess(), vp_schedule(4))], ids=["flow", "vp"]
)
def test_steps_hand_out_the_grid_by_index_in_any_order(process, schedule: Schedule):
    plan = StepPlan(schedule, (0.1, 0.2, 0.3, 0.0), ())
    index = torch.tensor([2, 0, 2, 3])
    step = plan.steps(index, process)
    assert torch.equal(step.index, index)
    assert torch.equal(step.sigma, schedule.sigmas[[2, 0, 2, 3]])
    assert torch.equal(step.sigma_next, schedule.sigmas[[3, 1, 3, 4]])
    assert torch.equal(step.timestep, schedule.timesteps[[2, 0, 2, 3]])
    assert torch.equal(step.noise_level, torch.tensor([0.3, 0.1, 0.3, 0.0]))
    # VP grids carry their alphas, which are exact where those of a float32 sigma are rounded.
    assert_close(step.alpha, process.alpha(step.sigma), rtol=1e-5, atol=0)
    assert_close(step.alpha_next, process.alpha(step.sigma_next), rtol=1e-5, atol=0)
    if schedule.alphas is not None:
        assert torch.equal(step.alpha, schedule.alphas[[2, 0, 2, 3]])
        assert torch.equal(step.alpha_next, schedule.alphas[[3, 1, 3, 4]])
    assert {value.dtype for value in (step.alpha, step.sigma, step.sigma_next, step.noise_level)} == {torch.float32}


def test_the_bound_at_sigma_one_is_the_second_sigma_of_the_grid():
    """The official code's bound."""
    schedule = flow_schedule(4)
    step = window(schedule, 0.7).steps(torch.tensor([0, 1, 2]), FlowProcess())
    assert torch.equal(step.sigma_ceiling, schedule.sigmas[1].expand(3))


def test_a_step_belongs_to_the_caller_and_can_be_changed_without_touching_the_plan():
    plan = window(flow_schedule(4), 0.7)
    before = plan.schedule.sigmas.clone()
    step = plan.steps(torch.tensor([0, 1]), FlowProcess())
    for value in (step.sigma, step.sigma_next, step.sigma_ceiling, step.timestep):
        value.zero_()
    assert torch.equal(plan.schedule.sigmas, before)
    assert float(plan.schedule.timesteps[0]) == 1000
