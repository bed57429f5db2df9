"""The training data of a method on the initial noise: the noise of the samples, and the learned distributions."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowrl.algorithms.base import NoiseMethod
from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive
from flowrl.core.tensors import sent
from flowrl.core.types import Identity
from flowrl.credit.critic import text_features
from flowrl.data.prompts import Prompt, identity
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import StepPlan
from flowrl.losses.batches import InitialBatch
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.weights.roles import Weights, freeze
from flowrl.rollout.learned_noise import Calibration, LearnedNoise, NoiseWeights, as_noise_weights
from flowrl.training.base import Demand, Iteration, Setting, Training, UpdateContext, Work

_TEXTS = 64  # prompts whose embeddings are on the device at once


class NoiseTraining(Training[NoiseMethod]):
    """The initial noise of samples; the network is frozen."""

    rows_are = ""
    frozen = True
    own_prompts = True
    weight_decay = 0.0

    def check(self, setting: Setting) -> None:
        super().check(setting)
        rollout, model, name = setting.rollout, setting.model, setting.name
        if rollout.shared_noise:
            raise ConfigError(
                f"rollout.shared_noise=true: the samples of {name} differ by their initial noise alone",
                {"rollout.shared_noise": False},
            )
        if rollout.sampler is not None:
            raise ConfigError(
                f"rollout.sampler={rollout.sampler}: with the noise of a sampler's steps the initial noise would not "
                f"decide the image, and {name} learns that alone; algorithm.solver takes the steps",
                {"rollout.sampler": None},
            )
        for key, value in (("lora", model.lora), ("init_lora", model.init_lora)):
            if value is not None:
                raise ConfigError(
                    f"model.{key}: {name} trains the initial noise, no weight of the network", {f"model.{key}": None}
                )
        if model.shard:
            raise ConfigError(f"model.shard=true: {name} does not split the frozen network", {"model.shard": False})
        if setting.optim.weight_decay:
            raise ConfigError(
                f"optim.weight_decay={setting.optim.weight_decay} would shrink the stds towards 0; "
                "algorithm.prior_coef pulls to the base's noise",
                {"optim.weight_decay": 0.0},
            )

    def check_prompts(self, train: Sequence[Prompt], evaluated: Sequence[Prompt]) -> None:
        known = {identity(prompt) for prompt in train}
        for prompt in evaluated:
            if identity(prompt) not in known:
                raise ConfigError(
                    f"data.eval_prompts: {prompt.text[:60]!r} is not a training prompt; this method learns the initial "
                    "noise of its own prompts alone",
                    {"data.eval_prompts": None},
                )

    def demand(self, plan: StepPlan, setting: Setting) -> Demand:
        return Demand(rows=0, share=self.method.taken(setting.group_size) / setting.group_size, latents=1)

    def weights(
        self,
        adapter: ModelAdapter,
        options: ModelConfig,
        prompts: Sequence[Identity],
        seed: int,
        device: torch.device | str,
    ) -> Weights:
        freeze(adapter, options, seed)
        noise = LearnedNoise(prompts, adapter.latent_shape()).to(device)
        return NoiseWeights(noise, train_std=self.method.train_std)

    def learned_noise(self, weights: Weights) -> LearnedNoise | None:
        return as_noise_weights(weights).network

    def begin(self, weights: Weights, texts: Texts, train: Sequence[Prompt], seed: int) -> None:
        """Give the distributions their V, on the features of their prompts, where the method wants one."""
        if self.method.critic is None:
            return
        noise = as_noise_weights(weights)
        by_identity = {identity(prompt): prompt for prompt in train}
        prompts, mean = [by_identity[key] for key in noise.network.prompts], noise.network.mean[0]
        parts = [text_features(texts.lookup(prompts[low : low + _TEXTS])) for low in range(0, len(prompts), _TEXTS)]
        text, rate = torch.cat(parts).to(mean.device), self.method.critic.learning_rate
        noise.calibration = Calibration(text, mean.numel(), derive(seed, "value"), rate)

    def work(self, context: UpdateContext, iteration: Iteration) -> Work:
        return NoiseBatches(context, iteration)


class NoiseBatches(Work):
    """This rank's samples of an iteration, in shares of one update each; no network is evaluated for them."""

    def __init__(self, context: UpdateContext, iteration: Iteration) -> None:
        super().__init__(context, iteration)
        rollout, drawn = iteration.rollout, iteration.rollout.noise
        assert drawn is not None
        self.weights, self.latents = as_noise_weights(context.networks.weights), drawn.initial
        self.slot_numbers = drawn.numbers
        self.identity = rollout.identity
        self.numbers = self.slot_numbers[torch.tensor([i.slot for i in rollout.samples.ids])]
        self.advantage = torch.zeros(len(self.numbers))
        self.old = torch.zeros(len(self.numbers), dtype=torch.float64)
        kept = iteration.credit.kept
        for number, chunk in enumerate(self.chunks(kept.flatten().nonzero().squeeze(1), kept.shape[1])):
            rows = torch.isin(self.identity, chunk).nonzero().squeeze(1)
            self.shares.append(rows[self.order(len(rows), "initials", number)])

    def prepare(self) -> None:
        """Log-probs and advantages under the distributions that drew the samples, before they move."""
        with self.weights.using(self.context.method.behaviour):
            with torch.no_grad():
                for rows in torch.arange(len(self.numbers)).split(self.context.optim.batch_size):
                    latents = sent(self.latents[rows], self.context.world.device)
                    self.old[rows] = self.context.method.log_prob(latents, self.numbers[rows], self.weights).cpu()
            advantage, error = self.context.method.calibrated(self.iteration.credit, self.slot_numbers, self.weights)
        self.advantage = advantage.flatten()[self.identity]
        if error is not None:
            self.iteration.sums.add("noise/critic_error", error)

    def batches(self, number: int) -> Iterator[tuple[InitialBatch, bool]]:
        """Parts of a share of at most `optim.batch_size` samples; all of them count."""
        device = self.context.world.device
        for rows in self.shares[number].split(self.context.optim.batch_size):
            batch = InitialBatch(
                latents=sent(self.latents[rows], device),
                numbers=self.numbers[rows],
                advantage=sent(self.advantage[rows], device),
                old_log_prob=sent(self.old[rows], device),
            )
            if len(batch):  # an empty share splits into one empty part
                yield batch, True


def numbers_of(noise: LearnedNoise, prompts: Sequence[Prompt]) -> Tensor:
    """Number of each prompt's noise distribution, [n] int64."""
    return noise.numbers([identity(prompt) for prompt in prompts])
