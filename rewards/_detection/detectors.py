"""Finding objects and naming their colours, for rewards. A helper, not a reward.

Sources: Mask2Former, arXiv:2112.01527, and DETR, arXiv:2005.12872, in transformers; the colour prompts are those of
djghosh13/geneval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.clips import Clip
from torch import Tensor

from flowrl.reward import RewardError

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
# GenEval's names for three of COCO's classes.
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
_GREY = 0x99


@dataclass(frozen=True, slots=True)
class Detection:
    """An object in an image."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]
    """(left, top, right, bottom) in pixels, right and bottom exclusive."""
    mask: np.ndarray | None = None
    """[H, W] bool, or none where the detector gives boxes only."""


class DetectionError(RuntimeError):
    """This one image could not be looked at."""


class Detector(Protocol):
    def __call__(self, pixels: np.ndarray) -> Sequence[Detection]:
        """Objects of an image, [H, W, 3] uint8, in any order and of any confidence.

        Raises:
            DetectionError: not with this image; others may do.
        """
        ...


class ColorNamer(Protocol):
    def __call__(self, pixels: np.ndarray, detections: Sequence[Detection]) -> list[str]:
        """One of COLORS for each object; all are of one label."""
        ...


@dataclass(frozen=True, slots=True)
class _Network:
    """A detector of transformers, one image at a time, so that no score depends on the padding of a batch."""

    model: Any
    processor: Any
    floor: float = 0.05
    """Detections below this confidence are dropped."""

    @property
    def labels(self) -> frozenset[str]:
        """Names of the classes, GenEval's where they differ from COCO's."""
        return frozenset(map(self._label, self.model.config.id2label))

    def _label(self, index: int) -> str:
        name: str = self.model.config.id2label[index]
        return RENAMED.get(name, name)


@dataclass(frozen=True, slots=True)
class Mask2Former(_Network):
    """Instance segmentation."""

    def __call__(self, pixels: np.ndarray) -> list[Detection]:
        device = self.model.device
        inputs = self.processor(images=[pixels], return_tensors="pt").to(device)
        # One image is resized to multiples of 32 and never padded, so a mask covers the whole of it.
        assert bool(inputs["pixel_mask"].all())
        with torch.autocast(device.type, enabled=False):
            outputs = self.model(pixel_values=inputs["pixel_values"], pixel_mask=inputs["pixel_mask"])
        masks = F.interpolate(outputs.masks_queries_logits, pixels.shape[:2], mode="bilinear")[0]
        return self._pick(outputs.class_queries_logits[0].softmax(dim=-1)[:, :-1], masks)

    def _pick(self, probabilities: Tensor, masks: Tensor) -> list[Detection]:
        """The best (query, class) pairs; [Q, C] and [Q, H, W]."""
        queries, classes = probabilities.shape
        best, flat = probabilities.flatten().topk(queries)
        result = []
        for probability, index in zip(best.tolist(), flat.tolist(), strict=True):
            logits = masks[index // classes]
            inside = logits > 0
            if not inside.any():
                continue
            confidence = probability * float(logits.sigmoid()[inside].mean())
            if confidence < self.floor:
                continue
            mask = inside.cpu().numpy()
            result.append(Detection(self._label(index % classes), confidence, box_of(mask), mask))
        return result


@dataclass(frozen=True, slots=True)
class BoxDetector(_Network):
    """Object detection without masks (DETR and its kin)."""

    def __call__(self, pixels: np.ndarray) -> list[Detection]:
        device, (height, width) = self.model.device, pixels.shape[:2]
        inputs = self.processor(images=[pixels], return_tensors="pt").to(device)
        with torch.autocast(device.type, enabled=False):
            outputs = self.model(**inputs)
        (seen,) = self.processor.post_process_object_detection(
            outputs, threshold=self.floor, target_sizes=[(height, width)]
        )
        result = []
        for confidence, index, corners in zip(*(seen[k].tolist() for k in ("scores", "labels", "boxes")), strict=True):
            left, top, right, bottom = (
                min(max(value, 0.0), side) for value, side in zip(corners, (width, height) * 2, strict=True)
            )
            if right > left and bottom > top:
                result.append(Detection(self._label(index), confidence, (left, top, right, bottom)))
        return result


def load_detector(model: str, *, device: str | None, reward: str) -> Mask2Former | BoxDetector:
    """A frozen float32 detector from a folder or the hub: with masks if it is a Mask2Former, else with boxes.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are of no detector.
    """
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModelForObjectDetection,
        Mask2FormerForUniversalSegmentation,
    )

    try:
        masks = AutoConfig.from_pretrained(model).model_type == "mask2former"
        family = Mask2FormerForUniversalSegmentation if masks else AutoModelForObjectDetection
        network = checkpoints.whole(family, model, reward=reward, dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load the detector {model!r}; give a folder or a hub id of a Mask2Former or an "
            f"object detector that can be reached: {error}"
        ) from error
    network.to(checkpoints.place(device))
    return Mask2Former(network, processor) if masks else BoxDetector(network, processor)


def box_of(mask: np.ndarray) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of a mask's pixels, the last two exclusive."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


@dataclass(frozen=True, slots=True)
class ClipColors:
    """Zero-shot colour of an object: its pixels on grey, cropped to its box, against three phrasings a colour."""

    clip: Clip
    prototypes: dict[str, Tensor] = field(default_factory=dict)
    """Label -> unit mean of the phrasings of each colour, [colors, D]; filled as labels come up."""

    def __call__(self, pixels: np.ndarray, detections: Sequence[Detection]) -> list[str]:
        if not detections:
            return []
        label = detections[0].label
        if label not in self.prototypes:
            self.prototypes[label] = self._prototypes(label)
        crops = [torch.from_numpy(cut_out(pixels, item)).permute(2, 0, 1) / 255 for item in detections]
        similarity = self.clip.embed_images(crops) @ self.prototypes[label].T
        return [COLORS[index] for index in similarity.argmax(dim=1).tolist()]

    def _prototypes(self, label: str) -> Tensor:
        wordings = (
            "a photo of a {color} {label}",
            "a photo of a {color}-colored {label}",
            "a photo of a {color} object",
        )
        phrases = [wording.format(color=color, label=label) for color in COLORS for wording in wordings]
        embedded = self.clip.embed_texts(phrases).unflatten(0, (len(COLORS), len(wordings)))
        return F.normalize(embedded.mean(dim=1), dim=-1)


def cut_out(pixels: np.ndarray, item: Detection) -> np.ndarray:
    """The object alone: what its mask leaves out turns grey, then the box is cropped; at least one pixel."""
    if item.mask is not None:
        pixels = np.where(item.mask[:, :, None], pixels, np.uint8(_GREY))
    left, top, right, bottom = (round(value) for value in item.box)
    # A sliver at the far border rounds to nothing inside the image.
    left, top = min(left, pixels.shape[1] - 1), min(top, pixels.shape[0] - 1)
    return np.ascontiguousarray(pixels[top : max(bottom, top + 1), left : max(right, left + 1)])
