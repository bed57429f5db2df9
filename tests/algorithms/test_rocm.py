"""ROCM: coefficients by the consistency law, autograd through the noisy chain, f-divergences, DRaFT without noise."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.algorithms.rocm import DIVERGENCES, Config, build
from flowrl.contracts.grids import vp_schedule
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.reward_gradients import Route, links
from flowrl.run.session import Session
from flowrl.samplers import cps, ddim
from flowrl.training.gradient_batches import GradientBatches
from tests.toys import nudge
from tests.training.test_gradient_batches import apart, gradient_of
from tests.training.test_leap_batches import slope

NODES = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
CONSISTENT = cps.build(cps.Config(noise_level=1.0))


def open_session(algorithm: str, *words: str) -> Session:
    return flowrl.Session(
        "configs/judge/draft.yaml",
        "model={name: sd3, path: tiny-sd3-student, lora: null, max_sequence_length: 9}",
        "rollout={num_inference_steps: 4, guidance_scale: 1.0, prompts_per_iteration: 3, group_size: 1, batch_size: 8}",
        "data.max_prompts=3",
        "data.max_eval_prompts=1",
        "eval.num_inference_steps=4",
        f"algorithm={algorithm}",
        *words,
    )


def noisy(divergence: str = "{}", level: float = 1.0) -> Session:
    sampler = f"rollout.sampler={{name: cps, noise_level: {level}}}"
    return open_session(f"{{name: rocm, divergence: {divergence}}}", sampler)


# ---- the reward's gradient


def test_links_have_the_coefficients_of_the_consistency_law():
    """c = -(1 - sigma') sigma a and a <- (1 - sigma') (a + J^T c / (1 - sigma')): keep and gain of each step."""
    with noisy() as session:
        rollout = session.roll_out(1)
        work = GradientBatches(session.parts.learner.context, _iteration(session, rollout))
        assert_close(rollout.plan.schedule.sigmas, NODES)
        found = [(link.step, link.keep, link.gain, link.through) for link in work.links]
    ends = [0.0, 0.25, 0.5, 0.75]
    expected = [(3 - k, 1 - end, -(1 - end) * (end + 0.25), float(k < 3)) for k, end in enumerate(ends)]
    for (a, b, c, d), (step, keep, gain, through) in zip(found, expected, strict=True):
        assert (a, d) == (step, through)
        assert (b, c) == pytest.approx((keep, gain), abs=1e-6)


def _iteration(session: Session, rollout: Any) -> Any:
    from flowrl.training.base import Iteration
    from flowrl.training.metrics import Sums

    return Iteration(1, rollout, session.credit(rollout), Sums())


def test_on_a_noise_prediction_model_the_links_are_those_of_the_samplers_mean():
    schedule, kind, process = vp_schedule(5), "eps", VPProcess()
    sampler = ddim.build(ddim.Config(eta=1.0))
    plan = build(Config()).plan(schedule, sampler, 1, 0)
    route = Route(4, tuple(reversed(range(5))))
    x, y = torch.randn(2, 1, 7, generator=torch.Generator().manual_seed(0)).unbind()
    for link in links(plan, process, kind, route, sampler)[1:]:
        step = plan.steps(torch.tensor([link.step]), process)
        mean = sampler.transition(process, process.predict(y, x, step.sigma, kind, step.alpha), x, step).mean
        assert_close(link.keep * x + link.gain * y, mean, rtol=1e-4, atol=1e-5)
    plain = [(link.keep, link.gain) for link in links(solver_plan(schedule), process, kind, route)]
    assert plain != [(link.keep, link.gain) for link in links(plan, process, kind, route, sampler)]


def by_autograd(session: Session, coef: float) -> dict[str, Tensor]:
    """Of minus the reward plus coef times the sum of KL per dim, through the whole chain with the very noise of the
    rollout in one graph; the latents of the KL are the rollout's."""
    rollout, policy = session.roll_out(1), session.networks.policy
    kept, x0, cond = rollout.samples.kept, rollout.samples.x0, rollout.cond.index(rollout.rows)

    def predicted(x: Tensor, k: int) -> Tensor:
        return x - NODES[k] * policy.adapter.predict(x, torch.full((len(x),), 1000 * float(NODES[k])), cond, 1.0)

    def kl(k: int) -> Tensor:
        with torch.no_grad(), session.weights.using("reference"):
            reference = predicted(kept[k].x, k)
        factor = ((1 - NODES[k + 1]) / NODES[k + 1]).square()
        return factor * (predicted(kept[k].x, k) - reference).square().flatten(1).mean(dim=1) / 2

    x = kept[0].x
    for k in range(4):
        end = (1 - NODES[k + 1]) * predicted(x, k)
        x = end + ((kept[k + 1].x if k < 3 else x0) - end).detach()
    total = -(slope(session, x0) * x).sum()
    if coef:
        total = total + coef * sum(kl(k).sum() for k in range(3))
    parameters = session.weights.parameters
    return dict(zip(parameters, torch.autograd.grad(total, [*parameters.values()]), strict=True))


@pytest.mark.parametrize("coef", [0.0, 20.0])
def test_a_step_at_a_time_gives_the_gradient_of_the_whole_noisy_chain(coef):
    with noisy(f"{{name: kl, coef: {coef}}}") as session:
        nudge(session.model.network, 0.02)  # away from the reference
        expected = by_autograd(session, coef)
        assert apart(gradient_of(session, batch_size=2), expected) < 1e-4
        assert apart(gradient_of(session, batch_size=8), expected) < 1e-4
        if coef:
            assert apart(by_autograd(session, 0.0), expected) > 0.1


def test_without_noise_and_divergence_it_is_draft_of_all_steps():
    with noisy(level=0.0) as session, open_session("{name: draft, steps: 4}") as draft:
        assert torch.equal(session.roll_out(1).samples.x0, draft.roll_out(1).samples.x0)
        assert apart(gradient_of(session), gradient_of(draft)) == 0


def test_an_update_trains_the_policy_alone_and_is_free_of_a_divergence_at_the_untouched_network():
    rows = []
    for divergence in ("{}", "{name: hellinger, coef: 5.0}"):
        with noisy(divergence) as session:
            rows.append(session.step(1))
            scorer = session.rewards
            assert scorer is not None
            judge = scorer.entries[0].reward.on_latents
            assert judge is not None
            assert judge.network is not None
            assert all(p.grad is None and not p.requires_grad for p in judge.network.parameters())
            second = session.step(2)
    assert rows[0]["grad/norm"] == pytest.approx(rows[1]["grad/norm"], rel=1e-5)
    assert rows[0]["grad/norm"] > 0
    assert rows[1]["policy/divergence/step00"] == 0
    assert second["policy/divergence/step00"] > 0
    assert "policy/divergence/step03" not in second  # the last step has no noise


def test_only_the_steps_that_move_the_image_have_noise_and_are_kept():
    schedule = Schedule(torch.tensor([1.0, 0.5, 0.2, 0.001, 0.0]), torch.tensor([1000.0, 500.0, 200.0, 1.0]))
    plan = build(Config()).plan(schedule, CONSISTENT, 1, 0)
    assert plan.noise_level == (1.0, 1.0, 0.0, 0.0)
    assert plan.keep == (0, 1, 2)
    assert not plan.train


# ---- the divergences

GRID = torch.linspace(-30, 30, 200_001, dtype=torch.float64)


def integrated(name: str, distance: float, std: float) -> float:
    """Of N(0, std^2) from N(distance std, std^2), by the definition."""
    x, step = GRID * std, float(GRID[1] - GRID[0]) * std
    p, q = (torch.exp(-(((x - m) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi)) for m in (0.0, distance * std))
    mixed = (p + q) / 2

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.clamp(min=1e-300) / b.clamp(min=1e-300)).log(), 0.0)

    terms = {
        "kl": kl(p, q),
        "hellinger": (p.sqrt() - q.sqrt()).square() / 2,
        "jensen_shannon": (kl(p, mixed) + kl(q, mixed)) / 2,
        "fisher": p * (x / std**2 - (x - distance * std) / std**2).square(),
    }
    return float(terms[name].sum()) * step


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_that_of_two_gaussians_and_its_slope_the_values(name):
    for distance, std in ((0.3, 1.0), (1.0, 0.5), (2.5, 0.75)):
        q = torch.tensor([distance**2], requires_grad=True)
        value = DIVERGENCES[name](q, torch.tensor([std]))
        assert float(value.detach()) == pytest.approx(integrated(name, distance, std), rel=1e-4)
        (slope,) = torch.autograd.grad(value.sum(), q)
        near = [integrated(name, math.sqrt(distance**2 + h), std) for h in (-1e-3, 1e-3)]
        assert float(slope) == pytest.approx((near[1] - near[0]) / 2e-3, rel=1e-3)


def test_close_by_all_are_multiples_of_the_kl_and_far_apart_two_of_them_have_no_slope():
    std = torch.tensor([0.5])
    q = torch.tensor([1e-3])
    shares = {name: float(f(q, std) / DIVERGENCES["kl"](q, std)) for name, f in DIVERGENCES.items()}
    assert shares == pytest.approx({"kl": 1, "hellinger": 0.25, "jensen_shannon": 0.25, "fisher": 8}, rel=1e-3)
    far = torch.tensor([1e3], requires_grad=True)
    for name, end in {"hellinger": 1.0, "jensen_shannon": math.log(2)}.items():
        value = DIVERGENCES[name](far, std)
        assert float(value.detach()) == pytest.approx(end, abs=1e-5)
        assert float(torch.autograd.grad(value.sum(), far)[0]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_at_equal_means_a_divergence_is_0_with_a_slope_of_0(name):
    shift = torch.zeros(1, 4, requires_grad=True)
    value = DIVERGENCES[name](shift.square().mean(dim=1), torch.ones(1))
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-7)
    assert np.abs(shift.grad.numpy()).max() == 0  # type: ignore[union-attr]
