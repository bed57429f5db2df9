"""Diversity: what an image or video adds to the others of its prompt, as the gain of a determinantal point process.

With unit embeddings E of a prompt's G images and L = E E^T + I,

    gain_i = log det L - log det (L without i) = -log (L^-1)_ii,     log((G + 1) / G) <= gain_i <= ln 2:

the least where all are equal, the most for an image unlike all others. Use it beside a quality reward, with
`advantages: {name: per_reward}` or `gdpo` if the weight is to act on comparable numbers; alone it rewards noise.

An image is compared with those of the same prompt and metadata in this call, that is on this process: where
prompts are fewer than processes, a prompt's group is split and each part is judged by itself. One sample per
prompt, as evaluations draw by default, always has ln 2.

Videos are compared instant by instant: with F frames, the similarity of two videos is the mean over f of the
similarity of their frames f, so the same frames in another order, or another motion from the same first frame, is
another video. Of videos with different numbers of frames, and of images beside them, as many frames as the shortest
has are compared, evenly spread from the first to the last.

With `near`, two more outputs for `advantages.spread` (flowrl/credit/spread.py), with the cosine similarity c of images:
`diversity_distance` is min_j (1 - c_ij), to the nearest other image, and `diversity_share` is 1 / n_i, where n_i images
are connected with it by similarities above `near`; alone both are 1.

Source: arXiv 2511.20647 rewards prompts by this gain; here it is that of one image against its group's others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from flowrl.rewards._vision.embedders import Embed, network
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward

_GRID, _WAVES = 8, 256

LEVEL = "tested"
CARD = Card(
    outputs=("diversity",),
    low=0.0,
    high=math.log(2),
    modality="any",
    resolution="8 x 8 mean colours of each frame; a network's own with `backbone`",
    needs_groups=True,
    level=LEVEL,
    licence="Apache-2.0 (this project); a network's own",
    source="arXiv:2511.20647, adapted to images",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    backbone: Annotated[str, NAME_OR_PATH] = "fixed"
    """`fixed`: 8 x 8 mean colours, compared by a Gaussian; else a CLIP or DINOv2: folder, hub id or tiny-clip."""
    bandwidth: float = 0.2
    """Scale of `fixed`: root mean square difference of two grids at which their similarity has fallen to exp(-1/2)."""
    near: float | None = None
    """Cosine similarity above which two images are alike; adds the outputs `diversity_distance` and `diversity_share`.
    With 1 none are alike. null: the gain alone."""
    device: str | None = None
    """Where a network runs; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth={self.bandwidth} must be positive")
        if self.near is not None and not -1 <= self.near <= 1:
            raise ValueError(f"near={self.near} must be in [-1, 1], a cosine similarity, or null")


def card_of(config: Config) -> Card:
    """The card, with the outputs that `near` adds."""
    more = ("diversity_distance", "diversity_share")
    return CARD if config.near is None else replace(CARD, outputs=(*CARD.outputs, *more), high=2.0)


@torch.no_grad()
def diversity_gain(embeddings: Tensor) -> Tensor:
    """-log (L^-1)_ii with L = E E^T + I and unit rows E, [P, G] float32 of embeddings [P, G, D]; no gradient.

    A row that is not finite has gain NaN and stands in nobody's way.

    >>> diversity_gain(torch.eye(2)[None]).exp().tolist()
    [[2.0, 2.0]]
    """
    finite = embeddings.isfinite().all(dim=2)
    # A row of zeros is decoupled in L, so it changes no other's gain.
    rows = F.normalize(torch.where(finite[:, :, None], embeddings.double(), 0.0), dim=2)
    kernel = rows @ rows.transpose(1, 2) + torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
    gain = -inverse.diagonal(dim1=1, dim2=2).log()
    return torch.where(finite, gain, torch.nan).float()


