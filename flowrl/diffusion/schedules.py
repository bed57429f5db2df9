"""Sigma grids: pure functions from a number of steps to float32 [K + 1], from noise to exactly 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.core.tensors import floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """A grid, and the network's input (timestep) at each of its steps.

    sigmas [K + 1] strictly decreasing to the last value (0 for flow models), timesteps [K] in the
    network's units, both float32. VP grids also have alphas [K + 1], which a float32 sigma near 1 does not determine
    (sqrt(1 - sigma^2) is off by 3e-5 where it is 1e-3), and their model's table of alphas_cumprod, float64.
    """

    sigmas: Tensor
    timesteps: Tensor
    alphas: Tensor | None = None
    table: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.sigmas) != len(self.timesteps) + 1:
            raise ValueError(
                f"{len(self.timesteps)} timesteps need {len(self.timesteps) + 1} sigmas, got {len(self.sigmas)}"
            )
        falls = self.sigmas.diff() < 0
        if self.alphas is not None:
            # Next to pure noise two sigmas may round to one, where their alphas still differ.
            falls = (self.sigmas.diff() <= 0) & (self.alphas.diff() > 0)
        if not bool(falls.all()):
            raise ValueError(f"sigmas must fall strictly, got {floats(self.sigmas)}")

    def __len__(self) -> int:
        return len(self.timesteps)

    def timestep_at(self, sigma: Tensor) -> Tensor:
        """The network's input (timestep) at any sigma, same shape, float32.

        Timesteps of a flow are proportional to sigma. Those of a VP table are its indices, and the log-SNR is linear
        between two of them; beyond its ends the nearest.

        Raises ValueError: neither: only the grid's own nodes are known.

        >>> Schedule(torch.tensor([0.8, 0.4, 0.0]), torch.tensor([800.0, 400.0])).timestep_at(torch.tensor([0.5]))
        tensor([500.])
        """
        if self.table is not None:
            return _index_at(self.table, sigma)
        unit = self.timesteps[0].double() / self.sigmas[0].double()
        if not torch.allclose(self.sigmas[:-1].double() * unit, self.timesteps.double(), rtol=1e-4):
            raise ValueError(
                "this model's timesteps are not proportional to sigma, so only nodes of its grid are known"
            )
        return (sigma.double() * unit).float()

    def at_flow(self, sigma: Tensor) -> Tensor:
        """This path's sigma where its SNR is that of a flow at `sigma`, same shape, float32.

        On VP sigma / hypot(sigma, 1 - sigma), inside what the network was trained on; a flow's own is returned.

        >>> Schedule(torch.tensor([0.8, 0.0]), torch.tensor([800.0])).at_flow(torch.tensor([0.6]))
        tensor([0.6000])
        """
        if self.table is None:
            return sigma.float()
        low, high = floats((1 - self.table[[0, -1]]).sqrt())
        return (sigma.double() / torch.hypot(sigma.double(), 1 - sigma.double())).clamp(low, high).float()


def _index_at(table: Tensor, sigma: Tensor) -> Tensor:
    """Fractional index of sigma in alphas_cumprod [N], same shape, float32: linear in ln(sigma / alpha)."""
    square = sigma.double().square()
    nodes, wanted = (1 / table - 1).log() / 2, (1 / (1 - square) - 1).log() / 2
    above = torch.searchsorted(nodes, wanted.contiguous()).clamp(1, len(nodes) - 1)
    share = (wanted - nodes[above - 1]) / (nodes[above] - nodes[above - 1])
    # At alpha = 0 both ends are infinite: this is the node itself.
    return (above - 1 + torch.where(wanted == nodes[above], 1.0, share).clamp(0, 1)).float()


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Resolution shift: s * sigma / (1 + (s - 1) * sigma); 0 and 1 stay.

    >>> shift_sigmas(torch.tensor([1.0, 0.5, 0.0]), 3.0).tolist()
    [1.0, 0.75, 0.0]
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def flow_match_euler(num_steps: int, shift: float, *, num_train_timesteps: int = 1000) -> Tensor:
    """Grid of diffusers' FlowMatchEulerDiscreteScheduler with a static shift, [K + 1].

    The training grid's smallest sigma is shifted once when the scheduler is made and again when the
    steps are set, so the last stochastic sigma is small (0.00893 for shift 3), not 1 / K.
    """
    smallest = shift_sigmas(torch.tensor(1 / num_train_timesteps, dtype=torch.float64), shift)
    grid = torch.linspace(1.0, float(smallest), num_steps, dtype=torch.float64)
    return torch.cat([shift_sigmas(grid, shift), torch.zeros(1, dtype=torch.float64)]).float()


def shifted_linspace(num_steps: int, shift: float) -> Tensor:
    """Grid of DanceGRPO and MixGRPO: linspace(1, 0, K + 1), shifted, [K + 1]."""
    return shift_sigmas(torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64), shift).float()
