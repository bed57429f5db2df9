"""CRD: centring within a prompt, pools, the pull by reward."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.crd import Config, build
from flowrl.losses.matching import implicit_reward, optimality, pool_weights, reward_fit
from tests.toys import CLEAN, EPS, TARGET, V, draw, loss_and_gradient

M, OFF = 6, AnchorConfig(coef=0.0)
SIGMA = torch.tensor([0.9, 0.9, 0.9, 0.4, 0.4, 0.4])
GROUP = torch.tensor([5, 5, 5, 1, 1, 1])
ADVANTAGE = torch.tensor([1.5, -0.5, -1.0, 5.0, 2.5, -5.0])
OLD = draw(4)


def found(config: Config, v: Tensor = V, old: Tensor = OLD, rows: slice = slice(None), **roles: Tensor):
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": ADVANTAGE, "group": GROUP}
    scene, networks = ({name: value[rows] for name, value in part.items()} for part in (scene, {"old": old} | roles))
    return loss_and_gradient(build(config), v[rows], networks, **scene)


@pytest.mark.parametrize("options", [{}, {"pools": 0.0}, {"pools": 0.3}, {"fit": "bce"}, {"adaptive": False}])
def test_prompts_are_never_mixed(options):
    """Two prompts together are the two alone."""
    config = Config(kl=OFF, **options)
    whole, gradient = found(config)
    parts = [found(config, rows=rows) for rows in (slice(0, 3), slice(3, 6))]
    assert float(whole.loss) == pytest.approx(sum(float(part.loss) for part, _ in parts), rel=1e-9)
    assert_close(gradient, torch.cat([g for _, g in parts]), rtol=1e-9, atol=1e-12)


def test_at_the_old_policy_the_implied_reward_is_0_and_the_gradient_lowers_errors_of_good_samples():
    """Gradient proportional to -Rc grad R: 5 / beta * 2 beta * (0 - Rc) * grad R."""
    output, gradient = found(Config(kl=OFF, beta=0.5), OLD, OLD)
    assert float(output.metrics["policy/implicit_reward"]) == 0
    given = optimality(ADVANTAGE, 5.0).double()
    centre = given - given.reshape(2, 3).mean(dim=1).repeat_interleave(3)
    v = OLD.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(implicit_reward(v, OLD, TARGET).sum(), v)
    assert_close(gradient, -10 * centre[:, None] * slope, rtol=1e-6, atol=1e-9)
    assert float(output.loss) == pytest.approx(10 * float(centre.square().sum()))


def test_the_value_is_that_of_centred_rewards_away_from_the_old_policy():
    beta = 2.0
    implied, given = beta * implicit_reward(V, OLD, TARGET), optimality(ADVANTAGE, 5.0).double()
    apart = (implied - given).reshape(2, 3)
    expected = 5 / beta * (apart - apart.mean(dim=1, keepdim=True)).square().sum()
    assert float(found(Config(kl=OFF, beta=beta))[0].loss) == pytest.approx(float(expected))


def test_cross_entropy_is_least_where_both_rewards_agree():
    given = torch.tensor([-0.4, 0.0, 0.7], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(reward_fit(given, given.detach(), "bce").sum(), given)
    assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
    assert reward_fit(torch.tensor([2.0]), torch.tensor([0.5]), "mse").tolist() == [2.25]


def test_two_pools_are_the_good_and_the_bad_by_their_advantage():
    """A, not r, decides; an empty pool is the whole group."""
    given = optimality(ADVANTAGE, 5.0).double()
    good, bad = pool_weights(given, ADVANTAGE, GROUP, 0.0)
    assert good.tolist() == [1.0, 0.0, 0.0, 0.5, 0.5, 0.0]
    assert bad.tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, 1.0]
    none, everyone = pool_weights(given[:3], torch.zeros(3), GROUP[:3], 0.0)
    assert none.tolist() == everyone.tolist() == pytest.approx([1 / 3] * 3)


def test_softmax_pools_lean_to_the_best_and_to_the_worst():
    given = optimality(ADVANTAGE, 5.0).double()
    good, bad = pool_weights(given, ADVANTAGE, GROUP, 0.2)
    for rows in (slice(0, 3), slice(3, 6)):
        assert_close(good[rows], (given[rows] / 0.2).softmax(dim=0))
        assert_close(bad[rows], (-given[rows] / 0.2).softmax(dim=0))
    (flat,) = pool_weights(given, ADVANTAGE, GROUP, None)
    assert_close(flat, torch.full((M,), 1 / 3, dtype=torch.float64))


def test_the_pull_is_kappa_times_m_without_reward_and_kappa_with_all_of_it():
    """1e-4 at r = 0, 0.1 at r = 1; rows 3 (A = 5) and 5 (A = -5)."""
    config = Config()
    share = config.kl.coef * (config.least_pull + (1 - config.least_pull) * optimality(ADVANTAGE, 5.0).double())
    assert float(share[5]) == pytest.approx(1e-4)
    assert float(share[3]) == pytest.approx(0.1)
    with_pull = found(config, reference=V + 0.2)[0]
    assert float(with_pull.loss - found(Config(kl=OFF))[0].loss) == pytest.approx(0.04 * float(share.sum()))
    alike = found(Config(least_pull=1.0), reference=V + 0.2)[0]
    assert float(alike.loss - found(Config(kl=OFF))[0].loss) == pytest.approx(0.04 * 0.1 * M)
