"""What every file in flowrl/algorithms/ must satisfy; a new file is tested before its author writes a test."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch

from flowrl.algorithms import base, flow_grpo
from flowrl.algorithms.base import EdgeMethod, GradientMethod, NoiseMethod, SampleMethod, StateMethod
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.contracts.methods import require_plan
from flowrl.core import registry
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig, Advantages
from flowrl.credit.history import HistoryConfig
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.training_times import TimesConfig
from flowrl.samplers import flow_sde
from flowrl.training.metrics import Sums
from flowrl.training.replay_gate import tolerance
from tests.toys import (
    ToyAdapter,
    algorithms,
    draw_advantages,
    learner_of,
    loss_of,
    noising_of,
    outputs_of,
    roll_out,
    rollout_of,
    terms_gradient,
)

NAMES = registry.names("algorithms")
EDGES, SAMPLES, NOISE, GRADIENT = map(algorithms, (EdgeMethod, SampleMethod, NoiseMethod, GradientMethod))
STATES = algorithms(StateMethod)
SPREAD = torch.tensor([[[0.9, 0.2, 0.4], [0.1, 0.8, 0.3]]])  # rewards [R, P, G]
DOCS = Path(__file__).resolve().parents[2] / "docs"
GIVEN = {
    (): SPREAD,
    ("chosen", "rejected"): torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]),
    ("chosen", "drawn"): torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]),
    ("labelled",): torch.tensor([[[1.0], [0.0]]]),
    ("chosen",): torch.tensor([[[1.0], [1.0]]]),
}
"""Members of a slot -> rewards of two slots."""
# Grids of a noise process are known at their own nodes only.
ON_GRID = TimesConfig(name="discrete_wo_init", count=4)


def build(name: str, **options):
    module = registry.load("algorithms", name)
    return module.build(module.Config(**options))


def samples_session(name: str, vp: bool):
    options = {"times": ON_GRID} if vp else {}
    group = rewards_of(name).shape[2]
    return roll_out(ToyAdapter(vp=vp), algorithm=build(name, **options), num_steps=10, group=group)


def rewards_of(name: str) -> torch.Tensor:
    """Of two prompts, [1, 2, G]: those of the data where the method takes its samples from there."""
    return GIVEN[build(name).members]


def test_there_are_algorithms_and_helpers_are_none():
    assert "flow_grpo" in EDGES
    assert "awm" in SAMPLES
    assert "find" in NOISE
    assert sorted(EDGES + SAMPLES + NOISE + GRADIENT + STATES) == sorted(NAMES)
    assert not [name for name in NAMES if name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_a_frozen_config_with_defaults_a_build_a_level_and_its_source(name):
    module = registry.load("algorithms", name)
    config = module.Config()
    assert type(config).__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(config))
    assert module.LEVEL in ("tested", "verified", "experimental")
    assert module.build(config).level == module.LEVEL
    assert module.build(config).spatial is None
    assert "Source: " in (module.__doc__ or "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)


def ours(cls: type) -> int:
    """Levels of inheritance above a class, as far as they are ours."""
    return max((1 + ours(base) for base in cls.__bases__ if base.__module__.startswith("flowrl.")), default=0)


@pytest.mark.parametrize("file", sorted(Path(base.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_no_class_stands_on_more_than_two_levels(file):
    """What methods share is composed; a tower of classes or of options cannot be read in one file."""
    module = importlib.import_module(f"flowrl.algorithms.{file.stem}")
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    assert [f"{cls.__name__}: {ours(cls)}" for cls in own if ours(cls) > 2] == []


def test_the_whole_loss_of_flow_grpo_stands_in_its_file():
    pieces = (flow_grpo.FlowGrpo.loss, flow_grpo.FlowGrpo.plan, flow_grpo.clipped_loss, flow_grpo.with_reference)
    assert {piece.__module__ for piece in pieces} == {flow_grpo.__name__}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(("num_steps", "shift"), [(4, 1.0), (6, 3.0), (10, 3.0), (25, 5.0)])
def test_the_plan_is_valid_on_any_grid_repeatable_and_trains_no_last_step(name, num_steps, shift):
    """StepPlan itself refuses a trained step without noise and an empty one cannot be made."""
    sampler, grid = flow_sde.build(flow_sde.Config()), flow_schedule(num_steps, shift)
    # MixGRPO-Flash makes nodes of its own, on the curve of the grid.
    module = registry.load("algorithms", name)
    own = {"shift": shift} if "shift" in {field.name for field in dataclasses.fields(module.Config)} else {}
    algorithm = module.build(module.Config(**own))
    algorithm.config.check(sampler, num_steps)
    require_plan(algorithm, sampler, grid, FlowProcess())
    for iteration in (1, 2, 60):
        plan = algorithm.plan(grid, sampler, iteration, 3)
        assert max(plan.train) < len(plan) - 1
        assert float(plan.schedule.sigmas[-1]) == 0


@pytest.mark.parametrize("name", SAMPLES + NOISE + GRADIENT)
@pytest.mark.parametrize("grid", [flow_schedule(10), flow_schedule(25, 5.0), vp_schedule(10)], ids=["10", "25", "vp"])
def test_a_plan_without_edges_is_repeatable_trains_nothing_and_walks_any_grid(name, grid):
    sampler, algorithm = flow_sde.build(flow_sde.Config()), build(name)
    if name in SAMPLES:
        algorithm.config.check(sampler, len(grid))
    require_plan(algorithm, sampler, grid, FlowProcess())
    plan, again = (algorithm.plan(grid, sampler, iteration, 3) for iteration in (1, 2))
    assert any(plan.stochastic) == (name in GRADIENT and algorithm.config.noisy)
    assert len(plan) == len(grid)
    assert (plan.noise_level, plan.solver) == (again.noise_level, again.solver)


@pytest.mark.parametrize("name", SAMPLES)
def test_times_are_repeatable_and_as_many_as_announced(name):
    """What the batch geometry is checked against before a model is loaded."""
    algorithm, ids = build(name), [SampleId(slot, sample) for slot in range(2) for sample in range(3)]
    for num_steps in (10, 25):
        found = algorithm.times(flow_schedule(num_steps), ids, 4, 7)
        assert found.sigma.shape == found.timestep.shape == (6, algorithm.config.terms(num_steps))
        assert bool(((found.sigma > 0) & (found.sigma <= 1)).all())
        assert torch.equal(algorithm.times(flow_schedule(num_steps), ids[2:4], 4, 7).sigma, found.sigma[2:4])
        if algorithm.unit in ("group", "prompt"):  # or its forwards would not hold whole groups of one time
            by_prompt = found.sigma.reshape(2, 3, -1)
            assert torch.equal(by_prompt, by_prompt[:, :1].expand_as(by_prompt))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("vp", [False, True], ids=["flow", "vp"])
def test_a_step_against_the_gradient_fits_the_better_samples_better_than_the_worse(name, vp):
    """The sign, whatever the loss: along its descent the errors of good samples fall against those of bad ones."""
    session = samples_session(name, vp)
    rewards = rewards_of(name)
    part = noising_of(session, rewards, batch_size=18)
    gradient = terms_gradient(session, part)
    scale = sum(float(g.square().sum()) for g in gradient.values()) ** 0.5
    best = {0, 4} if rewards is SPREAD else set(rewards.flatten().nonzero().flatten().tolist())
    everyone = torch.ones_like(rewards[0], dtype=torch.bool)
    plain = Advantages(values=torch.zeros(*everyone.shape, 1), valid=everyone, dead=~everyone[:, 0], kept=everyone)

    def margin() -> float:
        """Mean error of the others (0 without any), less that of the best."""
        errors: dict[bool, list[float]] = {True: [], False: []}
        everything = noising_of(session, rewards, plain, batch_size=18)
        with torch.no_grad():
            for batch, _ in everything.plain_batches(0):
                found = session.algorithm.outputs(batch, session.networks).error()
                for sample, error in zip(batch.sample.tolist(), found.tolist(), strict=True):
                    errors[sample in best].append(error)
        return sum(errors[False]) / max(len(errors[False]), 1) - sum(errors[True]) / len(errors[True])

    before = margin()
    with torch.no_grad():
        for weight, p in session.adapter.network.named_parameters():
            p -= 1e-2 / scale * gradient[weight]
    assert margin() > before


@pytest.mark.parametrize("name", SAMPLES)
def test_a_gaussian_of_one_dimension_moves_towards_the_reward(name):
    """For every method: data N(m, 1/4) as a network, reward x0; only m is trained."""
    # Errors of one dimension are of order 1, where those of an image differ by 1e-3: so is the margin's temperature.
    scaled = name in ("dgpo", "online_dpo", "diffusion_dpo", "diffusion_kto", "seppo")
    algorithm = build(name, **({"beta": 1.0} if scaled else {}))
    generator = torch.Generator().manual_seed(0)
    sigma, count, mean = torch.full((64,), 0.6), 64, torch.zeros(1, requires_grad=True)

    def network(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The exact velocity for data N(m, 1/4)."""
        x0 = m + 0.4 * 0.25 / (0.16 * 0.25 + 0.36) * (x - 0.4 * m)
        return (x - x0) / 0.6

    for _ in range(25):
        clean = mean.detach() + 0.5 * torch.randn(count, 1, generator=generator)
        eps, group = torch.randn(count, 1, generator=generator), torch.zeros(count, dtype=torch.int64)
        rewards = clean.reshape(1, 1, count)
        if algorithm.members:  # data: of every two the larger first, with one noise
            clean, eps = clean.reshape(-1, 2).sort(descending=True).values.reshape(count, 1), eps[: count // 2]
            eps, group = eps.repeat_interleave(2, dim=0), torch.arange(count) // 2
            rewards = torch.tensor([1.0, 0.0]).repeat(count // 2).reshape(1, -1, max(len(algorithm.members), 1))
        x = 0.4 * clean + 0.6 * eps
        credit = algorithm.advantages(rewards, torch.ones(1))
        kept = credit.kept.flatten()
        if algorithm.members == ("chosen",):
            kept = kept & (rewards.flatten() == 1)
        start = {"reference": torch.zeros(1), "earlier": torch.zeros(1)}
        names = ("earlier",) if name == "seppo" else algorithm.roles
        roles = {role: network(start.get(role, mean.detach()), x)[kept] for role in names}
        outputs = outputs_of(
            {"policy": network(mean, x)[kept]} | roles,
            clean=clean[kept],
            eps=eps[kept],
            sigma=sigma[kept],
            advantage=credit.values.flatten()[kept],
            group=group[kept],
        )
        (gradient,) = torch.autograd.grad(loss_of(algorithm, outputs).loss, mean)
        with torch.no_grad():
            mean -= 0.05 * gradient.sign()
    assert float(mean.detach()) > 0.5


@pytest.mark.parametrize("name", SAMPLES)
def test_an_iteration_on_samples_moves_the_policy_and_leaves_the_reference(name):
    session = samples_session(name, False)
    before = {role: {k: v.clone() for k, v in copy.items()} for role, copy in session.weights.copies.items()}
    start = [p.detach().clone() for p in session.adapter.network.parameters()]
    sums, rewards = Sums(), rewards_of(name)
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner_of(session, updates=1, batch_size=9).update(1, rollout_of(session, rewards), credit, sums)
    assert all(not torch.equal(a, b) for a, b in zip(start, session.adapter.network.parameters(), strict=True))
    for role, copy in before.items():
        moved = any(not torch.equal(value, session.weights.copies[role][k]) for k, value in copy.items())
        assert moved == (role in session.algorithm.lags), role
    assert sums.means()["grad/norm"] > 0
    glossary = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for metric in sums.means():  # the errors against networks stand in one row of the roles
        assert f"`{metric.removeprefix('matching/to_')}`" in glossary, metric


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("name", EDGES)
def test_before_the_first_update_the_log_ratio_is_bitwise_zero_at_the_rollouts_batches(name, guidance_scale):
    session = roll_out(ToyAdapter(key_per_step=True), algorithm=build(name), guidance_scale=guidance_scale)
    sampler = session.policy.sampler
    for batch in session.batches(draw_advantages(len(session.edges))):
        found = session.algorithm.log_ratio(session.networks.transition(batch), batch, sampler)
        if session.plan.tree is None:
            assert found.tolist() == [0.0] * len(batch)
        else:  # these batches hold nodes of several trees, and leave nodes out that no trained step starts from
            assert float(found.detach().abs().max()) < 1e-6
    assert 0 < tolerance(session.algorithm, sampler, torch.float32) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_rewards_of_earlier_iterations_are_part_of_the_state_where_a_rule_remembers_them(name):
    """A method that forgot them would go on from a checkpoint with other advantages."""
    module, memory = registry.load("algorithms", name), HistoryConfig(buffer_size=4, min_count=2)
    own = getattr(module.Config(), "advantages", None)
    try:
        options = {"baseline": "group"} if name == "find" else {}
        config = module.Config(advantages=AdvantageConfig(name="batch", history=memory), **options)
    except (TypeError, ValueError):
        # Refused, or there is no rule at all.
        assert own in (None, AdvantageConfig())
        return
    algorithm, other = module.build(config), module.build(config)
    algorithm.advantages(SPREAD, torch.ones(1), [("a", ()), ("b", ())])
    state = json.loads(json.dumps(algorithm.state_dict()))
    assert [row[0] for row in state["history"]] == ["a", "b"]
    other.load_state_dict(state)
    found, same = (each.advantages(SPREAD + 1, torch.ones(1), [("a", ()), ("c", ())]) for each in (algorithm, other))
    assert torch.equal(found.values, same.values)
    with pytest.raises(ValueError, match="foreign"):
        other.load_state_dict(state | {"foreign": 1})


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_is_retired_unless_that_is_asked_for(name):
    assert build(name).retired(torch.ones(1, 3, 4), torch.ones(1)).tolist() == [False] * 3


@pytest.mark.parametrize("name", EDGES)
def test_kept_edges_are_a_mask_over_the_rollouts_edges(name):
    session = roll_out(ToyAdapter(), algorithm=build(name))
    mask = session.algorithm.kept_edges(session.ids, session.plan, 1, 0)
    if mask is not None:
        assert mask.dtype == torch.bool
        assert mask.shape == (len(session.edges),)
        assert bool(mask.reshape(len(session.ids), -1).any(dim=1).all())
