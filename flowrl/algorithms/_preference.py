"""What the methods on pairs and labels share: who is preferred, at what error, and what they report.

    l = mean over dims of (v - v*)^2        Delta = (l_w - l_ref_w) - (l_l - l_ref_l), at one sigma and one eps

The sign of a sample (+1 preferred, -1 not) travels as its advantage.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.advantages import Advantages
from flowrl.diffusion.process import Process, VPProcess
from flowrl.losses.matching import group_sum
from flowrl.losses.preference import pair_margin, preference_loss
from flowrl.rollout.outputs import Outputs

Space = Literal["output", "eps"]


def require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")


def given_signs(rewards: Tensor) -> Advantages:
    """What the data say of every sample: rewards 1 and 0 [1, P, G] as signs +1 and -1.

    A slot of which one sample is missing (NaN) is left out whole: half a pair says nothing.
    """
    reward = rewards[0].float()
    valid = reward.isfinite()
    whole = valid.all(dim=1)
    signs = torch.where(valid, 2 * reward - 1, 0.0)
    return Advantages(values=signs[:, :, None], valid=valid, dead=~whole, kept=whole[:, None].expand_as(valid).clone())


def error_of(outputs: Outputs, role: str, space: Space) -> Tensor:
    """l of one network, [M] float64: of its own output, or of the noise that it implies.

    On a flow eps_hat - eps = (1 - sigma) (v - v*), so `eps` is `output` times (1 - sigma)^2.
    """
    return outputs.error(role) if space == "output" else outputs.eps_error(role)


def default_beta(process: Process) -> float:
    """Published for a mean over dims: SD 1.5 and SDXL by their authors, flows by Flow-Factory and verl-omni."""
    return 5000.0 if isinstance(process, VPProcess) else 2000.0


def pair_loss(
    outputs: Outputs, against: str, beta: float | None, space: Space, sign: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(-beta / 2 Delta) of each row's pair [M], and what every method on pairs reports.

    Both rows of a pair have its loss: the mean over rows is the mean over pairs.

    Args:
        outputs: of the policy and of `against`; whole pairs, by `batch.group`.
        against: the network that the margin is taken against.
        beta: inverse temperature; None: that of the process.
        space: of the errors.
        sign: another than the advantages' +1 and -1, [M].
    """
    batch = outputs.batch
    error, reference = error_of(outputs, "policy", space), error_of(outputs, against, space)
    margin = pair_margin(batch.advantage if sign is None else sign, error, reference, batch.group)
    chosen, rejected = (batch.advantage > 0).to(error), (batch.advantage < 0).to(error)
    metrics = {
        "policy/implicit_accuracy": (margin < 0).to(error),
        "policy/margin": margin,
        # Both errors may rise while their difference falls: only the margin is trained.
        "matching/error_chosen": group_sum(chosen * error, batch.group),
        "matching/error_rejected": group_sum(rejected * error, batch.group),
    }
    return preference_loss(margin, default_beta(outputs.adapter.process) if beta is None else beta), metrics


def agreement(outputs: Outputs, against: str, space: Space) -> Tensor:
    """-Delta of each row's pair, [M] float64: positive where the policy prefers what the data prefer."""
    batch = outputs.batch
    errors = (error_of(outputs, role, space) for role in ("policy", against))
    return -pair_margin(batch.advantage, *errors, batch.group).detach()
