"""Coefficients of reward gradients against autograd through the whole composition of a two-layer network, float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core import registry
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.losses.reward_gradients import Link, Route, levers, links, pulled_back

DIM, ROWS, STEPS = 5, 3, 6


class Network(nn.Module):
    """y(x, k): two layers, a bias of its own at each step, and a factor on what the input does."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.6 * torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.inner, self.outer, self.bias = drawn(7, DIM), drawn(DIM, 7), drawn(STEPS, 7)
        self.steepness = 1.0

    def forward(self, x: Tensor, k: int) -> Tensor:
        # Its value does not depend on the steepness, its Jacobian does.
        x = self.steepness * x + (1 - self.steepness) * x.detach()
        return torch.tanh(x @ self.inner.T + self.bias[k]) @ self.outer.T


def reward(x0: Tensor) -> Tensor:
    """[B]"""
    return torch.sin(x0).sum(dim=1) - 0.1 * x0.square().sum(dim=1)


def parameters_gradient(network: Network, total: Tensor) -> Tensor:
    grads = torch.autograd.grad(total, [*network.parameters()], allow_unused=True)
    return torch.cat([torch.zeros(1) if g is None else g.flatten() for g in grads])


def setting(vp: bool, route: Route):
    """(links over the whole grid, late to early, those of a route, start)."""
    schedule = vp_schedule(STEPS) if vp else flow_schedule(STEPS, 3.0)
    plan, process, kind = solver_plan(schedule), VPProcess() if vp else FlowProcess(), "eps" if vp else "velocity"
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = links(plan, process, kind, Route(route.end, (0,)))
    return whole, links(plan, process, kind, route), start


def walked(network: Network, whole: list[Link], start: Tensor, route: Route, *, nested: bool) -> Tensor:
    """The clean end of the composition with exactly the published stop-gradients."""
    x = start
    for link in reversed(whole):
        given = x if nested else x.detach()
        y = network(given, link.step)
        x = link.keep * x + link.gain * (y if link.step in route.trained else y.detach())
        if link.step < min(route.trained):
            x = x.detach()
    return x


def summed(network: Network, whole: list[Link], some: list[Link], start: Tensor, route: Route):
    """The gradient by the coefficients, one step at a time at the stored latents; and the clean end."""
    places, x = {}, start
    with torch.no_grad():
        for link in reversed(whole):
            places[link.step] = x
            x = link.keep * x + link.gain * network(x, link.step)
    x0 = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(reward(x0).sum(), x0)

    def product(k: int, c: Tensor) -> Tensor:
        here = places[k].clone().requires_grad_()
        return torch.autograd.grad(network(here, k), here, c)[0]

    total = torch.zeros(())
    found = [*pulled_back(slope, some, route.trained, product)]
    for k, c in found:
        total = total + (c * network(places[k], k)).sum()
    return parameters_gradient(network, total), x, found


ROUTES = {
    "DRaFT-1": (Route(5, (5,)), True),
    "DRaFT-3": (Route(5, (5, 4, 3), through=(5, 4)), True),
    "DRaFT-T": (Route(5, (5, 4, 3, 2, 1, 0), through=(5, 4, 3, 2, 1)), True),
    "ReFL": (Route(3, (3,)), False),
    "DRTune without its end": (Route(4, (2, 0)), False),
    "DRTune with its end": (Route(4, (4, 2, 0)), False),
}


@pytest.mark.parametrize("vp", [False, True], ids=["flow", "vp"])
@pytest.mark.parametrize("name", ROUTES)
def test_the_sum_over_steps_is_autograd_through_the_whole_composition(name, vp):
    route, nested = ROUTES[name]
    network = Network()
    whole, some, start = setting(vp, route)
    found, x0, _ = summed(network, whole, some, start, route)
    end = walked(network, whole, start, route, nested=nested)
    assert torch.equal(end.detach(), x0)
    expected = parameters_gradient(network, reward(end).sum())
    assert float(expected.abs().max()) > 1e-3
    assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["ReFL", "DRTune with its end", "DRTune without its end", "DRaFT-1"])
