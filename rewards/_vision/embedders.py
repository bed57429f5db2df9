"""Image embeddings of any CLIP or DINO, for rewards that compare images. A helper, not a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from flowrl.rewards._vision import checkpoints, open_clips
from flowrl.rewards._vision.arrays import to_uint8
from flowrl.rewards._vision.clips import projected
from torch import Tensor

from flowrl.reward import Images, RewardError

_CHUNK = 64

Embed = Callable[[Sequence[Tensor]], Tensor]
"""n finite images [3, H, W] in [0, 1] -> [n, D] on the CPU."""


def network(name: str, device: str | None, *, reward: str, instead: str = "", whole: bool = False) -> Embed:
    """Projected image embeddings of a CLIP, else the class token of a ViT such as DINO or DINOv2.

    The network is float32 and frozen, after its own preprocessing.

    Args:
        name: a folder or a hub id, or of open_clip an embedded CLIP such as tiny-clip, a folder or an `hf-hub:`.
        device: where it runs; none takes the GPU if there is one.
        reward: whose it is, for the error.
        instead: what else the user may give, for the error.
        whole: whether a ViT such as DINO, whose preprocessing makes squares, sees images in their own aspect: their
            shorter side gets the square's, and position embeddings are interpolated. Others keep the central square.

    Raises:
        RewardError: the weights can neither be found nor downloaded.
    """
    if open_clips.is_source(name):
        clip = open_clips.load(name, None, quick_gelu=None, device=device, preprocess="exact", reward=reward)
        return _in_chunks(lambda images: clip.embed_images(images).cpu())
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = AutoImageProcessor.from_pretrained(name)
        # Of a ViT the class token is taken; DINO's checkpoints have no pooler after it.
        model = checkpoints.whole(AutoModel, name, reward=reward, unused=("pooler.",), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load backbone={name!r}; give {instead}a folder or hub id of a CLIP or "
            f"DINOv2 that can be reached: {error}"
        ) from error
    place = checkpoints.place(device)
    model.to(place)
    size, position = {}, {}
    if whole and model.config.model_type == "vit":
        size, position = {"size": {"shortest_edge": processor.size["height"]}}, {"interpolate_pos_encoding": True}

    def part(images: Images) -> Tensor:
        pixels = processor(images=[to_uint8(p) for p in images], return_tensors="pt", **size)["pixel_values"].to(place)
        with torch.autocast(place.type, enabled=False):
            if hasattr(model, "get_image_features"):
                return projected(model.get_image_features(pixel_values=pixels)).cpu()
            return model(pixel_values=pixels, **position).last_hidden_state[:, 0].cpu()

    return _in_chunks(part)


def _in_chunks(part: Embed) -> Embed:
    return lambda images: torch.cat([part(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK)])
