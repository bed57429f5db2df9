"""Training of a judge of latents, in its script and renewed in a run. A helper, not a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from flowrl.rewards._latent_judge.network import ENTRIES, Judge
from torch import Tensor, nn

from flowrl.core.types import Condition


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Shares of the noise levels at which a judge is trained."""

    clean: float = 0.4
    """At sigma 0."""
    low: float = 0.3
    """Even in 0.03 to 0.1; the rest is even in 0 to 1."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] sigmas."""
        kind, place = torch.rand(2, count, generator=generator)
        low = torch.where(kind < self.clean + self.low, 0.03 + 0.07 * place, place)
        return torch.where(kind < self.clean, torch.zeros(()), low)


LEVELS = Levels()


def noised(x0: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Latents x0 [B, ...] on the straight path to noise, at levels [B]; the generator is of the CPU."""
    level = sigma.view(-1, *[1] * (x0.ndim - 1))
    return (1 - level) * x0 + level * torch.randn(x0.shape, generator=generator).to(x0.device)


class Trainer:
    """Adam on the weights of a judge, in place, with its state; between calls the judge stays frozen.

    Args:
        network: the judge.
        rate: learning rate.
        batch_size: samples of a step of `renew`.
        seed: of noise, noise levels and order.
        levels: shares of the noise levels.
    """

    def __init__(
        self,
        network: Judge,
        *,
        rate: float = 2e-4,
        batch_size: int = 96,
        seed: int = 0,
        levels: Levels = LEVELS,
    ) -> None:
        self.network, self.batch_size, self.levels = network, batch_size, levels
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)

    def renew(self, x0: Tensor, cond: Condition, labels: Tensor) -> dict[str, float]:
        """Go once over clean latents x0 [N, ...], the conditions of their prompts (N rows) and labels [N] in [0, 1].

        Returns:
            loss: mean binary cross entropy, and accuracy: share on the right side of 0, both before each step.
        """
        parts = torch.randperm(len(x0), generator=self.generator).split(self.batch_size)
        self.network.train().requires_grad_(True)
        loss = right = 0.0
        for pick in parts:
            wanted = labels[pick].to(x0.device, torch.float32)
            logits, found = self._step(x0[pick], cond.index(pick), wanted)
            loss += len(pick) / len(x0) * found.item()
            right += ((logits > 0) == (wanted > 0.5)).sum().item() / len(x0)
        self.network.eval().requires_grad_(False)
        return {"loss": loss, "accuracy": right}

    @property
    def rate(self) -> float:
        """Learning rate of the next steps."""
        return self.optimizer.param_groups[0]["lr"]

    @rate.setter
    def rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def _step(self, x0: Tensor, cond: Condition, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [B], loss) before one step."""
        sigma = self.levels.draw(len(x0), self.generator).to(x0.device)
        noise = torch.randn(x0.shape, generator=self.generator).to(x0.device)
        level = sigma.view(-1, *[1] * (x0.ndim - 1))
        logits = self.network(
            (1 - level) * x0.float() + level * noise, sigma, *(cond[name].float() for name in ENTRIES)
        )
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return logits.detach(), loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs: weights, Adam's moments, the generator."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
