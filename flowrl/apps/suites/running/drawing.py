"""Samples of a suite from any diffusers pipeline by its own call, with noise fixed for each (prompt id, k)."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item
from flowrl.media.media import open_image
from flowrl.models.weights.whole import require_finite


def seed_of(base_seed: int, item_id: str, k: int) -> int:
    """Seed of a sample: 64 bits of a hash over (base seed, prompt id, k).

    torch's generator on the CPU uses the lower 32 of them: of 4000 samples two share their noise once in 500 suites.

    >>> seed_of(0, "00001", 0) == seed_of(0, "00001", 0), seed_of(0, "1", 11) == seed_of(0, "11", 1)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"suite/{base_seed}/{item_id}/{k}".encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class Drawing:
    """The samples of a pipeline; `call` are the arguments of its call that are alike for all."""

    pipeline: Any
    call: Mapping[str, Any]
    base_seed: int = 0
    videos: bool = False
    """The suite is of videos, not of images."""

    def require_inputs(self, items: Sequence[Item]) -> None:
        """Raise ConfigError for a pipeline that makes no image from a text alone, or for edits from an image."""
        parameters = inspect.signature(type(self.pipeline).__call__).parameters
        kind = type(self.pipeline).__name__
        if any(item.metadata.get("images") for item in items):
            if "image" not in parameters:
                raise ConfigError(f"{kind} takes no image; this suite needs a model that edits images")
            return
        if "prompt" not in parameters or "generator" not in parameters:
            raise ConfigError(f"{kind} takes no prompt; a suite needs a model that makes images from texts")
        if "image" in parameters and parameters["image"].default is inspect.Parameter.empty:
            raise ConfigError(f"{kind} needs an image to begin with; a suite needs a model that takes a text alone")

    def __call__(self, samples: Sequence[tuple[Item, int]]) -> Sequence[Tensor] | Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W], float32 on the CPU, of samples; of edits one by one, each
        from the image of its item, since sizes and places of a batch's images would be those of the first.

        Raises ConfigError: the pipeline refuses its arguments, or makes videos for a suite of images, or the reverse;
        ModelError: an image with NaN.
        """
        sources = [item.metadata.get("images") for item, _ in samples]
        if any(sources) and len(samples) > 1:
            return [self([sample])[0] for sample in samples]
        given = {"image": open_image(sources[0][0])} if sources[0] else {}
        generators = [torch.Generator().manual_seed(seed_of(self.base_seed, item.id, k)) for item, k in samples]
        # Arguments that a pipeline wants once for each prompt.
        listed = {
            name: [value] * len(samples) if name.startswith("negative_prompt") and isinstance(value, str) else value
            for name, value in self.call.items()
        }
        try:
            result = self.pipeline(
                prompt=[item.text for item, _ in samples],
                generator=generators,
                output_type="pt",
                return_dict=False,
                **given,
                **listed,
            )[0]
        except ValueError as error:  # how pipelines refuse what they are called with
            raise ConfigError(f"{type(self.pipeline).__name__}: {error}") from error
        images = result if isinstance(result, Tensor) else torch.stack(list(result))
        kind = "videos of two frames or more" if self.videos else "images"
        fits = images.ndim == 5 and images.shape[1] > 1 if self.videos else images.ndim == 4
        if not fits or len(images) != len(samples):
            raise ConfigError(
                f"{type(self.pipeline).__name__} made {list(images.shape)} of {len(samples)} prompts; this suite is "
                f"for models of {kind}, one for each prompt (flowrl list suites)"
            )
        require_finite(self.pipeline, images, [item.text for item, _ in samples])
        return images.detach().float().cpu()
