"""Verifier of the shapes world in motion: does a video show exactly what its caption asks for, in every frame?

Each frame is seen as the verifier of images sees it (`_shapes/eye.py`); its objects are linked through time by
assignment (`_shapes/tracks.py`), and every asked-for object is judged on its track: shape and colour in every frame,
and its motion, by conditions that are each between 0 and 1. Strict is 1 where all of them are 1 and no frame has an
object too many. Where the record has a first frame (`image` or the first of `images`), it is a condition that the video
begins with it (`_shapes/kept.py`), and partial is multiplied by it.

    shapes_motion_strict    1 or 0, as above
    shapes_motion_partial   the same in degrees, less `surplus_penalty` for each object too many; 1 where strict is
    shapes_motion_flicker   change between frames that no asked motion explains; less is better

Source: this project; `python -m scripts.lab motion-accuracy` measures it (docs/rewards/shapes_motion.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flowrl.rewards._shapes.judged import Judged, judge
from flowrl.rewards._shapes.kept import kept
from flowrl.rewards._shapes.tracks import cell_of, tracked
from torch import Tensor

from flowrl.media.first_frame import fitted_frame
from flowrl.media.media import UNREADABLE, open_image, pixels
from flowrl.moving_shapes import MovingScene, parse
from flowrl.reward import Card, Images, Reward, RewardError
from flowrl.shapes import BACKGROUND, coverage

LEVEL = "tested"
CARD = Card(
    outputs=("shapes_motion_strict", "shapes_motion_partial", "shapes_motion_flicker"),
    low=0.0,
    high=1.0,
    less_is_better=("shapes_motion_flicker",),
    modality="video",
    resolution="every frame, averaged to 32 x 32 cells, what is finer counts as energy; every pixel for flicker",
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="flowrl lab",
)
LOOKS, CHANGES, STAYS = 0.5, 0.4, 0.1
"""Shares of the partial score: shape and colour, asked changes, what is asked to stay."""


@dataclass(frozen=True, kw_only=True)
class Config:
    surplus_penalty: float = 0.25
    """Loss of the partial score for each surplus object, in the mean over frames; two at most count."""

    def __post_init__(self) -> None:
        if not self.surplus_penalty >= 0:
            raise ValueError(f"surplus_penalty={self.surplus_penalty} must be at least 0")


def verdict(scene: MovingScene, judged: Sequence[Judged], counts: np.ndarray, penalty: float) -> tuple[float, float]:
    """(strict, partial) of the judged objects of a scene, and the number of objects in every frame [F]."""
    surplus = np.clip(counts - len(scene.actors), 0, 2).mean()
    strict = float(surplus == 0 and all(each.looks == each.motion == 1 for each in judged))
    score = LOOKS * float(np.mean([each.looks for each in judged]))
    for staying in (False, True):
        own = [each.looks * each.motion for each in judged if each.actor.stays == staying]
        if own:
            # What only stays, or only changes, has the shares of both.
            share = (STAYS if staying else CHANGES) if len(own) < len(judged) else STAYS + CHANGES
            score += share * float(np.mean(own))
    return strict, 1.0 if strict else max(score - penalty * float(surplus), 0.0)


def explained(judged: Sequence[Judged], video: np.ndarray) -> np.ndarray:
    """The judged objects on their asked courses over the background, float32 [F, 3, H, W].

    A course is the straight line nearest to the track along which the object does what is asked, at constant speed; an
    object's colour is the video's own mean on it, before and after it turns.
    """
    height, width = video.shape[-2:]
    cell, rows, columns = cell_of(video), np.arange(height)[:, None], np.arange(width)
    result = np.full_like(video, BACKGROUND)
    for each in judged:
        if each.course is None:
            continue
        x, y, radius = (values[:, None, None] for values in (each.course * cell).T)
        alpha = coverage(each.actor.object.shape, columns - x, rows - y, radius).astype(np.float32)
        for part in (slice(each.switch), slice(each.switch, None)):
            weight = np.square(alpha[part]).sum()
            if weight > 0:
                offset = np.einsum("fchw,fhw->c", video[part] - np.float32(BACKGROUND), alpha[part]) / weight
                result[part] += alpha[part][:, None] * offset[:, None, None]
    return np.clip(result, 0.0, 1.0)


def flicker(judged: Sequence[Judged], video: np.ndarray) -> float:
    """Mean over pairs of frames, pixels and colours of |change - change of what is explained|, in [0, 1]."""
    left = np.diff(video, axis=0) - np.diff(explained(judged, video), axis=0)
    return min(float(np.abs(left).mean()), 1.0)


def wanted_scene(prompt: str) -> MovingScene:
    """The scene that a prompt asks for.

    Raises:
        RewardError: it is no caption of this world.
    """
    try:
        return parse(prompt)
    except ValueError as error:
        raise RewardError(f"reward 'shapes_motion': {error}") from None


def first_frame(metadata: Mapping[str, Any], height: int, width: int) -> Tensor | None:
    """The record's first frame [3, H, W], fitted to the video as models fit it; None: the record has none.

    Raises:
        RewardError: it cannot be read, or not be fitted.
    """
    paths = metadata.get("images")
    if not paths:
        return None
    try:
        return pixels(fitted_frame(open_image(paths[0]), height, width))
    except UNREADABLE as error:
        raise RewardError(f"reward 'shapes_motion': the first frame {paths[0]!r}: {error}") from error


def check_prompt(prompt: str, metadata: dict) -> None:
    """Raise RewardError for a prompt that is no caption of this world, before anything is loaded."""
    wanted_scene(prompt)


def score_video(
    scene: MovingScene, video: np.ndarray, penalty: float = 0.25, begins: Tensor | None = None
) -> tuple[float, float, float]:
    """(strict, partial, flicker) of a finite video, float32 [F, 3, H, W] in [0, 1], that `begins` with [3, H, W]."""
    tracks, counts = tracked(video)
    judged = judge(scene, tracks, len(video))
    strict, partial = verdict(scene, judged, counts, penalty)
    if begins is not None:
        condition = kept(torch.from_numpy(video[0]), begins)
        strict, partial = strict * float(condition == 1), partial * condition
    return strict, partial, flicker(judged, video)


def build(config: Config) -> Reward:
    def one(scene: MovingScene, given: Tensor, record: Mapping[str, Any]) -> tuple[float, float, float]:
        if given.ndim != 4 or len(given) < 3:
            raise RewardError(
                f"reward 'shapes_motion' judges videos [F, 3, H, W] of 3 frames or more, got {list(given.shape)}; for "
                "images, take 'shapes'"
            )
        video = given.detach().float().cpu().numpy()
        if not np.isfinite(video).all():
            return math.nan, math.nan, math.nan
        begins = first_frame(record, *video.shape[-2:])
        return score_video(scene, video, config.surplus_penalty, begins)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        scenes = [wanted_scene(prompt) for prompt in prompts]
        rows = [one(*sample) for sample in zip(scenes, images, metadata, strict=True)]
        values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
        return dict(zip(CARD.outputs, values.unbind(1), strict=True))

    return Reward(score, CARD)
