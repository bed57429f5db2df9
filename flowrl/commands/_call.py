"""The arguments of a pipeline's own call, from the options --steps, --guidance and --set of a command."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.core.strict import overridden
from flowrl.models.base import network_config
from flowrl.models.generic.options import guidance_arguments

_COUNTS = ("num_inference_steps", "num_frames")
_OURS = ("self", "prompt", "image", "last_image", "generator", "output_type", "return_dict", "num_images_per_prompt")


def require_finite(guidance: float | None) -> None:
    """Raise ConfigError for a guidance scale that is no number."""
    if guidance is not None and not math.isfinite(guidance):
        raise ConfigError(f"--guidance {guidance}: must be a finite number")


def call_of(
    pipeline: Any, own: Mapping[str, Any], steps: int | None, guidance: float | None, words: Sequence[str]
) -> dict[str, Any]:
    """Arguments of the call: the model's `own`, then the options; `words` are key=value, and come last.

    Raises:
        ConfigError: an argument that the call does not have, that the command sets, or that does not fit the model.
        ModelError: a guidance scale for a pipeline without one.
    """
    require_finite(guidance)
    call = dict(own)
    if steps is not None:
        call["num_inference_steps"] = steps
    if guidance is not None:
        call |= guidance_arguments(pipeline, guidance, call)
    call |= _settings(pipeline, words)
    _require_positions(pipeline, call)
    return call


def _settings(pipeline: Any, words: Sequence[str]) -> dict[str, Any]:
    result, kind = overridden({}, list(words)), type(pipeline)
    known = [name for name in inspect.signature(kind.__call__).parameters if name not in _OURS]
    for name in result:
        if name in _OURS:
            raise ConfigError(f"--set {name}: the command sets it by itself; leave it out")
        if name not in known:
            raise ConfigError(
                f"--set {name}: {kind.__name__} takes no such argument; {suggest(name, known)}"
                f"there are: {', '.join(known)}"
            )
    for name in _COUNTS:
        count = result.get(name, 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"--set {name}={count}: must be a whole number, at least 1")
    _require_patches(pipeline, result.get("num_frames"))
    return result


def _require_positions(pipeline: Any, call: Mapping[str, Any]) -> None:
    """Refuse sides that are longer than a denoiser's table of positions, which fails inside (Wan's do)."""
    network, scale = getattr(pipeline, "transformer", None), getattr(pipeline, "vae_scale_factor_spatial", None)
    settings = {} if network is None else network_config(network)
    positions, patches = settings.get("rope_max_seq_len"), settings.get("patch_size")
    if positions is None or scale is None or not isinstance(patches, list | tuple):
        return
    known, largest = inspect.signature(type(pipeline).__call__).parameters, positions * scale * patches[-1]
    for name in ("height", "width"):
        side = call.get(name, known[name].default if name in known else None)
        if isinstance(side, int) and side > largest:
            raise ConfigError(
                f"{name}={side}: the denoiser has positions for {largest} pixels; give a smaller one, such as "
                f"--set {name}={largest}"
            )


def _require_patches(pipeline: Any, frames: int | None) -> None:
    """Refuse frames that a denoiser whose patches hold several latent frames cannot take: it would fail inside."""
    step, network = getattr(pipeline, "vae_scale_factor_temporal", None), getattr(pipeline, "transformer", None)
    if frames is None or step is None or network is None:
        return
    patches = network_config(network).get("patch_size")
    patch = patches[0] if isinstance(patches, list | tuple) and len(patches) == 3 else 1  # Wan's: time, height, width
    latents = (frames - 1) // step + 1 if (frames - 1) % step == 0 else frames // step + 1  # as it rounds them
    if latents % patch:
        from flowrl.models.wan import near_frames

        raise ConfigError(
            f"--set num_frames={frames}: it makes {latents} latent frames, and the denoiser reads {patch} at a time; "
            f"use {near_frames(frames, step, patch)}"
        )
