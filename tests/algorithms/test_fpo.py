"""FPO: ratios of stored pairs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import awm, diffusion_nft
from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.fpo import Config, build
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.training_times import TimesConfig
from tests.toys import ToyAdapter, loss_of, noising_of, outputs_of, roll_out

M = 6
SIGMA = torch.tensor([0.9, 0.5, 0.2, 0.7, 0.4, 0.1])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])
ADVANTAGE = torch.tensor([0.8, 0.8, 0.8, -0.3, -0.3, -0.3])


def draw(seed: int) -> Tensor:
    return torch.randn(M, 8, generator=torch.Generator().manual_seed(seed))


CLEAN, EPS = draw(1), draw(2)
SCENE: dict[str, Any] = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": ADVANTAGE, "sample": SAMPLE}


def outputs(v: Tensor, *, old: Tensor | None = None, vp: bool = False):
    return outputs_of({"policy": v}, **SCENE, old=old, vp=vp)


def test_the_error_of_the_implied_noise_is_one_minus_sigma_squared_that_of_the_velocity():
    eps, velocity = (build(Config(supervise=kind)).error(outputs(draw(3))) for kind in ("eps", "velocity"))
    assert_close(eps, (1 - SIGMA).double().square() * velocity, rtol=1e-4, atol=1e-7)


def test_on_a_noise_process_both_are_the_networks_own_error():
    """Its output is the noise."""
    eps, velocity = (build(Config(supervise=kind)).error(outputs(draw(3), vp=True)) for kind in ("eps", "velocity"))
    assert torch.equal(eps, velocity)


@pytest.mark.parametrize("pairs", [1, 3, 6])
@pytest.mark.parametrize("ratio", ["sample", "term"])
def test_the_ratio_of_the_old_policy_is_1_for_any_number_of_pairs(pairs, ratio):
    method = build(Config(ratio=ratio))
    found = outputs_of({"policy": draw(3)}, **(SCENE | {"sample": torch.arange(M) // pairs}))
    again = outputs_of({"policy": draw(3)}, **(SCENE | {"sample": torch.arange(M) // pairs}), old=method.error(found))
    output = loss_of(method, again)
    assert float(output.metrics["policy/ratio_mean"]) == M
    assert float(output.loss) == pytest.approx(-float(ADVANTAGE.sum()))


def test_pairs_are_averaged_before_the_exponential_or_each_has_its_ratio():
    now = build(Config()).error(outputs(draw(3)))
    shift = torch.tensor([0.3, -0.2, 0.5, 0.1, 0.2, -0.6], dtype=torch.float64)
    sample, term = (
        loss_of(build(Config(ratio=ratio, clip_range=9.0)), outputs(draw(3), old=now + shift)).metrics[
            "policy/ratio_mean"
        ]
        for ratio in ("sample", "term")
    )
    assert float(sample) == pytest.approx(3 * float(shift.reshape(2, 3).mean(dim=1).exp().sum()))
    assert float(term) == pytest.approx(float(shift.exp().sum()))
    assert float(term) > float(sample)  # Jensen


@pytest.mark.parametrize("ratio", ["sample", "term"])
def test_exponents_stay_within_3(ratio):
    now = build(Config()).error(outputs(draw(3)))
    method = build(Config(ratio=ratio))
    output = loss_of(method, outputs(draw(3), old=now + 50.0))
    assert float(output.metrics["policy/ratio_mean"]) == pytest.approx(M * math.exp(3))


def test_with_one_pair_on_velocities_its_gradient_is_that_of_awm_uniform():
    alone: dict[str, Any] = SCENE | {"sample": torch.arange(M)}
    off, found = AnchorConfig(coef=0.0), []
    for method in (build(Config(supervise="velocity")), awm.build(awm.Config(weighting="uniform", kl=off, ema_kl=off))):
        v = draw(3).requires_grad_(True)
        found.append(torch.autograd.grad(loss_of(method, outputs_of({"policy": v}, **alone)).loss, v)[0])
    assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


def test_the_clip_takes_the_gradient_of_what_has_moved_far_enough():
    now = build(Config(ratio="term")).error(outputs(draw(3)))
    shift = torch.tensor([2e-4, 0.0, -2e-4, -2e-4, 0.0, 2e-4], dtype=torch.float64)
    v = draw(3).requires_grad_(True)
    output = loss_of(build(Config(ratio="term")), outputs(v, old=now + shift))
    (gradient,) = torch.autograd.grad(output.loss, v)
    assert (gradient.abs().amax(dim=1) == 0).tolist() == [True, False, False, True, False, False]
    assert float(output.metrics["policy/clip_fraction"]) == 2


# ---- a pull for bad samples


def test_on_policy_the_quadratic_form_has_the_gradient_of_the_clip():
    found = []
    for negative in ("clip", "quadratic"):
        v = draw(3).requires_grad_(True)
        found.append(torch.autograd.grad(loss_of(build(Config(negative=negative)), outputs(v)).loss, v)[0])
    assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


def test_the_quadratic_form_pulls_back_bad_samples_that_have_left_and_good_ones_are_clipped_as_before():
    """Its factor of grad l is A - d / c, d the log ratio; at d = -50 too, beyond the bound of exponents."""
    advantage = torch.tensor([0.8, 0.8, 0.8, -0.3, -0.3, -0.3])
    shift = torch.tensor([2e-4, 0.0, -2e-4, -2e-4, -50.0, 1e-5], dtype=torch.float64)
    scene: dict[str, Any] = SCENE | {"advantage": advantage, "sample": torch.arange(M)}
    plain, pulled = (Config(ratio="term", negative=negative, clip_range=1e-4) for negative in ("clip", "quadratic"))
    now = build(plain).error(outputs(draw(3)))
    found = []
    for config in (plain, pulled):
        v = draw(3).requires_grad_(True)
        output = loss_of(build(config), outputs_of({"policy": v}, **scene, old=now + shift))
        found.append((output, torch.autograd.grad(output.loss, v)[0]))
    assert torch.equal(found[0][1][:3], found[1][1][:3])
    v = draw(3).requires_grad_(True)
    error = build(plain).error(outputs_of({"policy": v}, **scene))
    factor = advantage.double() - shift / 1e-4
    (expected,) = torch.autograd.grad((factor * error).sum(), v)
    assert_close(found[1][1][3:], expected[3:], rtol=1e-4, atol=1e-7)
    assert found[0][1][3:5].abs().max() == 0  # PPO has let them go
    assert float(found[1][0].metrics["policy/clip_fraction"]) == 3


# ---- V-GRPO


V_GRPO = Config(
    supervise="clean",
    shared=True,
    soft_clip=3.0,
    passes=1,
    times=TimesConfig(name="discrete", count=4, fraction=1.0),
    advantages=AdvantageConfig(clip=None),
)


def test_on_policy_v_grpo_has_the_gradient_of_diffusion_nft_at_its_old():
    """A grad [sigma^2 l / w], for pairs of their own or shared."""
    found = []
    off = AnchorConfig(coef=0.0)
    alone: dict[str, Any] = SCENE | {"sample": torch.arange(M)}
    nft = diffusion_nft.build(diffusion_nft.Config(mix=0.7, kl=off))
    for method in (build(V_GRPO), nft):
        v = draw(3).requires_grad_(True)
        roles = {"policy": v} | ({"old": draw(3)} if method is nft else {})
        found.append(torch.autograd.grad(loss_of(method, outputs_of(roles, **alone)).loss, v)[0])
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_at_ratio_1_the_loss_is_odd_in_the_advantage_and_equal_samples_of_a_group_cancel():
    method, v = build(V_GRPO), draw(3)
    scenes: list[dict[str, Any]] = [SCENE | {"advantage": sign * ADVANTAGE} for sign in (1, -1)]
    up, down = (loss_of(method, outputs_of({"policy": v}, **scene)).loss for scene in scenes)
    assert float(up) == -float(down) != 0
    # Two samples of one x0 with one pair, and advantages that sum to 0.
    same = {name: SCENE[name][:1].expand(2, *SCENE[name].shape[1:]) for name in ("clean", "eps", "sigma")}
    w = v[:1].expand(2, -1).clone().requires_grad_(True)
    scene: dict[str, Any] = same | {"advantage": torch.tensor([0.7, -0.7]), "sample": torch.arange(2)}
    (gradient,) = torch.autograd.grad(loss_of(method, outputs_of({"policy": w}, **scene)).loss, w)
    assert_close(gradient.sum(dim=0), torch.zeros(8), rtol=0, atol=1e-7)


def test_the_soft_clip_has_slope_1_at_0_and_a_bound():
    rewards = torch.tensor([[[0.0] * 15 + [1.0], [0.0] * 8 + [1e-3] * 8]])
    soft, plain = (
        build(Config(soft_clip=bound, advantages=AdvantageConfig(clip=None))).advantages(rewards, torch.ones(1)).values
        for bound in (3.0, None)
    )
    assert_close(soft, 3 * (plain / 3).tanh())
    assert float(plain.max()) > 3 > float(soft.max())
    assert_close(soft[1], plain[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("shared", [False, True])
def test_the_samples_of_a_prompt_share_their_pairs_where_that_is_asked_for(shared):
    session = roll_out(ToyAdapter(), algorithm=build(Config(shared=shared)), num_steps=10, group=3)
    rewards = torch.tensor([[[0.9, 0.2, 0.4], [0.1, 0.8, 0.3]]])
    ((batch, _),) = noising_of(session, rewards, batch_size=64).plain_batches(0)
    for values in (batch.sigma[:, None], batch.eps.flatten(1)):
        groups = [values[batch.sample // 3 == slot] for slot in (0, 1)]
        assert [len(group.unique(dim=0)) for group in groups] == ([8, 8] if shared else [24, 24])
        assert not torch.equal(*groups)


def test_kappa_pulls_to_the_clean_predictions_of_the_network_that_drew_the_samples():
    method = build(Config(old_kl=AnchorConfig(coef=2.0)))
    assert (method.roles, method.behaviour) == (("old",), "policy")
    assert method.lags["old"].decay(1000) == 0
    v, w = draw(3), draw(3) + 0.1
    roles = {"policy": v, "old": w}
    plain, pulled = (loss_of(build(config), outputs_of(roles, **SCENE)).loss for config in (Config(), method.config))
    assert float(pulled - plain) == pytest.approx(2 * 0.01 * float(SIGMA.square().sum()), rel=1e-4)
    assert build(Config()).roles == ()
