"""LeapAlign and FlowBP: coefficients against autograd through the published compositions, quadratures, drawn steps."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import flowbp, leap_align
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import Kept
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import FlowProcess, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.reward_gradients import SIDE, Route, links, misses, pulled_back, quadrature
from tests.losses.test_reward_gradients import DIM, ROWS, Network, parameters_gradient

# Exact in float32, so that the published composition can be compared in float64.
SIGMAS = torch.tensor([1.0, 0.875, 0.75, 0.5, 0.25, 0.125, 0.0])
T = len(SIGMAS) - 1
PLAN = solver_plan(Schedule(SIGMAS, 1000 * SIGMAS[:-1]))
SIGMA = SIGMAS.double()


class Rollout:
    """Stored latents and velocities of a deterministic rollout."""

    def __init__(self, network: Network) -> None:
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.x, self.v = [x], list[Tensor]()
        with torch.no_grad():
            for k in range(T):
                self.v.append(network(self.x[k], k))
                self.x.append(self.x[k] + (SIGMA[k + 1] - SIGMA[k]) * self.v[k])

    @property
    def kept(self) -> dict[int, Kept]:
        return {k: Kept(self.x[k], self.x[k] - SIGMA[k] * self.v[k]) for k in range(T)}


def through(true: Tensor, predicted: Tensor) -> Tensor:
    """Straight through: the value of the first, the gradient of the second."""
    return predicted + (true - predicted).detach()


def scaled(v: Tensor, factor: float) -> Tensor:
    return v.detach() + factor * (v - v.detach())


def weighed(x0: Tensor, weights: Tensor | None = None) -> Tensor:
    """Summed reward at clean latents."""
    each = torch.sin(x0).sum(dim=1) - 0.1 * x0.square().sum(dim=1)
    return each.sum() if weights is None else (weights * each).sum()


def eulers(network: Network, rollout: Rollout, x: Tensor, inputs: dict[int, Tensor], span: range, factor: float):
    """`x` after the Euler steps of a span; the network is evaluated anew at `inputs`."""
    for k in span:
        v = scaled(network(inputs[k], k), factor) if k in inputs else rollout.v[k]
        x = x + (SIGMA[k + 1] - SIGMA[k]) * v
    return x


def published_leaps(network, rollout, k: int, j: int, rho: float, order: int, rescale: float) -> Tensor:
    """x0 of FlowBP-Lagrange; of order 1 that of LeapAlign."""
    x = rollout.x[k]
    for start, end in ((k, j), (j, T)):
        nodes = flowbp.supports(start, end, order)
        omega = lagrange(SIGMA[list(nodes)], SIGMA[end])
        active = nodes[:2]
        full = sum(abs(w) for w in omega) / sum(abs(w) for w in omega[: len(active)])
        factor, landed = 1 + rescale * (full - 1), x
        for node, weight in zip(nodes, omega, strict=True):
            if node == start:
                given = rho * x + (1 - rho) * x.detach()
                v = scaled(network(given, node), factor)
            elif node in active:
                v = scaled(network(rollout.x[node], node), 0.25 * factor)
            else:
                v = rollout.v[node]
            landed = landed + weight * v
        x = through(rollout.x[end], landed)
    return x


def lagrange(points: Tensor, end: Tensor) -> list[float]:
    """Integrals of the Lagrange basis from the first point to the end, by their polynomials."""
    result = []
    for i, point in enumerate(points):
        basis = np.polynomial.Polynomial([1.0])
        for other in (*points[:i], *points[i + 1 :]):
            basis = basis * np.polynomial.Polynomial([-float(other), 1.0]) / float(point - other)
        whole = basis.integ()
        result.append(float(whole(float(end)) - whole(float(points[0]))))
    return result


def by_coefficients(network: Network, rollout: Rollout, route: Route, weights: Tensor | None = None):
    """The parameters' gradient by one step at a time, and the c of each."""
    x0 = rollout.x[T].clone().requires_grad_()
    (slope,) = torch.autograd.grad(weighed(x0, weights), x0)

    def product(k: int, c: Tensor) -> Tensor:
        here = rollout.x[k].clone().requires_grad_()
        return torch.autograd.grad(network(here, k), here, c)[0]

    found = dict(pulled_back(slope, links(PLAN, FlowProcess(), "velocity", route), route.trained, product))
    total = torch.stack([(c * network(rollout.x[k], k)).sum() for k, c in found.items()]).sum()
    return parameters_gradient(network, total), found


def same(found: Tensor, x0: Tensor, network: Network, weights: Tensor | None = None) -> None:
    expected = parameters_gradient(network, weighed(x0, weights))
    assert float(expected.abs().max()) > 1e-3
    assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pair", [(0, 3), (1, 5), (4, 5)])
