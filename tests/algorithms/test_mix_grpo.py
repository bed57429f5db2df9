"""MixGRPO and MixGRPO-Flash: the window that slides, the grid behind it."""

import torch

from flowrl.algorithms import mix_grpo, mix_grpo_flash
from flowrl.contracts.grids import flow_schedule
from flowrl.diffusion.windows import MixWindow
from flowrl.rollout.policy import Evaluations
from flowrl.samplers import flow_sde
from tests.toys import ToyAdapter, roll_out

SDE = flow_sde.build(flow_sde.Config())


def test_the_window_of_the_plan_slides_stays_and_is_never_empty():
    """Tau 2, s 1, w 2 on 6 steps, whose last start is 3."""
    algorithm = mix_grpo.build(mix_grpo.Config(window=MixWindow(size=2, interval=2)))
    plans = [algorithm.plan(flow_schedule(6), SDE, iteration, 0) for iteration in range(1, 11)]
    expected = [(0, 1)] * 2 + [(1, 2)] * 2 + [(2, 3)] * 2 + [(3,)] * 4
    assert [plan.train for plan in plans] == expected
    assert all(tuple(k for k, on in enumerate(plan.stochastic) if on) == plan.train for plan in plans)


def test_the_random_window_is_a_function_of_seed_and_iteration_alone():
    config = mix_grpo.Config(window=MixWindow(strategy="random", size=2))

    def draw(seed: int) -> list[tuple[int, ...]]:
        return [mix_grpo.build(config).plan(flow_schedule(10), SDE, k, seed).train for k in range(1, 30)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert len(set(draw(0))) > 3


def test_rewards_are_normalised_each_and_merged_with_weights_that_sum_to_one():
    """MixGRPO's advantage_aggr."""
    rewards = torch.tensor([[[0.0, 1.0, 2.0]], [[0.0, 0.0, 30.0]]])
    algorithm = mix_grpo.build(mix_grpo.Config())
    found = algorithm.advantages(rewards, torch.tensor([1.0, 3.0])).values[0, :, 0]
    each = (rewards - rewards.mean(2, keepdim=True)) / rewards.std(2, keepdim=True)
    torch.testing.assert_close(found, (0.25 * each[0] + 0.75 * each[1])[0], rtol=1e-5, atol=1e-6)


def test_flash_takes_fewer_steps_behind_the_window_by_its_solver():
    """e + n forwards; the grid is the full one up to sigma_{e+1} and ends at 0."""
    config = mix_grpo_flash.Config(window=MixWindow(size=2), ratio_kept=0.5, shift=3.0)
    full, plan = flow_schedule(10), mix_grpo_flash.build(config).plan(flow_schedule(10), SDE, 1, 0)
    assert plan.train == (0, 1)
    assert len(plan) == 1 + 4
    assert torch.equal(plan.schedule.sigmas[:3], full.sigmas[:3])
    assert float(plan.schedule.sigmas[-1]) == 0
    assert plan.solver == ("ode",) * 2 + ("dpm2_midpoint",) * 3


def test_a_flash_iteration_costs_what_its_plan_says():
    adapter = ToyAdapter()
    counter = Evaluations(adapter.network)
    config = mix_grpo_flash.Config(window=MixWindow(size=2), ratio_kept=0.5)
    session = roll_out(adapter, algorithm=mix_grpo_flash.build(config), num_steps=10)
    assert counter.rows == len(session.plan) * 6 < 10 * 6
