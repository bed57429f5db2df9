"""Deterministic steps: against their formulas, diffusers' own DPM-Solver++, and exact solutions."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import Prediction, SampleId, Step
from flowrl.diffusion.plan import StepPlan, solver_plan
from flowrl.diffusion.process import FlowProcess, Process, VPProcess
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.diffusion.solver_base import Node
from flowrl.diffusion.solvers import SOLVERS as TABLE
from flowrl.diffusion.solvers import SolverName
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.ode import Ode
from tests.toys import SHAPE, ToyAdapter

FLOW, VP = FlowProcess(), VPProcess()
SOLVERS = [name for name, solver in TABLE.items() if not solver.stochastic]
ORDER_2 = ("dpm2_midpoint", "dpm2_heun")


def step_between(process: Process, sigma: float, sigma_next: float, rows: int = 1) -> Step:
    sigmas = torch.tensor([sigma, sigma_next])
    alphas, none = process.alpha(sigmas), torch.zeros(rows)
    a, s, a2, s2 = (value.repeat(rows) for value in (alphas[:1], sigmas[:1], alphas[1:], sigmas[1:]))
    return Step(a, s, a2, s2, none, none, none, none)


def belief(process: Process, x: Tensor, x0_hat: Tensor, step: Step) -> Prediction:
    """What a network that believes in `x0_hat` says at x."""
    alpha, sigma = (value.reshape(-1, *[1] * (x.ndim - 1)) for value in (step.alpha, step.sigma))
    eps_hat = (x - alpha * x0_hat) / sigma
    return Prediction(x0_hat, eps_hat, alpha * eps_hat - sigma * x0_hat)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def solve(name: SolverName, prediction: Prediction, x: Tensor, step: Step, before: Node | None = None) -> Tensor:
    """The next latents alone."""
    return TABLE[name].step(prediction, Node(x, prediction.x0_hat, step), before)[0]


def node(prediction: Prediction, step: Step) -> Node:
    """A node that was left; no solver without noise looks at its latents."""
    return Node(prediction.x0_hat, prediction.x0_hat, step)


def test_every_name_has_its_solver():
    assert set(get_args(SolverName)) == set(TABLE)
    assert [name for name, solver in TABLE.items() if solver.stochastic] == ["sa"]


# ---- one step


@pytest.mark.parametrize(
    ("process", "schedule"),
    [(FLOW, flow_schedule(10)), (FLOW, Schedule(shifted_linspace(25, 3.0), torch.zeros(25))), (VP, vp_schedule(20))],
    ids=["sd3", "mixgrpo", "vp"],
)
def test_order_1_is_the_ode_step_on_every_step_of_a_grid(process, schedule):
    """Identical maps; on VP the ODE step is DDIM."""
    step = solver_plan(schedule).steps(torch.arange(len(schedule)), process)
    x = draw(len(schedule), 5)
    prediction = belief(process, x, draw(len(schedule), 5, seed=1), step)
    found = solve("dpm1", prediction, x, step, None)
    assert_close(found, Ode().transition(process, prediction, x, step).mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(solve("ode", prediction, x, step, None), Ode().transition(process, prediction, x, step).mean)


def test_order_2_adds_half_of_d1_or_the_heun_weight_of_it():
    """Written with plain floats: sigma 0.9 -> 0.7 -> 0.4."""
    lam = {s: math.log(1 - s) - math.log(s) for s in (0.9, 0.7, 0.4)}
    h, h_prev, x, m0, m1 = lam[0.4] - lam[0.7], lam[0.7] - lam[0.9], 0.3, 0.8, 0.5
    d1, gone = (m0 - m1) * h / h_prev, math.exp(-h) - 1
    first = 0.4 / 0.7 * x - 0.6 * gone * m0
    expected: dict[SolverName, float] = {
        "dpm2_midpoint": first - 0.6 * gone * d1 / 2,
        "dpm2_heun": first + 0.6 * (gone / h + 1) * d1,
    }
    before, here = step_between(FLOW, 0.9, 0.7), step_between(FLOW, 0.7, 0.4)
    at, value = torch.tensor([[x]]), torch.tensor([[m0]])
    history = node(belief(FLOW, at, torch.tensor([[m1]]), before), before)
    for solver, number in expected.items():
        found = solve(solver, belief(FLOW, at, value, here), at, here, history)
        assert float(found) == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize("process", [FLOW, VP], ids=["flow", "vp"])
def test_heun_is_exact_where_the_belief_is_linear_in_lambda(process):
    """x' = (sigma' / sigma) x + sigma' * integral of e^lambda x0_hat(lambda): the ODE of which it is a solver."""
    before, here = step_between(process, 0.9, 0.7), step_between(process, 0.7, 0.4)
    lam = [float(t.alpha.double().log() - t.sigma.double().log()) for t in (before, here)]
    end = float(here.alpha_next.double().log() - here.sigma_next.double().log())
    x, base, slope = draw(1, 4), draw(1, 4, seed=1), draw(1, 4, seed=2)
    history = node(belief(process, x, base + lam[0] * slope, before), before)
    prediction = belief(process, x, base + lam[1] * slope, here)
    at = torch.linspace(lam[1], end, 10001, dtype=torch.float64)[:, None]
    integral = torch.trapezoid(at.exp() * (base + at * slope), at.squeeze(1), dim=0)
    exact = 0.4 / 0.7 * x + 0.4 * integral
    assert_close(solve("dpm2_heun", prediction, x, here, history), exact.float(), rtol=1e-5, atol=1e-5)


