"""Facts of a model that its diffusers scheduler has: the process, the kind of prediction and the grid of the steps."""

import copy
import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.diffusion.process import FlowProcess, PredictionType, Process, VPProcess
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.diffusion.vp_schedules import last_end, vp_schedule

log = logging.getLogger("flowrl")
_VP_PREDICTIONS: dict[str, PredictionType] = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
_OWN_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")


_JUMPING = {
    "FlowMapEulerDiscreteScheduler": "from a time to another one that the network is told (AnyFlow)",
    "PiflowScheduler": "which holds the whole segment (Kandinsky 6, distilled)",
}
"""Schedulers of networks that predict no velocity -> what they predict, in words."""


@dataclass(frozen=True, slots=True)
class Path:
    """The noise process of a scheduler."""

    process: Process
    prediction_type: PredictionType

    @property
    def is_flow(self) -> bool:
        return isinstance(self.process, FlowProcess)


def path_of(scheduler: Any) -> Path:
    """Flow or VP, by the scheduler's class and configuration. Raises ModelError: neither."""
    kind, values = type(scheduler), scheduler.config
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "set_timesteps", None)):
        raise ModelError(f"scheduler {kind.__name__} has no step() and set_timesteps(): its loop cannot be entered")
    predicted = values.get("prediction_type", "flow_prediction")
    if kind.__name__ == "FlowMatchEulerDiscreteScheduler" or values.get("use_flow_sigmas"):
        if predicted != "flow_prediction":
            raise ModelError(f"{kind.__name__} with flow sigmas must have prediction_type='flow_prediction'")
        return Path(FlowProcess(), "velocity")
    if kind.__name__ in _JUMPING:
        raise ModelError(
            f"{kind.__name__} jumps over a part of the path by one prediction, {_JUMPING[kind.__name__]}: neither a "
            "velocity nor the noise, which flowrl trains, and no other scheduler makes one of it; a checkpoint that "
            "was not distilled so can be trained"
        )
    if kind.__name__.startswith("FlowMatch"):
        raise ModelError(
            f"{kind.__name__} is no plain grid of flow steps; load the pipeline with FlowMatchEulerDiscreteScheduler"
        )
    if "alphas_cumprod" in vars(scheduler) and predicted in _VP_PREDICTIONS:
        return Path(VPProcess(), _VP_PREDICTIONS[predicted])
    raise ModelError(
        f"{kind.__name__} with prediction_type={predicted!r} is neither a flow nor a noise process x = alpha x0 + "
        "sigma eps with alpha^2 + sigma^2 = 1; load the pipeline with FlowMatchEulerDiscreteScheduler or DDIMScheduler"
    )


def plain(scheduler: Any, path: Path) -> Any:
    """The scheduler of the pipeline's grid: itself for flows, DDIM of the same betas for VP.

    flowrl takes its own steps, so of a flow's multistep scheduler (UniPC, DPM-Solver) only the grid is used. VP
    schedulers scale their latents or space their steps in many ways; DDIM does neither. Its timesteps follow the
    scheduler's spacing and offset by DDIM's rule: no Karras sigmas, DPM-Solver's K + 1 points or Euler's fractions.
    """
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_ddim_cogvideox import CogVideoXDDIMScheduler

    name = type(scheduler).__name__
    if path.is_flow:
        if name != "FlowMatchEulerDiscreteScheduler":
            log.info("the grid of %s is kept; its multistep solver is replaced by flowrl's own steps", name)
        return scheduler
    if name in ("DDIMScheduler", "CogVideoXDDIMScheduler") and not scheduler.config.get("clip_sample"):
        return scheduler
    kind = CogVideoXDDIMScheduler if name.startswith("CogVideoX") else DDIMScheduler
    # Not by from_config: it takes DDIM's defaults where this scheduler's own defaults decide.
    known = inspect.signature(kind.__init__).parameters
    options: dict[str, Any] = {key: value for key, value in scheduler.config.items() if key in known}
    options["clip_sample"] = False
    made = kind(**options)
    dropped = [key for key in _OWN_SIGMAS if scheduler.config.get(key)]
    log.info(
        "%s is replaced by %s with the same betas; grid: DDIM's of spacing %r and offset %d%s",
        *(name, kind.__name__, made.config["timestep_spacing"], made.config["steps_offset"]),
        f", without {', '.join(dropped)}" if dropped else "",
    )
    return made


def with_shift(scheduler: Any, shift: float | None) -> Any:
    """A scheduler that makes of the pipeline's even sigmas the grid of `flow_grid` with `shift`."""
    if shift is None:
        return scheduler
    return type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift=shift, shift_terminal=None)


