"""A judge of tiny-sd3's latents, as a user's file: a small network on latents, noise level and prompt."""

from dataclasses import dataclass

import torch
from torch import nn

from flowrl import Card, LatentReward

CARD = Card(
    outputs=("toy_latent",),
    modality="latents",
    differentiable=True,
    resolution="8 x 8 latents",
    licence="Apache-2.0",
    source="the tests",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 8
    """Rows and columns of the latents."""
    seed: int = 0
    """Of the weights."""
    width: int = 128
    """Values of a token of the prompt."""


class Net(nn.Module):
    """Two layers, conditioned on noise level and prompt."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.inner = nn.Conv2d(4, 16, 3, padding=1)
            self.prompt, self.noise = nn.Linear(config.width, 16), nn.Linear(1, 16)
            self.head = nn.Linear(16, 1)

    def forward(self, x, sigma, cond):
        given = self.prompt(cond["prompt_embeds"].float().mean(dim=1)) + self.noise(sigma[:, None])
        return self.head((self.inner(x) + given[:, :, None, None]).tanh().mean(dim=(2, 3))).squeeze(1)


def build(config: Config) -> LatentReward:
    network = Net(config).eval().requires_grad_(False)
    return LatentReward(network, CARD, (4, config.size, config.size), network)
