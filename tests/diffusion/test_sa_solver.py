"""The SA-Solver: its formulas, its grid, and exact marginals on Gaussian data."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import Prediction, SampleId
from flowrl.diffusion.plan import StepPlan, solver_plan
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.solver_base import Node
from flowrl.diffusion.solvers import SaSolver, noise_levels, sa_schedule
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.ode import Ode
from tests.toys import SHAPE, ToyAdapter

FLOW, SA = FlowProcess(), SaSolver()
STD, MEAN = 0.5, 1.5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gaussian_belief(x: Tensor, sigma: Tensor) -> Prediction:
    """The exact x0_hat of data N(MEAN, STD^2) under the flow, for x [B, n]."""
    sigma = sigma.reshape(-1, 1)
    variance = (1 - sigma).square() * STD**2 + sigma.square()
    x0_hat = MEAN + (1 - sigma) * STD**2 / variance * (x - (1 - sigma) * MEAN)
    eps_hat = (x - (1 - sigma) * x0_hat) / sigma
    return Prediction(x0_hat, eps_hat, eps_hat - x0_hat)


def solved(plan: StepPlan, x: Tensor, noises: list[Tensor]) -> Tensor:
    """The solver along the plan on Gaussian data, from x [1, n]."""
    before = None
    for k in range(len(plan)):
        step = plan.steps(torch.tensor([k]), FLOW)
        belief = gaussian_belief(x, step.sigma)
        x, before = SA.step(belief, Node(x, belief.x0_hat, step, noises[k]), before, last=k == len(plan) - 1)
    return x


# ---- the grid


def test_the_grid_starts_below_pure_noise_and_its_last_step_is_shorter():
    grid = flow_schedule(14)
    found = sa_schedule(grid)
    assert float(found.sigmas[0]) == pytest.approx(0.999)
    assert float(found.sigmas[-2]) == pytest.approx(float(grid.sigmas[-3]) / 2)
    assert float(found.sigmas[-1]) == 0
    assert torch.equal(found.sigmas[1:-2], grid.sigmas[1:-2])
    assert_close(found.timesteps, 1000 * found.sigmas[:-1])
    assert float(grid.sigmas[0]) == 1, "the schedule that was given is changed"


def test_noise_is_added_in_the_middle_of_the_path_alone():
    grid = Schedule(torch.tensor([0.999, 0.9, 0.6, 0.3, 0.2, 0.0]), torch.zeros(5))
    assert noise_levels(grid, 0.4) == (0.0, 0.4, 0.4, 0.4, 0.0)


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (flow_schedule(2), "at least 3 steps"),
        (Schedule(torch.linspace(0.9, 0.1, 5), torch.zeros(4)), "ends at sigma 0"),
        (vp_schedule(10), "ends at sigma 0"),
    ],
)
def test_a_grid_that_it_cannot_walk_is_refused(grid, words):
    with pytest.raises(ValueError, match=words):
        sa_schedule(grid)


# ---- one step


def test_without_noise_an_order_1_step_is_ddim():
    """The first step is of order 1."""
    plan = solver_plan(flow_schedule(10), "sa", 0.0)
    step = plan.steps(torch.tensor([0, 0]), FLOW)
    x, v = draw(2, 3), draw(2, 3, seed=1)
    prediction = FLOW.predict(v, x, step.sigma, "velocity")
    ahead, _ = SA.step(prediction, Node(x, prediction.x0_hat, step, draw(2, 3, seed=2)), None)
    sigma, sigma_next = (value[:, None] for value in (step.sigma, step.sigma_next))
    ddim = (1 - sigma_next) * prediction.x0_hat + sigma_next * prediction.eps_hat
    assert_close(ahead, ddim, rtol=1e-5, atol=1e-6)
    assert_close(ahead, x + v * (sigma_next - sigma), rtol=1e-5, atol=1e-5)


def by_hand(noise_level: float) -> tuple[list[float], list[float]]:
    """Three steps with plain floats, coefficients by numerical integration.

    Returns what the solver gives after each step, and the beliefs that it is fed.
    """
    sigmas, m = [0.9, 0.7, 0.5, 0.3], [0.8, 0.5, 0.65]
    noise, q, tau2 = [0.3, -1.1, 0.7], 1 + noise_level**2, noise_level**2
    lam = [math.log((1 - s) / s) for s in sigmas]

    def step(x: float, k: int, pairs: list[tuple[float, float]]) -> float:
        """F with sum of coefficients times beliefs, given as (coefficient, belief)."""
        h = lam[k + 1] - lam[k]
        total = sum(c * value for c, value in pairs)
        decay, rest = math.exp(-tau2 * h), 1 - math.exp(-2 * tau2 * h)
        return (
            decay * sigmas[k + 1] / sigmas[k] * x
            + q * sigmas[k + 1] * math.exp(-tau2 * lam[k + 1]) * total
            + sigmas[k + 1] * math.sqrt(rest) * noise[k]
        )

    def coefficients(k: int) -> tuple[float, float, float, float]:
        """Of order 1, what order 2 moves in the predictor and in the corrector, and h."""
        h, end = lam[k + 1] - lam[k], math.exp(q * lam[k + 1])
        first = (end - math.exp(q * lam[k])) / q
        exact = end * (q * h - 1 + math.exp(-q * h)) / q**2  # integral of e^(qu) (u - lambda_k)
        back = lam[k] - lam[k - 1] if k else math.inf
        predictor = exact / back + end * (h * h / 2 - exact / end) / back
        corrector = exact / h + end * (h / 2 - exact / end / h)
        return first, predictor, corrector, h

    x, start, out = 0.2, 0.0, []
    for k in range(3):
        if k > 1:  # the step from k - 1 is taken again, with the belief at its end
            first, _, moved, _ = coefficients(k - 1)
            x = step(start, k - 1, [(first - moved, m[k - 1]), (moved, m[k])])
        start = x
        first, moved, _, _ = coefficients(k)
        pairs = [(first, m[k])] if k == 0 else [(first + moved, m[k]), (-moved, m[k - 1])]
        x = step(start, k, pairs)
        out.append(x)
    return out, m


@pytest.mark.parametrize("noise_level", [0.0, 0.4, 1.0])
def test_predictor_and_corrector_are_those_of_the_paper_with_one_noise(noise_level):
    expected, beliefs = by_hand(noise_level)
    plan = StepPlan(
        Schedule(torch.tensor([0.9, 0.7, 0.5, 0.3, 0.0]), torch.zeros(4)), (noise_level,) * 4, (), ("sa",) * 4
    )
    x, before = torch.tensor([[0.2]]), None
    for k, noise in enumerate([0.3, -1.1, 0.7]):
        step = plan.steps(torch.tensor([k]), FLOW)
        m = torch.tensor([[beliefs[k]]])
        x, before = SA.step(Prediction(m, m, m), Node(x, m, step, torch.tensor([[noise]])), before)
        assert float(x) == pytest.approx(expected[k], abs=2e-6)


def test_the_last_step_is_the_belief():
    plan = solver_plan(flow_schedule(5), "sa", 0.4)
    step, m = plan.steps(torch.tensor([4]), FLOW), draw(1, 3)
    assert torch.equal(SA.step(Prediction(m, m, m), Node(draw(1, 3, seed=1), m, step, m), None, last=True)[0], m)


# ---- whole trajectories on Gaussian data


@pytest.mark.parametrize("noise_level", [0.0, 0.4, 1.0])
def test_the_end_samples_have_the_mean_and_the_std_of_the_data(noise_level):
    """60000 samples: the standard errors are 0.002; the last belief replaces x, so the std falls short by a little."""
    plan = solver_plan(flow_schedule(60), "sa", noise_level)
    noises = [draw(1, 60_000, seed=k + 1) for k in range(60)]
    found = solved(plan, draw(1, 60_000), noises)
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.012)
    assert float(found.std()) == pytest.approx(STD, abs=0.012)


# ---- in a rollout


def finals(noise_level: float, batch_size: int, seed: int = 0) -> Tensor:
    adapter = ToyAdapter()
    cond, rows = adapter.encode(["one", "two"]), torch.tensor([0, 0, 0, 1, 1, 1])
    ids = [SampleId(slot, sample) for slot in range(2) for sample in range(3)]
    plan = solver_plan(flow_schedule(8), "sa", noise_level)
    noise = Noise(seed, "rollout", 1, SHAPE)
    samples, edges = run(Policy(adapter, Ode(), 1.0), plan, noise, Asked(ids, cond, rows), batch_size=batch_size)
    assert len(edges) == 0
    return samples.x0


def test_a_rollout_depends_on_its_noise_and_not_on_its_batches():
    whole = finals(0.8, 6)
    for batch_size in (1, 4):
        assert_close(finals(0.8, batch_size), whole, rtol=0, atol=1e-5)
    assert float((finals(0.0, 6) - whole).abs().max()) > 0.01


def test_its_steps_have_no_transition_though_they_have_noise():
    plan = solver_plan(flow_schedule(8), "sa", 0.4)
    assert max(plan.noise_level) == 0.4
    assert not any(plan.stochastic)
    assert plan.train == ()
