"""The shared part of the native families: a pipeline taken apart, its denoiser called directly, its encoders freed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._guidance import Forwards
from flowrl.models._schedulers import flow_grid, with_shift
from flowrl.models._vae import decoded_pixels, encoded_pixels
from flowrl.models.base import (
    ModelAdapter,
    ModelConfig,
    VaePrecision,
    check_size,
    network_config,
    require_channels,
    require_image_size,
    torch_dtype,
    unused_modules,
)
from flowrl.models.memory.savings import give_memory_back, place, switch_on
from flowrl.models.pipelines.declared import of_pipeline
from flowrl.models.pipelines.loading import load_pipeline, meta_pipeline
from flowrl.models.pipelines.paths import lacks
from flowrl.models.weights.roles import component_names

Part = Callable[[str], dict[str, Any]]
"""Name of a component -> its configuration, the JSON of a checkpoint."""
JOINT_ATTENTION = tuple(
    f"attn.{name}"
    for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v")
)
"""Attention projections of blocks on text and image together."""
LONG = 1000
"""Positions above which a text encoder's table does not bound the length of prompts."""
NO_ENCODERS = "the text encoders were freed; encode every prompt before free_text_encoders()"


def latent_channels(vae: Mapping[str, Any]) -> int | None:
    """Channels of a VAE's latents by its configuration; None: not in it."""
    return vae.get("z_dim") or vae.get("latent_channels")


def on_euler(part: Part) -> bool:
    """Whether a checkpoint has the plain flow scheduler, whose grid the families make themselves."""
    return part("scheduler").get("_class_name") == "FlowMatchEulerDiscreteScheduler"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a native family is recognised and loaded; its module takes `build`, `skeleton` and `takes` from here."""

    adapter: "Callable[[Any, Any], Native]"
    """(pipeline, Config) -> the adapter."""
    pipeline: str
    """Its class in diffusers."""
    vae: str = "AutoencoderKL"
    """The class of its VAE."""
    denoiser: str = "transformer"
    """The component that is trained."""
    channels: tuple[int, int]
    """Channels of the denoiser and of its VAE that their configurations leave out: diffusers' defaults."""
    patch: int = 1
    """Latent pixels a side of one packed token."""
    left_out: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Config -> arguments of `from_pretrained` that load less than the whole pipeline."""
    fits: Callable[[Part], bool] = on_euler
    """A further condition on a checkpoint, such as its scheduler."""

    def build(self, config: ModelConfig) -> "Native":
        """The adapter with the configured pipeline's weights."""
        return self.adapter(load_pipeline(self.pipeline, self.vae, config, **self.left_out(config)), config)

    def skeleton(self, config: ModelConfig, folder: Path, device: torch.device | str = "meta") -> "Native":
        """The adapter on the meta device, from a pipeline folder's JSON files alone, without tokenizers.

        `config.path` and `config.vae` are not read. With another `device` the denoisers and the VAE are there, with
        the values that their classes begin with; the text encoders never are.
        """
        absent = (*self.left_out(config), "feature_extractor", "image_encoder")
        options = {"kind": self.pipeline, "absent": absent, "device": device}
        return self.adapter(meta_pipeline(folder, config, **options), config)

    def takes(self, part: Part) -> bool:
        """Whether a checkpoint of the class takes text alone and is on the family's grid."""
        taken, made = self.channels
        channels = part(self.denoiser).get("in_channels", taken)
        return self.fits(part) and channels == self.patch**2 * (latent_channels(part("vae")) or made)


