"""GenEval: are the asked-for objects there, in the asked-for number, colour and place?

A detector finds the objects of an image, a zero-shot classifier names their colours, and rules compare both with
the prompt's record: `{"prompt": ..., "tag": "position", "include": [{"class": "dog", "count": 1},
{"class": "cat", "count": 1, "position": ["left of", 0]}]}`, one a line of a .jsonl prompt file.

Scores, of which one is trained on and the first three are always reported:
- partial: the mean over what is asked of how nearly it is met; extra objects count against it, and it can be negative;
- strict: 1 where numbers are exact and colours and places right, else 0;
- official: the benchmark's rule, which looks at the most confident objects only and so forgives extra ones;
- legacy: partial as the reward server of Flow-GRPO computes it: a violated position adds a full term.

Colours are named on objects cut out and cropped as the benchmark does, half an odd margin rounded half to even.
The benchmark's prompts are `geneval.jsonl`. The detector is one of transformers, not the benchmark's mmdet
checkpoint: report results as GenEval-hf; or it runs elsewhere, over HTTP (docs/rewards/geneval.md).

Source: arXiv:2310.11513; djghosh13/geneval; the other scores: yifan123/reward-server:reward_server/gen_eval.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from flowrl.rewards._detection.detectors import (
    COLORS,
    ClipColors,
    ColorNamer,
    Detection,
    DetectionError,
    Detector,
    load_detector,
)
from flowrl.rewards._detection.remote import RemoteDetector
from flowrl.rewards._vision import clips
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

log = logging.getLogger("flowrl")

REPORTED = ("partial", "strict", "official")
RELATIONS = ("left of", "right of", "above", "below")
_MAX_OBJECTS = 16
# An offset counts beyond a tenth of both sizes, and in an axis that holds more than half of it.
_POSITION_MARGIN, _POSITION_SHARE = 0.1, 0.5

LEVEL = "experimental"
CARD = Card(
    outputs=tuple(f"geneval_{name}" for name in REPORTED),
    # One object asked for and the most that are counted found.
    low=2.0 - _MAX_OBJECTS,
    high=1.0,
    modality="image",
    resolution="the whole image, resized by the detector; colours on 224 x 224 crops",
    requires=("include",),
    memory_gib=2.0,
    # 2: colours on the benchmark's crops; transformers', before, were a pixel off where the margin is odd.
    version="2",
    level=LEVEL,
    licence="MIT (GenEval, Mask2Former and CLIP)",
    source="arXiv:2310.11513",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    mode: Literal["partial", "strict", "official", "legacy"] = "partial"
    """Score that is trained on; partial, strict and official are always reported."""
    confidence: float = 0.3
    """An object counts above this confidence."""
    counting_confidence: float = 0.9
    """The same for prompts tagged "counting"."""
    detector: Annotated[str, NAME_OR_PATH] = "facebook/mask2former-swin-small-coco-instance"
    """Weights of a Mask2Former or of an object detector such as DETR, a folder or a hub id; or a server, http://..."""
    color_model: Annotated[str, NAME_OR_PATH] = "openai/clip-vit-large-patch14"
    """CLIP weights and tokenizer that name colours: a folder or a hub id."""
    device: str | None = None
    """Where the networks run; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("confidence", "counting_confidence"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1): an object counts above it")


@dataclass(frozen=True, slots=True)
class Clause:
    """One requirement: `count` objects of a class, of a colour, placed relative to an earlier clause."""

    label: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = 0


def read_clauses(metadata: Mapping[str, Any], key: str) -> list[Clause]:
    """The clauses under "include" or "exclude" of a prompt's record.

    Raises:
        RewardError: the record is not one of GenEval's.
    """
    clauses: list[Clause] = []
    for position, raw in enumerate(metadata.get(key, ())):
        try:
            relation, target = raw.get("position") or (None, 0)
            clause = Clause(raw["class"], int(raw["count"]), raw.get("color"), relation, int(target))
            _check(clause, position)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RewardError(
                f"reward 'geneval': {key}[{position}] = {raw!r} is not one of GenEval's clauses: "
                f"{type(error).__name__}: {error}"
            ) from None
        clauses.append(clause)
    if key == "include" and not clauses:
        raise RewardError(
            'reward \'geneval\' needs GenEval\'s records: a .jsonl prompt file whose lines have "prompt", "tag" and '
            '"include": [{"class": ..., "count": ...}]'
        )
    return clauses


def check_prompt(prompt: str, metadata: Mapping[str, Any]) -> None:
    """Raise RewardError for a record that is not one of GenEval's, before anything is loaded."""
    for key in ("include", "exclude"):
        read_clauses(metadata, key)


def _check(clause: Clause, position: int) -> None:
    if clause.count < 1:
        raise ValueError(f"count={clause.count} must be at least 1")
    if clause.color not in (None, *COLORS):
        raise ValueError(f"color={clause.color!r}; use one of {', '.join(COLORS)}")
    if clause.relation not in (None, *RELATIONS):
        raise ValueError(f"position {clause.relation!r}; use one of {', '.join(RELATIONS)}")
    if clause.relation and not 0 <= clause.target < position:
        raise ValueError(f"its position refers to clause {clause.target}, which does not come before it")


