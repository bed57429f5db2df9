"""What the words of a command line mean, for commands and the wing: rewards, a pipeline's own call, processes."""

import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.registry import suggest
from flowrl.core.strict import apply_override, overridden
from flowrl.models.base import network_config
from flowrl.models.generic.options import check_few_steps, guidance_arguments
from flowrl.models.pipelines.distilled import Distilled
from flowrl.run.folder import RunFolder
from flowrl.run.launch import launch
from flowrl.training.world import require_devices

_COUNTS = ("num_inference_steps", "num_frames", "height", "width", "max_sequence_length")
_SCALES = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "guidance_rescale")
_ITSELF = "the command sets it by itself; leave it out"
_ONE = "the command draws one at a time; for more of each prompt give --count (--samples with flowrl eval)"
_OBJECT = "it takes a tensor or a function, which no option can give; leave it out"
_OURS: dict[str, str] = {
    **{name: _ITSELF for name in ("self", "prompt", "image", "last_image", "generator", "output_type", "return_dict")},
    **{name: _ONE for name in ("num_images_per_prompt", "num_videos_per_prompt")},
    **{name: _OBJECT for name in ("latents", "prompt_embeds", "negative_prompt_embeds", "callback_on_step_end")},
}
"""Arguments that --set cannot have, with the reason and what to do."""
_ANY_FRAMES = ("AutoencoderKLCogVideoX",)
"""VAEs that decode an even number of latent frames to a multiple of their temporal factor, and not to one more."""


def in_processes(out: Path, processes: int) -> int:
    """Hold the folder of --out and run this command line in several processes; the exit code."""
    require_devices(processes)
    folder = RunFolder(out, "--out")
    descriptor = folder.lock()
    try:
        return launch(sys.argv[1:], processes, lock=descriptor, warn=print)
    finally:
        folder.unlock()


def reward_entries(rewards: Iterable[str], options: Iterable[str], *, prefixes: bool) -> dict[str, dict[str, Any]]:
    """Name -> entry of each reward of a command line, as a configuration has it. `rewards` are names, dotted paths or
    .py files, PREFIX=NAME if `prefixes`; `options` are `key=value` of the only reward, or `NAME.key=value`, NAME being
    the prefix where there is one.

    Raises ConfigError: two rewards of one name, or an option that does not name its reward.
    """
    result: dict[str, dict[str, Any]] = {}
    for word in rewards:
        before, equals, after = word.partition("=") if prefixes else ("", "", word)
        reward, prefix = (after, before) if equals else (word, None)
        name = prefix or (Path(reward).stem if reward.endswith(".py") else reward)
        if name in result:
            remedy = f"give one a prefix, --reward PREFIX={reward}" if prefixes else "serve one of them on another port"
            raise ConfigError(f"--reward {word}: two rewards are called {name!r}; {remedy}")
        result[name] = {"path" if reward.endswith(".py") else "name": reward}
        if prefix is not None:
            result[name]["prefix"] = prefix
    for word in options:
        # A dotted module path is a name with dots: the longest name that fits is meant.
        owner = max((name for name in result if word.startswith(f"{name}.")), key=len, default=None)
        if owner is None and len(result) > 1:
            raise ConfigError(f"--set {word}: name its reward, NAME.key=value with NAME one of {', '.join(result)}")
        apply_override(result[owner or next(iter(result))], word.removeprefix(f"{owner}."))
    return result


# ---- a pipeline's own call: --steps, --guidance, --set


def require_finite(guidance: float | None) -> None:
    """Raise ConfigError for a guidance scale that is no number."""
    if guidance is not None and not math.isfinite(guidance):
        raise ConfigError(f"--guidance {guidance}: must be a finite number")


def call_of(
    pipeline: Any,
    own: Mapping[str, Any],
    steps: int | None,
    guidance: float | None,
    words: Sequence[str],
    known: Distilled | None = None,
) -> dict[str, Any]:
    """Arguments of the call: the model's `own`, then the options; `words` are key=value, and come last.

    `known`: how the model is distilled to few steps.

    Raises ConfigError: an argument that the call does not have, that the command sets, or that does not fit the model;
    ModelError: a guidance scale for a pipeline without one, or steps or CFG that a distilled model does not take.
    """
    require_finite(guidance)
    call = dict(own)
    if steps is not None:
        call["num_inference_steps"] = steps
    if guidance is not None:
        call |= guidance_arguments(pipeline, guidance, call)
    call |= _settings(pipeline, words)
    _require_positions(pipeline, call)
    if known is not None:
        check_few_steps(pipeline, known, call)
    return call


def _settings(pipeline: Any, words: Sequence[str]) -> dict[str, Any]:
    result, kind = overridden({}, list(words)), type(pipeline)
    parameters = inspect.signature(kind.__call__).parameters
    known = [name for name in parameters if name not in _OURS]
    for name in result:
        if name in _OURS:
            raise ConfigError(f"--set {name}: {_OURS[name]}")
        if name not in known:
            raise ConfigError(
                f"--set {name}: {kind.__name__} takes no such argument; {suggest(name, known)}"
                f"there are: {', '.join(known)}"
            )
    for name, value in result.items():  # with a number that is none such the call would fail inside
        if value is None and parameters[name].default is None:
            continue
        shown = f"--set {name}={str(value).lower() if isinstance(value, bool) else value}"  # as YAML has it
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if name in _COUNTS and not (isinstance(number, int) and number >= 1):
            raise ConfigError(f"{shown}: must be a whole number, at least 1")
        if name in _SCALES and not math.isfinite(number):
            raise ConfigError(f"{shown}: must be a finite number")
    _require_frames(pipeline, result.get("num_frames"))
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
                f"{name}={side}: the denoiser has positions for {largest} pixels",
                Remedy(flag=f"--set {name}={largest}"),
            )


def _frame_step(pipeline: Any) -> int | None:
    """Frames of a latent frame after the first, where a call makes one more than a multiple of them; else None."""
    default = inspect.signature(type(pipeline).__call__).parameters["num_frames"].default
    ratio = getattr(pipeline, "vae_temporal_compression_ratio", None)  # of LTX, which may have no default
    step = getattr(pipeline, "vae_scale_factor_temporal", None) if ratio is None else ratio
    if not step or type(getattr(pipeline, "vae", None)).__name__ in _ANY_FRAMES:
        return None
    if default is None:
        return ratio
    return step if (default - 1) % step == 0 else None  # Helios and Allegro count otherwise, and their defaults tell


def _require_frames(pipeline: Any, frames: int | None) -> None:
    """Refuse frames that the pipeline would round, and those that fill no whole patches, with which it fails inside."""
    step = None if frames is None else _frame_step(pipeline)
    if frames is None or step is None:
        return
    network = getattr(pipeline, "transformer", None)
    patches = None if network is None else network_config(network).get("patch_size")
    patch = patches[0] if isinstance(patches, list | tuple) and len(patches) == 3 else 1  # Wan's: time, height, width
    from flowrl.models.wan import near_frames

    if (frames - 1) % step:
        raise ConfigError(
            f"--set num_frames={frames}: must be one more than a multiple of {step}",
            Remedy(flag=f"--set num_frames={near_frames(frames, step, patch)}"),
        )
    latents = (frames - 1) // step + 1
    if latents % patch:
        raise ConfigError(
            f"--set num_frames={frames}: it makes {latents} latent frames, and the denoiser reads {patch} at a time",
            Remedy(flag=f"--set num_frames={near_frames(frames, step, patch)}"),
        )