def test_leap_align_is_autograd_through_the_published_composition_with_its_weights(monkeypatch, pair, rho):
    network, config = Network(), leap_align.Config(rho=rho, tau=0.4)
    rollout, (k, j) = Rollout(network), pair
    monkeypatch.setattr(leap_align.Config, "pair", lambda *_: pair)
    route = leap_align.build(config).route(T, 1, 0)
    d_j = (rollout.x[j] - rollout.x[k] - (SIGMA[j] - SIGMA[k]) * rollout.v[k]).abs().mean(dim=1)
    d_0 = (rollout.x[T] - rollout.x[j] + SIGMA[j] * rollout.v[j]).abs().mean(dim=1)
    missed = misses(PLAN, FlowProcess(), route, rollout.kept, rollout.x[T])
    assert_close(missed, torch.stack([d_0, d_j]), atol=1e-6, rtol=1e-6)
    weights = 1 / (d_j.clamp(min=0.4) + d_0.clamp(min=0.4))
    found, c = by_coefficients(network, rollout, route, weights)
    assert sorted(c) == [k, j]
    same(found, published_leaps(network, rollout, k, j, rho, order=1, rescale=0.0), network, weights)


@pytest.mark.parametrize("rescale", [0.0, 0.5])
@pytest.mark.parametrize("pair", [(0, 3), (1, 5), (0, 1)])
def test_lagrange_is_autograd_through_the_published_composition(monkeypatch, pair, rescale):
    network, config = Network(), flowbp.Config(rule="lagrange", rho=0.1, rescale=rescale)
    rollout = Rollout(network)
    monkeypatch.setattr(flowbp.Config, "pair", lambda *_: pair)
    route = flowbp.build(config).route(T, 1, 0)
    found, _ = by_coefficients(network, rollout, route)
    k, j = pair
    same(found, published_leaps(network, rollout, k, j, 0.1, 3, rescale), network)


def test_lagrange_of_order_1_is_leap_align():
    options = {"rho": 0.3, "tau": 0.1, "lengths": [2.5, 6.0, 2.0]}
    one = flowbp.build(flowbp.Config(rule="lagrange", order=1, rescale=1.0, **options))
    other = leap_align.build(leap_align.Config(**options))
    assert one.tau == other.tau
    for iteration in range(20):
        routes = [method.route(T, iteration, 3) for method in (one, other)]
        assert links(PLAN, FlowProcess(), "velocity", routes[0]) == links(PLAN, FlowProcess(), "velocity", routes[1])
        assert routes[0].trained == routes[1].trained


@pytest.mark.parametrize("rescale", [0.0, 0.5, 1.0])
def test_sparse_is_autograd_through_the_published_composition(rescale):
    network = Network()
    rollout = Rollout(network)
    route = flowbp.build(flowbp.Config(steps=3, rescale=rescale)).route(T, 1, 0)
    full = 1 / sum(float(SIGMA[k] - SIGMA[k + 1]) for k in route.trained)
    inputs = {k: rollout.x[k] for k in route.trained}
    end = eulers(network, rollout, rollout.x[0], inputs, range(T), 1 + rescale * (full - 1))
    found, c = by_coefficients(network, rollout, route)
    assert len(c) == 3
    same(found, through(rollout.x[T], end), network)


@pytest.mark.parametrize("rescale", [0.0, 0.5])
@pytest.mark.parametrize("j", [1, 3, 5])
def test_bridge_is_autograd_through_the_published_composition(monkeypatch, j, rescale):
    network, rho = Network(), 0.5
    rollout = Rollout(network)
    monkeypatch.setattr(flowbp.Config, "pair", lambda *_: (0, j))
    route = flowbp.build(flowbp.Config(rule="bridge", rho=rho, rescale=rescale)).route(T, 1, 0)
    factor = 1 + rescale * (1 / sum(float(SIGMA[k] - SIGMA[k + 1]) for k in route.trained) - 1)
    inputs = {k: rollout.x[k] for k in route.trained}
    assert len(inputs) == 4
    assert j in inputs
    assert min(inputs) < j
    x = through(rollout.x[j], eulers(network, rollout, rollout.x[0], inputs, range(j), factor))
    inputs[j] = rho * x + (1 - rho) * x.detach()
    end = eulers(network, rollout, x, inputs, range(j, T), factor)
    found, _ = by_coefficients(network, rollout, route)
    same(found, through(rollout.x[T], end), network)


