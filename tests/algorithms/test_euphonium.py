"""Euphonium: DanceGRPO without a pull, the pulled transition and its density by hand, values, the distilled form."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.algorithms.base import EdgeMethod
from flowrl.core.types import Condition
from flowrl.losses.batches import Microbatch
from flowrl.rollout.trajectories import Rollout
from flowrl.run.session import Session
from tests.toys import bitwise, nudge

ETA, STRENGTH = 1.5, 4.0
TILT = f"tilt: {{output: judge, strength: {STRENGTH}}}"


def open_session(algorithm: str, *words: str) -> Session:
    return flowrl.Session(
        "configs/lab/dance_grpo.yaml",
        f"rollout={{sampler: {{name: dance_sde, eta: {ETA}}}, num_inference_steps: 4, prompts_per_iteration: 2}}",
        "rollout.group_size=3",
        "rollout.batch_size=4",
        "rollout.shared_noise=true",
        "data.max_prompts=3",
        "data.max_eval_prompts=1",
        "rewards=[{name: jpeg}, {name: latent_judge, model: tiny-judge, weight: 0.0}]",
        f"algorithm={algorithm}",
        "optim.batch_size=16",
        "optim.updates_per_iteration=1",
        *words,
    )


def euphonium(options: str = "", **known: Any) -> Session:
    more = "".join(f", {name}: {value}" for name, value in known.items())
    return open_session(
        f"{{name: euphonium, clip_range: 0.01, timestep_fraction: 1.0{options and ', '}{options}{more}}}"
    )


def slope_of(session: Session, x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
    assert session.rewards is not None
    judge = session.rewards.entries[1].reward.on_latents
    assert judge is not None
    x = x.clone().requires_grad_()
    return torch.autograd.grad(judge.value(x, sigma, cond).sum(), x)[0]


def batch_of(session: Session, rollout: Rollout) -> Microbatch:
    (batch,) = session.batches(rollout, session.credit(rollout), 1000)
    return batch


def expand(value: Tensor) -> Tensor:
    return value[:, None, None, None]


@pytest.mark.parametrize(
    "tilt", ["tilt: {output: judge, strength: 0.0}", pytest.param("tilt: null", marks=pytest.mark.slow)]
)
def test_without_a_pull_it_is_dance_grpo_bit_for_bit(tilt):
    found = []
    for session in (euphonium(tilt), open_session("{name: dance_grpo, clip_range: 0.01, timestep_fraction: 1.0}")):
        with session:
            rows = [session.step(k) for k in (1, 2)]
            assert rows[1]["grad/norm"] > 0
            found.append([p.detach().clone() for p in session.weights.parameters.values()])
    assert bitwise(*found)


def test_a_pulled_step_is_that_of_the_tilted_score_and_its_density_is_without_the_pull():
    """By hand: x' = x + (v + eta^2 / 2 (eps / sigma - lambda g)) dt + std z, and log p of the same without lambda."""
    with euphonium(TILT) as pulled, euphonium() as plain:
        rollout, other = pulled.roll_out(1), plain.roll_out(1)
        assert not torch.equal(rollout.samples.x0, other.samples.x0)
        policy, edges = pulled.networks.policy, rollout.edges
        sigmas, k = rollout.plan.schedule.sigmas, edges.step
        x, end = edges.nodes[edges.parent], edges.nodes[edges.child]
        cond, sigma, dt = rollout.cond.index(rollout.rows[edges.sample]), sigmas[k], sigmas[k + 1] - sigmas[k]
        with torch.no_grad():
            v = policy.adapter.predict(x, 1000 * sigma, cond, 1.0)
        g, eps, std = slope_of(pulled, x, sigma, cond), x + expand(1 - sigma) * v, ETA * (-dt).sqrt()
        mean = x + (v + ETA**2 / 2 * eps / expand(sigma)) * expand(dt)
        tilted = x + (v + ETA**2 / 2 * (eps / expand(sigma) - STRENGTH * g)) * expand(dt)
        assert float((tilted - mean).flatten(1).norm(dim=1).min()) > 0.01
        # The first step's noise is that of the run without a pull: it starts at the same latents.
        first, others = k == 0, other.edges
        drawn = others.nodes[others.child][first] - mean[first]
        assert_close(end[first] - tilted[first], drawn, rtol=1e-3, atol=1e-4)
        z = (end - tilted) / expand(std)
        assert float(z.square().mean()) == pytest.approx(1, abs=0.1)
        density = -(end - mean).square() / (2 * expand(std).square()) - expand(std).log() - math.log(2 * math.pi) / 2
        assert_close(edges.old_log_prob, density.flatten(1).mean(dim=1), rtol=1e-4, atol=1e-4)


