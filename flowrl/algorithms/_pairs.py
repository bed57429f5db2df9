"""What the methods on pairs share: their margin, the losses and soft labels that are made of it, and beta.

Delta = (l_w - l_ref_w) - (l_l - l_ref_l), m = -beta / 2 Delta; see `losses/preference.py`.

Source: arXiv 2405.16436 (`winner`); kykim0/margin-matching-pref-opt, arXiv 2605.09433 (`margin`);
bghira/SimpleTuner:distillation/flow_dpo/distiller.py (`auto_beta`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, pull
from flowrl.algorithms._options import Options
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.diffusion.process import Process, VPProcess
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import group_sum
from flowrl.losses.preference import LossName, pair_margin, preference_loss, shaped_loss
from flowrl.rollout.outputs import Outputs, Space

FLIPPED = ("smoothed", "robust")
"""Losses that take some labels to be wrong."""
SIZE = "policy/margin_size"
"""Metric: mean |Delta|, from which `auto_beta` follows."""


@dataclass(frozen=True, kw_only=True)
class PairOptions(Options):
    """Options of a method that trains the margin of a pair."""

    beta: float | None = None
    """Inverse temperature of the margin; null: 5000 on noise-prediction models, 2000 on flows. The larger, the smaller
    the learning rate must be."""
    space: Space = "output"
    """Errors of what the network predicts, or of the noise that this implies: on a flow beta times (1 - sigma)^2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(vars(self), "beta")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of a margin."""

    name: LossName = "sigmoid"
    """`sigmoid`: Diffusion-DPO's; `smoothed` stops at a margin where a share `flip` of labels would be wrong; `robust`
    is unbiased where that share is, and never stops; `ipo` is the squared distance of the margin from `target`;
    `hinge` ends at a margin of 1."""
    flip: float | None = None
    """Share of labels that are taken to be wrong, below 0.5; null: 0.1 of `smoothed` and `robust`."""
    target: float | None = None
    """Difference of errors at which `ipo` ends, in the units of `matching/error`; null: 1 / beta."""

    def __post_init__(self) -> None:
        if self.flip is not None and not 0 <= self.flip < 0.5:
            raise ValueError(f"flip={self.flip} must be in [0, 0.5)")
        if self.flip is not None and self.name not in FLIPPED:
            raise OptionError(
                f"flip={self.flip}: name={self.name} takes every label to be right",
                [{"name": "smoothed"}, {"flip": None}],
            )
        if self.target is not None and not self.target > 0:
            raise ValueError(f"target={self.target} must be positive: the winner's error is to fall more")
        if self.target is not None and self.name != "ipo":
            raise OptionError(f"target={self.target}: name={self.name} has none", [{"name": "ipo"}, {"target": None}])

    @property
    def wrong(self) -> float:
        """Share of labels that are taken to be wrong."""
        return 0.0 if self.name not in FLIPPED else 0.1 if self.flip is None else self.flip

    def __call__(self, delta: Tensor, beta: float) -> Tensor:
        return shaped_loss(delta, beta, self.name, self.wrong, self.target)


@dataclass(frozen=True, kw_only=True)
class MarginConfig:
    """What the difference d of a pair's rewards does."""

    gamma: float = 1.0
    """Factor of the difference, in 1 / its units: what counts as a clear preference is 1 / gamma and more."""
    form: Literal["label", "beta"] = "label"
    """`label`: the chosen image is the better one with p = sigmoid(gamma d) (MMPO); `beta`: beta tanh(gamma d / 2), so
    that an unclear pair trains little (PNAPO)."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "gamma")


@dataclass(frozen=True, kw_only=True)
class AutoBetaConfig:
    """Beta by the size of the margins: at a margin of M the gradient factor sigmoid(-m) is `factor`.

    M is a running mean of |Delta| over all pairs and processes; beta = 2 log((1 - factor) / factor) / M.
    """

    factor: float = 0.2
    """Gradient factor of a right pair of the usual margin, below 0.5: the lower, the larger beta."""
    decay: float = 0.99
    """Decay of the running mean, per update."""
    least: float = 1e-3
    """Least beta, for each value of a latent."""
    most: float = 1.0
    """Largest beta, for each value of a latent."""

    def __post_init__(self) -> None:
        if not 0 < self.factor < 0.5:
            raise ValueError(f"factor={self.factor} must be in (0, 0.5): 0.5 is that of a margin of 0")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be in [0, 1)")
        if not 0 < self.least <= self.most:
            raise ValueError(f"least={self.least} must be positive, and not above most={self.most}")

    def beta(self, size: float, values: int) -> float:
        """Beta for margins of this size above 0, between latents of so many values.

        >>> round(AutoBetaConfig().beta(0.05, 256), 3)
        55.452
        """
        beta = 2 * math.log(1 / self.factor - 1) / size
        return min(max(beta, self.least * values), self.most * values)

    def follow(self, size: float, seen: float) -> float:
        """The running mean after one more update; 0: nothing was seen yet."""
        return seen if size == 0 else self.decay * size + (1 - self.decay) * seen


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(Options):
    """What is made of the margin of a pair."""

    loss: LossConfig = field(default_factory=LossConfig)
    """Loss of the margin."""
    winner: float = 0.0
    """Coefficient of the error on the preferred image, which then falls too (RPO)."""
    margin: MarginConfig | None = None
    """Soft labels or weights from the margins of the pairs, ties included; null: all are right and weigh the same."""
    auto_beta: AutoBetaConfig | None = None
    """Beta by the size of the margins, once there are any; null: `beta` stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(vars(self), "winner")
        if self.margin is not None and self.margin.form == "beta" and self.loss.name == "ipo":
            raise OptionError(
                "margin.form=beta: the target of loss.name=ipo is no product of beta and the margin",
                [{"margin.form": "label"}, {"loss.name": "sigmoid"}],
            )
        if self.auto_beta is not None and self.loss.name in ("ipo", "hinge"):
            raise OptionError(
                f"auto_beta: loss.name={self.loss.name} has no gradient factor sigmoid(-m)",
                [{"auto_beta": None}, {"loss.name": "sigmoid"}],
            )

    def rows(self, delta: Tensor, beta: float, outputs: Outputs, space: Space) -> Tensor:
        """The loss of margins [M] for an inverse temperature, [M]; both rows of a pair have that of the pair."""
        batch, result = outputs.batch, self.loss(delta, beta)
        if self.margin is not None:
            assert batch.margin is not None  # of `SampleMethod.graded`, or of a method's own credit
            right = torch.sigmoid(self.margin.gamma * batch.margin.to(delta))
            if self.margin.form == "beta":  # of these losses beta is a factor of Delta alone
                result = self.loss((2 * right - 1) * delta, beta)
            else:
                result = right * result + (1 - right) * self.loss(-delta, beta)
        if self.winner > 0:
            chosen = (batch.advantage > 0) * outputs.error("policy", space)
            result = result + self.winner * group_sum(chosen, batch.group)
        return result

    def size_after(self, size: float, means: Mapping[str, float]) -> float:
        """The running mean of |Delta| after an update with these means over all processes; 0: it is not needed."""
        return 0.0 if self.auto_beta is None else self.auto_beta.follow(size, means[SIZE])


