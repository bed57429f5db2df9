"""The bases of samplers, and the Gaussian over the next latents that they return.

A sampler neither draws nor scores: `sample`, `log_prob` and `kl` exist once, here.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.core import registry
from flowrl.core.errors import OptionError
from flowrl.core.types import Prediction, Step
from flowrl.diffusion.process import FlowProcess, Process, VPProcess, expand

LogProbForm = Literal["mean", "sum", "unscaled", "position"]
KLDivisor = Literal["variance", "flow_grpo", "none"]
Ratio = Literal["plain", "ratio_norm"]
"""Kinds of ratio: exp(log p - log p_old), or GRPO-Guard's, without its bias and scale."""


@dataclass(frozen=True, slots=True)
class StepDistribution:
    """Gaussian over the next latents: mean [B, ...] and std [B], float32; std 0 is a deterministic step."""

    mean: Tensor
    std: Tensor
    channel_axis: int = 1
    """Channel axis of the mean, for the form `position`: 1 in [B, C, h, w], 2 in packed latents [B, tokens, C]."""
    noisy: bool | None = None
    """Whether every std is above 0; None: looked at when a density is asked for, which waits for a GPU."""

    def at(self, rows: Tensor) -> "StepDistribution":
        """The distributions of `rows` [n], which may repeat."""
        return StepDistribution(self.mean[rows], self.std[rows], self.channel_axis, self.noisy or None)

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise, [B, ...] float32; `noise` is standard normal, shaped like the mean."""
        if noise.shape != self.mean.shape:
            raise ValueError(f"noise {tuple(noise.shape)} must be shaped like the mean {tuple(self.mean.shape)}")
        return self.mean + expand(self.std, self.mean) * noise.float()

    def log_prob(self, x_next: Tensor, form: LogProbForm = "mean") -> Tensor:
        """Log-density of `x_next` [B, ...], float32.

        Forms: `mean` over all latent dims (the official Flow-GRPO number; clip ranges are tuned to it),
        `sum` (the true log-density), `unscaled` = -mean of (x_next - mean)^2 (CPS), `position` = mean over
        channels only, [B, ...] without the channel axis. All others are [B].

        Raises ValueError: a deterministic step (std 0) has no density; shapes differ.
        """
        if x_next.shape != self.mean.shape:
            raise ValueError(f"x_next {tuple(x_next.shape)} must be shaped like the mean {tuple(self.mean.shape)}")
        self._require_noise("log_prob")
        square = (x_next.float() - self.mean).square()
        dims = tuple(range(1, square.ndim))
        if form == "unscaled":
            return -square.mean(dim=dims)
        std = expand(self.std, square)
        density = -square / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
        if form == "mean":
            return density.mean(dim=dims)
        if form == "sum":
            return density.sum(dim=dims)
        if form == "position":
            return density.mean(dim=self.channel_axis)
        raise ValueError(f"log_prob form={form!r}; use 'mean', 'sum', 'unscaled' or 'position'")

    def kl(self, other: "StepDistribution", *, divisor: KLDivisor = "variance", dt: Tensor | None = None) -> Tensor:
        """Mean over dims of (mean - other.mean)^2 / (2 * divisor), [B]: the KL of two steps of equal std.

        The divisor is `variance`: std^2 (the Gaussian KL per dim); `flow_grpo`: std^2 / |dt|, as in the official code
        since 2025-07-15, whose KL lacks the factor 1 / |dt|; `none`: no division at all.
        """
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"other {tuple(other.mean.shape)} must be shaped like the mean {tuple(self.mean.shape)}")
        square = (self.mean - other.mean).square().mean(dim=tuple(range(1, self.mean.ndim)))
        if divisor == "none":
            return square
        self._require_noise("kl")
        variance = self.std.square()
        if divisor == "flow_grpo":
            if dt is None or dt.shape != self.std.shape:
                raise ValueError("kl divisor 'flow_grpo' needs dt, the sigma difference of the step, [B]")
            variance = variance / dt.abs()
        return square / (2 * variance)

    def _require_noise(self, what: str) -> None:
        if not (bool((self.std != 0).all()) if self.noisy is None else self.noisy):
            raise ValueError(f"{what} of a deterministic step (std 0): only stochastic steps can be scored or trained")


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """The options of a sampler whose file defines none."""

    noise_level: float = 1.0
    """Strength of the noise, in the sampler's own units; 0 is the deterministic step."""

    def __post_init__(self) -> None:
        if self.noise_level < 0:
            raise ValueError(f"noise_level={self.noise_level} must not be negative")


