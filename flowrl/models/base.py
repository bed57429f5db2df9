"""The interface of a model family: encode, schedule, predict, decode. No loop, LoRA, EMA or device logic inside."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError as ModelError
from flowrl.core.paths import NAME_OR_PATH, PATH
from flowrl.core.types import Condition
from flowrl.diffusion.process import FlowProcess, PredictionType, Process
from flowrl.diffusion.schedules import Schedule
from flowrl.media.media import FPS
from flowrl.models.memory.options import Checkpointing, MemorySettings, require_stored
from flowrl.models.pipelines.distilled import Distilled, Said

DtypeName = Literal["float32", "bfloat16", "float16"]
Precision = Literal["native", "autocast"]
GuidanceGradient = Literal["both", "positive"]
LoraKind = Literal["lora", "rslora", "dora", "lokr"]
VaePrecision = Literal["float32", "tf32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """A low-rank adapter. No dropout: it would make the ratio of old and new policy random."""

    rank: int = 32
    """Rank of the update."""
    alpha: float = 64.0
    """Scale numerator: the update is alpha / rank * B A."""
    kind: LoraKind = "lora"
    """As peft has them: `lora`; `rslora`, with the scale alpha / sqrt(rank); `dora`, which trains the norms of the
    weights' rows too; `lokr`, alpha / rank times a Kronecker product of two small matrices (docs/using_lora.md)."""
    targets: list[str] | None = None
    """Module name suffixes; null takes the family's own list."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha} must be positive: the update is alpha / rank * B A")
        if self.targets is not None and not self.targets:
            raise ValueError(
                "targets=[] binds to nothing; give module name suffixes, or null for the family's own list"
            )

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options every family has."""

    path: Annotated[str, NAME_OR_PATH]
    """Hub id, folder, single .safetensors file, or the name of an embedded asset such as tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    variant: str | None = None
    """Weight file variant, such as fp16."""
    dtype: DtypeName = "float32"
    """Precision of the network's frozen weights and of its forward pass; trained weights are always float32."""
    precision: Precision | None = None
    """Arithmetic of a forward in half precision: `native`, the network's own dtype, as its pipeline runs, each LoRA
    product one addmm; or `autocast`, torch.autocast with peft's own LoRA layers.
    Native has fewer casts, kernels and bytes; the two round differently. null: native, but autocast where all weights
    are trained in half precision: those are float32, so the network has no half-precision dtype of its own."""
    lora: LoraSettings | None = None
    """The adapter to train; null trains all weights of the denoiser."""
    init_lora: Annotated[str | None, PATH] = None
    """Folder or .safetensors of a LoRA to start from; its rank and targets must be those of `lora`."""
    vae: Annotated[str | None, NAME_OR_PATH] = None
    """Another VAE: hub id or folder."""
    vae_precision: VaePrecision = "tf32"
    """Arithmetic of the VAE, whatever `dtype` is: `tf32`, float32 with TF32 convolutions on a GPU; `float32`, IEEE
    throughout and slower there; `bfloat16` or `float16`, half the memory and coarser images (docs/memory.md)."""
    height: int | None = None
    """Image height in pixels; null takes the pipeline's default."""
    width: int | None = None
    """Image width in pixels; null takes the pipeline's default."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations in the backward pass: less memory, about a third more time. n: of every n-th block only.
    auto: where updates do not fit the device without it, by the estimate of `flowrl plan`."""
    compile: Literal["blocks"] | None = None
    """torch.compile of the denoiser's repeated blocks, one by one: fewer passes over memory for a start of minutes;
    null runs them as they are. What cannot be compiled whole is refused, never run uncompiled."""
    guidance_gradient: GuidanceGradient = "both"
    """Branches of classifier-free guidance through which an update differentiates.
    `positive` evaluates the unconditional branch alone and without gradient: less memory and compute in updates, and
    another gradient, that of the guidance scale times the conditional branch."""
    shard: bool = False
    """FSDP2: split the denoiser's weights over the processes; native adapters only. One process keeps them whole."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """Further savings of memory on the device (docs/memory.md)."""
    attention: str | None = None
    """Attention backend of the denoiser, by diffusers' name; null leaves the network's own."""
    distilled: Said | None = None
    """How the checkpoint was distilled to few steps, for one that does not say it, or says it wrongly: `nodes` to its
    own steps, `flow_map` and `consistency` to any, `adversarial` as SD-Turbo; `none`: it was not. null: what its files
    say (docs/distilled.md)."""

    def __post_init__(self) -> None:
        kind = None if self.lora is None else self.lora.kind
        require_stored(self.memory, kind, shard=self.shard, compiled=self.compile is not None)
        every = self.gradient_checkpointing
        if not isinstance(every, bool | str) and every < 2:
            raise ValueError(
                f"gradient_checkpointing={every} must be auto, true (every block), false, or n of at least 2 (every "
                "n-th block)"
            )

    @property
    def frames(self) -> int:
        """Frames of a generated video, as configured; 1: images."""
        return 1


class ModelAdapter:
    """The interface of a model family, with the defaults that most families share.

    A family sets `process`, `prediction_type`, `lora_targets` and `network`, and writes `encode`, `latent_shape`,
    `schedule`, `predict`, `decode_with_grad` (or, without a gradient, `decode`) and `to`. Latents are [B, C, h, w] or
    [B, C, T, h, w]; others say where the channels stand in `channel_axis`. No loop, LoRA, EMA or placement
    logic inside.
    """

    pipeline: Any = None
    """The diffusers pipeline whose components it uses; None: there is none."""
    process: Process = FlowProcess()
    prediction_type: PredictionType = "velocity"
    network: nn.Module
    """The denoiser: the only trainable part."""
    own_network: bool = True
    """The adapter calls `network` itself, so that a cheaper copy can stand in for it."""
    lora_targets: tuple[str, ...] = ()
    """Module suffixes that a LoRA binds to unless the run names its own."""
    height: int = 64
    """Height of an image in pixels."""
    width: int = 64
    """Width of an image in pixels."""
    num_frames: int = 1
    """Frames of a decoded video; 1: images."""
    fps: float = FPS
    """Frames a second of a decoded video."""
    channel_axis: int = 1
    """Axis of the latents [B, ...] that holds the channels: 2 for packed ones [B, tokens, C]."""
    autocasts: bool = False
    """The network runs under torch.autocast (`model.precision`), not in its own dtype."""
    unguided: float = 1.0
    """Largest guidance scale without CFG."""
    distilled: Distilled | None = None
    """How the checkpoint was distilled to few steps; None: it was not."""
    image_limits: tuple[int, int] = (0, 0)
    """Fewest and most reference images of a prompt, RGB, which `encode` takes next to the texts."""
    frame_images: bool = False
    """They are frames of the video, of sizes that `require_frame` takes."""
    decodes_with_cond: bool = False
    """`decode` needs the conditions: a given part of the video (a first frame) is not among the latents."""
    ragged: bool = False
    """Embeddings are as long as their prompts, one tensor each, so that a batch of several is padded."""
    text_batch: int = 64
    """Most prompts in one forward of the text encoders."""
    unconditional: Condition | None = None
    """Embedding that guidance leads away from, one row, made by `encode`; None: not yet, or kept by the pipeline."""

    @property
    def kind(self) -> str:
        """Name of the pipeline's class, for messages."""
        return type(self if self.pipeline is None else self.pipeline).__name__

    def dead_lora_modules(self) -> tuple[str, ...]:
        """Adapted modules whose output the network never uses, and which have no gradient."""
        return ()

    def encode(self, prompts: Sequence[str], images: Sequence[Sequence[Any]] | None = None) -> Condition:
        """Text embeddings of P prompts, on the model's device."""
        raise NotImplementedError

    def require_frame(self, size: tuple[int, int]) -> None:
        """Raise ValueError, with the remedy, where an image of this (width, height) cannot be a frame of the video."""

    def free_text_encoders(self) -> None:
        """Drop the encoders; `encode` raises from then on."""

    def take_text_encoders(self, encoders: Mapping[str, nn.Module]) -> None:
        """Put encoders, by the name of their component, back into the pipeline: `encode` works again."""
        for name, part in encoders.items():
            setattr(self.pipeline, name, part)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one prompt's embeddings: those of `encode` without the first dimension."""
        raise NotImplementedError

    def encoder_tokens(self, name: str, encoder: nn.Module) -> int:
        """Tokens of a prompt in a text encoder, by the name of the component."""
        raise NotImplementedError

    def blank_condition(self, batch: int) -> Condition:
        """Embeddings of `batch` prompts without values, for measurements."""
        raise NotImplementedError

    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample, without the batch dimension."""
        raise NotImplementedError

    def grid(self) -> tuple[int, ...] | None:
        """(h, w), or (T, h, w) of videos, that packed tokens are read from, row by row; None for other latents."""
        return None

    def schedule(self, num_inference_steps: int) -> Schedule:
        """The pipeline's own grid for that many steps."""
        raise NotImplementedError

    def branches(self, guidance_scale: float) -> int:
        """Samples through the network for each guided one: 2 under CFG."""
        return 1 + (guidance_scale > self.unguided)

    @property
    def takes_guidance(self) -> bool:
        """Whether a guidance scale changes its images: not by CFG where the checkpoint was distilled."""
        return self.distilled is None or self.branches(self.unguided + 1) == self.branches(self.unguided)

    def check_guidance(self, guidance_scale: float, key: str = "guidance_scale") -> None:
        """Raise ModelError if the checkpoint does not take this scale; `key` is the option or flag that gives it."""
        if self.distilled is not None and self.branches(guidance_scale) > self.branches(self.unguided):
            self.distilled.refuse_cfg(guidance_scale, self.unguided, key)

    def check_steps(self, steps: int, key: str = "num_inference_steps") -> None:
        """Raise ModelError if the checkpoint does not take so many steps; `key` is the option or flag that says so."""
        if self.distilled is not None:
            self.distilled.require_steps(steps, key)

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """Raw network output at x [B, ...] and timestep [B] (network units), guided; [B, ...]."""
        raise NotImplementedError

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        """Arguments of the pipeline's own call for one prompt, as configured."""
        raise NotImplementedError

    def batch_key(self, step_index: int) -> int:
        """Steps with the same key may share a forward."""
        return 0

    def part_at(self, timestep: float) -> str:
        """The component of the network that takes a sample at this timestep; empty where there is only one."""
        return ""

    def text_lengths(self, cond: Condition) -> Tensor | None:
        """Text tokens of each row, [P] int64: rows share a forward only if theirs are equal; None: all may.

        For networks that would be given padding with a mask, and with it another attention kernel.
        """
        return None

    def decode(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W], float32 in [0, 1], from clean latents; without a graph."""
        with torch.no_grad():
            return self.decode_with_grad(latents, cond)

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        """The same images, through which a gradient reaches the latents; none where a pixel is cut off at 0 or 1.

        Raises ModelError: the adapter has no such way.
        """
        raise ModelError(f"model: {type(self).__name__} gives no gradient of its images (`decode_with_grad`)")

    def leading(self, latents: Tensor, frame: int) -> Tensor:
        """The latents of videos [B, ...] that give the same frames 0 .. `frame`: all, where the decoder looks ahead."""
        return latents

    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Clean latents [B, ...] float32 of images or videos, on the adapter's device: `decode` undoes it.

        Images are [B, 3, H, W] or [B, F, 3, H, W] in [0, 1], of the model's size and number of frames. `noise`:
        standard normal, shaped like the latents, for a draw mean + std * noise of the VAE's posterior; None: its mean.

        Raises ModelError: the adapter has no encoder, or another size or number of frames.
        """
        raise ModelError(
            f"model: {self.kind} makes no latents of given images or videos here, so it cannot be fitted to any; use a "
            "class that can (docs/models.md, column `given images`)"
        )

    def source_of(self, image: Any) -> Tensor | None:
        """An RGB image that is edited, as the pipeline fits it, and the same through the VAE: [2, 3, H, W] in [0, 1].

        None: it edits no images, they do not pass its VAE, or this one has another aspect ratio than a sample.
        """
        return None

    def to(self, device: torch.device) -> None:
        """Move every part to the device."""
        raise NotImplementedError


