"""What every file in flowrl/samplers/ must satisfy; a new file is tested before its author writes a test."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from flowrl import registry
from flowrl.plan import StepPlan, window
from flowrl.process import FlowProcess, Process, VPProcess
from flowrl.samplers.base import StepDistribution, euler_mean
from flowrl.schedules import Schedule, shifted_linspace
from flowrl.types import Step
from tests.toys import flow_schedule, vp_schedule

NAMES = registry.names("samplers")
PATHS = {"flow": (FlowProcess(), "velocity", flow_schedule), "vp": (VPProcess(), "eps", vp_schedule)}


def build(name: str):
    module = registry.load("samplers", name)
    return module.build(module.Config())


def inputs(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, count, 2, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)


def call(name: str, path: str, step: Step, x: torch.Tensor, raw: torch.Tensor) -> StepDistribution:
    process, kind, _ = PATHS[path]
    return build(name).transition(process, process.predict(raw, x, step.sigma, kind), x, step)


def steps_of(path: str, num_steps: int, noise_level: float, shift: float = 3.0) -> Step:
    """All steps of a grid as one batch."""
    process, _, schedule = PATHS[path]
    grid = schedule(num_steps, shift) if path == "flow" else schedule(num_steps)
    return StepPlan(grid, (noise_level,) * num_steps, ()).steps(torch.arange(num_steps), process)


def supported(name: str) -> list[str]:
    """Paths the sampler does not refuse."""
    found = []
    for path in PATHS:
        try:
            call(name, path, steps_of(path, 4, 0.0), *inputs(4))
        except ValueError:
            continue
        found.append(path)
    return found


CASES = [(name, path) for name in NAMES for path in supported(name)]


def test_there_are_samplers():
    assert {"ode", "flow_sde", "dance_sde", "wan_sde", "memoryless", "sage", "cps", "ddim"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_file_has_a_frozen_config_with_defaults_and_a_build(name):
    module = registry.load("samplers", name)
    config = module.Config()
    assert dataclasses.is_dataclass(config)
    assert type(config).__dataclass_params__.frozen
    sampler = module.build(config)
    assert sampler.log_prob_form in ("mean", "sum", "unscaled", "position")
    assert sampler.default_noise_level() >= 0
    assert module.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_takes_a_path_and_refuses_any_other_by_name(name):
    assert supported(name)
    for path in set(PATHS) - set(supported(name)):
        with pytest.raises(ValueError, match=name):
            call(name, path, steps_of(path, 4, 0.0), *inputs(4))


@pytest.mark.parametrize(("name", "path"), CASES)
def test_noise_level_zero_is_the_deterministic_step(name, path):
    """grpo_family 1.5.1 and ddpo sheet 1.8.1 and 5.5.1."""
    step, (x, raw) = steps_of(path, 10, 0.0), inputs(10)
    process: Process = PATHS[path][0]
    found = call(name, path, step, x, raw)
    prediction = process.predict(raw, x, step.sigma, PATHS[path][1])
    assert_close(found.mean, euler_mean(process, prediction, step), rtol=1e-6, atol=1e-6)
    assert found.std.tolist() == [0.0] * 10


@pytest.mark.parametrize(("name", "path"), CASES)
def test_a_noisy_step_is_another_one_unless_the_sampler_is_deterministic(name, path):
    level = build(name).default_noise_level()
    step, (x, raw) = steps_of(path, 10, level), inputs(10)
    still = call(name, path, steps_of(path, 10, 0.0), x, raw)
    found = call(name, path, step, x, raw)
    assert bool((found.std[:-1] > 0).all()) == (level > 0)
    assert torch.allclose(found.mean, still.mean) == (level == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "path"), CASES)
def test_half_precision_latents_and_outputs_are_computed_in_float32(name, path, dtype):
    step = steps_of(path, 10, build(name).default_noise_level())
    x, raw = inputs(10, dtype)
    found = call(name, path, step, x, raw)
    exact = call(name, path, step, x.float(), raw.float())
    assert found.mean.dtype == found.std.dtype == torch.float32
    assert torch.equal(found.mean, exact.mean)
    assert torch.equal(found.std, exact.std)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_rows_of_a_batch_do_not_see_each_other(name, path):
    step = steps_of(path, 10, build(name).default_noise_level())
    x, raw = inputs(10)
    whole = call(name, path, step, x, raw)
    for k in range(10):
        alone = step.at(torch.tensor([k]))
        found = call(name, path, alone, x[k : k + 1], raw[k : k + 1])
        # The same arithmetic; vectorised and scalar loops may round differently by one unit.
        assert_close(found.mean[0], whole.mean[k], rtol=1e-6, atol=1e-6)
        assert_close(found.std[0], whole.std[k], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_transition_leaves_its_inputs_alone(name, path):
    step = steps_of(path, 10, build(name).default_noise_level())
    x, raw = inputs(10)
    before = [t.clone() for t in (x, raw, step.sigma, step.sigma_next)]
    call(name, path, step, x, raw)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, raw, step.sigma, step.sigma_next), strict=True))


# Parametrisations in which a network states the velocity: what it outputs, and d velocity / d output.
OUTPUTS = {
    "flow": {"velocity": lambda step: torch.ones_like(step.sigma)},
    "vp": {"v": lambda step: torch.ones_like(step.sigma), "eps": lambda step: 1 / step.alpha},
}


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("name", "path", "kind"), [(name, path, kind) for name, path in CASES for kind in OUTPUTS[path]]
)
def test_velocity_gain_is_the_derivative_of_the_mean_by_the_velocity(name, path, kind, noisy):
    """By autograd, in every latent dim, at random x."""
    sampler, process = build(name), PATHS[path][0]
    step = steps_of(path, 10, sampler.default_noise_level() * noisy)
    x, raw = inputs(10)
    raw = raw.clone().requires_grad_(True)
    sampler.transition(process, process.predict(raw, x, step.sigma, kind), x, step).mean.sum().backward()
    found = sampler.velocity_gain(step)
    assert found.shape == (10,)
    assert found.dtype == torch.float32
    expected = (found * OUTPUTS[path][kind](step))[:, None, None, None].expand_as(raw)
    # Autograd adds terms that the closed form cancels: 1 / alpha reaches 13 on VP, and a gain 1e-2.
    assert_close(raw.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_velocity_gain_is_negative_and_noise_only_raises_its_size(name, path):
    """Every law but the deterministic one resamples noise that it takes out along eps_hat."""
    sampler = build(name)
    still = sampler.velocity_gain(steps_of(path, 10, 0.0))
    found = sampler.velocity_gain(steps_of(path, 10, sampler.default_noise_level()))
    step = steps_of(path, 10, 0.0)
    assert_close(still, step.alpha * step.sigma_next - step.sigma * step.alpha_next, rtol=1e-4, atol=1e-6)
    assert bool((found < 0).all())
    # At sigma = 1 and sigma' = 0 the two are equal up to one rounding.
    assert bool((found <= still + 1e-7).all())


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(("name", "path"), CASES)
def test_every_stochastic_step_but_the_last_has_a_finite_density_on_every_grid(name, path, shift):
    level = build(name).default_noise_level()
    if level == 0:
        with pytest.raises(ValueError, match="noise level 0"):
            window(flow_schedule(4), level)
        return
    for num_steps in range(2, 41):
        step, (x, raw) = steps_of(path, num_steps, level, shift), inputs(num_steps)
        inner = torch.arange(num_steps - 1)
        step = step.at(inner)
        found = call(name, path, step, x[inner], raw[inner])
        noise = torch.randn(found.mean.shape, generator=torch.Generator().manual_seed(num_steps))
        log_prob = found.log_prob(found.sample(noise), "mean")
        assert bool(found.mean.isfinite().all()), (num_steps, shift)
        assert bool(((found.std > 0) & found.std.isfinite()).all()), (num_steps, shift)
        assert bool(log_prob.isfinite().all()), (num_steps, shift)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_the_mean_carries_gradient_to_the_network_output_at_every_trained_step(name, path):
    step = steps_of(path, 10, build(name).default_noise_level())
    x, raw = inputs(10)
    raw = raw.clone().requires_grad_(True)
    call(name, path, step, x, raw).mean.square().sum().backward()
    assert bool(raw.grad.isfinite().all())
    assert bool((raw.grad.flatten(1).norm(dim=1)[:-1] > 0).all())


# ---- every grid that the project can produce


@functools.cache
def grids(path: str) -> tuple[Schedule, ...]:
    """2 to 120 steps of every family."""
    if path == "vp":
        return tuple(vp_schedule(num_steps) for num_steps in range(2, 121))
    shifts, counts = (1.0, 3.0, 5.0, 7.0), range(2, 121)
    found = [flow_schedule(num_steps, shift) for shift in shifts for num_steps in counts]
    for sigmas in (shifted_linspace(num_steps, shift) for shift in shifts for num_steps in counts):
        found.append(Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1]))
    return tuple(found)


@functools.cache
def all_steps(path: str) -> Step:
    """Every step of every grid as one batch, the noisiest ends first: what a law refuses lies together."""
    process = PATHS[path][0]
    parts = [StepPlan(g, (1.0,) * len(g), ()).steps(torch.arange(len(g)), process) for g in grids(path)]
    names = [f.name for f in dataclasses.fields(Step) if f.name != "std_scale"]
    step = Step(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
    return rows(step, step.sigma_next.argsort(descending=True))


def rows(step: Step, chosen: torch.Tensor) -> Step:
    return step.at(chosen)


def taken(name: str, path: str, step: Step) -> Iterator[tuple[Step, StepDistribution]]:
    """The steps that the law takes, in as few calls as its refusals allow; a refusal says why."""
    x, raw = inputs(1)
    count, refusal = len(step.sigma), ""
    try:
        found = call(name, path, step, x.expand(count, -1, -1, -1), raw.expand(count, -1, -1, -1))
    except ValueError as error:
        refusal = str(error)
    if not refusal:
        yield step, found
        return
    assert name in refusal
    assert "sigma_next=" in refusal
    if count > 1:
        for half in torch.arange(count).tensor_split(2):
            yield from taken(name, path, rows(step, half))


@pytest.mark.parametrize(("name", "path"), CASES)
def test_every_step_of_every_grid_is_finite_or_refused_with_a_reason(name, path):
    level = build(name).default_noise_level()
    step = dataclasses.replace(all_steps(path), noise_level=torch.full_like(all_steps(path).sigma, level))
    count = 0
    for part, found in taken(name, path, step):
        assert bool((found.std.isfinite() & (found.std >= 0)).all())
        assert bool(found.mean.isfinite().all())
        assert bool(build(name).velocity_gain(part).isfinite().all())
        count += len(part.sigma)
    # Only steps next to pure noise may be refused: fewer than one in a hundred.
    assert count > 0.99 * len(step.sigma)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_no_step_is_refused_or_noisy_at_noise_level_zero(name, path):
    step = dataclasses.replace(all_steps(path), noise_level=torch.zeros_like(all_steps(path).sigma))
    [(_, found)] = taken(name, path, step)
    assert not bool(found.std.any())
    assert bool(found.mean.isfinite().all())
