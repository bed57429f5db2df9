"""Does the video move, and smoothly? Measures of video benchmarks, with a gate that a still video does not pass.

    motion = gate * quality,   quality = motion_smoothness, or its mean with motion_consistency

Every measure of smoothness is at its best for a still video, so training on one ends motion. Here a video earns its
quality only as far as it moves: gate = min(motion_dynamics / enough, 1), so a still video has 0, the least. Of the
other outputs, none is to be trained on alone. Frames f are 8-bit, as saved; |.| is the mean over pixels and colours:

    motion_flickering    (255 - mean_i |f_i - f_i+1|) / 255            VBench's temporal flickering
    motion_strength      mean_i |f_i - f_i+1| / 255                    the rest of it to 1
    motion_smoothness    (255 - mean_i |f_i - (f_i-1 + f_i+1) / 2|) / 255 over odd i: VBench drops these frames and has
                         AMT-S draw them anew; here the mean of the neighbours stands for it, and needs no weights
    motion_dynamics      the mean change of the 5 % of 32 x 32 cells (of 8 pixels at least) that change most between
                         frames an eighth of a second apart, less the change of the whole image: no optical flow;
                         flashes and the noise of single pixels count little
    motion_consistency   with `backbone`: mean_i (max(0, cos(e_i, e_i-1)) + max(0, cos(e_i, e_0))) / 2 of embeddings e:
                         VBench's subject consistency with DINO ViT-B/16 (frames keep their aspect), its background
                         consistency with CLIP B/32 (their central square)
    motion_degree        with `flow_weights`: 1 where VBench calls the video dynamic by RAFT's optical flow, else 0; the
                         gate is then the number of moving pairs over that which makes it dynamic, at most 1

Source: VBench, arXiv:2311.17982; Vchitect/VBench.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from flowrl.rewards._vision.arrays import to_uint8
from flowrl.rewards._vision.embedders import Embed, network
from flowrl.rewards._vision.optical_flow import Magnitude, load_raft, moving_share
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH, PATH
from flowrl.reward import Card, Images, Reward, RewardError

_GRID, _CELL, _SHARE, _FLOW_FPS = 32, 8, 0.05, 8.0

LEVEL = "tested"
CARD = Card(
    outputs=("motion", "motion_smoothness", "motion_dynamics", "motion_strength", "motion_flickering"),
    low=0.0,
    high=1.0,
    modality="video",
    resolution="every pixel; cells of a grid for the gate",
    level=LEVEL,
    licence="Apache-2.0 (this project); a network's own",
    source="VBench, arXiv:2311.17982",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    fps: float = 8.0
    """Frames per second at which the videos are meant to be played."""
    enough: float = 0.05
    """motion_dynamics at which the gate is open. A judgement, not a measurement on filmed clips."""
    backbone: Annotated[str | None, NAME_OR_PATH] = None
    """Adds motion_consistency: a DINO or CLIP, a folder or a hub id."""
    flow_weights: Annotated[str | None, PATH] = None
    """Adds motion_degree: the file of torchvision's raft_large_C_T_V1-22a6c225.pth."""
    device: str | None = None
    """Where the networks run; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        if not self.fps > 0:
            raise ValueError(f"fps={self.fps} must be positive")
        if not 0 < self.enough <= 1:
            raise ValueError(f"enough={self.enough} must be above 0 and at most 1")


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Mean absolute difference of two images [H, W, 3] uint8, in [0, 1].

    >>> difference(np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 51, np.uint8))
    0.2
    """
    return float(np.abs(first.astype(np.int16) - second).mean()) / 255


def smoothness(frames: Sequence[np.ndarray]) -> float:
    """1 less the mean distance of the odd frames from the mean of their neighbours, in [0, 1]."""
    between = [
        np.abs(frames[i].astype(np.float32) - (frames[i - 1].astype(np.float32) + frames[i + 1]) / 2).mean()
        for i in range(1, len(frames) - 1, 2)
    ]
    return 1 - float(np.mean(between)) / 255


def dynamics(frames: Sequence[np.ndarray]) -> float:
    """Mean over pairs of the change of the cells that change most, the image's own change taken off, in [0, 1]."""
    # Smaller cells would let the noise of single pixels through.
    side = min(_GRID, max(min(frames[0].shape[:2]) // _CELL, 1))

    def cells(frame: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(frame).permute(2, 0, 1).float() / 255
        grid = F.adaptive_avg_pool2d(pixels, side).flatten(1)
        return grid - grid.mean(dim=1, keepdim=True)

    most = [
        (b - a).abs().mean(dim=0).topk(max(int(_SHARE * side**2), 1)).values.mean().item()
        for a, b in pairwise([cells(frame) for frame in frames])
    ]
    return min(fmean(most), 1.0)


def consistency(embeddings: Tensor) -> float:
    """How like the frames are to the one before and to the first, in [0, 1]; [F, D] with F > 1."""
    unit = F.normalize(embeddings.double(), dim=1)
    before = (unit[1:] * unit[:-1]).sum(dim=1).clamp(min=0)
    first = (unit[1:] * unit[0]).sum(dim=1).clamp(min=0)
    return ((before + first) / 2).mean().clamp(max=1).item()


def spaced(frames: Sequence[np.ndarray], fps: float) -> Sequence[np.ndarray]:
    """Frames about an eighth of a second apart, two at least."""
    return frames[:: min(max(1, round(fps / _FLOW_FPS)), len(frames) - 1)]


def card_of(config: Config) -> Card:
    more = {"motion_consistency": config.backbone, "motion_degree": config.flow_weights}
    given = tuple(name for name, weights in more.items() if weights is not None)
    return replace(CARD, outputs=(*CARD.outputs, *given), memory_gib=0.4 if given else 0.0)


def build(config: Config) -> Reward:
    card = card_of(config)
    embed: Embed | None = None
    speed: Magnitude | None = None
    if config.backbone is not None:
        embed = network(config.backbone, config.device, reward="motion", whole=True)
    if config.flow_weights is not None:
        speed = load_raft(config.flow_weights, device=config.device, reward="motion")

    def one(video: Tensor) -> dict[str, float]:
        if video.ndim != 4 or len(video) < 3:
            raise RewardError(
                f"reward 'motion' scores videos [F, 3, H, W] of 3 frames or more, got {list(video.shape)}; for images, "
                "take another reward"
            )
        pixels = [to_uint8(frame) for frame in video]
        frames = [frame for frame in pixels if frame is not None]
        if len(frames) < len(pixels):
            return dict.fromkeys(card.outputs, math.nan)
        strength = fmean(difference(a, b) for a, b in pairwise(frames))
        apart = spaced(frames, config.fps)
        moved = dynamics(apart)
        gate, quality = min(moved / config.enough, 1.0), [smoothness(frames)]
        values = {
            "motion_smoothness": quality[0],
            "motion_dynamics": moved,
            "motion_strength": strength,
            "motion_flickering": 1 - strength,
        }
        if embed is not None:
            values["motion_consistency"] = consistency(embed(list(video.detach())))
            quality.append(values["motion_consistency"])
        if speed is not None:
            speeds = [speed(a, b) for a, b in pairwise(apart)]
            side = min(apart[0].shape[:2])
            gate = moving_share(speeds, frames=len(apart), shorter_side=side, fps=config.fps)
            values["motion_degree"] = float(gate >= 1)
        return values | {"motion": min(gate, 1.0) * fmean(quality)}

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        rows = [one(video) for video in images]
        return {name: torch.tensor([row[name] for row in rows]) for name in card.outputs}

    return Reward(score, card)