def relative_position(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Relations of box `a` to box `b`; none where they are too close, two where it lies diagonally.

    >>> relative_position((0, 0, 10, 10), (100, 0, 110, 10))
    {'left of'}
    """
    first, second = np.asarray(a, dtype=float).reshape(2, 2), np.asarray(b, dtype=float).reshape(2, 2)
    offset = first.mean(axis=0) - second.mean(axis=0)
    sizes = np.abs(first[1] - first[0]) + np.abs(second[1] - second[0])
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - _POSITION_MARGIN * sizes, 0)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    dx, dy = beyond / np.linalg.norm(offset)
    share = _POSITION_SHARE
    holding = {"left of": dx < -share, "right of": dx > share, "above": dy < -share, "below": dy > share}
    return {relation for relation, holds in holding.items() if holds}


class Sight:
    """Objects that count as seen in one image: per class the most confident objects first, and their colours."""

    def __init__(self, pixels: np.ndarray, found: Sequence[Detection], confidence: float, namer: ColorNamer) -> None:
        ordered = sorted((d for d in found if d.confidence > confidence), key=lambda d: -d.confidence)
        self._pixels, self._namer = pixels, namer
        self._objects: dict[str, list[Detection]] = {}
        for item in ordered:
            self._objects.setdefault(item.label, []).append(item)
        self._colors: dict[str, list[str]] = {}

    def objects(self, label: str) -> list[Detection]:
        return self._objects.get(label, [])[:_MAX_OBJECTS]

    def colors(self, label: str) -> list[str]:
        """Colours of `objects(label)`, looked at only where a colour is asked for."""
        if label not in self._colors:
            self._colors[label] = self._namer(self._pixels, self.objects(label))
        return self._colors[label]


def _all_related(relation: str, objects: Sequence[Detection], targets: Sequence[Detection]) -> bool:
    return all(relation in relative_position(o.box, t.box) for o in objects for t in targets)


def official(sight: Sight, include: Sequence[Clause], exclude: Sequence[Clause]) -> bool:
    """The benchmark's rule: the `count` most confident objects of each clause fulfil it, nothing excluded is there."""
    matched: list[list[Detection] | None] = []
    for clause in include:
        objects = sight.objects(clause.label)[: clause.count]
        good = len(objects) == clause.count
        if good and clause.color is not None:
            good = sight.colors(clause.label)[: clause.count].count(clause.color) >= clause.count
        if good and clause.relation is not None:
            targets = matched[clause.target]
            good = targets is not None and _all_related(clause.relation, objects, targets)
        matched.append(objects if good else None)
    seen = any(len(sight.objects(clause.label)) >= clause.count for clause in exclude)
    return all(group is not None for group in matched) and not seen


def exact(sight: Sight, include: Sequence[Clause]) -> dict[str, float]:
    """strict, partial and legacy: a term for each number, and one for each colour or position that is asked for."""
    matched: list[list[Detection] | None] = []
    terms: list[float] = []
    undeserved = 0
    for clause in include:
        objects = sight.objects(clause.label)
        good = len(objects) == clause.count
        terms.append(1 - abs(clause.count - len(objects)) / clause.count)
        if not good and (clause.color is not None or clause.relation is not None):
            terms.append(0.0)
        if good and clause.color is not None:
            right = sight.colors(clause.label).count(clause.color)
            terms.append(1 - abs(clause.count - right) / clause.count)
            good = right == clause.count
        if good and clause.relation is not None:
            targets = matched[clause.target]
            good = targets is not None and _all_related(clause.relation, objects, targets)
            terms.append(float(good))
            # The server appends 1 after the 0 of a violated position.
            undeserved += targets is not None and not good
        matched.append(objects if good else None)
    return {
        "strict": float(all(group is not None for group in matched)),
        "partial": sum(terms) / len(terms),
        "legacy": (sum(terms) + undeserved) / (len(terms) + undeserved),
    }


def _names(config: Config) -> tuple[str, ...]:
    return tuple(dict.fromkeys((config.mode, *REPORTED)))


def card_of(config: Config) -> Card:
    return replace(CARD, outputs=tuple(f"geneval_{name}" for name in _names(config)))


def scorer(config: Config, detector: Detector, namer: ColorNamer, labels: Collection[str] | None = None) -> Reward:
    """The reward on any detector and colour classifier; `labels` are the classes that the detector knows."""
    names = _names(config)

    def one(image: Tensor, record: Mapping[str, Any]) -> dict[str, float]:
        include, exclude = read_clauses(record, "include"), read_clauses(record, "exclude")
        _require_known(labels, (*include, *exclude))
        pixels = to_uint8(image)
        if pixels is None:
            return dict.fromkeys(names, math.nan)
        confidence = config.counting_confidence if record.get("tag") == "counting" else config.confidence
        try:
            result = detector(pixels)
        except DetectionError as error:
            log.warning("reward 'geneval': an image is not scored: %s", error)
            return dict.fromkeys(names, math.nan)
        sight = Sight(pixels, result, confidence, namer)
        return exact(sight, include) | {"official": float(official(sight, include, exclude))}

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        rows = [one(image, record) for image, record in zip(images, metadata, strict=True)]
        return {f"geneval_{name}": torch.tensor([row[name] for row in rows]) for name in names}

    return Reward(score, card_of(config))


def _require_known(labels: Collection[str] | None, clauses: Sequence[Clause]) -> None:
    """A class that the detector was never taught would be missing from every image."""
    if labels is None:
        return
    for clause in clauses:
        if clause.label not in labels:
            raise RewardError(
                f"reward 'geneval': the detector does not know the class {clause.label!r} of a prompt's record, only "
                f"{len(labels)} others (such as {', '.join(sorted(labels)[:3])}); leave such prompts out or give "
                "another detector"
            )


def build(config: Config) -> Reward:
    clip = clips.load(
        config.color_model,
        config.color_model,
        device=config.device,
        preprocess="exact",
        reward="geneval",
        # The benchmark crops by open_clip's transform, which is torchvision's.
        half_even_crop=True,
    )
    if config.detector.startswith(("http://", "https://")):
        return scorer(config, RemoteDetector(config.detector), ClipColors(clip))
    detector = load_detector(config.detector, device=config.device, reward="geneval")
    return scorer(config, detector, ClipColors(clip), detector.labels)
