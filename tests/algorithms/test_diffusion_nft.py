"""DiffusionNFT as a method: its gradient on a flow and on a noise process, schedules, modes."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.diffusion_nft import Config, build, by_mode
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.diffusion.process import expand
from tests.toys import ToyAdapter, loss_of, outputs_of, roll_out

M = 5
SIGMA = torch.tensor([0.1, 0.3, 0.6, 0.9, 0.97])
ADVANTAGE = torch.tensor([2.0, -5.0, 0.5, 7.0, -1.0])


def draw(seed: int) -> Tensor:
    return torch.randn(M, 8, generator=torch.Generator().manual_seed(seed))


CLEAN, EPS = draw(1), draw(2)


def gradient(config: Config, out: Tensor, old: Tensor, *, vp: bool = False) -> tuple[float, Tensor]:
    out = out.clone().requires_grad_(True)
    roles = {"policy": out, "old": old, "reference": old}
    output = loss_of(build(config), outputs_of(roles, clean=CLEAN, eps=EPS, sigma=SIGMA, advantage=ADVANTAGE, vp=vp))
    (found,) = torch.autograd.grad(output.loss, out)
    return float(output.loss.detach()), found


@pytest.mark.parametrize("vp", [False, True], ids=["flow", "vp"])
@pytest.mark.parametrize("mix", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_is_the_clipped_advantage_times_that_of_the_weighted_error(vp, mix):
    """On VP x0_hat = (x - sigma eps_hat) / alpha, so the error of x0 is (sigma / alpha)^2 that of eps."""
    old = draw(3)
    scale = SIGMA / (1 - SIGMA.square()).sqrt() if vp else SIGMA
    target = EPS if vp else EPS - CLEAN
    weight = scale * (old - target).abs().mean(dim=1)
    v = old.clone().requires_grad_(True)
    error = (v - target).square().mean(dim=1)
    (expected,) = torch.autograd.grad((ADVANTAGE.clamp(-5, 5) * scale.square() * error / weight).sum(), v)
    _, found = gradient(Config(mix=mix), old, old, vp=vp)
    assert_close(found, expected, rtol=2e-3, atol=1e-5)  # x0_hat is a difference of float32 numbers over alpha


@pytest.mark.parametrize("vp", [False, True], ids=["flow", "vp"])
def test_the_mirror_images_are_taken_around_the_old_networks_clean_prediction(vp):
    """With plain tensors, away from the old policy, both branches and their weights."""
    out, old, mix = draw(3), draw(4), 0.5

    def clean(output: Tensor) -> Tensor:
        x_alpha = (1 - SIGMA.square()).sqrt() if vp else 1 - SIGMA
        x = expand(x_alpha, CLEAN) * CLEAN + expand(SIGMA, CLEAN) * EPS
        x0 = x - expand(SIGMA, x) * output
        return x0 / expand(x_alpha, x) if vp else x0

    good = (ADVANTAGE / 10 + 0.5).clamp(0, 1)
    plus, minus = mix * clean(out) + (1 - mix) * clean(old), (1 + mix) * clean(old) - mix * clean(out)
    parts = [((b - CLEAN).square().mean(dim=1) / (b - CLEAN).abs().mean(dim=1)) for b in (plus, minus)]
    policy = 5 / mix * (good * parts[0] + (1 - good) * parts[1])
    pulled = 2.0 * (out - old).square().mean(dim=1)
    loss, _ = gradient(Config(mix=mix, kl=AnchorConfig(coef=2.0)), out, old, vp=vp)
    assert loss == pytest.approx(float((policy + pulled).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [-2.0, 0.0, 3.0]),
        ("positive_only", [0.0, 0.0, 3.0]),
        ("negative_only", [-2.0, 0.0, 0.0]),
        ("one_only", [0.0, 0.0, 1.0]),
        ("binary", [-1.0, 0.0, 1.0]),
    ],
)
def test_modes_leave_of_the_advantages_what_they_say(mode, expected):
    assert by_mode(torch.tensor([-2.0, 0.0, 3.0]), mode).tolist() == expected
    rewards = torch.rand(1, 2, 6, generator=torch.Generator().manual_seed(0))
    own = build(Config(mode=mode)).advantages(rewards, torch.ones(1))
    assert torch.equal(own.values, by_mode(advantages(rewards, torch.ones(1), AdvantageConfig()).values, mode))


# ---- its rollout


def test_two_steps_of_its_solver_are_ddim_twice():
    """The first and the last step are of order 1."""
    found = [
        roll_out(ToyAdapter(), algorithm=build(Config(solver=solver)), num_steps=2).samples.x0
        for solver in ("dpm2_midpoint", "dpm1", "ode")
    ]
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