# ---- fall-backs


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("process", [FLOW, VP], ids=["flow", "vp"])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_step_to_sigma_0_is_exactly_the_belief(solver, process, remembers):
    """At sigma' = 0 x' = x0_hat; also with a history, where D1 would be infinite."""
    before, step = step_between(process, 0.5, 0.2, rows=2), step_between(process, 0.2, 0.0, rows=2)
    x, x0_hat = draw(2, 3), draw(2, 3, seed=1)
    history = node(belief(process, x, draw(2, 3, seed=2), before), before) if remembers else None
    assert torch.equal(solve(solver, belief(process, x, x0_hat, step), x, step, history), x0_hat)


@pytest.mark.parametrize("solver", ORDER_2)
@pytest.mark.parametrize("process", [FLOW, VP], ids=["flow", "vp"])
def test_order_2_after_a_node_at_sigma_1_is_order_1(solver, process):
    """Lambda is -inf there, so D1 = 0; without any node before it is order 1 too."""
    before, step = step_between(process, 1.0, 0.8), step_between(process, 0.8, 0.6)
    x = draw(1, 3)
    prediction = belief(process, x, draw(1, 3, seed=1), step)
    noise = Prediction(draw(1, 3, seed=2), x, x)
    first = solve("dpm1", prediction, x, step, None)
    assert torch.equal(solve(solver, prediction, x, step, node(noise, before)), first)
    assert torch.equal(solve(solver, prediction, x, step, None), first)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_first_step_from_pure_noise_is_finite(solver):
    """lambda is -inf at sigma = 1: x' = sigma' x + alpha' x0_hat."""
    x, x0_hat, step = draw(1, 3), draw(1, 3, seed=1), step_between(FLOW, 1.0, 0.9)
    found = solve(solver, belief(FLOW, x, x0_hat, step), x, step, None)
    assert_close(found, 0.9 * x + 0.1 * x0_hat, rtol=0, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_row_has_its_own_coefficients_and_the_result_is_float32(solver):
    """One batch over steps of a grid equals the steps one by one; latents in half precision are computed in float32."""
    index = torch.tensor([4, 2, 7])
    plan = solver_plan(flow_schedule(9))
    before, step = plan.steps(index - 1, FLOW), plan.steps(index, FLOW)
    x = draw(3, 2, 2).bfloat16()
    prediction, older = (belief(FLOW, x.float(), draw(3, 2, 2, seed=s), step) for s in (1, 2))
    whole = solve(solver, prediction, x, step, node(older, before))
    assert whole.dtype == torch.float32
    for row in range(3):

        def pick(value, row=row):
            fields = [name for name in value.__dataclass_fields__ if getattr(value, name) is not None]
            return replace(value, **{name: getattr(value, name)[row : row + 1] for name in fields})

        history = node(pick(older), pick(before))
        alone = solve(solver, pick(prediction), x[row : row + 1].float(), pick(step), history)
        assert_close(whole[row : row + 1], alone, rtol=0, atol=0)


# ---- whole trajectories


def gaussian_flow(solver: SolverName, sigmas: Tensor, std: float = 0.5) -> float:
    """Relative error at the end of the exact ODE of data N(0, std^2), where x0_hat = (1 - sigma) std^2 / var * x."""

    def spread(sigma: Tensor) -> Tensor:
        return ((1 - sigma).square() * std**2 + sigma.square()).sqrt()

    plan = solver_plan(Schedule(sigmas.float(), torch.zeros(len(sigmas) - 1)))
    start = torch.ones(1, 1)
    x, history = start, None
    for k in range(len(plan)):
        step = plan.steps(torch.tensor([k]), FLOW)
        gain = (1 - step.sigma) * std**2 / spread(step.sigma).square()
        prediction = belief(FLOW, x, gain * x, step)
        x, history = solve(solver, prediction, x, step, history), node(prediction, step)
    exact = spread(sigmas[-1]) / spread(sigmas[0])
    return abs(float(x) / float(exact) - 1)


@pytest.mark.parametrize(("solver", "order"), [(n, each.order) for n, each in TABLE.items() if not each.stochastic])
def test_from_noise_to_data_the_error_falls_with_the_order_of_the_solver(solver, order):
    """Through both fall-backs: the step in lambda is large at the ends. Between them: the law of the contract."""
    few, many = (gaussian_flow(solver, torch.linspace(1, 0, count + 1, dtype=torch.float64)) for count in (64, 256))
    measured = math.log(few / many, 4)
    assert measured == pytest.approx(order, abs=0.35)


OPTIONS = {
    "dpm1": {"solver_order": 1},
    "dpm2_midpoint": {"solver_order": 2, "solver_type": "midpoint"},
    "dpm2_heun": {"solver_order": 2, "solver_type": "heun"},
}
FLOW_OPTIONS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
VP_OPTIONS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


@pytest.mark.parametrize("solver", OPTIONS)
@pytest.mark.parametrize(
    ("vp", "num_steps", "final"),
    [(False, 8, "zero"), (False, 20, "zero"), (True, 8, "zero"), (True, 20, "zero"), (True, 8, "sigma_min")],
)
def test_a_rollout_is_that_of_diffusers(solver, vp, num_steps, final):
    """Below and above the 15 steps of its rule, ending at sigma 0 or, on VP, above it."""
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    options = VP_OPTIONS if vp else FLOW_OPTIONS
    scheduler: Any = DPMSolverMultistepScheduler(**options, **OPTIONS[solver], final_sigmas_type=final)
    scheduler.set_timesteps(num_steps)
    sigmas = scheduler.sigmas.double()
    if vp:  # its sigmas are sigma / alpha
        sigmas = sigmas / (1 + sigmas.square()).sqrt()
    schedule = Schedule(sigmas.float(), scheduler.timesteps.float())
    adapter = ToyAdapter(vp=vp)
    cond, rows = adapter.encode(["prompt"]), torch.zeros(2, dtype=torch.int64)
    ids, noise = [SampleId(0, 0), SampleId(0, 1)], Noise(0, "rollout", 1, SHAPE)
    plan = StepPlan(schedule, (0.0,) * num_steps, (), (solver,) * num_steps)
    samples, _ = run(Policy(adapter, Ode(), 1.0), plan, noise, Asked(ids, cond, rows), batch_size=2)

    x = noise.initial(ids)
    with torch.no_grad():
        for t in scheduler.timesteps:
            out = adapter.predict(x, t.float().expand(2), cond.index(rows), 1.0)
            x = scheduler.step(out, t, x).prev_sample
    # float32 on both sides; on VP x0_hat is 15 times as large as x at the first step.
    tolerance = 1e-3 if vp else 1e-4
    assert_close(samples.x0, x, rtol=tolerance, atol=tolerance)