def test_the_ratio_is_1_before_the_first_update_and_only_the_named_steps_are_pulled():
    with euphonium(f"tilt: {{output: judge, strength: {STRENGTH}, steps: [1]}}") as session, euphonium() as plain:
        rollout = session.roll_out(1)
        assert rollout.plan.tilt == (0.0, STRENGTH / 2, 0.0, 0.0)
        edges, other = rollout.edges, plain.roll_out(1).edges
        same = (edges.nodes[edges.child] == other.nodes[other.child]).flatten(1).all(dim=1)
        assert torch.equal(same, edges.step == 0)
        batch, method = batch_of(session, rollout), session.method
        assert isinstance(method, EdgeMethod)
        with torch.no_grad():
            policy = session.networks.transition(batch)
        log_ratio = method.log_ratio(policy, batch, session.networks.policy.sampler)
        assert float(log_ratio.abs().max()) < 1e-5
        assert session.update(rollout, session.credit(rollout))["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_a_pull_raises_the_judge_trains_no_judge_and_does_not_depend_on_the_batch():
    strong = "tilt: {output: judge, strength: 100.0}"
    alone = open_session(f"{{name: euphonium, clip_range: 0.01, {strong}}}", "rollout.batch_size=1")
    with euphonium(strong) as pulled, euphonium() as plain, alone:
        rollout = pulled.roll_out(1)
        assert float(rollout.raw["judge"].mean()) > float(plain.roll_out(1).raw["judge"].mean()) + 0.5
        assert_close(alone.roll_out(1).samples.x0, rollout.samples.x0, rtol=1e-2, atol=1e-2)
        pulled.update(rollout, pulled.credit(rollout))
        assert pulled.rewards is not None
        judge = pulled.rewards.entries[1].reward.on_latents
        assert judge is not None
        assert judge.network is not None
        assert all(p.grad is None and not p.requires_grad for p in judge.network.parameters())


def test_values_credit_a_step_by_the_latents_before_it():
    with euphonium(TILT, step_values="{output: judge, weight: 2.0, of: value}") as session:
        rollout = session.roll_out(1)
        edges, gains = rollout.edges, rollout.gains
        assert gains is not None
        sigma, cond = rollout.plan.schedule.sigmas[edges.step], rollout.cond.index(rollout.rows[edges.sample])
        assert session.rewards is not None
        judge = session.rewards.entries[1].reward.on_latents
        assert judge is not None
        with torch.no_grad():
            values = judge.value(edges.nodes[edges.parent], sigma, cond)
        ids = [rollout.samples.ids[row] for row in edges.sample.tolist()]
        slot, sample = torch.tensor([[i.slot, i.sample] for i in ids]).T
        assert_close(gains[slot, sample, edges.step], values, rtol=1e-4, atol=1e-4)
        # One start for a group: its values are equal there, and say nothing.
        credit, plain = session.credit(rollout), session.method.advantages(rollout.rewards, torch.tensor([1.0, 0.0]))
        assert credit.steps is not None
        assert_close(credit.steps[:, :, 0], plain.values.sum(dim=2), rtol=1e-4, atol=1e-4)
        later = credit.steps[:, :, 1] - plain.values.sum(dim=2)
        assert_close(later.mean(dim=1), torch.zeros(2), rtol=0, atol=1e-4)
        assert float(later.abs().max()) > 0.5


def test_the_distilled_form_is_the_distance_from_the_old_velocity_with_the_pull():
    """At the policy of the rollout mean_d (pull / dt)^2 at pulled steps; its slope raises the judge, and at v_old +
    pull / dt it is 0."""
    options = f"tilt: {{output: judge, strength: {STRENGTH}, steps: [1, 2], distil: 0.5}}"
    with euphonium(options) as session:
        rollout = session.roll_out(1)
        batch = batch_of(session, rollout)
        sigma = batch.step.sigma
        x, cond = batch.by_edge(batch.latents), batch.cond.index(batch.parent)
        goal = -STRENGTH * ETA**2 / 2 * slope_of(session, x, sigma, cond)  # pull / dt
        pulled = (batch.step.index > 0).float()
        expected = (pulled * goal.square().flatten(1).mean(dim=1)).sum()
        found = session.method.loss(batch, session.networks)
        assert_close(found.metrics["policy/distilled"], expected, rtol=1e-3, atol=0)
        with euphonium(f"tilt: {{output: judge, strength: {STRENGTH}, steps: [1, 2]}}") as without:
            bare = without.method.loss(batch, session.networks)
        assert_close(found.loss - bare.loss, 0.5 * expected, rtol=1e-3, atol=1e-5)
        # The slope at the velocity is -(pull / dt) / D a value: the whole gradient is that of <v, it>.
        v = session.networks.policy.predict(batch.latents, batch.start, batch.cond).velocity
        by_hand = (-2 * 0.5 / v[0].numel() * expand(pulled) * goal * batch.by_edge(v)).sum()
        parameters = [*session.weights.parameters.values()]
        hand = torch.autograd.grad(by_hand, parameters)
        again = torch.autograd.grad(
            session.method.loss(batch, session.networks).loss - _bare(session, batch), parameters
        )
        apart, size = (sum(float(part.square().sum()) for part in parts) for parts in (_minus(hand, again), hand))
        assert apart < 1e-4 * size
        nudge(session.model.network, 0.01)
        moved = session.networks.policy.predict(batch.latents, batch.start, batch.cond).velocity.detach()
        reached = {**batch.columns, "velocity_old": batch.by_edge(moved)}
        there = dataclasses.replace(batch, columns=reached)
        assert float(session.method.loss(there, session.networks).metrics["policy/distilled"]) == 0


def _minus(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> list[Tensor]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _bare(session: Session, batch: Microbatch) -> Tensor:
    """The loss without the distilled form."""
    method: Any = session.method
    weight, method.distil = method.distil, 0.0
    try:
        return method.loss(batch, session.networks).loss
    finally:
        method.distil = weight
