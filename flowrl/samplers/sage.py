"""SAGE-SDE: Flow-SDE's noise integrated exactly over the step (SAGE-GRPO).

Flow-SDE takes g^2 = eta^2 s / (1 - s) at the step's start; here its integral is the step's variance:

    w    = eta^2 * (ln((1 - sigma') / (1 - min(sigma, sigma_max))) - (sigma - sigma'))
    mean = x + velocity * dt - w / (2 sigma) * eps_hat
    std  = sqrt(w)

that is the Euler-Maruyama step with g^2 = w / -dt. Singular point: the logarithm at sigma = 1, hence
`sigma_max`, which acts in the logarithm only. It sets the noise of the first step: 0.997 makes it noisier
than Flow-SDE's on coarse grids. A step that ends above about sigma_max has w <= 0 and is refused. Where
sigma' = 0, w is positive and finite. Log-prob form: mean over dims.

Source: arXiv 2603.21872; Tencent-Hunyuan/SAGE-GRPO:hyvideo/schedulers/scheduling_flow_match_discrete.py
(there the eps_hat term is switched by the flag `sde_solver`; without it the marginals are not kept).
"""

from dataclasses import dataclass

from torch import Tensor

from flowrl.core.tensors import sent
from flowrl.core.types import Step
from flowrl.samplers.base import FlowSampler

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config:
    eta: float = 0.5
    """Noise strength, dimensionless; 0 is the Euler step."""
    sigma_max: float = 0.997
    """Bound on sigma inside the logarithm, in (0, 1); the nearer to 1, the noisier the first step."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta={self.eta} must not be negative")
        if not 0 < self.sigma_max < 1:
            raise ValueError(f"sigma_max={self.sigma_max} must be between 0 and 1; the paper's is 0.997")


def unit_variance(sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> Tensor:
    """w at eta = 1, [B] float64; not positive where sigma_next is above about sigma_max.

    >>> import torch
    >>> w = unit_variance(torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0]), 0.997)
    >>> [round(float(value), 4) for value in w]
    [4.616, 0.1931]
    """
    sigma, sigma_next = sigma.double(), sigma_next.double()
    return ((1 - sigma_next) / (1 - sigma.clamp(max=sigma_max))).log() - (sigma - sigma_next)


class Sage(FlowSampler):
    kl_divisor = "variance"
    clip_ranges = (("mean", "plain", 1e-4),)
    noise_key = "eta"
    config: Config

    def diffusion(self, step: Step) -> Tensor:
        """The root mean square of Flow-SDE's g over the step, [B].

        Raises ValueError: a noisy step has w <= 0.
        """
        sigma_max = self.config.sigma_max
        # At low sigma the logarithm and the difference cancel to second order: float64, which not every device has.
        at = step.on_cpu
        sigma, sigma_next, noisy = at.sigma, at.sigma_next, at.noise_level > 0
        variance = unit_variance(sigma, sigma_next, sigma_max)
        bad = noisy & (variance <= 0)
        if bool(bad.any()):
            at, end = int(at.index[bad][0]), float(sigma_next[bad][0])
            raise ValueError(
                f"sampler 'sage': step {at} ends at sigma_next={end:.6g}, too near to 1 for sigma_max={sigma_max:g}: "
                "its noise would not be positive. Use fewer steps or a smaller shift, raise sigma_max above "
                "sigma_next, or leave this step deterministic"
            )
        g = (variance.clamp(min=0) / (sigma - sigma_next)).sqrt()
        return step.noise_level * sent(g.float(), step.noise_level.device)


build = Sage
