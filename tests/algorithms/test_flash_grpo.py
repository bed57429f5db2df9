"""Flash-GRPO: a step for each prompt, the weights of the steps, and Flow-GRPO-Fast as its limit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo, flow_grpo_fast
from flowrl.algorithms.flash_grpo import Config, build
from flowrl.algorithms.sage_grpo import gradient_norms
from flowrl.contracts.grids import flow_schedule
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.planning.memory import forward_rows
from flowrl.rollout.policy import Evaluations
from flowrl.samplers import cps, flow_sde, wan_sde
from flowrl.training.edge_batches import nodes_per_sample
from tests.toys import ToyAdapter, draw_advantages, nudge, roll_out

POOL = [0, 1, 3]
SDE, WAN = flow_sde.build(flow_sde.Config(noise_level=0.7)), wan_sde.build(wan_sde.Config())


def rolled(config: Config | None = None, **options: Any):
    algorithm = build(config or Config(sde_steps=POOL, clip_range=1e-3))
    given: dict[str, Any] = {"prompts": 3} | options
    return roll_out(ToyAdapter(), algorithm=algorithm, **given)


# ---- the steps


@pytest.mark.parametrize("shared_start", [False, True])
def test_a_sample_has_one_trained_step_and_those_of_a_prompt_have_the_same(shared_start):
    session = rolled(shared_start=shared_start)
    assert session.edges.sample.tolist() == list(range(9))
    steps = session.edges.step.reshape(3, 3)
    assert torch.equal(steps, steps[:, :1].expand_as(steps))
    assert sorted(steps[:, 0].tolist()) == POOL, "spread evenly over the prompts"
    assert steps[:, 0].tolist() == list(session.plan.own)


@pytest.mark.parametrize("shared_start", [False, True])
def test_the_samples_of_a_prompt_are_those_of_a_plan_with_its_step_alone(shared_start):
    session = rolled(shared_start=shared_start)
    for slot, k in enumerate(session.plan.own):
        alone = roll_out(
            ToyAdapter(), flow_grpo.Config(sde_steps=[k]), prompts=3, sampler=SDE, shared_start=shared_start
        )
        mine = slice(3 * slot, 3 * slot + 3)
        # Forwards hold other rows, so they round otherwise.
        assert_close(session.samples.x0[mine], alone.samples.x0[mine], rtol=1e-5, atol=1e-6)
        assert_close(session.edges.old_log_prob[mine], alone.edges.old_log_prob[mine], rtol=1e-5, atol=1e-6)
        for end in ("parent", "child"):
            found, expected = (each.edges.nodes[getattr(each.edges, end)[mine]] for each in (session, alone))
            assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_neither_batches_nor_shares_of_processes_change_who_has_which_step():
    """A batch, or a process, knows its own slots alone."""
    whole, small = rolled(batch_size=9), rolled(batch_size=1)
    assert torch.equal(whole.edges.step, small.edges.step)
    assert_close(whole.samples.x0, small.samples.x0, rtol=1e-5, atol=1e-6)


def test_the_order_is_the_iterations_own_and_every_step_comes_equally_often():
    plans = [build(Config(sde_steps=POOL)).plan(flow_schedule(6), SDE, iteration, 7) for iteration in range(1, 301)]
    assert all(sorted(plan.own) == POOL and plan.train == tuple(POOL) for plan in plans)
    first = [plan.own[0] for plan in plans]
    assert all(abs(first.count(k) - 100) < 5 * 8.2 for k in POOL)  # std sqrt(300 * 2 / 9)
    again = build(Config(sde_steps=POOL)).plan(flow_schedule(6), SDE, 5, 7)
    assert again.own == plans[4].own
    many = rolled(prompts=7)
    assert many.edges.step[::3].tolist() == [many.plan.own[slot % 3] for slot in range(7)]


def test_by_default_the_pool_is_the_first_half_of_the_grid():
    assert build(Config()).plan(flow_schedule(20), WAN, 1, 0).train == tuple(range(10))


def test_a_plan_of_own_steps_takes_the_trained_ones_of_chains_alone():
    plan = window(flow_schedule(6), 0.7, POOL)
    for change in ({"own": (0, 1)}, {"own": (0, 1, 2)}, {"own": (0, 1, 3), "solver": ("dpm1",) * 6}):
        with pytest.raises(ValueError, match="steps of its own for each slot"):
            replace(plan, **change)
    assert replace(plan, own=(3, 0, 1)).trained == 1
    assert nodes_per_sample(replace(plan, own=(3, 0, 1))) == 2


# ---- its cost


@pytest.mark.parametrize("shared_start", [False, True])
def test_a_rollout_and_an_update_cost_what_is_foretold(shared_start):
    adapter = ToyAdapter()
    counter = Evaluations(adapter.network)
    session = roll_out(
        adapter,
        algorithm=build(Config(sde_steps=POOL, clip_range=1e-3)),
        prompts=3,
        shared_start=shared_start,
        batch_size=9,
    )
    rollout = counter.rows
    session.gradient(draw_advantages(9), batch_size=9)
    rolled_out, once = SimpleNamespace(shared_noise=shared_start), SimpleNamespace(updates_per_iteration=1)
    run: Any = SimpleNamespace(rollout=rolled_out, optim=once)
    assert forward_rows(run, session.plan, 9, 3) == (rollout, counter.rows - rollout)


# ---- the weights


def weights_of(plan: StepPlan, sampler) -> torch.Tensor:
    return 1 / gradient_norms(plan, sampler, FlowProcess())


def test_the_raw_weights_are_the_published_ones():
    """Wan-SDE, 20 steps, shift 3: std_k / |gain_k|."""
    sigmas = shifted_linspace(20, 3.0)
    plan = window(Schedule(sigmas, 1000 * sigmas[:-1]), 1.0, range(10))
    published = [7.4845, 7.0483, 6.6177, 6.1927, 5.7737, 5.3610, 4.9548, 4.5555, 4.1634, 3.7787]
    assert weights_of(plan, WAN).tolist() == pytest.approx(published, abs=6e-5)


@pytest.mark.parametrize("sampler", [SDE, WAN, cps.build(cps.Config())], ids=lambda sampler: sampler.name)
def test_a_weighted_loss_is_the_plain_one_times_weights_of_mean_1(sampler):
    options = {"sde_steps": POOL, "clip_range": 10.0}
    session = rolled(Config(**options), sampler=sampler)
    nudge(session.adapter.network, 1e-3)
    strength = weights_of(session.plan, sampler)
    weight = dict(zip(session.plan.train, (strength / strength.mean()).tolist(), strict=True))
    assert sum(weight.values()) / 3 == pytest.approx(1, rel=1e-6)
    for row in range(9):
        advantage = torch.zeros(9)
        advantage[row] = 1.5
        batch = session.batch(advantage)
        held, plain = (
            build(Config(**options, weighted=weighted)).loss(batch, session.networks).loss.detach()
            for weighted in (True, False)
        )
        assert float(held) == pytest.approx(weight[int(session.edges.step[row])] * float(plain), rel=1e-5)


def test_a_pool_of_one_step_is_flow_grpo_fast_with_that_window():
    fast = flow_grpo_fast.build(flow_grpo_fast.Config(window_size=1, low=1, high=2, clip_range=1e-3))
    own, other = (
        roll_out(ToyAdapter(), algorithm=each) for each in (build(Config(sde_steps=[1], clip_range=1e-3)), fast)
    )
    assert torch.equal(own.samples.x0, other.samples.x0)
    assert torch.equal(own.edges.old_log_prob, other.edges.old_log_prob)
    for session in (own, other):
        nudge(session.adapter.network)
    advantage = draw_advantages(len(own.edges))
    found, expected = own.gradient(advantage), other.gradient(advantage)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
