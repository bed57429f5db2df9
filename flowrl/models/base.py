"""What a model family offers the loop: encode, schedule, predict, decode. No loop, LoRA, EMA or device logic inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flowrl.core import assets
from flowrl.core.errors import ModelError as ModelError
from flowrl.core.paths import NAME_OR_PATH, PATH
from flowrl.core.types import Condition
from flowrl.diffusion.process import PredictionType, Process
from flowrl.diffusion.schedules import Schedule
from flowrl.models._memory import MemorySettings, require_frozen, require_own_type

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """A low-rank adapter. No dropout: it would make the ratio of old and new policy random."""

    rank: int = 32
    """Rank of the update."""
    alpha: float = 64
    """Scale numerator: the update is alpha / rank * B A."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Options every family has."""

    path: Annotated[str, NAME_OR_PATH]
    """Hub id, folder, single .safetensors file, or the name of an embedded asset such as tiny-sd3."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    variant: str | None = None
    """Weight file variant, such as fp16."""
    dtype: DtypeName = "float32"
    """Of the network's frozen weights and of its forward pass; trained weights are always float32."""
    lora: LoraSettings | None = None
    """The adapter to train; null trains all weights of the denoiser."""
    init_lora: Annotated[str | None, PATH] = None
    """Folder or .safetensors of a LoRA to start from; its rank and targets must be those of `lora`."""
    vae: Annotated[str | None, NAME_OR_PATH] = None
    """Another VAE: hub id or folder."""
    height: int | None = None
    """Picture height in pixels; null takes the pipeline's default."""
    width: int | None = None
    """Picture width in pixels; null takes the pipeline's default."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    shard: bool = False
    """FSDP2: split the denoiser's weights over the processes; native adapters only. One process keeps them whole."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """What else saves memory on the device (docs/memory.md)."""
    attention: str | None = None
    """Attention backend of the denoiser, by diffusers' name; null leaves the network's own."""

    def __post_init__(self) -> None:
        require_frozen(self.memory, self.lora)
        require_own_type(self.memory, self.shard)


class ModelAdapter(Protocol):
    """One model family behind the loop.

    One that makes clips declares `num_frames`, how many `decode` gives (1: pictures), so that rewards can be tried.
    Latents are [B, C, h, w] or [B, C, T, h, w]. Where the channels stand elsewhere it declares `channel_axis`; packed
    ones [B, tokens, C] have 2, and `grid()`, the (h, w) or (T, h, w) that the tokens are read from, row by row.
    A checkpoint distilled to few steps says how in `distilled`, in words (empty: it is none), and refuses guidance
    scales that it does not take in `check_guidance(scale)`.
    One that can make latents of pictures has `encode_pictures(pictures, noise=None)`; see `encoded_pictures` below.
    """

    process: Process
    prediction_type: PredictionType
    lora_targets: tuple[str, ...]
    network: nn.Module
    """The denoiser: the only trainable part."""

    def dead_lora_modules(self) -> tuple[str, ...]:
        """Adapted modules whose output the network never uses: they can have no gradient."""
        ...

    def encode(self, prompts: Sequence[str]) -> Condition:
        """Text embeddings of P prompts, on the model's device.

        An adapter that takes pictures says how many a prompt must and may have, `picture_limits = (least, most)`;
        its `encode(prompts, pictures)` then gets a list of RGB pictures for each prompt. Others take text only.
        """
        ...

    def free_text_encoders(self) -> None:
        """Drop the encoders; `encode` raises from then on."""
        ...

    def latent_shape(self) -> tuple[int, ...]:
        """Of one sample, without the batch dimension."""
        ...

    def schedule(self, num_inference_steps: int) -> Schedule:
        """The pipeline's own grid for that many steps."""
        ...

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """Raw network output at x [B, ...] and timestep [B] (network units), guided; [B, ...]."""
        ...

    def batch_key(self, step_index: int) -> int:
        """Steps with the same key may share a forward."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W], float32 in [0, 1], from clean latents.

        Where a part of the clip is given (a first frame) and not among the latents, the adapter says
        `decodes_with_cond = True` and is called with their conditions too; see `decoded` below.
        """
        ...

    def to(self, device: torch.device) -> None: ...


def torch_dtype(name: DtypeName) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Mixed precision for the forward pass; nothing in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


Forward = Callable[[Tensor, Tensor, Condition], Tensor]
"""x [B, ...], timestep [B], B conditions -> network output [B, ...]."""