def torch_dtype(name: DtypeName) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def autocast(device: torch.device, dtype: torch.dtype, wanted: bool) -> AbstractContextManager:
    """Mixed precision for the forward pass where it is wanted; nothing in float32."""
    return torch.autocast(device.type, dtype=dtype) if wanted and dtype != torch.float32 else nullcontext()


def opaque(images: Tensor) -> Tensor:
    """Decoded images [B, 4, H, W] with their transparency, over white, [B, 3, H, W]; all others as they are."""
    if images.ndim != 4 or images.shape[1] != 4:
        return images
    colours, alpha = images.split([3, 1], dim=1)
    return colours * alpha + 1 - alpha


def decoded(adapter: ModelAdapter, latents: Tensor, cond: Condition, rows: Tensor, *, graph: bool = False) -> Tensor:
    """Images of clean latents [B, ...]; `rows` [B] are their conditions in `cond`, for adapters that need them."""
    decode = adapter.decode_with_grad if graph else adapter.decode
    return decode(latents, cond.index(rows)) if adapter.decodes_with_cond else decode(latents)


def image_shape(adapter: ModelAdapter) -> tuple[int, ...]:
    """Shape of what a model makes: an image (3, H, W), or a video (F, 3, H, W)."""
    frames = (adapter.num_frames,) if adapter.num_frames > 1 else ()
    return (*frames, 3, adapter.height, adapter.width)


