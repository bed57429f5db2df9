"""Conversions between what a network says and (x0_hat, eps_hat, velocity)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.diffusion.process import FlowProcess, PredictionType, VPProcess, expand

CASES = [(FlowProcess(), "velocity"), (VPProcess(), "eps"), (VPProcess(), "v"), (VPProcess(), "x0")]
IDS = [f"{type(process).__name__}-{kind}" for process, kind in CASES]

sigmas = st.lists(st.floats(0.02, 0.999), min_size=3, max_size=3).map(torch.tensor)
seeds = st.integers(0, 2**31)


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, 4, generator=generator)


@pytest.mark.parametrize(("process", "kind"), CASES, ids=IDS)
@settings(max_examples=50, deadline=None)
@given(sigma=sigmas, seed=seeds)
def test_a_network_that_says_its_target_is_read_as_the_true_data_and_noise(process, kind, sigma, seed):
    x0, eps = draw(seed)
    x = process.add_noise(x0, eps, sigma)
    found = process.predict(process.target(x0, eps, sigma, kind), x, sigma, kind)
    # x0_hat and eps_hat divide float32 rounding of x by alpha or sigma where the network gives the other one:
    # at most 1 / sqrt(1 - 0.999^2) = 22 and 1 / 0.02 = 50 times 2^-23 * |x|, |x| < 6.
    assert_close(found.x0_hat, x0, rtol=1e-5, atol=1e-4)
    assert_close(found.eps_hat, eps, rtol=1e-5, atol=1e-4)
    assert_close(found.velocity, process.velocity(x0, eps, sigma), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("process", "kind"), CASES, ids=IDS)
@settings(max_examples=50, deadline=None)
@given(sigma=sigmas, seed=seeds)
def test_whatever_the_network_says_its_two_estimates_make_up_x(process, kind, sigma, seed):
    raw, x = draw(seed)
    found = process.predict(raw, x, sigma, kind)
    # x0_hat of an eps network reaches |x| / alpha = 22 |x|; its rounding comes back multiplied by alpha.
    assert_close(process.add_noise(found.x0_hat, found.eps_hat, sigma), x, rtol=1e-5, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(sigma=sigmas, seed=seeds)
def test_vp_predictions_of_every_kind_agree(sigma, seed):
    """For the conversions: eps, v and x0 wrappers of one network mean the same."""
    process = VPProcess()
    eps, x = draw(seed)
    told = process.predict(eps, x, sigma, "eps")
    others: dict[PredictionType, torch.Tensor] = {"v": told.velocity, "x0": told.x0_hat}
    for kind, raw in others.items():
        found = process.predict(raw, x, sigma, kind)
        # eps_hat of an x0 network subtracts terms of size |x| / sigma (50 |x|) in float32.
        assert_close(found.eps_hat, told.eps_hat, rtol=1e-3, atol=5e-4)
        assert_close(found.x0_hat, told.x0_hat, rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("process", [FlowProcess(), VPProcess()], ids=["flow", "vp"])
def test_the_path_starts_at_the_data_and_ends_at_the_noise(process):
    x0, eps = draw(0)
    assert torch.equal(process.add_noise(x0, eps, torch.zeros(3)), x0)
    assert torch.equal(process.add_noise(x0, eps, torch.ones(3)), eps)


def test_flow_velocity_is_the_derivative_of_the_path():
    process, (x0, eps), h = FlowProcess(), draw(1), 2.0**-6
    slope = (
        process.add_noise(x0, eps, torch.full((3,), 0.5 + h)) - process.add_noise(x0, eps, torch.full((3,), 0.5))
    ) / h
    # The path is linear, so only the difference's rounding is left: 2^-22 / h.
    assert_close(process.target(x0, eps, torch.full((3,), 0.5), "velocity"), slope, rtol=0, atol=1e-4)


def test_vp_velocity_is_the_derivative_along_the_angle():
    """v = dx / d(phi) where alpha = cos(phi), sigma = sin(phi) (arXiv 2202.00512)."""
    process, (x0, eps) = VPProcess(), draw(1)
    phi = torch.tensor([0.3, 0.8, 1.4], dtype=torch.float64)
    angle = phi.clone().requires_grad_(True)
    path = angle.cos()[:, None, None] * x0.double() + angle.sin()[:, None, None] * eps.double()
    columns = [
        torch.autograd.grad(path[:, i, j].sum(), angle, retain_graph=True)[0] for i in range(2) for j in range(4)
    ]
    slope = torch.stack(columns, dim=1).reshape(3, 2, 4).float()
    assert_close(process.target(x0, eps, phi.sin().float(), "v"), slope, rtol=1e-5, atol=1e-5)


def test_half_precision_inputs_are_computed_in_float32():
    x0, eps = draw(2)
    sigma = torch.tensor([0.2, 0.5, 0.9])
    for process, kind in CASES:
        found = process.predict(eps.bfloat16(), x0.bfloat16(), sigma, kind)
        exact = process.predict(eps.bfloat16().float(), x0.bfloat16().float(), sigma, kind)
        assert torch.equal(found.x0_hat, exact.x0_hat)
        assert found.x0_hat.dtype == found.eps_hat.dtype == found.velocity.dtype == torch.float32
        assert process.add_noise(x0.bfloat16(), eps.bfloat16(), sigma).dtype == torch.float32


@pytest.mark.parametrize(
    ("process", "kind"),
    [*((FlowProcess(), kind) for kind in ("eps", "v", "x0")), (VPProcess(), "velocity")],
)
def test_a_process_refuses_the_predictions_of_the_other(process, kind):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=kind):
        process.predict(x, x, torch.ones(1), kind)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (3, 2), (4,)])
def test_expand_refuses_everything_but_one_value_per_sample(shape):
    with pytest.raises(ValueError, match=r"shape \[3\]"):
        expand(torch.ones(shape), torch.zeros(3, 2, 4))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4, 4), (3, 2, 5, 4, 4)])
def test_expand_scales_each_sample_by_its_own_value(shape):
    scaled = expand(torch.tensor([1.0, 2.0, 3.0]), torch.ones(shape)) * torch.ones(shape)
    assert scaled.shape == shape
    assert [row.unique().tolist() for row in scaled] == [[1.0], [2.0], [3.0]]
