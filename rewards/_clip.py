"""CLIP and SigLIP from transformers for rewards: unit embeddings. A helper, not a reward.

The networks are frozen and float32; autocast is off inside. No graph is kept unless a picture asks for gradients.
Source: `CLIPModel` and `SiglipVisionModel` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.reward import RewardError
from rewards._pixels import Pixels, Preprocess

Tower = Literal["clip", "siglip"]


@dataclass(frozen=True, slots=True)
class Clip:
    """A loaded CLIP."""

    model: Any
    tokenizer: Any
    pixels: Pixels

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def embed_images(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Unit image embeddings, [B, D], of pictures in [0, 1]."""
        pixels = self.pixels(images).to(self.device)
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


@dataclass(frozen=True, slots=True)
class Vision:
    """The image tower alone."""

    model: Any
    pixels: Pixels

    def embed_images(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Unit image embeddings, [B, D], of pictures in [0, 1]: CLIP's projected ones, SigLIP's pooled ones."""
        device = self.model.device
        pixels = self.pixels(images).to(device)
        with torch.autocast(device.type, enabled=False):
            output = self.model(pixel_values=pixels)
        features = output.image_embeds if hasattr(output, "image_embeds") else output.pooler_output
        return F.normalize(features, dim=-1)


def load(model: str, tokenizer: str, *, device: str | None, preprocess: Preprocess, reward: str) -> Clip:
    """A frozen float32 CLIP from a folder or the hub.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are of another network.
    """
    from transformers import AutoTokenizer, CLIPModel

    network = _network(CLIPModel, model, f"reward {reward!r}", device)
    try:
        words = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load the tokenizer {tokenizer!r} of CLIP {model!r}; give a folder or a hub id "
            f"that can be reached: {error}"
        ) from error
    return Clip(network, words, Pixels(size=network.config.vision_config.image_size, preprocess=preprocess))


def load_vision(model: str, tower: Tower, *, device: str | None, preprocess: Preprocess, reward: str) -> Vision:
    """The frozen float32 image tower of a CLIP or a SigLIP, from a folder or the hub.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are of another network.
    """
    from transformers import CLIPVisionModelWithProjection, SiglipVisionModel

    kind = CLIPVisionModelWithProjection if tower == "clip" else SiglipVisionModel
    network = _network(kind, model, f"reward {reward!r}", device)
    size = network.config.image_size
    if tower == "clip":
        return Vision(network, Pixels(size=size, preprocess=preprocess))
    half = (0.5, 0.5, 0.5)
    return Vision(network, Pixels(size=size, preprocess=preprocess, fit="squash", mean=half, std=half))


def _network(kind: Any, model: str, who: str, device: str | None) -> Any:
    try:
        network, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"{who} cannot load {kind.__name__} {model!r}; give a folder or a hub id that can be reached: {error}"
        ) from error
    # What a checkpoint lacks is drawn at random with no more than a warning.
    if info["missing_keys"]:
        raise RewardError(
            f"{who}: {model!r} is no {kind.__name__}: it lacks {len(info['missing_keys'])} of its weights, such as "
            f"{min(info['missing_keys'])!r}"
        )
    return network.eval().requires_grad_(False).to(place(device))


def place(device: str | None) -> str:
    """Where a network runs; none takes the GPU if there is one."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def projected(features: Any) -> Tensor:
    """The projected embedding: a tensor in transformers 4, an output's `pooler_output` since 5."""
    return features if isinstance(features, Tensor) else features.pooler_output
