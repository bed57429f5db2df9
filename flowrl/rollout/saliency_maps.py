"""Saliency maps of a rollout's images by a frozen backbone, frame by frame (arXiv 2511.18719)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.core import rng
from flowrl.core.errors import ModelError
from flowrl.credit.saliency import SpatialConfig, saliency, to_latent_grid
from flowrl.media.eight_bits import unit_floats
from flowrl.models.base import ModelAdapter, packed_grid

Backbone = Callable[[Tensor], tuple[Tensor, tuple[int, int]]]
"""Frames [B, 3, H, W] in [0, 1] -> patch tokens [B, h * w, d] row by row, and (h, w)."""
Mapper = Callable[[Tensor], Tensor]
"""Images [B, 3, H, W] or videos [B, F, 3, H, W], in [0, 1] or uint8 -> maps [B, *pos] float32 on the CPU."""
_FILTERS = 16
_FRAMES_AT_ONCE = 16


@torch.no_grad()
def importance(images: Tensor, backbone: Backbone, shape: tuple[int, ...], *, keep_mean: bool = False) -> Tensor:
    """Maps [B, *shape] of images [B, 3, H, W] or videos [B, F, 3, H, W]; all ones for a frame of one colour.

    Images are floats in [0, 1], or uint8, of which a few frames at a time become floats. `shape` and `keep_mean` as in
    `to_latent_grid`.
    """
    frames = images.reshape(-1, *images.shape[-3:])
    parts = []
    for frames_now in frames.split(_FRAMES_AT_ONCE):
        part = unit_floats(frames_now)
        result = saliency(*backbone(part))
        # Position embeddings distinguish patches even there. Half an 8-bit level is no difference.
        contrast = (part.amax(dim=(2, 3)) - part.amin(dim=(2, 3))).amax(dim=1)
        parts.append(torch.where((contrast < 0.5 / 255)[:, None, None].to(result.device), 1.0, result))
    maps = torch.cat(parts)
    return to_latent_grid(maps.reshape(len(images), -1, *maps.shape[1:]), shape, keep_mean=keep_mean)


def mapper(
    config: SpatialConfig,
    latent_shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    *,
    grid: tuple[int, ...] | None = None,
    channel_axis: int = 1,
) -> Mapper:
    """The mapper of a run, with its backbone loaded.

    `latent_shape` is that of one sample, [C, *pos]. `grid`: (h, w) or (T, h, w) of packed latents, whose maps are
    [B, tokens]; None: latents are not packed. `channel_axis`: place of C in latents [B, ...].

    Raises ModelError: the backbone's weights cannot be loaded.
    """
    backbone = load_backbone(config.backbone, device)
    shape = tuple(n for axis, n in enumerate(latent_shape, 1) if axis != channel_axis) if grid is None else grid

    def maps(images: Tensor) -> Tensor:
        result = importance(images, backbone, shape, keep_mean=config.keep_mean).cpu()
        return result if grid is None else result.flatten(1)

    return maps


def mapper_of(adapter: ModelAdapter, config: SpatialConfig, device: torch.device) -> Mapper:
    """The mapper to a model's latents; errors as of `mapper`."""
    layout = {"grid": packed_grid(adapter), "channel_axis": adapter.channel_axis}
    return mapper(config, adapter.latent_shape(), device, **layout)


def load_backbone(name: str = "fixed", device: torch.device | str = "cpu") -> Backbone:
    """`fixed`, which needs no weights, or a DINOv2 by folder or hub id (the paper's: facebook/dinov2-large)."""
    return _fixed() if name == "fixed" else _dinov2(name, device)


def _fixed() -> Backbone:
    """Mean colour and the strength of random 5 x 5 edge filters in each patch; seeded, the same everywhere."""
    filters = rng.normal((_FILTERS, 3, 5, 5), 0, "saliency", [()])[0]
    filters = filters - filters.mean(dim=(2, 3), keepdim=True)  # blind to a plain colour
    filters = filters / filters.flatten(1).norm(dim=1)[:, None, None, None]

    def tokens(frames: Tensor) -> tuple[Tensor, tuple[int, int]]:
        patch = max(4, min(frames.shape[-2:]) // 32)
        grid = (frames.shape[-2] // patch or 1, frames.shape[-1] // patch or 1)
        padded = F.pad(frames.float(), (2, 2, 2, 2), mode="replicate")
        features = torch.cat([frames.float(), F.conv2d(padded, filters.to(frames.device)).abs()], dim=1)
        return F.adaptive_avg_pool2d(features, grid).flatten(2).transpose(1, 2), grid

    return tokens


def _dinov2(name: str, device: torch.device | str) -> Backbone:
    """Patch tokens without class and register tokens; the whole frame at its own size, nothing cropped."""
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = AutoImageProcessor.from_pretrained(name)
        model = AutoModel.from_pretrained(name, dtype=torch.float32).eval().requires_grad_(False).to(device)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"saliency backbone={name!r} cannot be loaded, unlike a folder or hub id of a DINOv2 that can be reached: "
            f"{error}",
            {"algorithm.spatial.backbone": "fixed"},
        ) from error
    patch = model.config.patch_size
    others = 1 + getattr(model.config, "num_register_tokens", 0)
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))

    def tokens(frames: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = (frames.shape[-2] // patch or 1, frames.shape[-1] // patch or 1)
        # To whole patches: the model would crop the rest at the right and the bottom.
        size = (grid[0] * patch, grid[1] * patch)
        pixels = F.interpolate(frames.float().to(device), size, mode="bicubic", antialias=True).clamp(0, 1)
        with torch.autocast(torch.device(device).type, enabled=False):
            return model(pixel_values=(pixels - mean) / std).last_hidden_state[:, others:], grid

    return tokens
