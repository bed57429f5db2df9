"""The arguments of a pipeline's call: the user's, those of each entry, and the sizes that fit."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError, Remedy
from flowrl.core.registry import suggest
from flowrl.media.media import FPS
from flowrl.media.mp4 import require_rate
from flowrl.models.base import check_size, network_config
from flowrl.models.generic.families import DECIDED, SCALES, Family, Guidance, family_of, guidance_of
from flowrl.models.pipelines.distilled import Distilled
from flowrl.models.pipelines.paths import lacks

Asked = tuple[int | None, int | None]
"""(height, width) in pixels; None: the pipeline's default."""
RATES = ("frame_rate", "fps")
"""Arguments by which a call is told the frame rate of its videos."""
_NETWORKS = ("transformer", "transformer_2", "unet")


def find_networks(pipeline: Any) -> dict[str, nn.Module]:
    """The denoisers by component name. Raises ModelError: no component of a known name."""
    result = {name: part for name in _NETWORKS if isinstance(part := pipeline.components.get(name), nn.Module)}
    if not result:
        raise ModelError(
            f"{type(pipeline).__name__} has no denoiser under the names {', '.join(_NETWORKS)}; "
            f"its components are {', '.join(sorted(pipeline.components))}"
        )
    return result


def guidance_arguments(pipeline: Any, scale: float, call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, besides `call`, that set the pipeline's guidance to `scale`. Raises ModelError: it takes none."""
    kind = _guidance(pipeline)
    if kind == "none":
        raise ModelError(f"{type(pipeline).__name__} takes no guidance scale", Remedy(without="--guidance"))
    if kind == "guider":
        pipeline.guider.guidance_scale = scale
        return {}
    # Without a negative prompt the pipeline ignores a scale of true CFG.
    negative = {"negative_prompt": call.get("negative_prompt", "")} if kind == "true_cfg" else {}
    return {SCALES[kind]: scale} | negative


def _guidance(pipeline: Any) -> Guidance:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    network = next(iter(find_networks(pipeline).values()))
    return guidance_of(family_of(pipeline), pipeline, parameters, network)


def few_steps_call(pipeline: Any, known: Distilled) -> dict[str, Any]:
    """Arguments of the call of a distilled model where nothing else is said: its own steps, and no CFG."""
    steps = {} if known.nodes is None else {"num_inference_steps": len(known.nodes)}
    if _cfg(pipeline) is None:
        return steps
    return steps | guidance_arguments(pipeline, family_of(pipeline).free_at, {})


def check_few_steps(pipeline: Any, known: Distilled, call: Mapping[str, Any]) -> None:
    """Raise ModelError for a call by `flowrl sample` or a suite that a distilled model does not take."""
    if (steps := call.get("num_inference_steps")) is not None:
        known.require_steps(steps, "--steps")
    argument, free_at = _cfg(pipeline), family_of(pipeline).free_at
    if argument is not None:
        scale = pipeline.guider.guidance_scale if argument == "guider" else call.get(argument)
        if scale is not None and scale > free_at:
            known.refuse_cfg(scale, free_at, "--guidance")


def _cfg(pipeline: Any) -> str | None:
    """The argument of the call, or `guider`, that gives a scale of CFG; None: guidance is none or an input."""
    network = pipeline.components.get("unet")
    if network is not None and network_config(network).get("time_cond_proj_dim") is not None:
        return None
    return {"cfg": "guidance_scale", "true_cfg": "true_cfg_scale", "guider": "guider"}.get(_guidance(pipeline))


def check_components(pipeline: Any) -> None:
    """Raise ModelError if a component is null that the pipeline's class needs."""
    # diffusers keeps the optional components in a private attribute alone.
    optional = set(pipeline._optional_components)
    # Some models of a family have no transformer_2, second or third text encoder.
    needed = {"vae", "scheduler", "text_encoder", "tokenizer"}
    for name, part in pipeline.components.items():
        if part is None and name in needed - optional:
            raise ModelError(lacks(type(pipeline).__name__, name))


def check_fit(pipeline: Any, family: Family, networks: Mapping[str, nn.Module]) -> None:
    """Raise ModelError if the model is of a kind that its family lists as unfit."""
    for entry, (value, reason) in family.unfit.items():
        for config in (pipeline.config, *map(network_config, networks.values())):
            if config.get(entry) == value:
                raise ModelError(
                    f"{type(pipeline).__name__} with {entry}={value!r} (in its configuration) cannot be trained: "
                    f"it {reason}"
                )


@dataclass(frozen=True, slots=True)
class Size:
    """Size of an image in pixels; a side is a multiple of `unit`."""

    height: int
    width: int
    unit: int

    @staticmethod
    def of(pipeline: Any, asked: Asked, family: Family, parameters: Mapping, network: nn.Module) -> "Size":
        """The asked size, or the pipeline's. Raises ModelError: no default, or a side is no multiple of the unit."""
        scale = _scale(pipeline)
        patch = family.patch or network_config(network).get("patch_size") or 1
        patch = int(patch[-1]) if isinstance(patch, list | tuple) else int(patch)
        sides = []
        for place, name in enumerate(("height", "width")):
            side = asked[place] or _default_side(pipeline, name, place, parameters, network, scale)
            if side is None:
                raise ModelError(f"{type(pipeline).__name__} has no default size: set model.height and model.width")
            check_size(name, side, scale * patch)
            sides.append(side)
        return Size(sides[0], sides[1], scale * patch)

    def places(self, tokens: int, num_frames: int) -> tuple[int, ...]:
        """(h, w), or (T, h, w) of videos, of packed tokens. Raises ModelError: their number does not fit the size."""
        rows, columns = self.height // self.unit, self.width // self.unit
        if tokens % (rows * columns) or (num_frames == 1 and tokens != rows * columns):
            raise ModelError(f"{tokens} tokens are not a grid of {rows} x {columns}")
        return (rows, columns) if num_frames == 1 else (tokens // (rows * columns), rows, columns)

    def require(self, latents: Tensor, pipeline: Any) -> None:
        """Raise ModelError unless latents [..., h, w] of an image of this size have this size too."""
        scale = _scale(pipeline)
        height, width = (int(side) * scale for side in latents.shape[-2:])
        if (height, width) != (self.height, self.width):
            raise ModelError(
                f"model.height={self.height}, model.width={self.width} is not a size of {type(pipeline).__name__}: "
                f"it makes {height} x {width} of such an image",
                {"model.height": height, "model.width": width},
            )


def _scale(pipeline: Any) -> int:
    """Pixels a side of one latent pixel."""
    names = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor")
    return int(_attribute(pipeline, *names, "vae_scale_factor") or 1)


def _attribute(pipeline: Any, *names: str) -> Any:
    """The first of these attributes that the pipeline has and that is not empty, or None: classes name them freely."""
    return next((value for name in names if (value := getattr(pipeline, name, None))), None)


def _default_side(
    pipeline: Any, name: str, place: int, parameters: Mapping, network: nn.Module, scale: int
) -> int | None:
    """Pixels of a side by the pipeline's own default; None: it has none."""
    default = parameters[name].default if name in parameters else None
    if isinstance(default, int):
        return default
    fixed = _attribute(pipeline, f"default_{name}")
    if isinstance(fixed, int):
        return fixed
    sample = _attribute(pipeline, "default_sample_size") or network_config(network).get("sample_size")
    if isinstance(sample, list | tuple):
        sample = sample[place - 2]
    return int(sample) * scale if sample else None


def frames_of(pipeline: Any, given: Mapping[str, Any], parameters: Mapping, network: nn.Module) -> int:
    """Frames of a decoded video; 1 for images. `given` are the user's arguments of the call.

    Raises ModelError: asked-for frames that the VAE cannot divide.
    """
    name = next((name for name in ("num_frames", "frames") if name in parameters), None)
    if name is None:
        return 1
    asked = given.get(name)
    if asked is None:
        asked = parameters[name].default or network_config(network).get("sample_frames") or 1
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
    step = int(_attribute(pipeline, *names) or 1)
    # The pipelines round down to whole latent frames after the first.
    whole = (int(asked) - 1) // step * step + 1
    if given.get(name) not in (None, whole):
        near = max(round((int(asked) - 1) / step), 0) * step + 1
        raise ModelError(
            f"model.call.{name}={asked} must be one more than a multiple of {step}, the VAE's factor in time",
            {f"model.call.{name}": near},
        )
    return whole


def rate_of(given: Mapping[str, Any], parameters: Mapping, where: str) -> float:
    """Frames a second of the videos of a call: what it is told, else its own default; `FPS` where it knows no rate.

    Raises ConfigError: it is told a rate that is not above 0; `where` stands before its name.
    """
    for name in RATES:
        if given.get(name) is not None:
            return require_rate(given[name], where + name)
        if name in parameters and isinstance(parameters[name].default, int | float):
            return float(parameters[name].default)
    return FPS


class Call:
    """The arguments with which a pipeline is entered.

    Raises ModelError: model.call names an argument that the pipeline does not take, or that flowrl decides.
    """

    def __init__(
        self, pipeline: Any, config: Any, family: Family, guidance: Guidance, size: Size, parameters: Mapping
    ) -> None:
        self.pipeline, self.guidance, self.size, self.parameters = pipeline, guidance, size, parameters
        given = dict(config.call)
        self._check(given, family)
        self.negative = given.pop("negative_prompt", None)
        self.fixed = {name: value for name, value in family.call.items() if name in parameters} | given

    def _check(self, given: dict[str, Any], family: Family) -> None:
        kind = type(self.pipeline).__name__
        ours = DECIDED | ({SCALES[self.guidance]: "rollout.guidance_scale"} if self.guidance in SCALES else {})
        ours |= dict.fromkeys(family.images, "data.prompts")
        for name in given:
            if name in ours:
                raise ModelError(f"model.call.{name} is not to be set: {ours[name]} decides it")
            if name in family.refused:
                raise ModelError(f"model.call.{name}: {kind} with it {family.refused[name]}")
            if name not in self.parameters or name == "self" or "embeds" in name or "callback" in name:
                hidden = {"self", *ours, *family.refused}
                valid = [n for n in self.parameters if n not in hidden and not ("embeds" in n or "callback" in n)]
                raise ModelError(
                    f"model.call.{name}: {kind} takes no such argument; {suggest(name, valid)}"
                    f"there are: {', '.join(valid)}"
                )

    def arguments(
        self, batch: int, guidance_scale: float, prompts: list[str] | None, steps: int, output_type: str
    ) -> dict[str, Any]:
        """Arguments of one call for `batch` prompts; None where the encoded prompts are handed in."""
        options: dict[str, Any] = {
            "prompt": [""] * batch if prompts is None else prompts,
            "num_inference_steps": steps,
            "output_type": output_type,
            "return_dict": False,
            **self.fixed,
        }
        if "height" in self.parameters:
            options |= {"height": self.size.height, "width": self.size.width}
        if "max_area" in self.parameters:
            # FLUX Kontext scales every size to this area.
            options["max_area"] = self.size.height * self.size.width
        if "generator" in self.parameters:
            # For noise that is thrown away or that a decoder adds, instead of the global generator.
            options["generator"] = torch.Generator().manual_seed(0)
        negative = self.negative
        if self.guidance in SCALES:
            options[SCALES[self.guidance]] = guidance_scale
        if self.guidance == "true_cfg":
            negative = (negative or "") if guidance_scale > 1 else None
        elif self.guidance == "guider":
            self.pipeline.guider.guidance_scale = guidance_scale
        if self.guidance == "embedded" and self.fixed.get("true_cfg_scale", 1) > 1:
            negative = negative or ""
        if negative is not None and "negative_prompt" in self.parameters:
            options["negative_prompt"] = [negative] * batch
        return options

    def own(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        """The same arguments for the pipeline's own call on one prompt, as a user would write them."""
        options = self.arguments(1, guidance_scale, None, steps, "pt")
        for name in ("prompt", "output_type", "return_dict", "generator"):
            options.pop(name, None)
        if "negative_prompt" in options:
            options["negative_prompt"] = options["negative_prompt"][0]
        return options