def test_bridge_without_rho_is_sparse_at_the_same_steps_and_a_doubled_jacobian_is_felt_by_rho_alone():
    network, rest = Network(), {"rule": "bridge", "steps": 4, "rescale": 0.5}
    rollout = Rollout(network)
    bridge = flowbp.build(flowbp.Config(rho=0.0, **rest)).route(T, 1, 0)
    sparse = Route(T - 1, bridge.trained, rescale=0.5)
    assert links(PLAN, FlowProcess(), "velocity", bridge) == links(PLAN, FlowProcess(), "velocity", sparse)
    found = {}
    for rho in (0.0, 0.5):
        route = flowbp.build(flowbp.Config(rho=rho, **rest)).route(T, 1, 0)
        for network.steepness in (1.0, 2.0):
            found[rho, network.steepness] = by_coefficients(network, rollout, route)[0]
    assert torch.equal(found[0.0, 1.0], found[0.0, 2.0])
    assert not torch.allclose(found[0.5, 1.0], found[0.5, 2.0])
    assert not torch.allclose(found[0.5, 1.0], found[0.0, 1.0])


def test_sparse_of_all_steps_is_drtune_to_the_end_whatever_r_and_of_the_last_draft_1():
    every = flowbp.build(flowbp.Config(steps=T, rescale=1.0)).route(T, 1, 0)
    plain = Route(T - 1, tuple(range(T - 1, -1, -1)))
    assert links(PLAN, FlowProcess(), "velocity", every) == links(PLAN, FlowProcess(), "velocity", plain)
    last = flowbp.build(flowbp.Config(steps=1, bias=900.0)).route(T, 1, 0)
    assert last == Route(T - 1, (T - 1,)), "DRaFT-1"


# ---- the quadrature


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_weights_of_a_leap_add_up_to_its_length_and_integrate_polynomials_exactly(order):
    sigmas = flow_schedule(25, 3.0).sigmas.double()
    for start, end in ((0, 25), (3, 17), (20, 24), (9, 10)):
        nodes = flowbp.supports(start, end, order)
        assert len(nodes) == min(order, end - start)
        assert nodes[0] == start
        assert max(nodes) < end
        at, goal = [float(sigmas[k]) for k in nodes], float(sigmas[end])
        weights = quadrature(at, goal)
        assert sum(weights) == pytest.approx(goal - at[0], abs=1e-12)
        assert weights == pytest.approx(lagrange(sigmas[list(nodes)], sigmas[end]), abs=1e-10)
        for degree in range(len(nodes)):
            whole = (goal ** (degree + 1) - at[0] ** (degree + 1)) / (degree + 1)
            assert sum(w * t**degree for w, t in zip(weights, at, strict=True)) == pytest.approx(whole, abs=1e-10)


def test_supports_are_evenly_apart_and_all_of_a_short_leap():
    assert flowbp.supports(0, 25, 3) == (0, 12, 24)
    assert flowbp.supports(7, 8, 3) == (7,)
    assert flowbp.supports(4, 10, 1) == (4,)
    for start, end in ((0, 6), (2, 21), (5, 14)):
        at = torch.linspace(0, end - start - 1, 4).round().long().tolist()
        assert flowbp.supports(start, end, 4) == tuple(start + i for i in at)


@pytest.mark.parametrize("kind", ["eps", "v"])
def test_a_leap_of_a_noise_process_lands_where_eps_is_a_polynomial_of_its_time(kind):
    """x / alpha moves by eps d(sigma / alpha): exact for a square, which three supports know."""
    plan, process = solver_plan(vp_schedule(10)), VPProcess()
    sigma = plan.schedule.sigmas.double()
    alphas = plan.schedule.alphas
    alpha = process.alpha(sigma).double() if alphas is None else alphas.double()
    time, x = sigma / alpha, torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None].expand(4, DIM)

    def at(t: Tensor) -> Tensor:
        """The exact path x / alpha through `x` at the first step."""
        return x / alpha[0] + 0.3 * (t - time[0]) - 0.2 * (t**2 - time[0] ** 2) + 0.1 * (t**3 - time[0] ** 3)

    def kept(k: int) -> Kept:
        here, eps = alpha[k] * at(time[k]), 0.3 - 0.4 * time[k] + 0.3 * time[k] ** 2
        return Kept(here, (here - sigma[k] * eps) / alpha[k])

    route = Route(9, (5, 0), leaps=((5, 7, 9), (0, 2, 4)))
    missed = misses(plan, process, route, {k: kept(k) for k in (0, 2, 4, 5, 7, 9)}, at(torch.tensor(0.0)))
    assert float(missed.max()) < 1e-4
    single = misses(plan, process, Route(9, (5, 0), leaps=((5,), (0,))), {k: kept(k) for k in (0, 5)}, at(time[0] * 0))
    assert float(single.min()) > 1e-2
    # The gain of an output and of the start's latents are the slopes of that landing.
    found = {link.step: link for link in links(plan, process, kind, route)}
    for k in (0, 2):
        step = plan.steps(torch.tensor([k]), process)
        one, zero = torch.ones(1, 1), torch.zeros(1, 1)
        by_output = process.predict(one, zero, step.sigma, kind, step.alpha).eps_hat
        by_latents = process.predict(zero, one, step.sigma, kind, step.alpha).eps_hat
        weight = float(alpha[5]) * quadrature([float(time[i]) for i in (0, 2, 4)], float(time[5]))[(0, 2).index(k)]
        weight *= SIDE if k else 1
        assert found[k].gain == pytest.approx(weight * float(by_output), rel=1e-3)
        if k == 0:
            assert found[k].keep == pytest.approx(float(alpha[5] / alpha[0]) + weight * float(by_latents), rel=1e-3)
        else:
            assert found[k].keep == 1


