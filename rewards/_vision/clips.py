"""CLIP and SigLIP from transformers for rewards: unit embeddings. A helper, not a reward.

The networks are frozen and float32, the image tower in the dtype that is asked for; autocast is off inside. No graph is
kept unless an image asks for gradients.
Source: `CLIPModel` and `SiglipVisionModel` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.options import DTYPES, Dtype
from flowrl.rewards._vision.pixels import Pixels, Preprocess
from flowrl.rewards._vision.pool import threads
from torch import Tensor

from flowrl.reward import Images, RewardError

Tower = Literal["clip", "siglip"]


@dataclass(frozen=True, slots=True)
class Clip:
    """A loaded CLIP."""

    model: Any
    tokenizer: Any
    pixels: Pixels
    dtype: torch.dtype = torch.float32
    """Of the image tower."""

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def embed_images(self, images: Images) -> Tensor:
        """Unit image embeddings, [B, D] float32, of images in [0, 1]."""
        pixels = self.pixels(images).to(self.device, self.dtype)
        with torch.autocast(self.device.type, enabled=False):
            return F.normalize(projected(self.model.get_image_features(pixel_values=pixels)).float(), dim=-1)

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
    """An image tower alone: a CLIPModel without its text tower, or a SiglipVisionModel."""

    model: Any
    pixels: Pixels
    width: int
    """Size of its embeddings."""
    dtype: torch.dtype = torch.float32

    def embed_images(self, images: Images) -> Tensor:
        """Unit image embeddings, [B, D] float32, of images in [0, 1]: CLIP's projected ones, SigLIP's pooled ones."""
        device = self.model.device
        pixels = self.pixels(images).to(device, self.dtype)
        forward = getattr(self.model, "get_image_features", self.model)
        with torch.autocast(device.type, enabled=False):
            return F.normalize(projected(forward(pixel_values=pixels)).float(), dim=-1)


def load(
    model: str,
    tokenizer: str,
    *,
    device: str | None,
    preprocess: Preprocess,
    reward: str,
    half_even_crop: bool = False,
    dtype: Dtype = "float32",
) -> Clip:
    """A frozen CLIP from a folder or the hub; `half_even_crop` as in `Pixels`, `dtype` of its image tower.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are of another network.
    """
    from transformers import AutoTokenizer, CLIPModel

    network = _network(CLIPModel, model, reward, device)
    try:
        words = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load the tokenizer {tokenizer!r} of CLIP {model!r}; give a folder or a hub id "
            f"that can be reached: {error}"
        ) from error
    for tower in (network.vision_model, network.visual_projection):
        tower.to(DTYPES[dtype])
    size, count = network.config.vision_config.image_size, threads(network.device)
    pixels = Pixels(size=size, preprocess=preprocess, half_even_crop=half_even_crop, threads=count)
    return Clip(network, words, pixels, DTYPES[dtype])


def load_vision(
    model: str,
    tower: Tower,
    *,
    device: str | None,
    preprocess: Preprocess,
    reward: str,
    half_even_crop: bool = False,
    dtype: Dtype = "float32",
) -> Vision:
    """The frozen image tower of a CLIP or a SigLIP, from a folder or the hub.

    SigLIP sees the whole image; `half_even_crop` is of CLIP's centre square, as in `Pixels`.

    Raises:
        RewardError: the weights can neither be found nor downloaded, or are of another network.
    """
    from transformers import CLIPModel, SiglipVisionModel

    if tower == "siglip":
        network, half = _network(SiglipVisionModel, model, reward, device), (0.5, 0.5, 0.5)
        size, count = network.config.image_size, threads(network.device)
        pixels = Pixels(size=size, preprocess=preprocess, fit="squash", mean=half, std=half, threads=count)
        return Vision(network.to(DTYPES[dtype]), pixels, network.config.hidden_size, DTYPES[dtype])
    # Not CLIPVisionModelWithProjection: it takes the width from another place of the configuration than CLIPModel.
    network = _network(CLIPModel, model, reward, device)
    network.text_model = network.text_projection = None
    size, count = network.config.vision_config.image_size, threads(network.device)
    pixels = Pixels(size=size, preprocess=preprocess, half_even_crop=half_even_crop, threads=count)
    return Vision(network.to(DTYPES[dtype]), pixels, network.config.projection_dim, DTYPES[dtype])


def _network(kind: Any, model: str, reward: str, device: str | None) -> Any:
    try:
        network = checkpoints.whole(kind, model, reward=reward, dtype=torch.float32)
    except RewardError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load {kind.__name__} {model!r}; give a folder or a hub id that can be reached: "
            f"{error}"
        ) from error
    return network.to(checkpoints.place(device))


def projected(features: Any) -> Tensor:
    """The projected embedding: a tensor in transformers 4, an output's `pooler_output` since 5."""
    return features if isinstance(features, Tensor) else features.pooler_output
