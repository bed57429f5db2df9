"""GRPO-Guard: the normalised ratio and the weights of the steps."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.flow_grpo import clipped_terms
from flowrl.algorithms.grpo_guard import Config, Reweight, build, step_weight
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.diffusion.plan import window
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.losses.ratio import Surrogate, normalised_log_ratio
from flowrl.samplers import cps, dance_sde, ddim, flow_sde
from flowrl.samplers.base import StepDistribution
from tests.toys import ToyAdapter, make_step, nudge, roll_out

SDE = flow_sde.build(flow_sde.Config())
DANCE = dance_sde.build(dance_sde.Config())


def steps(sampler, num_steps: int = 8):
    plan = window(flow_schedule(num_steps), sampler.default_noise_level())
    return plan.steps(torch.arange(1, num_steps - 1), FlowProcess())


def test_the_normalised_log_ratio_is_the_plain_one_freed_of_bias_and_scale():
    """s (l + mean(dmu^2) / (2 s^2)) = mean(z dmu), to 1e-6 in float64."""
    draw = torch.Generator().manual_seed(0)
    old, change, z = torch.randn(3, 5, 64, generator=draw, dtype=torch.float64).unbind(0)
    std = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    s, change = std[:, None], 0.01 * change
    x_next = old + s * z
    plain = (-(x_next - old - change).square() + (x_next - old).square()).mean(1) / (2 * std**2)
    expected = std * (plain + change.square().mean(1) / (2 * std**2))
    found = normalised_log_ratio(StepDistribution((old + change).double(), std), old, x_next)
    # x' enters as float32, as in a rollout.
    assert_close(found, expected, rtol=0, atol=1e-6)


def test_over_the_noise_its_mean_is_zero_and_its_variance_free_of_the_step():
    """Variance mean(dmu^2) / D at any std; 20000 draws."""
    draw = torch.Generator().manual_seed(1)
    change, dims = 0.05 * torch.randn(16, generator=draw), 16
    for std in (0.05, 0.5):
        z = torch.randn(20000, dims, generator=draw)
        policy = StepDistribution(change.expand(20000, -1), torch.full((20000,), std))
        found = normalised_log_ratio(policy, torch.zeros(20000, dims), std * z)
        variance = float(change.square().mean() / dims)
        assert abs(float(found.mean())) < 5 * (variance / 20000) ** 0.5
        assert float(found.var()) == pytest.approx(variance, rel=0.05)


def velocity_gradients(sampler, form: Reweight, *, normalised: bool = True) -> torch.Tensor:
    """|d loss / d v| of every step by autograd, on policy, with one noise z and A = 1 everywhere; and |z| / D last."""
    step, draw = steps(sampler), torch.Generator().manual_seed(3)
    count = len(step.sigma)
    x, v = torch.randn(2, count, 2, 5, generator=draw).unbind(0)
    z = torch.randn(1, 2, 5, generator=draw)
    v.requires_grad_(True)
    policy = sampler.transition(FlowProcess(), FlowProcess().predict(v, x, step.sigma, "velocity"), x, step)
    old = policy.mean.detach()
    x_next = StepDistribution(old, policy.std).sample(z.expand(count, -1, -1))
    if normalised:
        log_ratio = normalised_log_ratio(policy, old, x_next)
    else:
        log_ratio = policy.log_prob(x_next) - StepDistribution(old, policy.std).log_prob(x_next)
    terms = clipped_terms(
        log_ratio, [torch.ones(count)], Surrogate(bounds=(1e-3, 1e-3)), step_weight(form, sampler, step)
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
    return torch.cat([gradient.flatten(1).norm(dim=1), z.norm()[None] / 10])


@pytest.mark.parametrize(
    ("sampler", "form", "scale"), [(SDE, "exact", 1.0), (DANCE, "exact", 1.0), (SDE, "flow_grpo", 1 + 0.7**2 / 2)]
)
def test_on_policy_the_gradient_by_the_velocity_has_one_norm_at_all_steps(sampler, form, scale):
    """By autograd through the kernel, the ratio and the clipped loss: |z| / D, times beta."""
    *found, expected = velocity_gradients(sampler, form)
    # z is recovered from x' - mean.
    assert_close(torch.stack(found), (scale * expected).expand(6), rtol=1e-4, atol=0)


@pytest.mark.parametrize("sampler", [SDE, DANCE])
def test_without_the_weights_the_norms_are_far_apart(sampler):
    """Baseline beta h z / s, RatioNorm alone beta h z."""
    step = steps(sampler)
    gain, std = sampler.velocity_gain(step).abs(), sampler.default_noise_level() * torch.ones(6)
    length = (step.sigma_next - step.sigma).abs()
    g = std * (step.sigma / (1 - step.sigma)).sqrt() if sampler is SDE else std
    for normalised, size in ((True, gain), (False, gain / (g * length.sqrt()))):
        *found, unit = velocity_gradients(sampler, "none", normalised=normalised)
        norms = torch.stack(found)
        assert_close(norms, size * unit, rtol=1e-4, atol=0)
        assert float(norms.max() / norms.min()) > 2


@pytest.mark.parametrize(("sigma", "ratio"), [(1.0, 1.0), (1 / 6, 1.5)])
def test_the_published_dance_weight_is_beta_squared_times_the_exact_one(sigma, ratio):
    """Eta 0.3, 1.0 at sigma 1 and 1.5 at sigma 1/6."""
    step = make_step(FlowProcess(), sigma, 0.9 * sigma, 0.3)
    published, exact = step_weight("dance_grpo", DANCE, step), step_weight("exact", DANCE, step)
    assert published is not None
    assert exact is not None
    assert float(published / exact) == pytest.approx(ratio, abs=1e-3)


def test_the_published_dance_weight_multiplies_by_beta_where_the_exact_one_divides():
    """They differ by beta^2 times the step's length being equal."""
    step = steps(DANCE)
    length = (step.sigma_next - step.sigma).abs()
    beta = 1 + 0.09 * (1 - step.sigma) / (2 * step.sigma)
    assert_close(step_weight("dance_grpo", DANCE, step), beta / length, rtol=1e-5, atol=0)
    assert_close(step_weight("exact", DANCE, step), 1 / (beta * length), rtol=1e-5, atol=0)
    assert step_weight("none", DANCE, step) is None