def flow_grid(
    scheduler: Any, num_inference_steps: int, tokens: int, *, even: bool, max_shift: float, shift: float | None
) -> Schedule:
    """The grid of a family on the plain flow scheduler; timesteps are 1000 sigma. The pipeline's scheduler is left as
    it is; its mu is linear in `tokens`, the number of the image's tokens, and `max_shift` is the mu of the longest
    sequence where its configuration has none. `even`: the pipeline hands in linspace(1, 1 / K, K); False: the
    scheduler's own sigmas. `shift`: of even sigmas, instead of everything that the scheduler does; None: the
    scheduler's grid.

    Raises ModelError: another scheduler.
    """
    if shift is not None:
        sigmas = shifted_linspace(num_inference_steps, shift)
        return Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1])
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        remedy = "set model.shift to a number to replace the pipeline's grid" if even else "load the pipeline with it"
        raise ModelError(f"{type(scheduler).__name__} is not the family's FlowMatchEulerDiscreteScheduler; {remedy}")
    own, values = copy.deepcopy(scheduler), scheduler.config
    mu = calculate_shift(
        tokens,
        values.get("base_image_seq_len", 256),
        values.get("max_image_seq_len", 4096),
        values.get("base_shift", 0.5),
        values.get("max_shift", max_shift),
    )
    evenly = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps, dtype=torch.float64).tolist()
    own.set_timesteps(num_inference_steps, sigmas=evenly if even else None, mu=mu)
    return Schedule(
        sigmas=torch.as_tensor(own.sigmas).float().cpu(), timesteps=torch.as_tensor(own.timesteps).float().cpu()
    )


FinalAlpha = Literal["model", "first"]
"""Where the last step of a VP grid ends: at the alpha of the model's scheduler, or at the first training step (DDPO's
rule, which leaves noise in it)."""


def schedule_of(
    path: Path,
    scheduler: Any,
    timesteps: Tensor,
    sigmas: Tensor | None,
    final_alpha: FinalAlpha = "model",
    *,
    to_clean: bool = False,
) -> Schedule:
    """The pipeline's grid with sigma falling from noise to data.

    `path` is the scheduler's process and prediction; timesteps [K] and, of flows only, sigmas [K + 1] are its own; it
    has alphas_cumprod and their end. `final_alpha`: end of a VP grid; with `to_clean` that is clean data, whatever the
    scheduler's end is.

    Raises ModelError: a grid without single steps, or one on which a noise-prediction network cannot start.
    """
    steps = timesteps.detach().float().cpu()
    if path.is_flow:
        if sigmas is None or len(sigmas) != len(steps) + 1:
            raise ModelError(
                f"{type(scheduler).__name__} does not take one step per sigma; use a first-order scheduler"
            )
        levels = sigmas.detach().float().cpu()
        return Schedule(sigmas=1 - levels if rising(levels) else levels, timesteps=steps)
    table, own = torch.as_tensor(scheduler.alphas_cumprod), float(scheduler.final_alpha_cumprod)
    timesteps = timesteps[timesteps >= 0]  # diffusers' trailing grids may have one timestep too many, -1
    return vp_grid(path, table, timesteps, grid_end(table, timesteps, own, final_alpha, to_clean))


def grid_end(table: Tensor, timesteps: Tensor, own: float, final_alpha: FinalAlpha, to_clean: bool) -> float:
    """alphas_cumprod after the last step of a grid [K]; `own` is that of the scheduler.

    1 with `to_clean`: a distilled checkpoint's own scheduler ends there, of which the given one is a replacement.
    """
    if final_alpha == "first":
        return last_end(table, timesteps, None)
    return 1.0 if to_clean else last_end(table, timesteps, own)


def vp_grid(path: Path, table: Tensor, timesteps: Tensor, end: float) -> Schedule:
    """`vp_schedules.vp_schedule` for this network, with errors that name the option.

    A table for eps ends at the last sigma below 1 in float32, since losses at drawn times divide by alpha.
    """
    try:
        result = vp_schedule(table, timesteps, end)
    except ValueError as error:
        raise ModelError.about(error, "model.path, model.final_alpha: ", place="model") from None
    assert result.alphas is not None
    if path.prediction_type == "eps" and float(result.alphas[0]) == 0:
        raise ModelError(
            f"model.path: the first step, timestep {float(result.timesteps[0]):g}, is pure noise (alpha = 0: "
            "rescale_betas_zero_snr), where a noise prediction contains no image; use a v-prediction checkpoint, or a "
            "scheduler without rescale_betas_zero_snr"
        )
    if path.prediction_type == "eps":
        assert result.table is not None
        return replace(result, table=result.table[(1 - result.table).sqrt().float() < 1])
    return result


def rising(sigmas: Tensor) -> bool:
    """Whether the scheduler counts sigma from noise (0) to data (1), as Mochi's: its velocity is x0 - eps."""
    return bool(sigmas[0] < sigmas[-1])
