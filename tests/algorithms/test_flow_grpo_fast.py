"""Flow-GRPO-Fast: the window that moves, the published clip ranges, CPS."""

import re
from collections import Counter

import pytest
import torch

from flowrl.algorithms import flow_grpo
from flowrl.algorithms.flow_grpo_fast import Config, build
from flowrl.config.components import component
from flowrl.contracts.grids import flow_schedule
from flowrl.diffusion.process import euler_mean
from flowrl.rollout.policy import Evaluations
from flowrl.samplers import cps, flow_sde, memoryless, wan_sde
from tests.toys import ToyAdapter, draw_advantages, roll_out

SDE = flow_sde.build(flow_sde.Config())
CPS = cps.build(cps.Config())


def windows(config: Config, count: int, seed: int = 0, steps: int = 10) -> list[tuple[int, ...]]:
    algorithm, grid = build(config), flow_schedule(steps)
    return [algorithm.plan(grid, SDE, iteration, seed).train for iteration in range(1, count + 1)]


# ---- the window


def test_the_latents_at_the_window_are_an_ode_run_from_the_same_noise():
    session = roll_out(ToyAdapter(), algorithm=build(Config(window_size=2, low=2, high=4)))
    assert session.plan.train == (2, 3)
    x, cond = session.noise.initial(session.ids), session.cond.index(session.rows)
    with torch.no_grad():
        for k in range(2):
            step = session.plan.steps(torch.full((6,), k), session.adapter.process)
            x = euler_mean(session.adapter.process, session.policy.predict(x, step, cond), step)
    entry = session.edges.nodes[session.edges.parent[session.edges.step == 2]]
    torch.testing.assert_close(entry, x, rtol=1e-6, atol=1e-6)


def test_the_start_is_uniform_and_differs_between_iterations_and_seeds():
    """hi - lo - w + 1 = 4 places; 2000 draws, 5 standard deviations are 97."""
    found = windows(Config(window_size=2, high=5), 2000)
    counts = Counter(window[0] for window in found)
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(abs(count - 500) < 100 for count in counts.values())
    assert all(window[1] == window[0] + 1 for window in found)
    assert found[:50] != windows(Config(window_size=2, high=5), 50, seed=1)


def test_members_of_a_bundle_with_one_start_are_bitwise_equal_at_the_window():
    session = roll_out(
        ToyAdapter(), algorithm=build(Config(window_size=2, low=2, high=4)), shared_start=True, batch_size=6
    )
    entry = session.edges.nodes[session.edges.parent[session.edges.step == 2]].reshape(2, 3, -1)
    assert torch.equal(entry, entry[:, :1].expand_as(entry))


def test_an_update_costs_as_many_forwards_as_the_window_has_steps():
    adapter = ToyAdapter()
    counter = Evaluations(adapter.network)
    session = roll_out(adapter, algorithm=build(Config(window_size=2)))
    before = counter.rows
    session.gradient(draw_advantages(len(session.edges)))
    assert counter.rows - before == 2 * len(session.ids)


def test_by_default_the_window_lies_in_the_noisier_half():
    assert {k for window in windows(Config(), 200) for k in window} == {0, 1, 2, 3, 4}


# ---- the clip range


@pytest.mark.parametrize(
    ("sampler", "plain", "fast"),
    [(SDE, 1e-4, 1e-5), (CPS, 1e-5, 1e-5), (wan_sde.build(wan_sde.Config()), 1e-3, 1e-5)],
)
def test_the_default_clip_range_is_the_published_one_of_law_form_and_ratio(sampler, plain, fast):
    assert flow_grpo.Config().clip(sampler) == (plain, plain)
    assert Config().clip(sampler) == (fast, fast)


def test_a_given_clip_range_is_used_as_it_is():
    assert Config(clip_range=0.3).clip(CPS) == (0.3, 0.3)
    assert flow_grpo.Config(clip_range=[0.3, 0.4]).clip(memoryless.build(memoryless.Config())) == (0.3, 0.4)


def test_a_sampler_without_a_published_clip_range_asks_for_one():
    with pytest.raises(ValueError, match=r"'memoryless'.*algorithm\.clip_range"):
        memoryless.build(memoryless.Config()).clip_range("plain")


@pytest.mark.parametrize("base", ["flowrl.Sampler", "flowrl.samplers.flow_sde.FlowSde"])
def test_a_sampler_by_path_is_named_by_its_file(tmp_path, base):
    """Even one that is called like a built-in sampler, or extends it: the published value is not for it."""
    file = tmp_path / "flow_sde.py"
    file.write_text(f"import flowrl.samplers.flow_sde\nclass Mine({base}):\n    def transition(self, *_): ...\n")
    sampler = component("samplers", {"path": str(file)}, "rollout.sampler").build()
    with pytest.raises(ValueError, match=rf"sampler '{re.escape(str(file))}'.*algorithm\.clip_range"):
        flow_grpo.Config().check(sampler, 10)


# ---- CPS


def test_with_cps_the_stored_log_probs_and_the_ratio_are_unscaled():
    """Log p = -mean (x' - mean)^2, in rollout and loss alike."""
    session = roll_out(ToyAdapter(key_per_step=True), algorithm=build(Config()), sampler=CPS)
    for batch in session.batches(draw_advantages(len(session.edges))):
        mean = session.networks.transition(batch).mean
        expected = -(batch.next_latents - mean).square().flatten(1).mean(1)
        assert torch.equal(batch.old_log_prob, expected)
        ratio = session.algorithm.loss(batch, session.networks).per_step["policy/ratio"]
        assert ratio.tolist() == [1.0] * len(batch)


def test_with_cps_the_gradient_is_that_of_the_unscaled_log_prob():
    session = roll_out(ToyAdapter(), algorithm=build(Config()), sampler=CPS)
    advantage = draw_advantages(len(session.edges))
    found = session.gradient(advantage)
    session.adapter.network.zero_grad()
    for batch in session.batches(advantage):
        square = (batch.next_latents - session.networks.transition(batch).mean).square().flatten(1).mean(1)
        ((batch.advantage[:, 0] * square).sum() / len(session.edges)).backward()
    for name, p in session.adapter.network.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-7)
