"""Diffusion-DPO: given pairs of images, the error on the preferred one falls against that on the other.

    1. pairs (c, x_w, x_l) of the data; no rollout, no reward
    2. one sigma and one eps for both: x = alpha x0 + sigma eps
    3. Delta = (l_w - l_ref_w) - (l_l - l_ref_l), l = mean (v - v*)^2, the reference without CFG
    4. loss = -log sigmoid(-beta / 2 Delta) + kl mean (v - v_ref)^2

On a model that predicts noise l is the error of eps, on a flow that of the velocity. A sample's sign (+1 preferred, -1
not) travels as its advantage. The other methods on pairs take margin and loss from here.

Source: arXiv 2311.12908; SalesforceAIResearch/DiffusionDPO:train.py; flow form: arXiv 2501.13918.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from flowrl.algorithms._matching import AnchorConfig, PullOptions, pull
from flowrl.algorithms._options import Options, TimesOptions
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.core.strict import require_positive
from flowrl.diffusion.process import Process, VPProcess
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from flowrl.losses.matching import group_sum
from flowrl.losses.preference import pair_margin, preference_loss
from flowrl.rollout.outputs import Outputs, Space

LEVEL = "tested"


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
class Config(PairOptions, PullOptions, TimesOptions):
    """The times, and what every method on pairs has."""


class DiffusionDpo(SampleMethod[Config]):
    members = ("chosen", "rejected")
    prefers = True
    unit = "group"
    shared_times = "group"
    shared_eps = True
    compared = ("reference",)

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        return pair_loss(self.config, self.config.kl, self.outputs(batch, networks), "reference")

    def preferred(self, batch: NoisedBatch, networks: Networks) -> Tensor:
        return agreement(self, batch, networks)


def pair_loss(
    pair: PairOptions,
    kl: AnchorConfig,
    outputs: Outputs,
    against: str,
    sign: Tensor | None = None,
    metrics: Mapping[str, Tensor] = MappingProxyType({}),
) -> LossOutput:
    """The loss of step 4, summed over the rows; the margin is taken against the outputs of `against`.

    Args:
        pair: options of the margin.
        kl: pull to the untouched network.
        outputs: of the policy and all networks that are compared.
        against: see `margin`.
        sign: see `margin`.
        metrics: name -> [M], reported too.
    """
    delta = margin(outputs, against, pair.space, sign)
    policy = preference_loss(delta, pair.beta or default_beta(outputs.adapter.process))
    told = {"policy/loss": policy, **metrics} | pair_metrics(outputs, delta, pair.space) | outputs.metrics()
    return summed(policy + pull(kl, outputs, "reference"), told)


def margin(outputs: Outputs, against: str, space: Space, sign: Tensor | None = None) -> Tensor:
    """Delta of each row's pair, [M] float64: below 0 the policy prefers what the data prefer.

    Both rows of a pair have its margin: a mean over rows is the mean over pairs.

    Args:
        outputs: those of the policy and of `against`; whole pairs, by `batch.group`.
        against: the network that the margin is taken against.
        space: that of the errors.
        sign: [M]; None: the advantages, +1 and -1.
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


build = DiffusionDpo