class Sampler(ABC):
    """A sampler: the Gaussian distribution of the next latents, given the latents and the network's prediction there.

    `transition` is all that one must write:

        class MySampler(flowrl.Sampler):
            def transition(self, process, prediction, x, step):
                std = 0.5 * step.noise_level * step.sigma_next
                direction = (step.sigma_next**2 - std**2).sqrt()
                return StepDistribution(mean=ddim_mean(prediction, step, direction), std=std)

    A configuration names its file: `rollout.sampler: {path: my_sampler.py, noise_level: 0.7}`.
    """

    Config: ClassVar[type] = NoiseOptions
    """The options of a sampler whose file defines no `Config`."""
    log_prob_form: LogProbForm = "mean"
    """The form of log-prob that its published clip ranges belong to."""
    kl_divisor: ClassVar[KLDivisor | None] = None
    """Divisor of the KL to a reference in the code that published the sampler; None: no such code has a KL, and
    Flow-GRPO's is taken, `variance` on noise-prediction models."""
    clip_ranges: ClassVar[tuple[tuple[LogProbForm, Ratio, float], ...]] = ()
    """(log-prob form, kind of ratio, published bound on |ratio - 1|)."""
    largest: ClassVar[float] = math.inf
    """Bound on the noise level: beyond it more noise than sigma' would be left."""
    noise_key: ClassVar[str] = "noise_level"
    """The option that is its noise level."""
    order: ClassVar[int] = 0
    """The power of the step with which the marginals tend to the path's own, at the default noise level; 0: they need
    not. (Without noise every sampler is the deterministic step, of order 1.)"""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @property
    def name(self) -> str:
        """The name of a built-in sampler; of any other its file."""
        return registry.name_of(self)

    @abstractmethod
    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        """Distribution of the next latents given x [B, ...]; noise level from `step.noise_level`.

        Raises ValueError: the sampler does not support the process, or the step.
        """

    def velocity_gain(self, step: Step) -> Tensor:
        """d mean / d velocity of each step, [B] float32, negative: how far a change of the network moves the mean.

        One number per sample, the same in all latent dims and at every x: each sampler's mean is affine in the
        velocity. `velocity` is that of `Prediction`: eps - x0 on a flow, alpha eps - sigma x0 on VP. Noise
        only raises its size; at noise level 0 it is dt on a flow. A sampler may give it in closed form.

        Raises ValueError: the sampler does not support the step.
        """
        at = step.on_cpu
        flow = bool(((at.alpha + at.sigma - 1).abs() < 1e-4).all())
        process, zeros = FlowProcess() if flow else VPProcess(), torch.zeros(len(step.sigma), 1).to(step.sigma)
        # On both paths x0_hat moves with the velocity by -sigma and eps_hat by alpha.
        moved = Prediction(-step.sigma[:, None], step.alpha[:, None], zeros + 1)
        still = self.transition(process, Prediction(zeros, zeros, zeros), zeros, step).mean
        return (self.transition(process, moved, zeros, step).mean - still)[:, 0]

    def default_noise_level(self) -> float:
        """Noise level of a stochastic step where the plan does not set one."""
        return dataclasses.asdict(self.config)[self.noise_key]

    def clip_range(self, ratio: Ratio) -> float:
        """The published bound on |ratio - 1| for a kind of ratio, in the units of the log-prob form.

        Raises ValueError: nobody published one.
        """
        # Those of its own class: a sampler that extends a built-in one is another, and nobody tuned the range to it.
        bounds = {(form, kind): bound for form, kind, bound in vars(type(self)).get("clip_ranges", ())}
        if (self.log_prob_form, ratio) not in bounds:
            built = {name: registry.load("samplers", name).build for name in registry.names("samplers")}
            known = [name for name, cls in built.items() if any(kind == ratio for _, kind, _ in cls.clip_ranges)]
            raise ValueError(
                f"clip_range=null: there is no published value for sampler {self.name!r} (log-prob form "
                f"{self.log_prob_form!r}) with the {ratio!r} ratio; give algorithm.clip_range, or use one of "
                f"{', '.join(known)}"
            )
        return bounds[self.log_prob_form, ratio]