@dataclass(frozen=True, kw_only=True)
class FlowConfig(ModelConfig):
    """Options of flow families with one long text encoder."""

    LONGEST: ClassVar[int] = 512
    max_sequence_length: int = 512
    """Text tokens per prompt."""
    shift: float | None = None
    """Static shift of the sigmas instead of the scheduler's own; null: the pipeline's shift for this image size.
    DanceGRPO and MixGRPO publish 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_sequence_length <= self.LONGEST:
            raise ValueError(f"max_sequence_length={self.max_sequence_length} must be in 1..{self.LONGEST}")
        if self.shift is not None and self.shift <= 0:
            raise ValueError(f"shift={self.shift} must be positive; null takes the pipeline's own")


class Native(ModelAdapter):
    """The adapter of a family: class attributes and `predict`.

    By default its process is a flow on the plain flow scheduler, and its VAE an AutoencoderKL: images to latents and
    back by one shift and scale for all channels. `network`: the trained one; None: the pipeline's transformer.
    """

    patch: ClassVar[int] = 1
    """Latent pixels a side of one packed token; 1: latents are not packed."""
    text_width: ClassVar[str] = "joint_attention_dim"
    """Entry of the denoiser's configuration: width of a token's embedding."""
    pooled_width: ClassVar[str | None] = None
    """Entry with the width of a prompt's pooled embedding; None: there is none."""
    latent_shift: ClassVar[float | None] = None
    """Shift of the VAE's latents; None takes its configuration's."""
    encoding: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the pipeline's `encode_prompt`."""
    embeddings: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    """Entries of a condition in the order in which `encode_prompt` returns them; "", and what follows, is left out."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Adapted modules whose output is never used; {last} is the number of the last transformer block."""
    even_sigmas: ClassVar[bool] = True
    """The pipeline hands linspace(1, 1 / K, K) to its scheduler; False: the scheduler has its own."""
    max_shift: ClassVar[float] = 1.15
    """mu of the longest sequence where the scheduler's configuration has none."""

    def __init__(self, pipeline: Any, config: Any, network: nn.Module | None = None) -> None:
        self.pipeline = pipeline
        self.config: Any = config
        self._had_encoder = pipeline.text_encoder is not None
        self.network = pipeline.transformer if network is None else network
        self.device = torch.device("cpu")
        self.dtype, self.autocasts = torch_dtype(config.dtype), config.precision == "autocast"
        for name, part in pipeline.components.items():
            if part is not None and (name == "vae" or name.startswith("text_encoder")):
                part.requires_grad_(False).eval()
        self.network.eval()
        networks = list(component_names(self.network).values())
        switch_on(pipeline, networks, config)
        # The denoiser's configuration; that of the first where there are several.
        self.settings = network_config(networks[0])
        self.distilled = of_pipeline(pipeline, config.distilled, config.revision)
        require_channels(networks[0], self.patch**2 * (latent_channels(pipeline.vae.config) or 0))
        (height, width), self.unit, largest = self.sides()
        self.height = height if config.height is None else config.height
        self.width = width if config.width is None else config.width
        check_size("height", self.height, self.unit, largest)
        check_size("width", self.width, self.unit, largest)

    def dead_lora_modules(self) -> tuple[str, ...]:
        return unused_modules(self.unused, self.network)

    # ---- sizes and steps

    def sides(self) -> tuple[tuple[int, int], int, int | None]:
        """((height, width) by default, unit, largest side or None), in pixels; a side is a multiple of the unit."""
        scale = self.pipeline.vae_scale_factor
        default = self.pipeline.default_sample_size * scale
        return (default, default), self.patch * scale, None

    def tokens(self) -> tuple[int, int]:
        """(rows, columns) of the denoiser's tokens."""
        return self.height // self.unit, self.width // self.unit

    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of packed tokens; None where latents are not packed."""
        return None if self.patch == 1 else self.tokens()

    def latent_shape(self) -> tuple[int, ...]:
        channels, scale, (rows, columns) = self.settings["in_channels"], self.pipeline.vae_scale_factor, self.tokens()
        if self.patch > 1:
            return (rows * columns, channels)
        return (channels, self.height // scale, self.width // scale)

    @property
    def shift(self) -> float | None:
        """The configured static shift of the sigmas; None: the scheduler's own grid."""
        return self.config.shift if isinstance(self.config, FlowConfig) else None

    def schedule(self, num_inference_steps: int) -> Schedule:
        rows, columns = self.tokens()
        return flow_grid(
            self.pipeline.scheduler,
            num_inference_steps,
            rows * columns,
            even=self.even_sigmas,
            max_shift=self.max_shift,
            shift=self.shift,
        )

    # ---- prompts

    def texts(self, prompts: list[str]) -> Condition:
        """Embeddings of prompts, by the pipeline's own `encode_prompt`."""
        options = {"max_sequence_length": self.config.max_sequence_length, **self.encoding}
        made = self.pipeline.encode_prompt(prompt=prompts, device=self.device, **options)
        return Condition({name: part for name, part in zip(self.embeddings, made, strict=False) if name})

    def negative(self) -> Condition | None:
        """The embedding that guidance leads away from, one row; None: no such guidance."""
        return self.texts([self.config.negative_prompt])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Sequence[Sequence[Any]] | None = None) -> Condition:
        if self.pipeline.text_encoder is None:
            raise ModelError(NO_ENCODERS if self._had_encoder else lacks(self.kind, "text_encoder"))
        if self.unconditional is None:
            self.unconditional = self.negative()
        return self.texts(list(prompts))

    def free_text_encoders(self) -> None:
        for name in [name for name in self.pipeline.components if name.startswith("text_encoder")]:
            setattr(self.pipeline, name, None)
        give_memory_back()

    @property
    def text_tokens(self) -> int:
        """Tokens of one prompt's embedding, at most."""
        return self.config.max_sequence_length

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": (self.text_tokens, self.settings[self.text_width])}
        return shapes if self.pooled_width is None else shapes | {"pooled": (self.settings[self.pooled_width],)}

    def encoder_tokens(self, name: str, encoder: Any) -> int:
        # CLIP pads to its table of positions; a language model's is far longer than any prompt.
        positions = vars(encoder.config).get("max_position_embeddings") or LONG
        return positions if positions < LONG else self.config.max_sequence_length

    def blank_condition(self, batch: int) -> Condition:
        shapes = self.condition_shapes()
        return Condition({name: torch.empty(batch, *shape, dtype=self.dtype) for name, shape in shapes.items()})

    # ---- the network

    def forwards(self, *, separate: bool = False) -> Forwards:
        """The forwards of classifier-free guidance; `separate`: two, even where both may carry gradient."""
        if self.config.guidance_gradient == "positive":
            return "detached"
        return "separate" if separate else "joined"

    # ---- the pipeline's own call

    def scheduler(self) -> Any:
        """The pipeline's scheduler as configured."""
        return with_shift(self.pipeline.scheduler, self.shift)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        """Arguments of the pipeline's own call for one prompt as configured; sets the pipeline's scheduler too."""
        self.pipeline.scheduler = self.scheduler()
        call = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
        return call | {"height": self.height, "width": self.width} | self.text_options()

    def text_options(self) -> dict[str, Any]:
        """Arguments of the pipeline's text encoding."""
        return {"max_sequence_length": self.config.max_sequence_length}

    # ---- images

    # The pipelines' own packing has no public name.

    def packed(self, latents: Tensor) -> Tensor:
        """The VAE's latents [B, C, h, w] in the network's layout."""
        return latents if self.patch == 1 else self.pipeline._pack_latents(latents, *latents.shape)

    def unpacked(self, latents: Tensor) -> Tensor:
        """The network's latents in the VAE's layout."""
        if self.patch == 1:
            return latents
        return self.pipeline._unpack_latents(latents, self.height, self.width, self.pipeline.vae_scale_factor)

    def _shift(self) -> float:
        return (self.pipeline.vae.config.shift_factor or 0.0) if self.latent_shift is None else self.latent_shift

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        vae = self.pipeline.vae
        latents = self.unpacked(latents) / vae.config.scaling_factor + self._shift()
        return decoded_pixels(vae, latents, self.config.vae_precision)

    @torch.no_grad()
    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        require_image_size(images, self.height, self.width)
        vae = self.pipeline.vae
        latents = encoded_pixels(vae, images.to(self.device), self.config.vae_precision, noise, self.packed)
        return (latents - self._shift()) * vae.config.scaling_factor

    def to(self, device: torch.device) -> None:
        place(self.pipeline, self.config, device, autocasts=self.autocasts)
        self.device = device
        if self.unconditional is not None:
            self.unconditional = self.unconditional.to(device)


def decoded_frames(vae: Any, latents: Tensor, precision: VaePrecision) -> Tensor:
    """Frames [B, F, 3, H, W] in [0, 1] of latents [B, C, T, h, w]: a VAE with a mean and a std for each channel."""
    mean, std = _of_channels(vae, latents.device)
    return decoded_pixels(vae, latents * std + mean, precision).transpose(1, 2)


def encoded_frames(vae: Any, frames: Tensor, precision: VaePrecision, noise: Tensor | None = None) -> Tensor:
    """Latents [B, C, T, h, w] float32 of frames [B, F, 3, H, W] in [0, 1] on the VAE's device; undoes `decoded_frames`.

    `noise` as in `ModelAdapter.encode_images`.

    Source: diffusers:pipelines/wan/pipeline_wan_i2v.py (retrieve_latents, then the mean and 1 / std of each channel).
    """
    mean, std = _of_channels(vae, frames.device)
    return (encoded_pixels(vae, frames.transpose(1, 2), precision, noise) - mean) * (1 / std)


def _of_channels(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(mean, std) of a VAE's latents, one a channel, [1, C, 1, 1, 1] each."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean, std = (
        torch.tensor(each, device=device).view(shape) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
