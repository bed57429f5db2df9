"""DPOK: policy gradient on remembered transitions, with a critic and a KL to the pretrained model.

    1. roll out by DDIM with eta = 1; all transitions (x, x', step, log p_old, r) go into a buffer of the newest 1000
    2. V(x, text, step) makes `critic.steps` steps of its own AdamW on the mean of (V - r)^2 over 256 of them
    3. `policy_steps` times: 24 of them, A = r - V, ratio = exp(log p(x'|x) - log p_old(x'|x)), log p the mean over dims
       loss = -w A clamp(ratio, 1 - c, 1 + c) + kl.coef * KL(policy | reference)

Clamped alone, without PPO's max with the unclipped term: outside the band there is no gradient, whatever the sign of A.

Source: arXiv 2305.16381; google-research/google-research:dpok/train_online_pg.py, dpok/reward_model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowrl.algorithms._credit import plain_rewards
from flowrl.algorithms._options import ClipRange, StepOptions, clip_bounds
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ratio_metrics, single_advantage
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.core.types import Identity
from flowrl.credit.advantages import Advantages
from flowrl.credit.critic import Critic, CriticConfig
from flowrl.diffusion.plan import noisy_steps
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import LossOutput, Microbatch
from flowrl.losses.ratio import clamped_ratio_loss, clipped_ratio_loss
from flowrl.rollout.policy import by_edge
from flowrl.rollout.transitions import Transitions
from flowrl.samplers.base import Sampler

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class BatchedCriticConfig(CriticConfig):
    batch_size: int = 256
    """Transitions of a critic's step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "batch_size")


@dataclass(frozen=True, kw_only=True)
class AnchorKL:
    coef: float = 0.01
    """Weight of the KL to the reference; 0 computes no reference."""
    form: Literal["gaussian", "eps_mse"] = "gaussian"
    """`gaussian`: KL of the step's two Gaussians, mean over dims of (mean - mean_ref)^2 / (2 std^2); `eps_mse`: mean of
    (eps_hat - eps_hat_ref)^2, as released."""

    def __post_init__(self) -> None:
        require_not_negative(vars(self), "coef")


