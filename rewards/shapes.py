"""Verifier of the shapes world: does an image show exactly what its caption asks for?

`_shapes/eye.py` says what an image shows; here that is judged against the scene of the caption. What nobody asked for
and no object explains is one more object, so nothing drawn beside the asked-for objects goes unseen.

Source: this project; `python tests/rewards/test_rewards_shapes.py` prints the accuracy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flowrl.rewards._shapes.eye import BLOB, Found, detect, detect_all
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flowrl.reward import Card, Images, Reward, RewardError
from flowrl.shapes import ObjectSpec, Scene, holds, parse

__all__ = ["BLOB", "CARD", "LEVEL", "Config", "Found", "build", "check_prompt", "detect", "score_scene", "wanted_scene"]

LEVEL = "tested"
CARD = Card(
    outputs=("shapes_strict", "shapes_partial"),
    low=0.0,
    high=1.0,
    modality="image",
    resolution="every pixel, averaged to 32 x 32 cells; what is finer counts as energy",
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="flowrl lab",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    surplus_penalty: float = 0.25
    """Loss of the partial score for each surplus object; two at most count."""

    def __post_init__(self) -> None:
        if not self.surplus_penalty >= 0:
            raise ValueError(f"surplus_penalty={self.surplus_penalty} must be at least 0")


def _object_score(spec: ObjectSpec, found: Found) -> float:
    """1 for the right shape in the right colour, 0.5 for colour only, 0.25 for shape only."""
    shape = found.shape == spec.shape
    if spec.color is None:
        return 1.0 if shape else 0.0
    color = found.color == spec.color
    return 1.0 if shape and color else 0.5 if color else 0.25 if shape else 0.0


def score_scene(scene: Scene, found: Sequence[Found], surplus_penalty: float = 0.25) -> tuple[float, float]:
    """(strict, partial) of the found objects against the scene.

    strict is 1 where the multiset of objects and the relation are exactly the asked ones, else 0.
    partial in [0, 1] is the mean object score under the best assignment, less the surplus penalty;
    for `position` 0.6 of that and 0.4 for the relation, which holds between objects of the right shapes alone.
    """
    wanted = len(scene.objects)
    if not found:
        return 0.0, 0.0
    table = np.asarray([[_object_score(spec, item) for item in found] for spec in scene.objects])
    related = True
    if scene.relation is None:
        total = float(table[linear_sum_assignment(table, maximize=True)].sum()) / wanted
    else:
        total, related = _best_pair(scene, scene.relation, table, found)
    surplus = len(found) - wanted
    strict = float(total == 1.0 and related and surplus == 0)
    objects = max(total - surplus_penalty * min(max(surplus, 0), 2), 0.0)
    if scene.relation is not None:
        return strict, 0.6 * objects + 0.4 * float(related)
    return strict, objects


def _best_pair(scene: Scene, relation: str, table: np.ndarray, found: Sequence[Found]) -> tuple[float, bool]:
    """Mean object score and relation of the best (first, second); the scores decide, then the relation."""
    best = (float(table.max()) / 2, False)
    for (i, first), (j, second) in itertools.permutations(enumerate(found), 2):
        shaped = first.shape == scene.objects[0].shape and second.shape == scene.objects[1].shape
        related = shaped and holds(relation, (first.x, first.y), (second.x, second.y))
        best = max(best, (float(table[0, i] + table[1, j]) / 2, related))
    return best


def wanted_scene(prompt: str) -> Scene:
    """The scene that a prompt asks for.

    Raises:
        RewardError: it is no caption of this world.
    """
    try:
        return parse(prompt)
    except ValueError as error:
        raise RewardError(f"reward 'shapes': {error}") from None


def check_prompt(prompt: str, metadata: dict) -> None:
    """Raise RewardError for a prompt that is no caption of this world, before anything is loaded."""
    wanted_scene(prompt)


def build(config: Config) -> Reward:
    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        scenes = [wanted_scene(prompt) for prompt in prompts]
        pixels = [image.detach().float().cpu().numpy() for image in images]
        pairs = [(math.nan, math.nan)] * len(scenes)
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, image in enumerate(pixels):
            if np.isfinite(image).all():
                sizes.setdefault(image.shape, []).append(i)
        for places in sizes.values():
            for i, found in zip(places, detect_all(np.stack([pixels[i] for i in places])), strict=True):
                pairs[i] = score_scene(scenes[i], found, config.surplus_penalty)
        strict, partial = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
        return {"shapes_strict": strict, "shapes_partial": partial}

    return Reward(score, CARD)
