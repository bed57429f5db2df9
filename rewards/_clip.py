"""CLIP from transformers for rewards: preprocessing and unit embeddings. A helper, not a reward.

The network is frozen and float32; autocast is off inside. No graph is kept unless a picture asks for gradients.
Source: openai/CLIP preprocessing (shortest side by bicubic, centre crop); `CLIPModel` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from flowrl.reward import RewardError
from rewards._images import to_uint8

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
Preprocess = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True)
class Clip:
    """A loaded CLIP."""

    model: Any
    tokenizer: Any
    preprocess: Preprocess
    """"exact": 8-bit PIL as the published scores were made; "fast": float tensors, differentiable."""

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def embed_images(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Unit image embeddings, [B, D], of pictures in [0, 1]."""
        size = self.model.config.vision_config.image_size
        prepare = exact_pixels if self.preprocess == "exact" else fast_pixels
        pixels = torch.stack([prepare(picture, size) for picture in images]).to(self.device)
        with torch.autocast(self.device.type, enabled=False):
            return F.normalize(projected(self.model.get_image_features(pixel_values=pixels)), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit text embeddings, [B, D]; each distinct text is encoded once, cut at the model's length."""
        distinct = list(dict.fromkeys(texts))
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(distinct, padding=True, truncation=True, max_length=length, return_tensors="pt")
        with torch.autocast(self.device.type, enabled=False):
            features = self.model.get_text_features(
                input_ids=tokens["input_ids"].to(self.device), attention_mask=tokens["attention_mask"].to(self.device)
            )
        rows = [distinct.index(text) for text in texts]
        return F.normalize(projected(features), dim=-1)[rows]


def load(model: str, tokenizer: str, *, device: str | None, preprocess: Preprocess, reward: str) -> Clip:
    """A frozen float32 CLIP from a folder or the hub.

    Raises:
        RewardError: the weights can neither be found nor downloaded.
    """
    from transformers import AutoTokenizer, CLIPModel

    try:
        network = CLIPModel.from_pretrained(model, dtype=torch.float32)
        words = AutoTokenizer.from_pretrained(tokenizer)
    except OSError as error:
        raise RewardError(
            f"reward {reward!r} cannot load CLIP {model!r} with tokenizer {tokenizer!r}; give a folder or a hub id "
            f"that can be reached: {error}"
        ) from error
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Clip(network.eval().requires_grad_(False).to(place), words, preprocess)


def projected(features: Any) -> Tensor:
    """The projected embedding: a tensor in transformers 4, an output's `pooler_output` since 5."""
    return features if isinstance(features, Tensor) else features.pooler_output


def _resized(height: int, width: int, size: int) -> tuple[int, int]:
    """(height, width) once the shorter side is `size`; the longer one is rounded down.

    >>> _resized(480, 832, 224)
    (224, 388)
    """
    short, long = min(height, width), max(height, width)
    longer = int(size * long / short)
    return (size, longer) if height <= width else (longer, size)


def _normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def _centre(pixels: Tensor, size: int) -> Tensor:
    top, left = (pixels.shape[-2] - size) // 2, (pixels.shape[-1] - size) // 2
    return pixels[..., top : top + size, left : left + size]


def exact_pixels(picture: Tensor, size: int) -> Tensor:
    """[3, size, size] through 8 bits and PIL; NaN where the picture is not finite."""
    values = to_uint8(picture)
    if values is None:
        return torch.full((3, size, size), torch.nan)
    height, width = _resized(*values.shape[:2], size)
    resized = Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    return _normalised(_centre(pixels, size))


def fast_pixels(picture: Tensor, size: int) -> Tensor:
    """[3, size, size] on float tensors, differentiable; scores differ from the exact ones by some 0.2 %."""
    height, width = _resized(*picture.shape[-2:], size)
    resized = F.interpolate(picture[None].float(), (height, width), mode="bicubic", antialias=True)[0]
    # PIL works on 8 bits and so cuts off the overshoot of the bicubic kernel.
    return _normalised(_centre(resized.clamp(0, 1), size))
