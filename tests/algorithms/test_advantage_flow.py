"""AdvantageFlow: its minimum, its limits, and which settings are not convex."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import awm, diffusion_nft
from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.advantage_flow import Config, build
from flowrl.credit.advantages import AdvantageConfig, advantages
from tests.toys import CLEAN, EPS, TARGET, V, loss_and_gradient, outputs_of

M, OFF = 6, AnchorConfig(coef=0.0)
SIGMA = torch.tensor([0.9, 0.5, 0.2, 0.9, 0.5, 0.2], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, 0.4, 0.0, -0.3, -0.9, -1.0])
SCENE: dict[str, Any] = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": ADVANTAGE}
ROLES = {"old": V - 0.2, "reference": V + 0.1}


def gradient(config: Any, v: Tensor = V, roles: dict[str, Tensor] = ROLES, module: Any = None, **scene: Tensor):
    return loss_and_gradient((build if module is None else module.build)(config), v, roles, **(SCENE | scene))[1]


@pytest.mark.parametrize("space", ["clean", "velocity"])
@pytest.mark.parametrize("gamma", [1.1, "one_minus"])
def test_the_minimum_is_the_weighted_mean_of_the_sample_and_the_two_networks(space, gamma):
    """In closed form; clean predictions are affine in outputs, so it is one point in both spaces."""
    pull = 0.5
    a = ADVANTAGE[:, None].double()
    g = 1 - a if gamma == "one_minus" else 1.1
    best = (a * TARGET + g * ROLES["old"] + pull * ROLES["reference"]) / (a + g + pull)
    config = Config(space=space, gamma=gamma, kl=AnchorConfig(coef=pull))
    # Sums of a dozen numbers of size 1, in float32 where the toy's process rounds.
    assert float(gradient(config, best).abs().max()) < 1e-6
    assert float(gradient(config).abs().max()) > 1e-2


def test_where_all_networks_agree_the_gradient_is_the_advantage_times_that_of_the_error():
    roles = {"old": V, "reference": V}
    found = gradient(Config(space="velocity"), roles=roles)
    assert_close(found, ADVANTAGE[:, None] * 2 * (V - TARGET) / 8, rtol=1e-6, atol=1e-9)
    clean = gradient(Config(), roles=roles)
    assert_close(clean, SIGMA.square()[:, None] * found, rtol=1e-5, atol=1e-7)
    assert clean[2].abs().max() == 0  # A = 0


def test_gamma_1_minus_a_is_diffusion_nft_with_mix_1_without_weights():
    found = gradient(Config(gamma="one_minus", kl=OFF))
    rule = AdvantageConfig(clip=1.0)
    nft = diffusion_nft.Config(mix=1.0, adaptive=False, kl=OFF, advantages=rule)
    assert_close(found, gradient(nft, module=diffusion_nft), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("space", "weighting"), [("clean", "sigma2"), ("velocity", "uniform")])
def test_without_anchors_it_is_awm(space, weighting):
    found = gradient(Config(space=space, gamma=0.0, kl=OFF))
    plain = awm.Config(weighting=weighting, kl=OFF, ema_kl=OFF)
    assert_close(found, gradient(plain, module=awm), rtol=1e-5, atol=1e-7)


def test_rvm_is_its_preset_on_outputs_without_gamma():
    """Published: .1 clip(A, 5), A (v - v*) + beta (v - v_ref), of half the mean square."""
    config = Config(
        space="velocity",
        gamma=0.0,
        kl=AnchorConfig(coef=0.25),
        advantages=AdvantageConfig(std="global", clip=5.0),
        advantage_max=0.5,
    )
    method = build(config)
    assert (method.roles, method.behaviour, method.lags) == (("reference",), "policy", {})
    expected = (ADVANTAGE[:, None] * (V - TARGET) + 0.25 * (V - ROLES["reference"])) / 8
    assert_close(gradient(config), 2 * expected, rtol=1e-6, atol=1e-9)
    rewards = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    plain = advantages(rewards, torch.ones(1), AdvantageConfig())
    assert_close(method.advantages(rewards, torch.ones(1)).values, 0.1 * plain.values)


@pytest.mark.parametrize("space", ["clean", "velocity"])
def test_with_weights_a_term_is_divided_by_its_own_mean_error(space):
    plain, divided = (gradient(Config(space=space, adaptive=adaptive)) for adaptive in (False, True))
    found = outputs_of({"policy": V} | ROLES, **SCENE)
    width = found.distance(space="clean" if space == "clean" else "output")
    expected = (V - TARGET).abs().mean(dim=1) * (SIGMA if space == "clean" else 1)
    assert_close(width, expected, rtol=1e-5, atol=1e-7)
    assert_close(divided, plain / width[:, None], rtol=1e-5, atol=1e-7)


def test_the_samples_are_drawn_by_the_network_that_holds():
    assert (build(Config()).behaviour, build(Config()).roles) == ("old", ("reference", "old"))
    assert build(Config(kl=OFF)).roles == ("old",)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, False),
        ({"gamma": "one_minus", "kl": OFF}, False),
        ({"gamma": 0.5}, True),
        ({"gamma": 0.5, "kl": AnchorConfig(coef=0.6)}, False),
        ({"gamma": 0.5, "kl": AnchorConfig(coef=0.6, weight="elbo")}, True),
        ({"gamma": 0.5, "advantage_max": 0.4}, False),
    ],
)
def test_a_setting_that_is_not_convex_is_warned_of_by_name(options, warned):
    notes = Config(**options).notes
    assert bool(notes) == warned
    assert all("algorithm.gamma=0.5" in note and "not convex" in note for note in notes)


def test_the_default_rule_divides_by_the_root_mean_square_of_the_centred_rewards():
    """Not by the std of all rewards, which prompts of different means widen."""
    rewards = torch.tensor([[[0.0, 1.0, 0.5], [10.0, 10.4, 10.2], [3.0, 3.0, 3.0]]]).double()
    centred = rewards[0] - rewards[0].mean(dim=1, keepdim=True)
    found = build(Config()).advantages(rewards, torch.ones(1))
    expected = (centred / (centred.square().mean().sqrt() + 1e-4)).clamp(-1, 1)
    assert_close(found.values.squeeze(2), expected.float(), rtol=1e-6, atol=1e-7)
    assert float(found.values.abs().max()) == 1
    assert found.dead.tolist() == [False, False, True]
