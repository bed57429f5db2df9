"""The learned initial noise: a mean and a std for every latent value of every prompt, and their critic.

A distribution is N(mean, std^2), initially N(0, 1). Each prompt's mean and std are separate parameters, so AdamW moves
those of the present prompts alone. `learned_noise.safetensors` holds all as [P, ...], with the prompts in its metadata.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.tensors import sent
from flowrl.core.types import Gaussians, Identity
from flowrl.credit.critic import Critic
from flowrl.models.weights.roles import Weights

FILE = "learned_noise.safetensors"


class UnknownPrompt(KeyError):
    """A prompt without a learned noise distribution."""


class LearnedNoise(nn.Module):
    """The distributions of P prompts, each by its text and images (repeats count once); `shape` is that of one sample's
    latents.
    """

    def __init__(self, prompts: Sequence[Identity], shape: Sequence[int]) -> None:
        super().__init__()
        self.prompts = tuple(dict.fromkeys(prompts))
        self.rows = {prompt: row for row, prompt in enumerate(self.prompts)}
        self.mean = nn.ParameterList(nn.Parameter(torch.zeros(*shape)) for _ in self.prompts)
        self.std = nn.ParameterList(nn.Parameter(torch.ones(*shape)) for _ in self.prompts)

    def numbers(self, prompts: Sequence[Identity]) -> Tensor:
        """Number of each prompt's distribution, [n] int64. Raises UnknownPrompt: a prompt without one."""
        for prompt in prompts:
            if prompt not in self.rows:
                raise UnknownPrompt(prompt[0])
        return torch.tensor([self.rows[prompt] for prompt in prompts], dtype=torch.int64)

    def distributions(self, numbers: Tensor) -> Gaussians:
        """The distributions of `numbers` [M], with gradients, on the parameters' device."""
        distinct, place = numbers.unique(return_inverse=True)
        rows = distinct.tolist()
        mean, std = (torch.stack([values[row] for row in rows]) for values in (self.mean, self.std))
        return Gaussians(mean, std).at(sent(place, mean.device))

    @torch.no_grad()
    def drawn_from(self, numbers: Tensor) -> Gaussians:
        """The present distributions of `numbers` [M], detached, on the CPU."""
        result = self.distributions(numbers)
        return Gaussians(result.mean.float().cpu(), result.std.float().cpu())

    def save(self, folder: Path) -> None:
        """Write `learned_noise.safetensors`."""
        from safetensors.torch import save_file

        everything = self.drawn_from(torch.arange(len(self.prompts)))
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"mean": everything.mean.contiguous(), "std": everything.std.contiguous()}
        save_file(tensors, folder / FILE, metadata={"prompts": json.dumps(self.prompts)})

    @staticmethod
    def load(file: Path) -> "LearnedNoise":
        """Inverse of `save`, on the CPU."""
        from safetensors import safe_open

        with safe_open(file, framework="pt") as source:
            mean, std = source.get_tensor("mean"), source.get_tensor("std")
            prompts = [(text, tuple(images)) for text, images in json.loads(source.metadata()["prompts"])]
        result = LearnedNoise(prompts, mean.shape[1:])
        for own, rows in ((result.mean, mean), (result.std, std)):
            for parameter, row in zip(own, rows, strict=True):
                parameter.data = row
        return result


class Calibration:
    """V(mean, std, text): the expected reward of a draw from a distribution, fitted while the distributions change.
    `text`: features of each of the P prompts, [P, F]; `values`: number of values of one sample's latents; it has an
    AdamW of its own.
    """

    def __init__(self, text: Tensor, values: int, seed: int, learning_rate: float) -> None:
        self.text = text
        self.critic = Critic(2 * values + text.shape[1], seed, learning_rate, text.device)

    def __call__(self, distributions: Gaussians, numbers: Tensor) -> Tensor:
        """Expected rewards, [P], of the distributions of the prompts `numbers` [P]."""
        text = self.text[numbers.to(self.text.device)]
        return self.critic(torch.cat([distributions.mean.flatten(1), distributions.std.flatten(1), text], dim=1))

    def fit(self, distributions: Gaussians, numbers: Tensor, rewards: Tensor, steps: int) -> None:
        """Take `steps` steps on the mean squared error to rewards [P, G] without NaN."""
        known = rewards.isfinite()
        for _ in range(steps):
            self.critic.descend((self(distributions, numbers)[:, None] - rewards.nan_to_num())[known])


_CRITIC = "critic"
_ROUNDING = 1e-5  # a distribution that is scaled already rests


class NoiseWeights(Weights):
    """The distributions as trained weights with their roles; the network stays as it is. They are on the device of the
    run; `train_std` False keeps every std at 1.
    """

    sparse = True
    network: LearnedNoise

    def __init__(self, noise: LearnedNoise, *, train_std: bool = True) -> None:
        super().__init__(noise, None, (), 0)
        self.calibration: Calibration | None = None
        if not train_std:
            noise.std.requires_grad_(False)
            self.bind()

    @property
    def description(self) -> str:
        return f"initial noise of {len(self.network.prompts)} prompts"

    @torch.no_grad()
    def bound_std(self, least: float) -> None:
        """Raise every std to at least `least`, in every role."""
        for values in (self.values, *self.copies.values()):
            for name, value in values.items():
                if name.startswith("std."):
                    value.clamp_(min=least)

    @torch.no_grad()
    def keep_moment(self) -> None:
        """Scale each distribution to mean(mean^2 + std^2) = 1 over its values, the E z^2 of N(0, 1)."""
        noise = self.network
        mean, std = (torch.stack([p.detach() for p in values]) for values in (noise.mean, noise.std))
        moments = (mean.square() + std.square()).flatten(1).mean(dim=1).tolist()
        for k, moment in enumerate(moments):
            if abs(moment - 1) > _ROUNDING:
                noise.mean[k].mul_(moment**-0.5)
                noise.std[k].mul_(moment**-0.5)

    def state(self) -> dict[str, Tensor]:
        critic = {} if self.calibration is None else self.calibration.critic.state()
        return super().state() | {f"{_CRITIC}/{name}": value for name, value in critic.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        prefix = f"{_CRITIC}/"
        critic = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        super().load_state({name: value for name, value in tensors.items() if not name.startswith(prefix)})
        if self.calibration is not None:
            self.calibration.critic.load_state(critic)

    def save(self, folder: Path, pipeline_class: Any = None) -> None:
        """Write `learned_noise.safetensors`, which `flowrl sample` reads."""
        self.network.save(folder)


def as_noise_weights(weights: Weights) -> NoiseWeights:
    """The weights of a run that trains the initial noise."""
    assert isinstance(weights, NoiseWeights)
    return weights