@dataclass(frozen=True, kw_only=True)
class Config(StepOptions):
    default_sampler: ClassVar[str] = "ddim"

    clip_range: ClipRange | None = None
    """Bound on |ratio - 1|, in the units of the sampler's log-prob form; two numbers: its largest fall and rise; null:
    the published value of the sampler."""
    sde_steps: list[int] | None = None
    """Steps that are stochastic and trained, counted from 0 (noisiest); null: all that leave noise."""
    guidance_scale: float | None = None
    """Guidance scale of the training forward; only rollout's or null is accepted."""
    buffer: int = 1000
    """Newest transitions of the run that are kept."""
    batch: int = 24
    """Transitions of a policy step, over all processes."""
    policy_steps: int = 5
    """Optimizer steps per iteration."""
    critic: BatchedCriticConfig = field(default_factory=BatchedCriticConfig)
    """V, the baseline of a reward."""
    reward_weight: float = 100.0
    """w, against the KL."""
    surrogate: Literal["clamp", "ppo"] = "clamp"
    """`clamp`: -w A clamp(ratio), as released; `ppo`: max of that and -w A ratio, which pulls back a ratio that went
    too far in the wrong direction."""
    kl: AnchorKL = field(default_factory=AnchorKL)
    """KL to the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "buffer", "batch", "policy_steps", "reward_weight")
        if self.clip_range is not None:
            clip_bounds(self.clip_range)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",) if self.kl.coef > 0 else ()

    def clip(self, sampler: Sampler) -> tuple[float, float]:
        return clip_bounds(sampler.clip_range("plain") if self.clip_range is None else self.clip_range)

    def check(self, sampler: Sampler, num_steps: int) -> None:
        self.clip(sampler)
        super().check(sampler, num_steps)

    def stochastic_steps(self, schedule: Schedule, iteration: int, seed: int) -> Sequence[int]:
        return noisy_steps(schedule) if self.sde_steps is None else self.sde_steps

    def check_geometry(self, samples: int, num_steps: int, updates: int) -> None:
        """Refuse more than one update, and a buffer smaller than an iteration."""
        if updates != 1:
            raise OptionError(
                f"optim.updates_per_iteration={updates} would share out samples, and every policy step draws its own "
                f"(algorithm.policy_steps={self.policy_steps} counts the steps)",
                {"optim.updates_per_iteration": 1},
            )
        # The least there can be: whether the last step is trained too is known once there is a grid.
        self.check_trained(samples, self.most_trained(num_steps))

    def check_trained(self, samples: int, trained: int) -> None:
        """Refuse a buffer that cannot hold `samples` of `trained` steps."""
        made = samples * trained
        if made > self.buffer:
            raise OptionError(
                f"buffer={self.buffer} holds less than the {made} transitions of one iteration, of which the first "
                f"would never be trained",
                {"buffer": made},
            )


class Dpok(EdgeMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.passes = config.policy_steps
        self.transitions: Transitions = Transitions(config.buffer)
        self.critic: Critic | None = None
        self.saved: dict[str, Tensor] = {}  # a checkpoint's critic, until its features are known

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        """Rewards as they are: V is subtracted when transitions are drawn."""
        return plain_rewards(rewards, weights)

    def make_critic(self, features: int, num_steps: int, seed: int, device: torch.device) -> Critic:
        if self.critic is None:
            self.critic = Critic(features, seed, self.config.critic.learning_rate, device, num_steps)
            if self.saved:
                self.critic.load_state(self.saved)
        return self.critic

    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        config, policy, sampler = self.config, networks.policy, networks.policy.sampler
        prediction = policy.predict(batch.latents, batch.start, batch.cond)
        transition = by_edge(policy.distribution(prediction, batch.latents, batch.start), batch)
        log_ratio = self.log_ratio(transition, batch, sampler)
        rule = clamped_ratio_loss if config.surrogate == "clamp" else clipped_ratio_loss
        surrogate, clipped = rule(log_ratio, single_advantage(batch), config.clip(sampler))
        loss = config.reward_weight * surrogate
        metrics = ratio_metrics(log_ratio, loss) | {"policy/clip_fraction": clipped.float().sum()}
        if config.kl.coef > 0:
            with torch.no_grad(), networks.weights.using("reference"):
                anchor = policy.predict(batch.latents, batch.start, batch.cond)
            if config.kl.form == "gaussian":
                kl = transition.kl(by_edge(policy.distribution(anchor, batch.latents, batch.start), batch))
            else:
                kl = batch.by_edge((prediction.eps_hat - anchor.eps_hat).square().flatten(1).mean(dim=1))
            loss = loss + config.kl.coef * kl
            metrics["policy/kl_reference"] = kl.detach().sum()
        per_step = {"policy/ratio": log_ratio.detach().exp(), "policy/clip_fraction": clipped.float()}
        return LossOutput(loss=loss.sum(), metrics=metrics, per_step=per_step)

    # ---- checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.transitions.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"prompts"}:
            raise ValueError(f"dpok keeps the prompts of its transitions, the checkpoint has {sorted(state)}")
        self.transitions.load_state(state["prompts"])

    def tensors(self) -> dict[str, Tensor]:
        critic = self.saved if self.critic is None else self.critic.state()
        result = {f"transitions.{name}": value for name, value in self.transitions.tensors().items()}
        return result | {f"critic.{name}": value for name, value in critic.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"transitions": {}, "critic": {}}
        for name, value in tensors.items():
            section, _, rest = name.partition(".")
            parts[section][rest] = value
        self.transitions.load_tensors(parts["transitions"])
        self.critic, self.saved = None, parts["critic"]


build = Dpok
