"""The contract of a sampler: a Gaussian whose mean follows the network, deterministic without noise, row by row."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.contracts.laws import Law, law, require
from flowrl.contracts.orders import PATHS, require_order
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.process import PredictionType, Process, euler_mean
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.samplers.base import Sampler, StepDistribution

STEPS = 10
FORMS = ("mean", "sum", "unscaled", "position")
REFUSED = 0.01
"""Share of the steps of all grids that a law may refuse: those next to pure noise."""


@dataclass(frozen=True)
class OnPath:
    """A sampler on one of the paths that it takes."""

    sampler: Sampler
    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def level(self) -> float:
        return self.sampler.default_noise_level()

    def steps(self, noise_level: float | None = None, num_steps: int = STEPS, shift: float = 3.0) -> Step:
        """All steps of a grid as one batch."""
        level = self.level if noise_level is None else noise_level
        grid = flow_schedule(num_steps, shift) if self.path == "flow" else vp_schedule(num_steps)
        return StepPlan(grid, (level,) * num_steps, ()).steps(torch.arange(num_steps), PATHS[self.path][0])

    def call(self, step: Step, x: Tensor, raw: Tensor, kind: PredictionType | None = None) -> StepDistribution:
        """The transition from x under the network's output `raw`."""
        process, usual = PATHS[self.path]
        return self.sampler.transition(process, process.predict(raw, x, step.sigma, kind or usual), x, step)


