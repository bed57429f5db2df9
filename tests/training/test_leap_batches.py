"""LeapAlign and FlowBP on tiny-sd3 and its judge: autograd through both leaps, weights, the judge's parameters."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms.base import GradientMethod
from flowrl.losses.reward_gradients import Route, levers
from flowrl.run.session import Session
from flowrl.scoring.surroundings import Latents
from tests.training.test_gradient_batches import apart, gradient_of, open_session

LEAP = "algorithm={name: leap_align, rho: 0.4, tau: %s, decoded_at_once: 1}"
JUDGE = "rewards=[{name: latent_judge, model: tiny-judge}]"


def route_of(session: Session, reach: int) -> Route:
    assert isinstance(session.method, GradientMethod)
    return session.method.route(reach, 1, 0)


def slope(session: Session, clean: Tensor) -> Tensor:
    """The judge's gradient at clean latents of the samples of iteration 1."""
    rollout, climb = session.roll_out(1), session.parts.learner.context.climb
    assert climb is not None
    prompts = [rollout.prompts[i.slot] for i in rollout.samples.ids]
    latents = Latents(clean, rollout.cond, rollout.rows)
    return climb(latents, [(1.0, prompts, rollout.cond, rollout.rows)]).gradient


def composed(session: Session, rho: float) -> tuple[dict[str, Tensor], Tensor]:
    """Of minus the weighed reward by autograd through the published composition in one graph; the weights."""
    rollout, policy = session.roll_out(1), session.networks.policy
    plan, kept, x0 = rollout.plan, rollout.samples.kept, rollout.samples.x0
    k, j = sorted(kept)[:2]
    sigma, cond = plan.schedule.sigmas, rollout.cond.index(rollout.rows)

    def v(x: Tensor, at: int) -> Tensor:
        return policy.predict(x, plan.steps(torch.full((len(x),), at), policy.adapter.process), cond).velocity

    to_j = kept[k].x + (sigma[j] - sigma[k]) * v(kept[k].x, k)
    x_j = to_j + (kept[j].x - to_j).detach()
    to_0 = x_j - sigma[j] * v(rho * x_j + (1 - rho) * x_j.detach(), j)
    missed = [(a - b).detach().abs().flatten(1).mean(dim=1) for a, b in ((to_j, kept[j].x), (to_0, x0))]
    weights = 1 / torch.stack(missed).clamp(min=0.1).sum(dim=0)
    end = to_0 + (x0 - to_0).detach()
    total = (weights[:, None, None, None] * slope(session, x0) * end).sum()
    grads = torch.autograd.grad(-total, [*session.weights.parameters.values()])
    return dict(zip(session.weights.parameters, grads, strict=True)), weights


def test_two_leaps_give_the_gradient_of_the_whole_graph_in_any_batches_and_weigh_their_samples():
    with open_session(JUDGE, LEAP % 0.1) as session:
        reach = levers(session.roll_out(1).plan.schedule)
        route = route_of(session, reach)
        assert route.end not in route.trained
        expected, weights = composed(session, 0.4)
        found = gradient_of(session)
        assert apart(found, expected) < 1e-4
        assert apart(gradient_of(session, batch_size=8), found) < 1e-4
        rollout = session.roll_out(1)
        (late, _) = session.batches(rollout, session.credit(rollout), 8)
        assert_close(late.metrics["reward_gradient/leap_weight"].sort().values, weights.sort().values)
        assert float(weights.max() / weights.min()) > 1.01
    with open_session(JUDGE, LEAP % "null") as alike:
        rollout = alike.roll_out(1)
        (plain, _) = alike.batches(rollout, alike.credit(rollout), 8)
        weight = late.metrics["reward_gradient/leap_weight"][:, None, None, None]
        assert_close(late.coefficient, weight * plain.coefficient, rtol=1e-5, atol=1e-9)
        assert "reward_gradient/leap_weight" not in plain.metrics


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("{rule: sparse, steps: 2}", marks=pytest.mark.slow),
        pytest.param("{rule: bridge, steps: 3}", marks=pytest.mark.slow),
        "{rule: lagrange, order: 2}",
    ],
)
def test_on_a_judge_of_latents_a_step_trains_the_policy_alone_by_each_rule(rule):
    with open_session(JUDGE, "algorithm={name: flowbp, decoded_at_once: 8, " + rule[1:]) as session:
        assert session.rewards is not None
        judge = session.rewards.entries[0].reward.on_latents
        assert judge is not None
        row = session.step(1)
        assert row["grad/norm"] > 0
        assert row["nfe/train"] >= len(route_of(session, 3).trained)
        assert ("reward_gradient/leap_weight" in row) == ("lagrange" in rule)
        assert judge.network is not None
        tensors = [*judge.network.parameters()]
        assert tensors
        assert all(p.grad is None and not p.requires_grad for p in tensors)


def test_draft_of_one_step_is_the_low_variance_form_without_redrawn_ends():
    """Its -sigma G at the last step's own prediction, which the sample is but for the steps without a lever."""
    with open_session(JUDGE, "algorithm.decoded_at_once=8") as session:
        rollout = session.roll_out(1)
        (batch,) = session.batches(rollout, session.credit(rollout), 8)
        kept = rollout.samples.kept[int(batch.steps[0])]
        order = [int((kept.x == x).flatten(1).all(dim=1).nonzero()) for x in batch.latents]
        expected = -batch.step.sigma[0] * slope(session, kept.x0_hat)[order]
        assert float((batch.coefficient - expected).norm() / expected.norm()) < 0.02
