"""What a diffusers scheduler says of a model: its process, what the network predicts, and the grid of its steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.models.base import ModelError
from flowrl.process import FlowProcess, PredictionType, Process, VPProcess
from flowrl.schedules import Schedule

log = logging.getLogger("flowrl")
_VP_PREDICTIONS: dict[str, PredictionType] = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}


@dataclass(frozen=True, slots=True)
class Path:
    """The noise process behind a scheduler."""

    process: Process
    prediction_type: PredictionType

    @property
    def is_flow(self) -> bool:
        return isinstance(self.process, FlowProcess)


def path_of(scheduler: Any) -> Path:
    """Flow or VP, by the scheduler's class and configuration.

    Raises:
        ModelError: neither; the message names what can be used instead.
    """
    kind, values = type(scheduler), scheduler.config
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "set_timesteps", None)):
        raise ModelError(f"scheduler {kind.__name__} has no step() and set_timesteps(): its loop cannot be entered")
    predicted = values.get("prediction_type", "flow_prediction")
    if kind.__name__ == "FlowMatchEulerDiscreteScheduler" or values.get("use_flow_sigmas"):
        if predicted != "flow_prediction":
            raise ModelError(f"{kind.__name__} with flow sigmas must have prediction_type='flow_prediction'")
        return Path(FlowProcess(), "velocity")
    if kind.__name__.startswith("FlowMatch"):
        raise ModelError(
            f"{kind.__name__} is no plain grid of flow steps; load the pipeline with FlowMatchEulerDiscreteScheduler"
        )
    if hasattr(scheduler, "alphas_cumprod") and predicted in _VP_PREDICTIONS:
        return Path(VPProcess(), _VP_PREDICTIONS[predicted])
    raise ModelError(
        f"{kind.__name__} with prediction_type={predicted!r} is neither a flow nor a noise process x = alpha x0 + "
        "sigma eps with alpha^2 + sigma^2 = 1; load the pipeline with FlowMatchEulerDiscreteScheduler or DDIMScheduler"
    )


def plain(scheduler: Any, path: Path) -> Any:
    """The scheduler with which the pipeline shows its grid: itself for flows, its DDIM for VP.

    flowrl takes its own steps, so of a flow's multistep scheduler (UniPC, DPM-Solver) only the grid is used. VP
    schedulers scale their latents or space their steps in many ways; DDIM of the same betas does neither.
    """
    import diffusers

    name = type(scheduler).__name__
    if path.is_flow:
        if name != "FlowMatchEulerDiscreteScheduler":
            log.info("the grid of %s is kept; its multistep solver is replaced by flowrl's own steps", name)
        return scheduler
    if name in ("DDIMScheduler", "CogVideoXDDIMScheduler") and not scheduler.config.get("clip_sample"):
        return scheduler
    kind = diffusers.CogVideoXDDIMScheduler if name.startswith("CogVideoX") else diffusers.DDIMScheduler
    log.info("%s is replaced by %s with the same betas and step spacing", name, kind.__name__)
    return kind.from_config(scheduler.config, clip_sample=False)


def schedule_of(path: Path, scheduler: Any, timesteps: Tensor, sigmas: Tensor | None) -> Schedule:
    """The pipeline's grid as flowrl writes it: sigma falls from noise to data.

    Args:
        path: of the scheduler.
        scheduler: gives alphas_cumprod.
        timesteps: the scheduler's, [K].
        sigmas: the scheduler's, [K + 1]; flows only.

    Raises:
        ModelError: no grid of single steps.
    """
    steps = timesteps.detach().float().cpu()
    if path.is_flow:
        if sigmas is None or len(sigmas) != len(steps) + 1:
            raise ModelError(
                f"{type(scheduler).__name__} does not take one step per sigma; use a first-order scheduler"
            )
        levels = sigmas.detach().float().cpu()
        return Schedule(sigmas=1 - levels if rising(levels) else levels, timesteps=steps)
    # Each step ends where the next one starts; DDIM ends the last at final_alpha_cumprod.
    alphas = torch.as_tensor(scheduler.alphas_cumprod).double().cpu()
    last = torch.as_tensor(scheduler.final_alpha_cumprod).double().cpu().reshape(1)
    kept = torch.cat([alphas[timesteps.long().cpu()], last])
    return Schedule(sigmas=(1 - kept).clamp(min=0).sqrt().float(), timesteps=steps)


def rising(sigmas: Tensor) -> bool:
    """The scheduler counts sigma from noise (0) to data (1), as Mochi's does: its velocity is x0 - eps."""
    return bool(sigmas[0] < sigmas[-1])
