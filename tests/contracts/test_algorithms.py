"""What every file in flowrl/algorithms/ must satisfy; a new file is tested before its author writes a test."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flowrl import registry
from flowrl.samplers import flow_sde
from tests.toys import ToyAdapter, draw_advantages, flow_schedule, nudge, roll_out

NAMES = registry.names("algorithms")


def build(name: str):
    module = registry.load("algorithms", name)
    return module.build(module.Config())


def test_there_are_algorithms_and_helpers_are_none():
    assert "flow_grpo" in NAMES
    assert not [name for name in NAMES if name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_a_frozen_config_with_defaults_a_build_a_level_and_its_source(name):
    module = registry.load("algorithms", name)
    config = module.Config()
    assert type(config).__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(config))
    assert not hasattr(config, "__dict__"), "the options are not slotted"
    assert module.LEVEL in ("tested", "verified", "experimental")
    assert module.build(config).level == module.LEVEL
    assert module.build(config).spatial is None
    assert "Source: " in module.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.advantages = None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_steps", "shift"), [(4, 1.0), (6, 3.0), (10, 3.0), (25, 5.0)])
def test_the_plan_is_valid_on_any_grid_repeatable_and_trains_no_last_step(name, num_steps, shift):
    """DESIGN section 4; StepPlan itself refuses a trained step without noise and an empty one cannot be made."""
    sampler, grid = flow_sde.build(flow_sde.Config()), flow_schedule(num_steps, shift)
    # MixGRPO-Flash makes nodes of its own, on the curve of the grid.
    own = {"shift": shift} if hasattr(build(name).config, "shift") else {}
    module = registry.load("algorithms", name)
    algorithm = module.build(module.Config(**own))
    algorithm.config.check(sampler, num_steps)
    for iteration in (1, 2, 60):
        plan = algorithm.plan(grid, sampler, iteration, 3)
        assert plan.train
        assert max(plan.train) < len(plan) - 1
        assert float(plan.schedule.sigmas[-1]) == 0
        again = algorithm.plan(grid, sampler, iteration, 3)
        assert (again.train, again.noise_level, again.solver) == (plan.train, plan.noise_level, plan.solver)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moved", [False, True])
def test_the_loss_is_finite_and_its_gradient_reaches_every_weight(name, moved):
    session = roll_out(ToyAdapter(), algorithm=build(name))
    if moved:
        nudge(session.adapter.network, 1e-4)
    advantage = draw_advantages(len(session.edges))
    for batch in session.batches(advantage):
        output = session.algorithm.loss(batch, session.networks)
        assert bool(output.loss.isfinite())
        assert output.loss.shape == ()
        assert set(session.algorithm.feedback) <= set(output.metrics)
        values = [*output.metrics.values(), *output.per_step.values()]
        assert all(bool(value.isfinite().all()) and not value.requires_grad for value in values)
        assert all(value.shape == (len(batch),) for value in output.per_step.values())
    for weight, gradient in session.gradient(advantage).items():
        assert bool(gradient.isfinite().all()), weight
        assert float(gradient.abs().max()) > 0, weight


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_update_the_log_ratio_is_bitwise_zero_at_the_rollouts_batches(name):
    """grpo_family 1.5.2 and 6.6.2, in the log ratio that the method itself uses."""
    session = roll_out(ToyAdapter(key_per_step=True), algorithm=build(name))
    sampler = session.policy.sampler
    for batch in session.batches(draw_advantages(len(session.edges))):
        found = session.algorithm.log_ratio(session.networks.transition(batch), batch, sampler)
        assert found.tolist() == [0.0] * len(batch)
    assert 0 < session.algorithm.parity_tolerance(sampler, torch.float32) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_state_survives_a_checkpoint_and_a_foreign_one_is_refused(name):
    algorithm, other = build(name), build(name)
    state = algorithm.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ValueError, match="foreign"):
        other.load_state_dict({"foreign": 1})


@pytest.mark.parametrize("name", NAMES)
def test_kept_edges_are_a_mask_over_the_rollouts_edges(name):
    session = roll_out(ToyAdapter(), algorithm=build(name))
    mask = session.algorithm.kept_edges(session.ids, session.plan, 1, 0)
    if mask is not None:
        assert mask.dtype == torch.bool
        assert mask.shape == (len(session.edges),)
        assert bool(mask.reshape(len(session.ids), -1).any(dim=1).all())
