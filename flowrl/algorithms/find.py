"""FIND: the distribution of the initial noise is learned for each prompt; the network stays frozen.

    1. z ~ N(mu, s^2), per prompt; x0 by a deterministic solver: z decides the image, one decision an episode
    2. A = r - V(mu, s, text), and 5 steps of V towards r; or r less the group's mean
    3. rho = exp(log p(z; mu, s) - log p_old(z)), p_old the distribution that drew z
    4. loss = max(-k A rho, -k A clamp(rho, 1 - c, 1 + c)) + prior * mean[mu^2 + (s - 1)^2];
       s >= least_std after each step

At first mu = 0 and s = 1: the base sampler's own noise. Only the prompts of an update move.

Source: arXiv 2407.19453; vpx-ecnu/FIND:dist_train2.py, corrected as docs/algorithms/find.md says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import plain_rewards
from flowrl.algorithms._options import ClipRange, CreditOptions, NoiseOptions, clip_bounds
from flowrl.algorithms.base import Networks, NoiseMethod
from flowrl.core.errors import OptionError, Remedy
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import AdvantageConfig, Advantages, RuleConfig
from flowrl.credit.critic import CriticConfig
from flowrl.losses.batches import InitialBatch, LossOutput, summed
from flowrl.losses.ratio import NoiseForm, clipped_ratio_loss, gaussian_log_prob, noise_prior
from flowrl.models.weights.roles import Weights
from flowrl.rollout.learned_noise import NoiseWeights, as_noise_weights

LEVEL = "tested"
_GROUP = AdvantageConfig(std="none", clip=None)


@dataclass(frozen=True, kw_only=True)
class Config(NoiseOptions, CreditOptions):
    baseline: Literal["critic", "group"] = "critic"
    """Baseline of a reward: V, or the other samples of its prompt (`advantages`)."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """V, the baseline of a reward."""
    advantages: AdvantageConfig = field(default_factory=lambda: _GROUP)
    """Rule of `baseline: group`."""
    reward_scale: float = 10.0
    """k: times the advantage, against the prior."""
    log_prob: NoiseForm = "sqrt"
    """Sum over the latent's D values, over 1, sqrt(D) or D (`mean`, published)."""
    clip_range: ClipRange = 0.2
    """c, in the units of `log_prob`; two numbers: the ratio's largest fall and rise."""
    prior_coef: float = 0.01
    """Pull to N(0, 1)."""
    train_std: bool = True
    """False learns the means alone."""
    least_std: float = 0.5
    """s is at least this after each step; at the published 1e-4 single values lose their std, and gradients explode."""
    keep_moment: bool = False
    """After each step scale mu and s back to mean(mu^2 + s^2) = 1: z keeps the size that the network was trained on."""
    refresh: int = 1
    """Iterations for which one distribution draws; above 1 a copy of it is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, default in (("advantages", _GROUP), ("filter", None)) if self.baseline == "critic" else ():
            if vars(self)[key] != default:
                raise OptionError(f"{key} is of baseline=group", [{"baseline": "group"}, Remedy(without=key)])
        if self.keep_moment and not self.train_std:
            raise OptionError(
                "keep_moment=true needs train_std=true: a mean that grows leaves less for the std",
                [{"train_std": True}, {"keep_moment": False}],
            )
        if not 0 < self.least_std <= 1:
            raise ValueError(f"least_std={self.least_std} must be in (0, 1]: every std begins at 1")
        require_positive(vars(self), "reward_scale", "refresh")
        clip_bounds(self.clip_range)
        require_not_negative(vars(self), "prior_coef")

    def credit_rule(self) -> RuleConfig | None:
        """V compares a sample with no other of its prompt, so one is enough for it."""
        return self.advantages.rule() if self.baseline == "group" else None


class Find(NoiseMethod[Config]):
    remembers = ("iterations",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.iterations = 0
        self.train_std, self.critic = config.train_std, config.critic if config.baseline == "critic" else None
        self.behaviour = "policy" if config.refresh == 1 else "old"
        self.roles = () if config.refresh == 1 else ("old",)

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """Rewards as they are if V is the baseline: `calibrated` subtracts it."""
        if self.config.baseline == "group":
            return self.rule(rewards, weights, prompts)
        return plain_rewards(rewards, weights)

    def calibrated(self, credit: Advantages, numbers: Tensor, weights: NoiseWeights) -> tuple[Tensor, float | None]:
        """(A [P, G], V's mean squared error) of the distributions `numbers` [P] that drew; then V's own steps."""
        critic, total = weights.calibration, credit.values.squeeze(2)
        if critic is None:
            return total, None
        assert self.critic is not None
        with torch.no_grad():
            distributions = weights.network.distributions(numbers)
            advantage = total - critic(distributions, numbers).cpu()[:, None]
        rewards = torch.where(credit.valid, total, torch.nan).to(distributions.mean)
        # Not before: fitted to these very rewards, it would take a part of their noise for its own.
        critic.fit(distributions, numbers, rewards, self.critic.steps)
        return advantage, float(advantage[credit.valid].square().mean())

    def log_prob(self, latents: Tensor, numbers: Tensor, weights: NoiseWeights) -> Tensor:
        """Log-prob of latents [M, ...] under the distributions `numbers` [M] as they are now, [M] float64."""
        distributions = weights.network.distributions(numbers)
        return gaussian_log_prob(latents, distributions.mean, distributions.std, self.config.log_prob)

    def loss(self, batch: InitialBatch, networks: Networks) -> LossOutput:
        config, weights = self.config, as_noise_weights(networks.weights)
        distributions = weights.network.distributions(batch.numbers)
        log_prob = gaussian_log_prob(batch.latents, distributions.mean, distributions.std, config.log_prob)
        log_ratio = log_prob - batch.old_log_prob
        credit = config.reward_scale * batch.advantage.to(log_ratio)
        policy, clipped = clipped_ratio_loss(log_ratio, credit, clip_bounds(config.clip_range))
        prior = noise_prior(distributions.mean, distributions.std)
        metrics = {
            "policy/loss": policy,
            "policy/ratio_mean": log_ratio.exp(),
            "policy/clip_fraction": clipped.double(),
            "policy/approx_kl": log_ratio.square() / 2,
            "noise/prior": prior,
            "noise/mean_square": distributions.mean.square().flatten(1).mean(dim=1),
            "noise/std": distributions.std.flatten(1).mean(dim=1),
        }
        return summed(policy + config.prior_coef * prior, metrics)

    def after_update(self, updates: int, weights: Weights, means: dict[str, float]) -> None:
        as_noise_weights(weights).bound_std(self.config.least_std)
        if self.config.keep_moment:
            as_noise_weights(weights).keep_moment()

    def after_iteration(self, updates: int, weights: Weights) -> None:
        self.iterations += 1
        if self.roles and self.iterations % self.config.refresh == 0:
            weights.snapshot("old")


build = Find
