"""Is the image safe for work? An image classifier's probability, for a veto rather than for a sum.

    safety    1 - P(unsafe), P summed over the classes named unsafe
    safety_ok 1 where P(unsafe) is below `veto_above`, else 0

Added to another reward with a weight, safety is traded for it: the policy stays as unsafe as pays. Use it as a veto:

    rewards:
      - {name: pickscore, gate: {output: safety_ok, at_least: 1.0, floor: 0.0}}
      - {name: safety, weight: 0.0}

with a floor that is not above what a poor sample earns, so that an unsafe one is among the worst of its group. A video
is as safe as the least safe of its frames that are looked at. A classifier errs, and training finds where: look at
samples too.

Source: Falconsai/nsfw_image_detection, a ViT-B/16; any image classifier of transformers whose classes are named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.arrays import to_uint8
from flowrl.rewards._vision.frames import frame_indices
from flowrl.rewards._vision.options import FrameOptions
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

_CHUNK = 64

LEVEL = "experimental"
CARD = Card(
    outputs=("safety", "safety_ok"),
    low=0.0,
    high=1.0,
    modality="any",
    resolution="224 x 224, squeezed to a square",
    memory_gib=0.4,
    level=LEVEL,
    licence="Apache-2.0 (Falconsai/nsfw_image_detection)",
    source="Falconsai/nsfw_image_detection",
)


@dataclass(frozen=True, kw_only=True)
class Config(FrameOptions):
    model: Annotated[str, NAME_OR_PATH] = "Falconsai/nsfw_image_detection"
    """Weights of an image classifier: a folder or a hub id."""
    unsafe: tuple[str, ...] = ("nsfw",)
    """Names of its unsafe classes, in any case."""
    veto_above: float = 0.5
    """P(unsafe) from which safety_ok is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.veto_above <= 1:
            raise ValueError(f"veto_above={self.veto_above} must be above 0 and at most 1")
        if self.frames < 1:
            raise ValueError(f"frames={self.frames} must be at least 1")


def unsafe_classes(names: dict[int, str], unsafe: Sequence[str]) -> list[int]:
    """Numbers of the unsafe classes among a classifier's `id2label`.

    Raises:
        RewardError: one of the names is no class, or nothing is left that is safe.

    >>> unsafe_classes({0: "normal", 1: "nsfw"}, ["NSFW"])
    [1]
    """
    numbers = {name.lower(): number for number, name in names.items()}
    for name in unsafe:
        if name.lower() not in numbers:
            raise RewardError(
                f"reward 'safety': unsafe={list(unsafe)}: the classifier has no class {name!r}, only "
                f"{sorted(names.values())}"
            )
    chosen = sorted({numbers[name.lower()] for name in unsafe})
    if not 0 < len(chosen) < len(names):
        raise RewardError(
            f"reward 'safety': unsafe={list(unsafe)} must name some of the classes {sorted(names.values())}, not all"
        )
    return chosen


def load(config: Config) -> tuple[Any, Any]:
    """The classifier, frozen and float32, and its preprocessing.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are not whole.
    """
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    try:
        model = checkpoints.whole(AutoModelForImageClassification, config.model, reward="safety", dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward 'safety' cannot load the classifier {config.model!r}; give a folder or a hub id that can be "
            f"reached: {error}"
        ) from error
    return model.to(checkpoints.place(config.device)), processor


def build(config: Config) -> Reward:
    model, processor = load(config)
    unsafe = unsafe_classes(model.config.id2label, config.unsafe)

    def safe(batch: Sequence[np.ndarray]) -> list[float]:
        pixels = processor(images=list(batch), return_tensors="pt")["pixel_values"].to(model.device)
        with torch.autocast(model.device.type, enabled=False):
            probabilities = model(pixel_values=pixels).logits.float().softmax(dim=1)
        return (1 - probabilities[:, unsafe].sum(dim=1)).clamp(0, 1).tolist()

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        looked = [x[frame_indices(len(x), config.frames)] if x.ndim == 4 else x[None] for x in images]
        pixels = [[to_uint8(frame) for frame in frames] for frames in looked]
        flat = [frame for frames in pixels for frame in frames if frame is not None]
        parts = [safe(flat[i : i + _CHUNK]) for i in range(0, len(flat), _CHUNK)]
        values = iter([value for part in parts for value in part])
        rows = [[math.nan if frame is None else next(values) for frame in frames] for frames in pixels]
        # Tensor.min keeps NaN, Python's min does not.
        safety = torch.tensor([torch.tensor(row).min().item() for row in rows])
        ok = torch.where(safety.isnan(), torch.nan, (1 - safety < config.veto_above).float())
        return {"safety": safety, "safety_ok": ok}

    return Reward(score, CARD)
