"""The positions of an image at which an advantage counts: saliency maps M >= 0 on the latent grid, for A(p) = M(p) A.

    1. patch tokens of a frozen backbone, [N, d], less their mean
    2. projections on the top 3 right singular vectors, each mapped to [0, 1]; their mean weighted by sigma_j^2
    3. as a grid: Gaussian of sigma 1, stretched to [0, 1], resized to the latents, stretched again

The sign of a singular vector is arbitrary, and with it which end of a component is bright: here the end that the
border of the image has less of. (The official code takes (max - c) / (max - min) of whatever sign comes out.)

A method that takes the option `spatial` has them made from every rollout's images (rollout/saliency_maps.py), and its
advantages multiplied by them (`apply_map`).

Source: arXiv 2511.18719; Tele-AI/TeleBoost:teleboost/algorithms/vipo.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.core.errors import OptionError

_COMPONENTS = 3


@dataclass(frozen=True, kw_only=True)
class SpatialConfig:
    backbone: str = "fixed"
    """Network that the maps come from: `fixed`, which needs no weights, or a DINOv2 by folder or hub id."""
    ratio: Literal["position", "sample"] = "position"
    """`position`: ratio, clip and advantage of every latent position, from its log-prob (mean over channels); `sample`:
    the method's own ratio, with the mean over positions of the clipped advantages."""
    keep_mean: bool = False
    """Divide every map by its mean, so that the update keeps its size; the official code does not."""

    def __post_init__(self) -> None:
        if not self.backbone:
            raise ValueError("backbone is empty; give fixed, or a folder or hub id of a DINOv2")
        if self.keep_mean and self.ratio == "sample":
            raise OptionError(
                "keep_mean=true with ratio=sample: maps of mean 1 leave the mean over positions as it was, so nothing "
                "would change",
                [{"ratio": "position"}, {"keep_mean": False}],
            )