def test_a_sample_does_not_change_the_ratio_of_another():
    """It fails for the official code, whose bias is averaged over the batch."""
    session = roll_out(ToyAdapter(), algorithm=build(Config()))
    nudge(session.adapter.network, 0.05)
    batch = session.batch()
    policy = session.networks.transition(batch)
    before = session.algorithm.log_ratio(policy, batch, SDE)
    other = dataclasses.replace(policy, mean=torch.cat([policy.mean[:1] + 5, policy.mean[1:]]))
    after = session.algorithm.log_ratio(other, batch, SDE)
    assert torch.equal(after[1:], before[1:])
    assert float(after[0]) != float(before[0])


def test_the_published_clip_range_belongs_to_the_normalised_ratio():
    assert Config().clip(SDE) == Config().clip(DANCE) == (2e-6, 2e-6)
    assert Config(ratio_norm=False).clip(SDE) == (1e-4, 1e-4)


def test_a_normalised_ratio_of_the_unscaled_form_is_refused():
    """Not defined for CPS."""
    with pytest.raises(ValueError, match="ratio_norm=true"):
        Config(clip_range=1e-5).check(cps.build(cps.Config()), 10)
    Config(ratio_norm=False).check(cps.build(cps.Config()), 10)


@pytest.mark.parametrize(("form", "spread"), [("exact", 1), ("flow_grpo", 18), ("dance_grpo", 327)])
def test_the_published_weights_are_refused_where_they_equalise_nothing(form, spread):
    """On SD's 50 steps by DDIM, the largest weighted move of a step over the smallest; |dt| is a flow's."""
    sampler, process = ddim.build(ddim.Config()), VPProcess()
    step = window(vp_schedule(50), 1.0).steps(torch.arange(49), process)
    weight = step_weight(form, sampler, step)
    assert weight is not None
    moves = weight * sampler.velocity_gain(step).abs()
    assert float(moves.max() / moves.min()) == pytest.approx(spread, rel=0.01)
    Config(reweight=form).check_process(FlowProcess())
    if form == "exact":
        Config(reweight=form).check_process(process)
        return
    with pytest.raises(ValueError, match=f"reweight={form} .*try reweight=exact"):
        Config(reweight=form).check_process(process)