def test_a_doubled_jacobian_leaves_methods_without_a_product_unchanged(name):
    route, _ = ROUTES[name]
    network = Network()
    whole, some, start = setting(False, route)
    before, _, _ = summed(network, whole, some, start, route)
    network.steepness = 2.0
    after, _, _ = summed(network, whole, some, start, route)
    assert torch.equal(before, after)
    if name == "DRaFT-1":
        wide, _ = ROUTES["DRaFT-3"]
        others = [summed(network, *setting(False, wide)[:2], start, wide)[0] for network.steepness in (1.0, 2.0)]
        assert not torch.allclose(others[0], others[1])


def test_the_gradient_is_the_finite_difference_of_the_reward():
    """Of DRaFT over all steps, which stops no gradient."""
    route, _ = ROUTES["DRaFT-T"]
    network = Network()
    whole, some, start = setting(False, route)
    gradient, _, _ = summed(network, whole, some, start, route)
    direction = torch.randn(len(gradient), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values, size = [], 1e-5
    flat = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    with torch.no_grad():
        for sign in (1, -1):
            torch.nn.utils.vector_to_parameters(flat + sign * size * direction, network.parameters())
            values.append(reward(walked(network, whole, start, route, nested=True)).sum())
    assert_close((values[0] - values[1]) / (2 * size), gradient @ direction, rtol=1e-6, atol=1e-8)


def test_coefficients_of_a_flow_are_the_published_ones():
    """ReFL -sigma G; DRTune Delta G, and -sigma G at its end if that is trained; DRaFT-1 Delta G at the last step."""
    sigmas = flow_schedule(STEPS, 3.0).sigmas.double()
    for name, expected in {
        "ReFL": {3: -sigmas[3]},
        "DRTune with its end": {4: -sigmas[4], 2: sigmas[3] - sigmas[2], 0: sigmas[1] - sigmas[0]},
        "DRTune without its end": {2: sigmas[3] - sigmas[2], 0: sigmas[1] - sigmas[0]},
        "DRaFT-1": {5: sigmas[6] - sigmas[5]},
    }.items():
        route, _ = ROUTES[name]
        whole, some, start = setting(False, route)
        _, x0, found = summed(Network(), whole, some, start, route)
        x0 = x0.requires_grad_()
        (slope,) = torch.autograd.grad(reward(x0).sum(), x0)
        assert [k for k, _ in found] == sorted(expected, reverse=True)
        for k, c in found:
            assert_close(c, expected[k] * slope, rtol=1e-6, atol=1e-9)  # sigmas are float32


@pytest.mark.parametrize("name", ["refl", "drtune"])
def test_ends_lie_in_the_window_and_trained_steps_are_apart_and_repeatable(name):
    module = registry.load("algorithms", name)
    method = module.build(module.Config(window=0.4))
    routes = [method.route(10, iteration, 0) for iteration in range(200)]
    assert routes == [method.route(10, iteration, 0) for iteration in range(200)]
    assert routes != [method.route(10, iteration, 1) for iteration in range(200)]
    assert {route.end for route in routes} == {6, 7, 8, 9}
    for route in routes:
        assert max(route.trained) <= route.end
        gaps = {a - b for a, b in pairwise(route.trained)}
        assert gaps == (set() if name == "refl" else {(route.end + 1) // 3})
    firsts = {route.trained for route in routes if route.end == 9}
    assert firsts == ({(9,)} if name == "refl" else {(6, 3, 0), (7, 4, 1), (8, 5, 2), (9, 6, 3)})
    assert method.route(1, 1, 0) == Route(0, (0,))


def test_a_step_below_the_least_noise_level_is_no_lever():
    grid = flow_schedule(STEPS, 3.0)
    assert [round(float(sigma), 2) for sigma in grid.sigmas[-3:]] == [0.43, 0.01, 0.0]
    assert levers(grid) == STEPS - 1
    (jump,) = links(solver_plan(grid), FlowProcess(), "velocity", Route(4, (4,)))
    assert (jump.step, jump.keep) == (4, 1.0)
    assert jump.gain == pytest.approx(-float(grid.sigmas[4]))