def saliency(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Map in [0, 1] of each frame, [B, h, w] float32, from its patch tokens [B, h * w, d].

    All ones, never zeros, where the tokens are all alike or not finite.

    >>> saliency(torch.tensor([[[0.0], [0.0], [2.0], [0.0], [0.0]]]), (1, 5)).argmax().item()
    2
    """
    h, w = grid
    if tokens.ndim != 3 or tokens.shape[1] != h * w:
        raise ValueError(f"tokens {tuple(tokens.shape)} must be [B, {h * w}, d] for a grid of {h} x {w}")
    tokens = tokens.float()
    tokens = torch.where(tokens.isfinite().all(dim=2).all(dim=1)[:, None, None], tokens, 0.0)
    centred = tokens - tokens.mean(dim=1, keepdim=True)
    left, sigma, _ = torch.svd(centred)  # torch declares no types for linalg.svd; this one calls it
    top = sigma[:, :_COMPONENTS]
    components = _stretched(left[:, :, :_COMPONENTS] * top[:, None], (1,), otherwise=0.5)
    # Sign-free: a flipped component has 1 - border. The corner decides where the border is even.
    rim = torch.ones(h, w, dtype=torch.bool, device=tokens.device)
    rim[1:-1, 1:-1] = False
    border = components[:, rim.flatten()].mean(dim=1, keepdim=True) - 0.5
    components = torch.where(border + 1e-4 * (components[:, :1] - 0.5) > 0, 1 - components, components)
    energy = top.square()
    weights = energy / energy.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    maps = _smoothed((components * weights[:, None]).sum(dim=2).reshape(-1, h, w))
    # Rounding alone leaves singular values of some 1e-7 of the tokens' size.
    alike = sigma[:, 0] <= 1e-5 * tokens.flatten(1).square().sum(dim=1).sqrt()
    return torch.where(alike[:, None, None], 1.0, _stretched(maps, (1, 2)))


def to_latent_grid(maps: Tensor, shape: tuple[int, ...], *, keep_mean: bool = False) -> Tensor:
    """Maps [B, F, h, w] of each frame (an image is one) on the grid of the latents: [B, *shape] float32 in [0, 1], or
    of mean 1. The shape is (H, W), or (T, H, W): frames go to T by linear interpolation. `keep_mean` divides by the
    mean, so that the mean update keeps its size (the official code does not).
    """
    if maps.ndim != 4 or len(shape) not in (2, 3) or (len(shape) == 2 and maps.shape[1] > 1):
        raise ValueError(f"maps {tuple(maps.shape)} do not fit the latent grid {shape}: (H, W) or (T, H, W)")
    times, *sides = (1,) * (3 - len(shape)) + tuple(shape)
    frames = maps.float().reshape(-1, 1, *maps.shape[-2:])
    frames = F.interpolate(frames, tuple(sides), mode="bilinear", antialias=True).squeeze(1)
    videos = _stretched(frames, (1, 2)).reshape(len(maps), 1, maps.shape[1], *sides)
    videos = _stretched(F.interpolate(videos, (times, *sides), mode="trilinear").squeeze(1), (1, 2, 3))
    if keep_mean:
        videos = videos / videos.mean(dim=(1, 2, 3), keepdim=True)
    return videos.reshape(len(maps), *shape)


def apply_map(
    advantages: Tensor, maps: Tensor, ratio: Literal["position", "sample"], bound: Tensor | None = None
) -> Tensor:
    """Advantages [E, R], not clipped yet, as the loss takes them: times the map of each, then clipped to +-bound [R].

    Returns:
        [E, R, *pos] for a ratio of every position. For one ratio of the whole sample their mean, [E, R]: the clipped
        loss max(-A r, -A clamp(r)) is linear in |A| and M >= 0, so the mean over positions may be taken first.
    """
    dense = dense_advantages(advantages, maps, bound)
    if ratio == "position":
        return dense
    # float64: the mean of n equal float32 numbers is then that number, so maps of ones change no bit.
    return dense.flatten(2).double().mean(dim=2).float()


def dense_advantages(advantages: Tensor, maps: Tensor, bound: Tensor | None) -> Tensor:
    """Advantages [E, R] times the map of each edge [E, *pos], then within +-bound [R]: [E, R, *pos].

    >>> dense_advantages(torch.tensor([[4.0]]), torch.tensor([[0.5, 2.0]]), torch.tensor([5.0])).tolist()
    [[[2.0, 5.0]]]
    """
    if advantages.ndim != 2 or len(advantages) != len(maps):
        raise ValueError(f"advantages {tuple(advantages.shape)} must be [E, R] for E = {len(maps)} maps")
    positions = (1,) * (maps.ndim - 1)
    dense = advantages.reshape(*advantages.shape, *positions) * maps[:, None]
    if bound is None:
        return dense
    if bound.shape != advantages.shape[1:]:
        raise ValueError(f"bound {tuple(bound.shape)} must be one for each of {advantages.shape[1]} columns")
    clip = bound.reshape(-1, *positions)
    return dense.clamp(-clip, clip)


def _stretched(values: Tensor, dims: tuple[int, ...], otherwise: float = 1.0) -> Tensor:
    """(v - min) / (max - min) over `dims`; a constant one becomes `otherwise`."""
    low, high = values.amin(dim=dims, keepdim=True), values.amax(dim=dims, keepdim=True)
    # Relative, so that interpolating a constant leaves it one.
    flat = high - low <= 1e-6 * torch.maximum(low.abs(), high.abs())
    return torch.where(flat, otherwise, (values - low) / torch.where(flat, 1.0, high - low))


def _smoothed(maps: Tensor) -> Tensor:
    """Gaussian of sigma 1, cut off at 4, of [B, h, w]; the rim is repeated outwards."""
    kernel = (-0.5 * torch.arange(-4.0, 5.0, device=maps.device).square()).exp()
    kernel = kernel / kernel.sum()
    padded = F.pad(maps[:, None], (4, 4, 4, 4), mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel.view(1, 1, 9, 1)), kernel.view(1, 1, 1, 9)).squeeze(1)
