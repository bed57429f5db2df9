"""FPO: ratios of stored pairs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import awm
from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.fpo import Config, build
from tests.toys import loss_of, outputs_of

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