def ddim_gain(step: Step, direction: Tensor) -> Tensor:
    """d mean / d velocity of `ddim_mean`, [B].

    On flow and VP paths alike x0_hat moves with the velocity by -sigma and eps_hat by alpha.

    >>> half, one = torch.full((1,), 0.5), torch.ones(1)
    >>> step = Step(half, half, one, 0 * one, 500 * one, 0 * one, 0 * one, one)  # a flow from sigma 0.5 to 0
    >>> ddim_gain(step, step.sigma_next).tolist()
    [-0.5]
    """
    return step.alpha * direction - step.sigma * step.alpha_next


class FlowSampler(Sampler):
    """A sampler of the SDE that keeps a flow's marginals: one Euler-Maruyama step, at the noise strength `diffusion`.

    With g = diffusion(step), dt = sigma_next - sigma < 0 and eps_hat = x + (1 - sigma) v:

        mean = x + (v + g^2 / (2 sigma) * eps_hat) * dt
        std  = g * sqrt(-dt)
    """

    order = 1

    @abstractmethod
    def diffusion(self, step: Step) -> Tensor:
        """g of each step, [B] float32, at least 0.

        Raises ValueError: the sampler does not support the step.
        """

    def transition(self, process: Process, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        if not isinstance(process, FlowProcess):
            raise OptionError(
                f"sampler {self.name!r} needs a flow model (x = (1 - sigma) x0 + sigma eps), and this one "
                "predicts noise (VP); cps is for a consistency model",
                {"rollout.sampler": {"name": "ddim", "eta": 1.0}},
            )
        return euler_maruyama(x, prediction.velocity, step.sigma, step.sigma_next, self.diffusion(step))

    def velocity_gain(self, step: Step) -> Tensor:
        """dt * (1 + g^2 (1 - sigma) / (2 sigma)), [B]."""
        sigma, g = step.sigma, self.diffusion(step)
        return (step.sigma_next - sigma) * (1 + g.square() * (1 - sigma) / (2 * sigma))


def euler_maruyama(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> StepDistribution:
    """The step of `FlowSampler` from x [B, ...] with `velocity` [B, ...], any float dtype; the others are [B].

    >>> x, v, one = torch.ones(1, 4), torch.full((1, 4), 0.5), torch.ones(1)
    >>> d = euler_maruyama(x, v, 0.8 * one, 0.6 * one, 1.4 * one)  # Flow-SDE at noise level 0.7
    >>> round(float(d.mean[0, 0]), 4), round(float(d.std), 6)
    (0.6305, 0.626099)
    """
    x, v = x.float(), velocity.float()
    dt = sigma_next - sigma
    eps_hat = x + expand(1 - sigma, x) * v
    drift = v + expand(g.square() / (2 * sigma), x) * eps_hat
    return StepDistribution(mean=x + drift * expand(dt, x), std=g * (-dt).sqrt())


def step_std(sampler: Sampler, process: Process, step: Step) -> Tensor:
    """std of the sampler's transitions at `step`, [B]: the same at every x.

    Raises ValueError: the sampler does not support the process, or a step.
    """
    zeros = torch.zeros(len(step.sigma), 1)
    return sampler.transition(process, Prediction(zeros, zeros, zeros), zeros, step).std


def density_scale(sampler: Sampler, process: Process, step: Step) -> Tensor:
    """Factor between the sampler's own log-prob and a Gaussian's up to a constant, [B]: 1 / (2 std^2) if `unscaled`.

    1 for the other forms, and where the step has no noise.
    """
    std = step_std(sampler, process, step)
    if sampler.log_prob_form != "unscaled":
        return torch.ones_like(std)
    return torch.where(std > 0, 1 / (2 * std.square()), 1.0)


def takes_vp(sampler: Sampler) -> bool:
    """Whether the sampler supports noise-prediction (VP) models."""
    process, half = VPProcess(), torch.full((1,), 0.5)
    fixed = {name: half for name in ("sigma_ceiling", "timestep")} | {"index": torch.zeros(1, dtype=torch.int64)}
    noise, less = torch.full((1,), sampler.default_noise_level()), half / 2
    levels = {"sigma": half, "alpha": process.alpha(half), "sigma_next": less, "alpha_next": process.alpha(less)}
    try:
        step_std(sampler, process, Step(**levels, noise_level=noise, **fixed))
    except ValueError:
        return False
    return True
