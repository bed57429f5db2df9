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


class Trainer:
    """Adam, a step of two samples at a time in an order of its own."""

    def __init__(self, network: Net) -> None:
        self.network, self.generator = network, torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=0.05)

    def renew(self, x0, cond, labels):
        self.network.train().requires_grad_(True)
        loss = torch.zeros(())
        for pick in torch.randperm(len(x0), generator=self.generator).split(2):
            logits = self.network(x0[pick], torch.zeros(len(pick)), cond.index(pick))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[pick])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": float(loss.detach())}

    def state_dict(self):
        parts = {"network": self.network, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()} | {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def build(config: Config) -> LatentReward:
    network = Net(config).eval().requires_grad_(False)
    return LatentReward(network, CARD, (4, config.size, config.size), network, Trainer(network))