def require_anchor(loss: LossConfig, kl: AnchorConfig, beta: float | None) -> None:
    """Refuse a robust loss without a pull to the reference.

    Far out it is -wrong / (1 - 2 wrong) beta / 2 times the loser's error, against half of the pull on the loser.
    """
    if loss.name != "robust" or loss.wrong == 0 or kl.coef > 0:
        return
    enough = float(f"{(beta or 2000.0) * loss.wrong / (1 - 2 * loss.wrong):.4g}")
    raise OptionError(
        f"loss.name=robust without kl: nothing bounds it from below, so it never stops, and few pairs diverge; from "
        f"kl.coef={enough:g} it is bounded",
        [{"kl.coef": enough}, {"loss.name": "smoothed"}],
    )


def pair_loss(
    pair: PairOptions,
    kl: AnchorConfig,
    outputs: Outputs,
    against: str,
    sign: Tensor | None = None,
    metrics: Mapping[str, Tensor] = MappingProxyType({}),
    preference: PreferenceOptions | None = None,
    size: float = 0.0,
) -> LossOutput:
    """The loss of step 4, summed over the rows; the margin is taken against the outputs of `against`.

    `against` and `sign` are as in `margin`; `metrics`, name -> [M], are reported too. `preference`: what is made of the
    margin; None: the loss of Diffusion-DPO. `size`: running mean of |Delta| for its `auto_beta`; 0: there is none yet.
    `kl` pulls to the untouched network.
    """
    delta = margin(outputs, against, pair.space, sign)
    beta = pair.beta or default_beta(outputs.adapter.process)
    if preference is not None and preference.auto_beta is not None:
        beta = preference.auto_beta.beta(size, outputs.batch.clean[0].numel()) if size > 0 else beta
        metrics = {**metrics, SIZE: delta.abs(), "policy/beta": torch.full_like(delta, beta)}
    policy = preference_loss(delta, beta) if preference is None else preference.rows(delta, beta, outputs, pair.space)
    told = (
        {"policy/loss": policy, "policy/gradient_factor": torch.sigmoid(beta / 2 * delta), **metrics}
        | pair_metrics(outputs, delta, pair.space)
        | outputs.metrics()
    )
    return summed(policy + pull(kl, outputs, "reference"), told)


def margin(outputs: Outputs, against: str, space: Space, sign: Tensor | None = None) -> Tensor:
    """Delta of each row's pair, [M] float64: below 0 the policy prefers what the data prefer.

    Both rows of a pair have its margin: a mean over rows is the mean over pairs. Pairs are whole, by `batch.group`; the
    errors are those of `space`. `sign` is [M]; None: the advantages, +1 and -1.
    """
    batch = outputs.batch
    errors = outputs.error("policy", space), outputs.error(against, space)
    return pair_margin(batch.advantage if sign is None else sign, *errors, batch.group)


def pair_metrics(outputs: Outputs, margin: Tensor, space: Space) -> dict[str, Tensor]:
    """Name -> [M]: how often a pair is in the data's order, its margin and the errors of its two samples."""
    batch, error = outputs.batch, outputs.error("policy", space)
    chosen, rejected = (batch.advantage > 0).to(error), (batch.advantage < 0).to(error)
    return {
        "policy/implicit_accuracy": (margin < 0).to(error),
        "policy/margin": margin,
        # Both errors may rise while their difference falls: only the margin is trained.
        "matching/error_chosen": group_sum(chosen * error, batch.group),
        "matching/error_rejected": group_sum(rejected * error, batch.group),
    }


def agreement(method: SampleMethod[Any], batch: NoisedBatch, networks: Networks) -> Tensor:
    """Minus the margin against the untouched network, [M] float64: `preferred` of a method on pairs."""
    outputs = method.outputs(batch, networks, ("reference",))
    return -margin(outputs, "reference", method.config.space).detach()


def default_beta(process: Process) -> float:
    """Published for a mean over dims: SD 1.5 and SDXL by their authors, flows by Flow-Factory and verl-omni."""
    return 5000.0 if isinstance(process, VPProcess) else 2000.0
