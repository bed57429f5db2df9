"""Every method on a noise-prediction model: a tiny StableDiffusionPipeline, rolled out by DDIM or a solver."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from flowrl.algorithms.base import EdgeMethod, SampleMethod
from flowrl.core import registry
from flowrl.core.types import SampleId
from flowrl.samplers import ddim
from flowrl.samplers.base import step_std
from flowrl.training.metrics import Sums
from tests import native
from tests import tiny_pipelines as tiny
from tests.toys import Session, algorithms, draw_advantages, learner_of, make_step, roll_out, rollout_of

# Methods that are defined on flows only -> what their refusal tells to use instead.
UNDEFINED = {"mix_grpo_flash": r"predicts noise \(VP\); use mix_grpo"}
EDGES = [name for name in algorithms(EdgeMethod) if name not in UNDEFINED]
SAMPLES = algorithms(SampleMethod)
OWN = {
    "grpo_guard": {"clip_range": 1e-3},
    "sage_grpo": {"clip_range": 1e-3},
    "dynamic_tree_rpo": {"growth": 0.0},
}
"""Nobody published a clip range for their ratio on DDIM's steps; eta 1 leaves no room for noisier layers."""
SPREAD = torch.tensor([[[0.9, 0.2], [0.1, 0.8]]])  # rewards [R, P, G]
PROMPTS = (("one", ()), ("two", ()))


def build(name: str, **options: Any) -> Any:
    module = registry.load("algorithms", name)
    return module.build(module.Config(**OWN.get(name, {}) | options))


def adapter() -> Any:
    return native.adapter("sd", tiny.make("sd"), (16, 16))


def session_of(name: str, num_steps: int = 6, **options: Any) -> Session:
    sampler = ddim.build(ddim.Config())
    build(name, **options).config.check(sampler, num_steps)
    leaves = getattr(build(name, **options).config, "leaves", lambda steps: 1)(num_steps)
    group = 2 * leaves  # what a tree is compared with
    return roll_out(adapter(), algorithm=build(name, **options), sampler=sampler, group=group, num_steps=num_steps)


def iterate(session: Session) -> dict[str, float]:
    """The metrics of one iteration's updates; asserts that they moved the network."""
    before = [p.detach().clone() for p in session.adapter.network.parameters()]
    group, sums = max(i.sample for i in session.ids) + 1, Sums()
    rewards = SPREAD if group == 2 else torch.rand(1, 2, group, generator=torch.Generator().manual_seed(0))
    credit, rollout = session.algorithm.advantages(rewards, torch.ones(1), PROMPTS), rollout_of(session, rewards)
    if session.plan.tree is not None:
        credit = session.algorithm.on_tree(credit, rollout.leaf_rewards(torch.ones(1)), 1)
    learner = learner_of(
        session,
        updates=1,
        batch_size=9,
        lookup=lambda prompts: session.cond.index(torch.tensor([PROMPTS.index(p) for p in prompts])),
    )
    learner.update(1, dataclasses.replace(rollout, prompts=PROMPTS), credit, sums)
    after = list(session.adapter.network.parameters())
    assert all(bool(p.isfinite().all()) for p in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return sums.means()


@pytest.mark.parametrize("name", EDGES)
def test_a_method_on_steps_replays_its_rollout_and_trains(name):
    session = session_of(name)
    sampler = session.policy.sampler
    for batch in session.batches(draw_advantages(len(session.edges))):
        ratio = session.algorithm.log_ratio(session.networks.transition(batch), batch, sampler)
        # Other batches than the rollout's: rounding only.
        assert float(ratio.detach().abs().max()) <= 1e-5
    means = iterate(session)
    assert all(math.isfinite(value) for value in means.values())
    assert means["grad/norm"] > 0


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
    means = iterate(session)
    assert all(math.isfinite(value) for value in means.values())
    assert means["grad/norm"] > 0


@pytest.mark.parametrize("name", UNDEFINED)
def test_a_method_for_flows_only_says_what_to_use(name):
    assert name in algorithms(EdgeMethod)
    with pytest.raises(ValueError, match=UNDEFINED[name]):
        session_of(name)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "sage", "memoryless", "wan_sde"])
def test_a_law_for_flows_only_says_what_to_use(name):
    module, model = registry.load("samplers", name), adapter()
    with pytest.raises(ValueError, match=rf"'{name}' needs a flow.*rollout\.sampler=\{{.name.: .ddim., .eta.: 1\.0\}}"):
        step_std(module.build(module.Config()), model.process, make_step(model.process, 0.8, 0.6, 0.5))


def test_the_sa_solver_says_what_to_use_on_a_grid_that_ends_above_zero():
    with pytest.raises(ValueError, match=r"ends at 0\.0292; try algorithm\.solver=ode algorithm\.solver_noise=0\.0$"):
        session_of("awm", 8, solver="sa")
