"""AdvantageFlow: every sample pulls or pushes by its advantage, and two networks hold.

    1. sample x0 with the lagging network `old` by any solver, no CFG; without gamma there is none: with the policy
    2. A = (r - mean of its prompt) / (root mean square of that over the iteration), within +-1
    3. loss = A mean (y - x0)^2 + gamma mean (y - y_old)^2 + lambda mean (y - y_ref)^2, y = x - sigma v the clean
       prediction; or all three of the output, v and v*, in place of y and x0
    4. after the iteration: old <- d old + (1 - d) policy

Strictly convex in y where A + gamma + lambda > 0, with its minimum at (A x0 + gamma y_old + lambda y_ref) / (A + gamma
+ lambda). Its limits: `gamma: one_minus`, which is 1 - A, has the gradient of DiffusionNFT with mix 1, without weights;
without gamma and lambda it is AWM's with `weighting: sigma2`, or of outputs with `uniform`; RVM, A (v - v*) + beta
(v - v_ref), is half of its gradient on outputs without gamma, beta being lambda.

The pace of `old` and the training times are DiffusionNFT's: the paper's are not known to us.

Source: arXiv 2605.26013, with the formulas of arXiv 2609.37670; RVM: hao-ai-lab/FastVideo, pull request 1806.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, BoundOptions, LagConfig, NormOptions, pull, pulling
from flowrl.algorithms._options import CreditOptions, SolverOptions, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.types import Identity
from flowrl.credit.advantages import AdvantageConfig, Advantages
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed

LEVEL = "experimental"


@dataclass(frozen=True, kw_only=True)
class Config(NormOptions, BoundOptions, CreditOptions, SolverOptions, TimesOptions):
    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="permutation", count=None, fraction=0.99))
    advantages: AdvantageConfig = field(default_factory=lambda: AdvantageConfig(std="within", clip=1.0))
    space: Literal["clean", "velocity"] = "clean"
    """What is compared: the clean prediction, or the network's output."""
    gamma: float | Literal["one_minus"] = 1.1
    """Pull to the network that drew the samples; `one_minus` is 1 - A of each; 0 draws them with the policy."""
    kl: AnchorConfig = field(default_factory=lambda: AnchorConfig(coef=1e-3))
    """lambda, the pull to the untouched network."""
    adaptive: bool = False
    """Divide a term by the mean absolute error of its y, without gradient (MeanFlowAdvantage)."""
    old: LagConfig = field(default_factory=LagConfig)
    """Pace of `old`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gamma, float | int) and not self.gamma >= 0:
            raise ValueError(f"gamma={self.gamma} must not be negative, or one_minus")

    @property
    def notes(self) -> Sequence[str]:
        held = self.kl.coef if self.kl.weight == "uniform" else 0.0
        if self.gamma == "one_minus" or self.gamma + held > self.advantage_max:
            return ()
        return (
            f"algorithm.gamma={self.gamma:g} with algorithm.kl.coef={self.kl.coef:g} is not convex for advantages down "
            f"to -{self.advantage_max:g}: without limit the policy may leave bad samples; above their sum it is "
            f"(algorithm.gamma={1.1 * self.advantage_max:g})",
        )


class AdvantageFlow(SampleMethod[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compared = pulling(config.norm_guard, reference=config.kl)
        if config.gamma:
            self.compared, self.lags, self.behaviour = (*self.compared, "old"), {"old": config.old}, "old"

    def advantages(self, rewards: Tensor, weights: Tensor, prompts: Sequence[Identity] = ()) -> Advantages:
        return self.config.rescaled(self.rule(rewards, weights, prompts))

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        config, outputs, advantage = self.config, self.outputs(batch, networks), batch.advantage.double()
        space = "clean" if config.space == "clean" else "output"
        policy = advantage * outputs.error(space=space) + pull(config.kl, outputs, "reference", space)
        if config.gamma:
            gamma = 1 - advantage if config.gamma == "one_minus" else config.gamma
            policy = policy + gamma * outputs.apart("old", space=space)
        if config.adaptive:
            policy = policy / outputs.distance(space=space)
        return config.guarded(summed(policy, {"policy/loss": policy} | outputs.metrics()), outputs)


build = AdvantageFlow