def classifier_free(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """u + s (c - u), all [B, ...]."""
    return negative + guidance_scale * (positive - negative)


def guided(
    forward: Forward,
    x: Tensor,
    timestep: Tensor,
    cond: Condition,
    unconditional: Condition | None,
    guidance_scale: float,
    *,
    combine: Callable[[Tensor, Tensor, float], Tensor] = classifier_free,
    separate: bool = False,
) -> Tensor:
    """Classifier-free guidance. Both branches carry gradient; as in diffusers, guidance_scale <= 1 means none.

    Args:
        forward: the network.
        x: latents, [B, ...].
        timestep: [B].
        cond: B rows.
        unconditional: one row.
        guidance_scale: s.
        combine: (unconditional output, conditional output, s) -> output, each [B, ...].
        separate: two forwards instead of one on a doubled batch (unconditional half first): where texts differ in
            length, and where a rollout of large latents would not fit twice.

    Raises:
        ModelError: there is nothing to guide away from.
    """
    if guidance_scale <= 1:
        return forward(x, timestep, cond)
    if unconditional is None:
        raise ModelError("guidance needs the embedding of the empty prompt: call encode() first")
    rows = unconditional.index(torch.zeros(len(x), dtype=torch.int64))
    if separate:
        negative, positive = forward(x, timestep, rows), forward(x, timestep, cond)
    else:
        output = forward(torch.cat([x, x]), torch.cat([timestep, timestep]), Condition.collate([rows, cond]))
        negative, positive = output.chunk(2)
    return combine(negative, positive, guidance_scale)


def decoded(adapter: ModelAdapter, latents: Tensor, cond: Condition, rows: Tensor) -> Tensor:
    """Pictures of clean latents [B, ...]; `rows` [B] are their conditions in `cond`, for adapters that want them."""
    if getattr(adapter, "decodes_with_cond", False):
        decode: Any = adapter.decode
        return decode(latents, cond.index(rows))
    return adapter.decode(latents)


def encoded_pictures(adapter: ModelAdapter, pictures: Tensor, noise: Tensor | None = None) -> Tensor:
    """Clean latents [B, ...] float32 of pictures [B, 3, H, W] in [0, 1], on the adapter's device: `decode` undoes it.

    Args:
        adapter: the model.
        pictures: of the size that it makes.
        noise: standard normal, shaped like the latents: a draw of the VAE's posterior, mean + std * noise. None: the
            mean.

    Raises:
        ModelError: the adapter has no encoder, or makes pictures of another size.
    """
    encode = getattr(adapter, "encode_pictures", None)
    if encode is None:
        raise ModelError(
            f"model: {type(adapter).__name__} makes no latents of pictures, so a method that trains on given pictures "
            "cannot use it; use a native adapter of an image family (docs/models.md)"
        )
    return encode(pictures, noise)


def require_picture_size(pictures: Tensor, height: int, width: int) -> None:
    """Raise ModelError unless pictures [B, 3, H, W] have the size that the model makes."""
    if pictures.ndim != 4 or pictures.shape[1:] != (3, height, width):
        raise ModelError(
            f"pictures {list(pictures.shape)} are not [B, 3, {height}, {width}], which the model makes: resize them, "
            "or set model.height and model.width to their size"
        )


def channel_axis(adapter: ModelAdapter) -> int:
    """Axis of its latents [B, ...] that holds the channels: 1 unless it says otherwise."""
    return getattr(adapter, "channel_axis", 1)


def packed_grid(adapter: ModelAdapter) -> tuple[int, ...] | None:
    """(h, w), or (T, h, w) of clips, that the tokens of packed latents are read from; None for latents with positions.

    Raises:
        ModelError: the latents are packed, and the adapter does not say where each token lies in the picture.
    """
    own = getattr(adapter, "grid", None)
    grid = None if own is None else own()
    shape = adapter.latent_shape()
    if grid is not None or len(shape) > 2:
        return grid
    raise ModelError(
        f"algorithm.spatial: this model's latents are packed to {shape}, and of its class it is not known where each "
        "token lies in the picture (docs/models.md); set algorithm.spatial=null"
    )


def branches(adapter: ModelAdapter, guidance_scale: float) -> int:
    """Samples that go through the network for each guided one: 2 under CFG unless the adapter says otherwise."""
    own = getattr(adapter, "branches", None)
    return 1 + (guidance_scale > unguided(adapter)) if own is None else own(guidance_scale)


def unguided(adapter: ModelAdapter) -> float:
    """The scale up to which CFG does nothing: 1 unless the adapter says otherwise."""
    return getattr(adapter, "unguided", 1.0)


def require_channels(network: Any, expected: int) -> None:
    """Raise ModelError where the network takes more than latents: a variant that paints in or animates a picture."""
    found = network.config.in_channels
    if found != expected:
        raise ModelError(
            f"model.path: this {type(network).__name__} takes {found} channels, not the {expected} of its "
            "latents, so it wants a picture beside the text; use model.name=generic, or a text-only checkpoint"
        )


def check_size(name: str, value: int, unit: int, largest: int | None = None) -> None:
    """Raise ModelError unless `value` pixels (or frames) are a positive multiple of `unit`, at most `largest`."""
    if value > 0 and value % unit == 0 and (largest is None or value <= largest):
        return
    near = max(round(value / unit), 1) * unit
    near = near if largest is None else min(near, largest)
    limits = "" if largest is None else f" in {unit}..{largest}"
    raise ModelError(f"model.{name}={value} must be a multiple of {unit}{limits}; use {near}")


def asset_folder(name: str) -> Path | None:
    """Folder of an embedded pipeline, or None."""
    return assets.asset_folder(name, "model_index.json")


def resolve_path(path: str) -> str:
    """A path as diffusers wants it: the folder of an asset, an existing local path, or the hub id itself.

    Raises:
        ModelError: it looks like a local path and is not there, or is a pickle.
    """
    asset = asset_folder(path)
    if asset is not None:
        return str(asset)
    local = Path(path).expanduser()
    if local.suffix in {".ckpt", ".pt", ".bin", ".pth"}:
        raise ModelError(f"model.path={path!r}: pickle checkpoints are not read; convert it to .safetensors")
    if local.exists():
        return str(local)
    if path.startswith((".", "/", "~")) or local.suffix == ".safetensors" or path.count("/") != 1:
        raise ModelError(
            f"model.path={path!r}: no such file, folder or embedded asset; a hub id looks like 'owner/name'"
        )
    return path


def lacks(kind: str, component: str) -> str:
    """Why a pipeline with a null component is refused."""
    return (
        f"{kind} needs its component {component!r}, which this model leaves out (null in model_index.json); give a "
        "complete pipeline folder"
    )


def require_folder(path: str) -> None:
    """Raise ModelError where a local path is no whole pipeline; hub ids and single files pass."""
    folder = Path(resolve_path(path))
    if not folder.exists() or folder.suffix == ".safetensors":
        return
    index = folder / "model_index.json"
    if not index.is_file():
        raise ModelError(
            f"model.path={path!r} is no pipeline folder: it has no model_index.json; give the folder that "
            "save_pretrained() of a pipeline wrote, or a hub id"
        )
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model.path={path!r}: its model_index.json cannot be read: {error}") from None
    listed = [name for name, value in parts.items() if isinstance(value, list) and len(value) == 2 and value[0]]
    missing = [name for name in listed if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"model.path={path!r}: its model_index.json names {missing[0]!r}, but there is no folder "
            f"{missing[0]!r}; copy the whole pipeline"
        )


def null_components(path: str) -> dict[str, None]:
    """Parts that a local folder's model_index.json declares absent; diffusers wants them said explicitly."""
    file = Path(path) / "model_index.json"
    if not file.is_file():
        return {}
    index = json.loads(file.read_text(encoding="utf-8"))
    return {name: None for name, value in index.items() if value == [None, None]}


@contextmanager
def loading(key: str, path: str) -> Iterator[None]:
    """Turn what a hub, a folder or a file can raise into one ModelError that names the key and the remedy."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from safetensors import SafetensorError

    try:
        yield
    except ModelError:
        raise
    except (HfHubHTTPError, OSError, ValueError, SafetensorError) as error:
        # diffusers wraps the hub's own errors in OSError: the reason is further down the chain.
        chain: list[BaseException] = [error]
        while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(below)
        if any(isinstance(e, GatedRepoError) for e in chain):
            text = f"{key}={path!r} is gated: accept its licence on its hub page, then run 'hf auth login'"
        elif any(isinstance(e, RepositoryNotFoundError) for e in chain):
            text = (
                f"{key}={path!r}: the hub has no such repository, or it is private: check the spelling, "
                "or run 'hf auth login'"
            )
        else:
            reason = (str(error).splitlines() or [""])[0]
            text = (
                f"{key}={path!r} could not be loaded ({type(error).__name__}: {reason}); "
                "without a network, give a folder that is already here or an embedded asset such as tiny-sd3"
            )
        raise ModelError(text) from error
