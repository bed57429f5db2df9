"""DGPO: the group's weight, the mask, its networks."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import crd
from flowrl.algorithms._matching import AnchorConfig
from flowrl.algorithms.base import Networks
from flowrl.algorithms.dgpo import Config, build
from flowrl.losses.matching import overshot
from flowrl.rollout.policy import Policy
from flowrl.samplers.ode import Ode
from tests.toys import CLEAN, EPS, TARGET, Moves, ToyAdapter, V, draw, loss_and_gradient

M, OFF = 6, AnchorConfig(coef=0.0)
SIGMA = torch.tensor([0.9, 0.9, 0.9, 0.4, 0.4, 0.4])
GROUP = torch.tensor([5, 5, 5, 1, 1, 1])
ADVANTAGE = torch.tensor([1.2, -0.2, -1.0, 0.5, 0.5, -1.0])


def found(config: Config, reference: Tensor, average: Tensor, **options: Tensor):
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "advantage": ADVANTAGE, "group": GROUP} | options
    return loss_and_gradient(build(config), V, {"reference": reference, "average": average}, **scene)


def preference(reference: Tensor, beta: float) -> Tensor:
    """Gradient of -log sigmoid(-beta / G sum A (l - l_ref)) of both groups, over beta / G."""
    v = V.clone().requires_grad_(True)
    margin = ADVANTAGE * ((v - TARGET).square().mean(dim=1) - (reference - TARGET).square().mean(dim=1))
    loss = -torch.nn.functional.logsigmoid(-beta * margin.reshape(2, 3).mean(dim=1)).sum()
    return torch.autograd.grad(loss, v)[0] * 3 / beta


@pytest.mark.parametrize("beta", [1.0, 30.0])
@pytest.mark.parametrize("against_average", [False, True])
def test_its_gradient_is_that_of_the_group_preference_over_beta_by_g(beta, against_average):
    """The mask does not act, since the average is the policy itself."""
    config = Config(beta=beta, kl=OFF, against_average=against_average)
    near, far = V + 0.1 * draw(4), V + 0.3 * draw(5)
    _, gradient = found(config, near, V)
    if against_average:  # a margin of 0 at V itself
        assert_close(gradient, preference(V, beta), rtol=1e-5, atol=1e-8)
        _, gradient = found(Config(beta=beta, kl=OFF, against_average=True, clip_range=1e9), near, far)
        assert_close(gradient, preference(far, beta), rtol=1e-5, atol=1e-8)
    else:
        assert_close(gradient, preference(near, beta), rtol=1e-5, atol=1e-8)


def test_at_the_reference_every_group_weighs_one_half():
    output, gradient = found(Config(kl=OFF), V, V)
    assert float(output.metrics["policy/group_weight"]) == M / 2
    assert_close(gradient, 0.5 * ADVANTAGE[:, None] * 2 * (V - TARGET) / 8, rtol=1e-6, atol=1e-9)


def test_the_mask_holds_what_has_left_the_range_to_the_side_it_wants():
    """A = 0 falls into the second branch."""
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    log_ratio = torch.tensor([0.02, -0.02, 0.02, -0.02, -0.02])
    held = overshot(torch.zeros(5), log_ratio, advantage, 0.01)
    assert held.tolist() == [True, False, False, True, True]


def test_masked_terms_have_no_gradient_and_the_others_theirs():
    # The average's error is larger by far for rows 0 and 3: their ratio is above 1 + c.
    average = V.clone()
    average[[0, 3]] += 3 * torch.sign(V - TARGET)[[0, 3]]
    output, gradient = found(Config(kl=OFF), V, average)
    assert (gradient.abs().amax(dim=1) == 0).tolist() == [True, False, False, True, False, False]
    assert float(output.metrics["policy/clip_fraction"]) == 2
    assert float(output.loss) == pytest.approx(float(found(Config(kl=OFF), V, V)[0].loss))


def test_the_pull_is_added_and_has_its_gradient_where_the_mask_acts():
    average = V + 3 * torch.sign(V - TARGET)
    output, gradient = found(Config(kl=AnchorConfig(coef=2.0)), V + 0.1, average, advantage=torch.ones(M))
    assert_close(gradient, torch.full_like(gradient, 2 * 2.0 * -0.1 / 8), rtol=1e-6, atol=1e-9)
    assert float(output.metrics["matching/to_reference"]) == pytest.approx(M * 0.01)


def test_the_average_draws_the_samples_from_its_step_on_and_a_checkpoint_keeps_that():
    weights: Any = Moves()
    method = build(Config(sample_average_from=200))
    for updates, expected in ((199, "policy"), (200, "average"), (201, "average")):
        method.after_iteration(updates, weights)
        assert method.behaviour == expected
    assert [role for role, _ in weights] == ["average"] * 3
    other = build(Config())
    other.load_state_dict(method.state_dict())
    assert other.behaviour == "average"
    never = build(Config(sample_average_from=None))
    never.after_iteration(10_000, weights)
    assert never.behaviour == "policy"
    with pytest.raises(ValueError, match="behaviour"):
        other.load_state_dict({"behaviour": "nobody"})


class Embedded(ToyAdapter):
    """Takes guidance as an input."""

    def branches(self, guidance_scale: float) -> int:
        return 1


@pytest.mark.parametrize("module", [build, crd.build], ids=["dgpo", "crd"])
def test_the_reference_has_guidance_of_its_own_only_where_guidance_is_cfg(module):
    """With CFG the trained forwards go without; an embedded value is the same for all networks."""
    config: Any = Config(reference_guidance=4.0) if module is build else crd.Config(reference_guidance=4.0)
    weights: Any = None  # which guidance does not depend on
    cfg, embedded = (
        module(config).guidance(Networks(Policy(adapter, Ode(), 3.5), weights), module(config).compared)
        for adapter in (ToyAdapter(), Embedded())
    )
    assert cfg.pop("reference") == 4.0
    assert set(cfg.values()) == {1.0}
    assert set(embedded.values()) == {3.5}
    assert "sampling" not in cfg


class Above0(ToyAdapter):
    """Guides above 0: a scale of 1 is CFG."""

    unguided = 0.0


@pytest.mark.parametrize("adapter", [ToyAdapter(), Above0(), Embedded()])
def test_by_default_the_reference_is_guided_as_the_policy_is(adapter):
    """So that the margin is 0 at the start, in whatever units the pipeline guides."""
    method, weights = build(Config()), cast(Any, None)
    scales = set(method.guidance(Networks(Policy(adapter, Ode(), 3.5), weights), method.compared).values())
    assert scales == {3.5 if isinstance(adapter, Embedded) else adapter.unguided}