def test_a_grid_that_begins_at_alpha_0_has_long_steps_and_their_misses():
    sigmas = torch.tensor([1.0, 0.8, 0.6, 0.0])
    plan, process = solver_plan(Schedule(sigmas, 1000 * sigmas[:-1])), VPProcess()
    found = links(plan, process, "v", Route(2, (1, 0), leaps=((1,), (0,))))
    assert [(link.keep, link.gain) for link in found] == [
        pytest.approx((0.6, -0.8), abs=1e-6),
        pytest.approx((0.8, -0.6), abs=1e-6),
    ]
    x, x0_hat = torch.ones(1, 1), torch.full((1, 1), 0.25)
    kept = {0: Kept(x, x0_hat), 1: Kept(0.6 * x0_hat + 0.8 * x, x0_hat)}  # by DDIM from the first
    assert float(misses(plan, process, Route(2, (1, 0), leaps=((1,), (0,))), kept, x0_hat).max()) < 2e-3


# ---- drawn steps


def routes(count: int, reach: int, **options) -> list[Route]:
    method = flowbp.build(flowbp.Config(**options))
    found = [method.route(reach, iteration, 0) for iteration in range(count)]
    assert found == [method.route(reach, iteration, 0) for iteration in range(count)]
    assert found != [method.route(reach, iteration, 1) for iteration in range(count)]
    return found


def test_sparse_draws_each_step_once_and_late_ones_more_often():
    plain, late = (routes(400, 10, steps=3, bias=bias) for bias in (0.0, 2.0))
    for route in (*plain, *late):
        assert len(set(route.trained)) == 3
        assert list(route.trained) == sorted(route.trained, reverse=True)
    counts = [np.bincount([*chain(*(r.trained for r in found))], minlength=10) / 400 for found in (plain, late)]
    assert counts[0] == pytest.approx(np.full(10, 0.3), abs=0.09)
    assert counts[1][9] > 3 * max(counts[1][:3])


@pytest.mark.parametrize("steps", [2, 3, 5, 9])
def test_bridge_trains_its_step_and_both_sides_in_proportion(steps):
    for route in routes(60, 9, rule="bridge", steps=steps, bias=4.0):
        (j,) = route.through
        before, after = [k for k in route.trained if k < j], [k for k in route.trained if k >= j]
        assert len(set(route.trained)) == len(route.trained) == steps
        assert list(route.trained) == sorted(route.trained, reverse=True)
        assert j in after
        assert len(before) == min(max(round(steps * j / 9), 1, steps - 9 + j), j, steps - 1)


def test_pairs_are_alike_or_follow_the_dirichlet_lengths_with_the_overflow_before_k():
    uniform = leap_align.Config()
    seen = {uniform.pair(4, iteration, 0) for iteration in range(200)}
    assert seen == {(k, j) for j in range(4) for k in range(j)}
    config = leap_align.Config(lengths=[2.5, 6.0, 2.0])
    pairs = np.array([config.pair(25, iteration, 0) for iteration in range(600)])
    after, between, before = 24 - pairs[:, 1], pairs[:, 1] - pairs[:, 0], pairs[:, 0] + 1
    assert [x.mean() for x in (after, between, before)] == pytest.approx([25 * s / 10.5 for s in (2.5, 6, 2)], abs=0.6)
    assert min(after.min(), between.min(), before.min()) >= 1
    capped = leap_align.Config(lengths=[2.5, 6.0, 2.0], tail=4)
    bounded = np.array([capped.pair(25, iteration, 0) for iteration in range(600)])
    assert (bounded[:, 1] - bounded[:, 0] == between).all()
    assert (24 - bounded[:, 1] == np.minimum(after, 4)).all()
    assert leap_align.Config(lengths=[9.0, 9.0, 0.01]).pair(3, 1, 0) == (0, 1)


@pytest.mark.parametrize(("options", "reach"), [({}, 1), ({"lengths": [1.0, 1.0, 1.0]}, 2)])
def test_too_few_steps_for_a_pair_are_named(options, reach):
    with pytest.raises(ValueError, match="and leaps need"):
        leap_align.build(leap_align.Config(**options)).route(reach, 1, 0)