@torch.no_grad()
def apart(embeddings: Tensor, near: float) -> Tensor:
    """Distance to the nearest other, and 1 / size of the own cluster, [2, P, G] float32, of embeddings [P, G, D].

    Clusters are the connected parts of similarities above `near`. A row that is not finite has NaN, and is no other's.

    >>> same, other = [1.0, 0.0], [0.0, 1.0]
    >>> apart(torch.tensor([[same, same, other]]), 0.9).tolist()
    [[[0.0, 0.0, 1.0]], [[0.5, 0.5, 1.0]]]
    """
    finite = embeddings.isfinite().all(dim=2)
    rows = F.normalize(torch.where(finite[:, :, None], embeddings.double(), 0.0), dim=2)
    size = rows.shape[1]
    itself = torch.eye(size, dtype=torch.bool, device=rows.device)
    others = finite[:, :, None] & finite[:, None, :] & ~itself
    # Equal rows may have a similarity above 1 by rounding.
    cosine = (rows @ rows.transpose(1, 2)).clamp(max=1.0)
    distance = torch.where(others, 1 - cosine, torch.inf).amin(dim=2)
    distance = torch.where(others.any(dim=2), distance, 1.0)
    linked = (others & (cosine > near)) | itself
    for _ in range(size.bit_length()):  # each round doubles the length of the paths
        linked = (linked.double() @ linked.double()) > 0
    share = 1 / linked.sum(dim=2).double()
    return torch.where(finite, torch.stack([distance, share]), torch.nan).float()


def colour_waves(bandwidth: float) -> Embed:
    """Random Fourier features of colour grids: cosine similarity is close to exp(-rms^2 / (2 bandwidth^2))."""
    size = 3 * _GRID**2
    waves = torch.randn(size, _WAVES, generator=torch.Generator().manual_seed(0)) / (bandwidth * size**0.5)

    def embed(images: Images) -> Tensor:
        grids = torch.stack([F.adaptive_avg_pool2d(p.float().cpu(), _GRID).flatten() for p in images])
        phase = grids @ waves
        return torch.cat([phase.cos(), phase.sin()], dim=1)

    return embed


def instants(frames: int, count: int) -> list[int]:
    """Numbers of `count` frames of `frames`, evenly spread from the first to the last; one alone is the first.

    >>> instants(9, 9) == list(range(9)), instants(9, 5), instants(9, 4), instants(9, 1)
    (True, [0, 2, 4, 6, 8], [0, 3, 5, 8], [0])
    """
    return [round(place * (frames - 1) / max(count - 1, 1)) for place in range(count)]


def groups_of(prompts: Sequence[str], metadata: Sequence[dict]) -> list[list[int]]:
    """Places of equal prompts with equal metadata, in the order of their first.

    >>> groups_of(["a", "b", "a", "a"], [{}, {}, {}, {"seed": 1}])
    [[0, 2], [1], [3]]
    """
    result: dict[tuple[str, str], list[int]] = {}
    for place, (prompt, extra) in enumerate(zip(prompts, metadata, strict=True)):
        result.setdefault((prompt, json.dumps(extra, sort_keys=True, default=repr)), []).append(place)
    return list(result.values())


def build(config: Config) -> Reward:
    if config.backbone == "fixed":
        embed = colour_waves(config.bandwidth)
    else:
        embed = network(config.backbone, config.device, reward="diversity", instead="'fixed', or ")

    def embeddings(images: Images) -> Tensor:
        """[B, D]; that of a video has those of its frames side by side. NaN where a pixel is not finite."""
        videos = [image if image.ndim == 4 else image[None] for image in images]
        count = min(map(len, videos))
        frames = [frame for video in videos for frame in video[instants(len(video), count)]]
        unit = F.normalize(embed([frame.detach().nan_to_num(0.0, 0.0, 0.0) for frame in frames]), dim=1)
        unit[[not bool(frame.isfinite().all()) for frame in frames]] = math.nan
        # Unit frames side by side: the cosine similarity of two videos is the mean of their frames' similarities.
        return unit.reshape(len(videos), -1)

    card = card_of(config)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | dict[str, Tensor]:
        features, groups = embeddings(images), groups_of(prompts, metadata)
        table = pad_sequence([features[rows] for rows in groups], batch_first=True, padding_value=math.nan)
        found = (diversity_gain(table), *(() if config.near is None else apart(table, config.near)))
        result = {name: torch.empty(len(prompts)) for name in card.outputs}
        for values, tables in zip(result.values(), found, strict=True):
            for rows, own in zip(groups, tables, strict=True):
                values[rows] = own[: len(rows)]
        return result if len(result) > 1 else result["diversity"]

    return Reward(score, card)
