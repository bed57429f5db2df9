"""Dynamic-TreeRPO: noise by layer, clip ranges by advantage, regression to the best way."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.dynamic_tree_rpo import Config, DynamicTreeRpo, TuningConfig, build
from flowrl.algorithms.g2rpo import Config as G2rpoConfig
from flowrl.algorithms.g2rpo import build as g2rpo
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.windows import MixWindow
from flowrl.samplers import cps, dance_sde, ddim, flow_sde
from flowrl.samplers.base import step_std
from tests.toys import Session, ToyAdapter, gradient_of, nudge, replay_of, roll_out, rollout_of

ONE = torch.ones(1)
LAW = flow_sde.build(flow_sde.Config(noise_level=0.6))


def window(size: int) -> MixWindow:
    return MixWindow(size=size, strategy="frozen")


def session_of(iteration: int = 1, **options: Any) -> Session:
    config = Config(**({"window": window(2), "clip_range": 1e-3} | options))
    return roll_out(ToyAdapter(), algorithm=build(config), sampler=LAW, prompts=2, group=4, iteration=iteration)


def rewards() -> torch.Tensor:
    return torch.tensor([[[0.1, 0.9, 0.2, 0.4], [0.8, 0.3, 0.5, 0.6]]])


def stds(plan: StepPlan, sampler: Any, vp: bool = False) -> torch.Tensor:
    """Of the trained steps."""
    process = ToyAdapter(vp=vp).process
    return step_std(sampler, process, plan.steps(torch.tensor(plan.train), process))


def credit_of(session: Session, values: torch.Tensor):
    credit = session.algorithm.advantages(values, ONE)
    return session.algorithm.on_tree(credit, rollout_of(session, values).leaf_rewards(ONE), 1)


# ---- noise


def test_the_noise_of_a_layer_grows_linearly_and_is_the_one_that_is_scored():
    algorithm = build(Config(window=window(4), growth=0.5))
    plan = algorithm.plan(flow_schedule(10), LAW, 1, 0)
    assert plan.noise_level[:4] == pytest.approx([0.6, 0.675, 0.75, 0.825])
    assert plan.noise_level[4:] == (0.0,) * 6
    found, expected = (stds(each, LAW) for each in (plan, replace(plan, noise_level=(0.6,) * 4 + (0.0,) * 6)))
    assert_close(found / expected, torch.tensor([1.0, 1.125, 1.25, 1.375]))


@pytest.mark.parametrize("vp", [False, True])
@pytest.mark.parametrize("law", [ddim, cps])
def test_growth_that_would_leave_more_noise_than_sigma_is_refused_and_what_the_message_names_fits(law, vp):
    (key,) = (field.name for field in fields(law.Config))
    for growth, level in ((0.5, 0.8), (0.5, 1.0), (0.1, 0.99), (3.0, 0.5)):
        with pytest.raises(ValueError, match=rf"growth={growth}.*try growth=.*, or rollout\.sampler\.{key}=") as error:
            Config(growth=growth).check(law.build(law.Config(**{key: level})), 10)
        growths, levels = (
            float(text) for text in re.findall(r"=([\d.]+)(?:,|$)", str(error.value).partition("; try ")[2])
        )
        for fits, own in ((growths, level), (growth, levels)):
            config, sampler = Config(growth=fits, window=window(4)), law.build(law.Config(**{key: own}))
            config.check(sampler, 10)
            plan = build(config).plan((vp_schedule if vp else flow_schedule)(10), sampler, 1, 0)
            assert stds(plan, sampler, vp).le(plan.schedule.sigmas[1:5] * (1 + 1e-6)).all()
            assert max(plan.noise_level) == pytest.approx(1, abs=2e-3), "no more room than that"


def test_laws_without_a_bound_and_a_tree_of_one_layer_take_any_growth():
    for sampler in (dance_sde.build(dance_sde.Config(eta=0.9)), flow_sde.build(flow_sde.Config(noise_level=0.9))):
        Config(growth=7.0).check(sampler, 10)
    Config(growth=7.0, window=window(1)).check(ddim.build(ddim.Config(eta=1.0)), 10)
    Config(growth=0.0).check(ddim.build(ddim.Config(eta=1.0)), 10)


def test_the_rollouts_noise_is_that_of_its_plan():
    session = session_of(growth=1.0)
    step = session.plan.steps(session.edges.step, session.adapter.process)
    assert_close(step.noise_level, 0.6 * (1 + session.edges.step / 2))
    law = session.policy.transition(
        session.edges.nodes[session.edges.parent], step, session.cond.index(session.rows[session.edges.sample])
    )
    assert_close(law.std, step_std(LAW, session.adapter.process, step))
    drawn = (session.edges.nodes[session.edges.child] - law.mean).flatten(1) / law.std[:, None]
    assert float(drawn.square().mean()) == pytest.approx(1, abs=0.2)


def test_one_layer_with_all_children_is_g2rpo_with_one_stride():
    """Growth 0 and depth 1; the same picture, the same edges, the same gradient."""
    tree = session_of(children=4, window=window(1), growth=0.0)
    flat = g2rpo(G2rpoConfig(children=4, strides=[1], steps=[0], clip_range=1e-3))
    other = roll_out(ToyAdapter(), algorithm=flat, sampler=LAW, prompts=2, group=4)
    assert torch.equal(tree.samples.x0, other.samples.x0)
    assert torch.equal(tree.edges.old_log_prob, other.edges.old_log_prob)
    advantage = torch.randn(len(tree.edges), generator=torch.Generator().manual_seed(1))
    found, expected = tree.gradient(advantage), other.gradient(advantage)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_window_slides_and_keeps_its_leaves_to_the_end():
    config = Config(window=MixWindow(size=3, interval=1), children=2)
    starts = [config.tree(8, iteration, 0).splits.index(True) for iteration in range(1, 9)]
    assert starts == [0, 1, 2, 3, 3, 3, 3, 3], "of 8 steps the last two are never in it"
    assert all(config.tree(8, iteration, 0).leaves == 8 for iteration in range(1, 9))
    assert config.leaves(4) == 4, "a short grid has a shallow tree"


# ---- clip


def clipped(sensitivity: float, advantage: float, size: float) -> torch.Tensor:
    session = session_of(clip_sensitivity=sensitivity, clip_range=size)
    nudge(session.adapter.network, 0.02)
    batch = session.batch(torch.full((len(session.edges),), advantage))
    return session.algorithm.loss(batch, session.networks).per_step["policy/clip_fraction"]


def test_the_clip_range_is_the_plain_one_at_advantage_0_and_wider_in_the_advantages_direction():
    session = session_of()
    nudge(session.adapter.network, 0.02)
    batch = session.batch(torch.ones(len(session.edges)))
    change = session.algorithm.log_ratio(session.networks.transition(batch), batch, LAW).detach().exp() - 1
    size = float(change.abs().median())
    for advantage in (1.0, -1.0):
        outward = change * advantage
        for sensitivity in (0.0, 0.5):
            bound = size * (1 + sensitivity)
            assert torch.equal(clipped(sensitivity, advantage, size).bool(), outward > bound)
    with torch.no_grad():
        losses = []
        for sensitivity in (0.0, 0.5):
            plain = session_of(clip_sensitivity=sensitivity, clip_range=size)
            nudge(plain.adapter.network, 0.02)
            losses.append(plain.algorithm.loss(plain.batch(torch.zeros(len(plain.edges))), plain.networks).loss)
    assert torch.equal(*losses)


# ---- tuning


def tuned_session() -> tuple[Session, Any]:
    """After an iteration of low rewards, one whose best leaves are above their mean."""
    session = session_of(tuning=TuningConfig(coef=2.0), clip_range=1e3)
    credit_of(session, rewards() - 1)
    return session, credit_of(session, rewards())


def test_the_target_is_the_velocity_on_the_way_to_the_best_leaf_of_the_tree():
    session, credit = tuned_session()
    edges = session.algorithm.annotated(rollout_of(session, rewards()), credit)
    best = {0: 1, 1: 0}
    assert session.plan.tree is not None
    for slot, leaf in best.items():
        for k in session.plan.train:
            lead = 4 * slot + int(session.plan.tree.child(k)[leaf])
            (own,) = ((edges.sample == lead) & (edges.step == k)).nonzero().squeeze(1)
            for row in ((edges.sample // 4 == slot) & (edges.step == k)).nonzero().squeeze(1):
                assert torch.equal(edges.columns["target"][row], edges.columns["velocity_old"][own])
    velocity = session.policy.predict(
        edges.nodes[edges.parent],
        session.plan.steps(edges.step, session.adapter.process),
        session.cond.index(session.rows[edges.sample]),
    ).velocity
    assert_close(edges.columns["velocity_old"], velocity.detach(), rtol=1e-4, atol=1e-5)


def test_the_weight_is_the_best_leafs_advantage_over_its_bound_where_it_beats_the_running_mean():
    session, credit = tuned_session()
    edges = session.algorithm.annotated(rollout_of(session, rewards()), credit)
    leaf = credit.values.squeeze(2)
    assert_close(edges.columns["worth"], (leaf.amax(dim=1)[edges.sample // 4] / 5).double())
    low = credit_of(session, rewards() - 2)
    assert session.algorithm.annotated(rollout_of(session, rewards()), low).columns["worth"].eq(0).all()


def test_nothing_is_imitated_before_there_is_a_mean():
    session = session_of(tuning=TuningConfig())
    credit = credit_of(session, rewards())
    edges = session.algorithm.annotated(rollout_of(session, rewards()), credit)
    assert edges.columns["worth"].eq(0).all()


def test_the_regression_has_no_gradient_on_the_best_way_at_the_old_policy():
    session, credit = tuned_session()
    replay = replay_of(session, rewards(), credit, updates=1, batch_size=64)
    edges = replay.rollout.edges
    on_best = (edges.columns["target"] == edges.columns["velocity_old"]).flatten(1).all(dim=1)
    found = {}
    for name, rows in (("best", on_best), ("others", ~on_best)):
        session.adapter.network.zero_grad()
        nothing = torch.zeros_like(replay.advantage)
        for batch in replay.forwards(rows.nonzero().squeeze(1), nothing):
            output = session.algorithm.loss(batch, session.networks)
            output.loss.backward()
            assert output.loss.item() == pytest.approx(float(output.metrics["policy/tuning"]), abs=1e-9)
        found[name] = max(float(g.abs().max()) for g in gradient_of(session.adapter.network).values())
    assert on_best.sum() == 8, "both children of the root and of one node, in each of two trees"
    assert found["best"] < 1e-6 < found["others"]


def test_the_running_mean_survives_a_checkpoint():
    session, _ = tuned_session()
    state = session.algorithm.state_dict()
    other = build(session.algorithm.config)
    other.load_state_dict(state)
    assert other.mean == session.algorithm.mean == pytest.approx(0.9 * -0.525 + 0.1 * 0.475)
    assert DynamicTreeRpo(Config()).state_dict() == {}