def require_image_size(images: Tensor, height: int, width: int, num_frames: int = 1) -> None:
    """Raise ModelError unless images [B, 3, H, W], or videos [B, F, 3, H, W], have the model's size."""
    frames = (num_frames,) if num_frames > 1 else ()
    shape = (*frames, 3, height, width)
    if images.ndim == 1 + len(shape) and images.shape[1:] == shape:
        return
    what, also = ("videos", ", model.num_frames") if frames else ("images", "")
    raise ModelError(
        f"{what} {list(images.shape)} are not [B, {', '.join(map(str, shape))}], the model's size: resize them, or set "
        f"model.height and model.width{also} to their size"
    )


def packed_grid(adapter: ModelAdapter) -> tuple[int, ...] | None:
    """(h, w), or (T, h, w) of videos, of packed latents' tokens; None for latents with positions.

    Raises ModelError: the latents are packed, and the adapter does not know their grid.
    """
    grid, shape = adapter.grid(), adapter.latent_shape()
    if grid is not None or len(shape) > 2:
        return grid
    raise ModelError(
        f"algorithm.spatial: this model's latents are packed to {shape}, and the places of its class's tokens in the "
        "image are not known (docs/models.md)",
        {"algorithm.spatial": None},
    )


def network_config(network: nn.Module) -> Mapping[str, Any]:
    """The configuration that a diffusers network was made from."""
    config = network.config
    assert isinstance(config, Mapping)
    return config


def unused_modules(names: Sequence[str], network: nn.Module) -> tuple[str, ...]:
    """Names of modules in which {last} is the number of the network's last transformer block."""
    if not names:
        return ()
    last = len(list(network.get_submodule("transformer_blocks").children())) - 1
    return tuple(name.format(last=last) for name in names)


def require_channels(network: nn.Module, expected: int) -> None:
    """Raise ModelError where the network takes more than latents: a variant for inpainting or image to video."""
    channels = network_config(network)["in_channels"]
    if channels != expected:
        raise ModelError(
            f"model.path: this {type(network).__name__} takes {channels} channels, not the {expected} of its "
            "latents, so it needs an image next to the text; give a text-only checkpoint"
        )


def check_size(name: str, value: int, unit: int, largest: int | None = None) -> None:
    """Raise ModelError unless `value` pixels (or frames) are a positive multiple of `unit`, at most `largest`."""
    if value > 0 and value % unit == 0 and (largest is None or value <= largest):
        return
    near = max(round(value / unit), 1) * unit
    near = near if largest is None else min(near, largest)
    limits = "" if largest is None else f" in {unit}..{largest}"
    raise ModelError(f"model.{name}={value} must be a multiple of {unit}{limits}", {f"model.{name}": near})
