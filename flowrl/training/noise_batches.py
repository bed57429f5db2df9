"""What a method on the initial noise trains on: the samples by what they started from, and the run's learned laws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowrl.algorithms.base import Networks, NoiseMethod
from flowrl.config.schema import RunConfig
from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive, permutation
from flowrl.credit.advantages import Advantages
from flowrl.credit.critic import text_features
from flowrl.data.prompts import Prompt, identity
from flowrl.data.text_cache import Texts
from flowrl.losses.batches import InitialBatch
from flowrl.rollout.learned_noise import Calibration, LearnedNoise, NoiseWeights, learned
from flowrl.rollout.trajectories import Rollout
from flowrl.training.metrics import Sums
from flowrl.training.microbatches import update_chunks
from flowrl.training.world import World

_TEXTS = 64  # prompts whose embeddings are on the device at once


class Initials:
    """This rank's samples of an iteration, in shares of one update each; no network is evaluated for them."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: NoiseMethod,
        networks: Networks,
        world: World,
        rollout: Rollout,
        credit: Advantages,
        iteration: int,
        sums: Sums,
    ) -> None:
        assert rollout.initial is not None
        assert rollout.laws is not None
        self.config, self.algorithm, self.world = config, algorithm, world
        self.weights, self.credit, self.sums = learned(networks.weights), credit, sums
        self.latents, self.laws = rollout.initial, rollout.laws
        self.identity = rollout.identity
        self.law = self.laws[torch.tensor([i.slot for i in rollout.samples.ids])]
        self.advantage = torch.zeros(len(self.law))
        self.old = torch.zeros(len(self.law), dtype=torch.float64)
        useful = credit.kept.flatten().nonzero().squeeze(1)
        self.shares = []
        chunks = update_chunks(useful, config.optim.updates_per_iteration, config.seed, iteration)
        for number, chunk in enumerate(chunks):
            rows = torch.isin(self.identity, chunk).nonzero().squeeze(1)
            self.shares.append(rows[permutation(len(rows), config.seed, "initials", iteration, number, world.rank)])

    def prepare(self) -> None:
        """Log-probs and advantages under the laws that drew the samples, before they move."""
        with self.weights.using(self.algorithm.behaviour):
            with torch.no_grad():
                for rows in torch.arange(len(self.law)).split(self.config.optim.batch_size):
                    latents = self.latents[rows].to(self.world.device)
                    self.old[rows] = self.algorithm.log_prob(latents, self.law[rows], self.weights).cpu()
            advantage, error = self.algorithm.calibrated(self.credit, self.laws, self.weights)
        self.advantage = advantage.flatten()[self.identity]
        if error is not None:
            self.sums.add("noise/value_error", error)

    @property
    def sizes(self) -> list[int]:
        """Samples of each share."""
        return [len(share) for share in self.shares]

    def batches(self, number: int) -> Iterator[tuple[InitialBatch, bool]]:
        """Parts of a share of at most `optim.batch_size` samples; all of them count."""
        device = self.world.device
        for rows in self.shares[number].split(self.config.optim.batch_size):
            batch = InitialBatch(
                latents=self.latents[rows].to(device),
                law=self.law[rows],
                advantage=self.advantage[rows].to(device),
                old_log_prob=self.old[rows].to(device),
            )
            if len(batch):  # an empty share splits into one empty part
                yield batch, True


def numbers_of(noise: LearnedNoise, prompts: Sequence[Prompt]) -> Tensor:
    """Number of each prompt's law, [n] int64."""
    return noise.numbers([identity(prompt) for prompt in prompts])


def require_own_prompts(train: Sequence[Prompt], evaluated: Sequence[Prompt]) -> None:
    """Raise ConfigError where an evaluation has a prompt that no law is learned for."""
    known = {identity(prompt) for prompt in train}
    for prompt in evaluated:
        if identity(prompt) not in known:
            raise ConfigError(
                f"data.eval_prompts: {prompt.text[:60]!r} is no training prompt; this method learns the initial noise "
                "of its own prompts and has nothing to say about others: set data.eval_prompts to null"
            )


def noise_weights(
    algorithm: NoiseMethod, train: Sequence[Prompt], shape: Sequence[int], device: torch.device
) -> NoiseWeights:
    """The laws of the training prompts."""
    noise = LearnedNoise([identity(prompt) for prompt in train], shape).to(device)
    return NoiseWeights(noise, train_std=algorithm.train_std)


def add_calibration(
    algorithm: NoiseMethod, weights: NoiseWeights, texts: Texts, train: Sequence[Prompt], seed: int
) -> None:
    """Give the laws their V, on the features of their prompts, where the method wants one."""
    if algorithm.value is None:
        return
    by_identity = {identity(prompt): prompt for prompt in train}
    prompts, mean = [by_identity[key] for key in weights.network.prompts], weights.network.mean[0]
    parts = [text_features(texts.lookup(prompts[low : low + _TEXTS])) for low in range(0, len(prompts), _TEXTS)]
    text, rate = torch.cat(parts).to(mean.device), algorithm.value.learning_rate
    weights.calibration = Calibration(text, mean.numel(), derive(seed, "value"), rate)
