"""The margin of a pair, which the methods on pairs train, and what they report of it.

    l = mean over dims of (v - v*)^2        Delta = (l_w - l_ref_w) - (l_l - l_ref_l), at one sigma and one eps

The sign of a sample (+1 preferred, -1 not) travels as its advantage.
"""

from __future__ import annotations

from torch import Tensor

from flowrl.diffusion.process import Process, VPProcess
from flowrl.losses.matching import group_sum
from flowrl.losses.preference import pair_margin
from flowrl.rollout.outputs import Outputs, Space


def default_beta(process: Process) -> float:
    """Published for a mean over dims: SD 1.5 and SDXL by their authors, flows by Flow-Factory and verl-omni."""
    return 5000.0 if isinstance(process, VPProcess) else 2000.0


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