def inputs(count: int = STEPS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(latents, network output), [count, 2, 3, 3] each."""
    x, raw = torch.randn(2, count, 2, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    return x, raw


def taken_paths(sampler: Sampler) -> list[OnPath]:
    """The paths that a sampler does not refuse."""
    result = []
    for path in PATHS:
        each = OnPath(sampler, path)
        try:
            each.call(each.steps(0.0, 4), *inputs(4))
        except ValueError:
            continue
        result.append(each)
    return result


def on_each(sampler: Sampler) -> list[OnPath]:
    """The same, for a trial on each of them."""
    result = taken_paths(sampler)
    require(bool(result), "it refuses flow and VP models alike")
    return result


def apart(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the larger of 1 and the size."""
    return float(((result - expected).abs() / expected.abs().clamp(min=1)).max())


@law("declarations", "log_prob_form is one of mean, sum, unscaled, position; the noise level is not negative")
def declared(sampler: Sampler) -> str:
    form, level = sampler.log_prob_form, sampler.default_noise_level()
    require(form in FORMS, f"log_prob_form={form!r}")
    require(0 <= level <= sampler.largest and math.isfinite(level), f"default_noise_level()={level}")
    return f"log_prob_form={form!r}, noise level {level:g}"


@law("paths", "takes flow models, noise-prediction (VP) models, or both, and refuses the other with a ValueError")
def paths(sampler: Sampler) -> str:
    return f"takes {' and '.join(each.path for each in on_each(sampler))}"


@law("without noise", "at noise level 0 the mean is alpha' x0_hat + sigma' eps_hat and the std is 0")
def without_noise(sampler: Sampler) -> str:
    worst = 0.0
    for each in on_each(sampler):
        process, kind = PATHS[each.path]
        step, (x, raw) = each.steps(0.0), inputs()
        result = each.call(step, x, raw)
        require(not bool(result.std.any()), f"std {result.std.tolist()} on {each}")
        worst = max(worst, apart(result.mean, euler_mean(process, process.predict(raw, x, step.sigma, kind), step)))
    return require(worst <= 2e-6, f"the mean differs by {worst:.2g}")


@law("with noise", "at a positive noise level the std is positive and the mean another one, but at the last step")
def with_noise(sampler: Sampler) -> str:
    for each in on_each(sampler):
        x, raw = inputs()
        still, result = each.call(each.steps(0.0), x, raw), each.call(each.steps(), x, raw)
        noisy, moved = bool((result.std[:-1] > 0).all()), not torch.allclose(result.mean, still.mean)
        require(noisy == (each.level > 0), f"std {result.std.tolist()} at noise level {each.level:g} on {each}")
        require(moved == (each.level > 0), f"the mean is {'another' if moved else 'the same'} one on {each}")
    return "noisy" if sampler.default_noise_level() else "deterministic, as it says"


@law("half precision", "latents and outputs in bfloat16 or float16 are computed in float32")
def half_precision(sampler: Sampler) -> str:
    for each in on_each(sampler):
        for dtype in (torch.bfloat16, torch.float16):
            x, raw = inputs(dtype=dtype)
            result, exact = each.call(each.steps(), x, raw), each.call(each.steps(), x.float(), raw.float())
            kinds = {result.mean.dtype, result.std.dtype}
            require(kinds == {torch.float32}, f"mean and std are {kinds} for {dtype}")
            same = torch.equal(result.mean, exact.mean) and torch.equal(result.std, exact.std)
            require(same, f"differs by {apart(result.mean, exact.mean):.2g} from the same numbers in float32 ({dtype})")
    return "mean and std are float32, bitwise those of float32 latents"


@law("rows", "each sample's distribution is its own: the same alone as in a batch")
def rows(sampler: Sampler) -> str:
    worst = 0.0
    for each in on_each(sampler):
        step, (x, raw) = each.steps(), inputs()
        whole = each.call(step, x, raw)
        for k in range(STEPS):
            alone = each.call(step.at(torch.tensor([k])), x[k : k + 1], raw[k : k + 1])
            # The same arithmetic; vectorised and scalar loops may round differently by one unit.
            worst = max(worst, apart(alone.mean[0], whole.mean[k]), apart(alone.std, whole.std[k : k + 1]))
    return require(worst <= 2e-6, f"differs by {worst:.2g}")


@law("inputs", "latents, prediction and step are left as they were")
def inputs_alone(sampler: Sampler) -> str:
    for each in on_each(sampler):
        step, (x, raw) = each.steps(), inputs()
        process, kind = PATHS[each.path]
        prediction = process.predict(raw, x, step.sigma, kind)
        given = [x, prediction.x0_hat, prediction.eps_hat, prediction.velocity, step.sigma, step.sigma_next]
        before = [tensor.clone() for tensor in given]
        sampler.transition(process, prediction, x, step)
        changed = [k for k, (a, b) in enumerate(zip(before, given, strict=True)) if not torch.equal(a, b)]
        names = ("x", "x0_hat", "eps_hat", "velocity", "step.sigma", "step.sigma_next")
        require(not changed, f"transition changes {', '.join(names[k] for k in changed)} on {each}")
    return "as they were"


OUTPUTS = {
    "flow": {"velocity": lambda step: torch.ones_like(step.sigma)},
    "vp": {"v": lambda step: torch.ones_like(step.sigma), "eps": lambda step: 1 / step.alpha},
}
"""Parametrisations in which a network states the velocity: what it outputs, and d velocity / d output."""


@law("velocity gain", "velocity_gain(step) is d mean / d velocity, [B] float32, in every latent dim")
def velocity_gain(sampler: Sampler) -> str:
    worst = 0.0
    for each in on_each(sampler):
        for kind, scale in OUTPUTS[each.path].items():
            for level in (0.0, each.level):
                step, (x, raw) = each.steps(level), inputs()
                raw = raw.clone().requires_grad_(True)
                each.call(step, x, raw, kind).mean.sum().backward()
                result = sampler.velocity_gain(step)
                shape = tuple(result.shape), result.dtype
                require(shape == ((STEPS,), torch.float32), f"it is {shape} for {STEPS} samples")
                expected, grad = (result * scale(step))[:, None, None, None].expand_as(raw), raw.grad
                assert grad is not None
                # Autograd adds terms that the closed form cancels: 1 / alpha reaches 13 on VP, and a gain 1e-2.
                near = torch.allclose(grad, expected, rtol=1e-4, atol=1e-6)
                worst = max(worst, apart(grad, expected))
                require(near, f"differs by {worst:.2g} on {each}, at noise level {level:g}")
    return f"differs by {worst:.2g}"


@law("direction", "the gain is negative (towards data), and noise only raises its size")
def direction(sampler: Sampler) -> str:
    for each in on_each(sampler):
        step = each.steps()
        still, result = sampler.velocity_gain(each.steps(0.0)), sampler.velocity_gain(step)
        expected = step.alpha * step.sigma_next - step.sigma * step.alpha_next
        near = torch.allclose(still, expected, rtol=1e-4, atol=1e-6)
        require(near, f"without noise it is {still.tolist()}, and the path's is {expected.tolist()} on {each}")
        require(bool((result < 0).all()), f"{result.tolist()} on {each}")
        # At sigma = 1 and sigma' = 0 the two are equal up to one rounding.
        require(
            bool((result <= still + 1e-7).all()), f"{result.tolist()}, and {still.tolist()} without noise on {each}"
        )
    return "negative at every step"


@law("density", "noisy steps but the last have a finite mean, a positive std and a finite log-prob on grids of 2-40")
def density(sampler: Sampler) -> str:
    if not sampler.default_noise_level():
        return "deterministic: it has none"
    for each in on_each(sampler):
        for num_steps, shift in ((n, s) for n in range(2, 41) for s in (1.0, 3.0)):
            inner, (x, raw) = torch.arange(num_steps - 1), inputs(num_steps)
            result = each.call(each.steps(None, num_steps, shift).at(inner), x[inner], raw[inner])
            noise = torch.randn(result.mean.shape, generator=torch.Generator().manual_seed(num_steps))
            log_prob = result.log_prob(result.sample(noise), sampler.log_prob_form)
            good = result.mean.isfinite().all() & (result.std > 0).all() & result.std.isfinite().all()
            where = f"on {each} at {num_steps} steps and shift {shift:g}"
            require(bool(good & log_prob.isfinite().all()), f"std {result.std.tolist()} {where}")
    return "finite"


@law("gradient", "the mean carries a finite gradient to the network's output at every step but the last")
def gradient(sampler: Sampler) -> str:
    for each in on_each(sampler):
        x, raw = inputs()
        raw = raw.clone().requires_grad_(True)
        mean = each.call(each.steps(), x, raw).mean
        require(mean.requires_grad, f"the mean has none on {each}")
        (result,) = torch.autograd.grad(mean.square().sum(), raw)
        sizes = result.flatten(1).norm(dim=1)
        require(bool(result.isfinite().all() and (sizes[:-1] > 0).all()), f"its size is {sizes.tolist()} on {each}")
    return "arrives"


# ---- every grid that the project can produce


@functools.cache
def grids(path: str) -> tuple[Schedule, ...]:
    """2 to 120 steps of every family."""
    if path == "vp":
        return tuple(vp_schedule(num_steps) for num_steps in range(2, 121))
    shifts, counts = (1.0, 3.0, 5.0, 7.0), range(2, 121)
    result = [flow_schedule(num_steps, shift) for shift in shifts for num_steps in counts]
    for sigmas in (shifted_linspace(num_steps, shift) for shift in shifts for num_steps in counts):
        result.append(Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1]))
    return tuple(result)


