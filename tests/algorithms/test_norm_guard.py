"""NormGuard: a penalty on outputs that outgrow the untouched network's."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import advantage_flow, awm, diffusion_dpo, diffusion_nft
from flowrl.algorithms._matching import AnchorConfig, NormGuardConfig
from tests.toys import CLEAN, EPS, V, draw, loss_and_gradient, outputs_of

SIGMA = torch.tensor([0.9, 0.5, 0.2, 0.9, 0.5, 0.2], dtype=torch.float64)
SCENE: dict[str, Any] = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "group": torch.tensor([0, 0, 1, 1, 2, 2])}
SIGNS = torch.tensor([1.0, -1.0] * 3)
OFF = AnchorConfig(coef=0.0)
METHODS = {
    awm: {"kl": OFF, "ema_kl": OFF},
    diffusion_nft: {"kl": OFF},
    diffusion_dpo: {},
    advantage_flow: {"kl": OFF},
}


def of(guard: NormGuardConfig, policy: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The penalty [M], and its gradient on the policy's output."""
    v = policy.clone().requires_grad_(True)
    penalty = guard.of(outputs_of({"policy": v, "reference": reference}, **SCENE))
    (gradient,) = torch.autograd.grad(penalty.sum(), v)
    return penalty.detach(), gradient


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.05])
def test_it_is_exactly_0_with_its_gradient_up_to_the_margin(power, scale):
    penalty, gradient = of(NormGuardConfig(power=power, margin=0.0 if scale <= 1 else 0.06), scale * V, V)
    assert not penalty.any()
    assert not gradient.any()


@pytest.mark.parametrize("power", [1, 2])
def test_beyond_it_is_the_power_of_the_growth_and_its_gradient_shrinks_the_output_alone(power):
    guard = NormGuardConfig(coef=3.0, power=power, margin=0.1)
    penalty, gradient = of(guard, 1.5 * V, V)
    assert_close(penalty, torch.full((6,), 3 * 0.4**power, dtype=torch.float64))
    factor = gradient / V
    assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-9, atol=0)
    assert bool((factor > 0).all())


def test_a_common_turn_or_scale_of_both_networks_changes_nothing():
    turn = torch.linalg.qr(draw(9, 8, 8)).Q
    plain = of(NormGuardConfig(), 1.5 * V, V)[0]
    for change in (turn, 7.0 * torch.eye(8, dtype=torch.float64)):
        assert_close(of(NormGuardConfig(), 1.5 * V @ change, V @ change)[0], plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("module", METHODS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_method_that_has_it_adds_it_whatever_the_advantages(module):
    """And compares with the untouched network even without a pull to it."""
    guard = NormGuardConfig(coef=2.0)
    config, plain = module.Config(norm_guard=guard, **METHODS[module]), module.Config(**METHODS[module])
    assert "reference" in module.build(config).roles
    roles = {"reference": 0.8 * V, "old": V - 0.2, "anchor": V}
    expected = of(guard, V, 0.8 * V)
    for sign in (1.0, -1.0):
        scene = SCENE | {"advantage": sign * SIGNS}
        (held, with_guard), (loss, without) = (
            loss_and_gradient(module.build(each), V, roles, **scene) for each in (config, plain)
        )
        assert float(held.loss - loss.loss) == pytest.approx(float(expected[0].sum()), rel=1e-6)
        assert_close(with_guard - without, expected[1], rtol=1e-6, atol=1e-9)
        assert float(held.metrics["policy/norm_guard"]) == pytest.approx(float(expected[0].sum()))
        small = loss_and_gradient(module.build(config), V, roles | {"reference": 1.2 * V}, **scene)[0]
        other = loss_and_gradient(module.build(plain), V, roles | {"reference": 1.2 * V}, **scene)[0]
        assert float(small.loss) == float(other.loss)