@functools.cache
def all_steps(path: str) -> Step:
    """Every step of every grid as one batch, the noisiest ends first: refused steps are next to each other."""
    process = PATHS[path][0]
    parts = [StepPlan(g, (1.0,) * len(g), ()).steps(torch.arange(len(g)), process) for g in grids(path)]
    tensors = [dataclasses.asdict(part) for part in parts]
    step = Step(
        **{name: torch.cat([each[name] for each in tensors]) for name, one in tensors[0].items() if one is not None}
    )
    return step.at(step.sigma_next.argsort(descending=True))


def accepted(each: OnPath, steps: Step) -> Iterator[tuple[Step, StepDistribution]]:
    """The steps that are taken, in as few calls as the refusals allow; a refusal says at which sigma_next.

    Raises Broken: more are refused than may be, or one is without a reason.
    """
    (x, raw), waiting, refused = inputs(1), [steps], 0
    while waiting:
        step = waiting.pop()
        count = len(step.sigma)
        try:
            result = each.call(step, x.expand(count, -1, -1, -1), raw.expand(count, -1, -1, -1))
        except ValueError as error:
            require("sigma_next=" in str(error), f"refuses a step on {each} without sigma_next=: {error}")
            waiting += [step.at(half) for half in torch.arange(count).tensor_split(2)] if count > 1 else []
            refused += count == 1
            most = REFUSED * len(steps.sigma)
            require(refused <= most, f"refuses more than {REFUSED:.0%} of the steps on {each}, such as: {error}")
            continue
        yield step, result


@law("every grid", "steps of all grids of 2-120 are finite; at most 1 % next to noise is refused, with sigma_next=")
def every_grid(sampler: Sampler) -> str:
    refused = 0
    for each in on_each(sampler):
        steps = all_steps(each.path)
        steps = dataclasses.replace(steps, noise_level=torch.full_like(steps.sigma, each.level))
        refused += len(steps.sigma)
        for part, result in accepted(each, steps):
            bad = ~(result.std.isfinite() & (result.std >= 0) & result.mean.flatten(1).isfinite().all(dim=1))
            where = f"on {each} at sigma_next={part.sigma_next[bad][:3].tolist()}"
            require(not bool(bad.any()), f"a mean or std is not finite {where}")
            require(bool(sampler.velocity_gain(part).isfinite().all()), f"velocity_gain is not finite on {each}")
            refused -= len(part.sigma)
    return f"finite; {refused} steps are refused"


@law("every grid without noise", "no step is refused or noisy at noise level 0")
def every_grid_without_noise(sampler: Sampler) -> str:
    for each in on_each(sampler):
        steps = all_steps(each.path)
        parts = list(accepted(each, dataclasses.replace(steps, noise_level=torch.zeros_like(steps.sigma))))
        require(len(parts) == 1, f"refuses steps on {each}")
        result = parts[0][1]
        require(not bool(result.std.any()) and bool(result.mean.isfinite().all()), f"noisy or not finite on {each}")
    return "deterministic"


@law("order", "halving the steps divides the error of the marginals of Gaussian data by 2^order, or more")
def order(sampler: Sampler) -> str:
    def advance(
        process: Process, prediction: Prediction, x: Tensor, step: Step, noise: Tensor, before: object
    ) -> tuple[Tensor, None]:
        return sampler.transition(process, prediction, x, step).sample(noise), None

    found = [require_order(sampler.order, advance, each.path, each.level) for each in on_each(sampler)]
    return f"order {sampler.order}; measured {', '.join(found)}"


LAWS: tuple[Law[Sampler], ...] = (
    *(declared, paths, without_noise, with_noise, half_precision, rows, inputs_alone, velocity_gain, direction),
    *(density, gradient, every_grid, every_grid_without_noise, order),
)
