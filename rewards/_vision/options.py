"""Options that rewards on a vision network share. A helper, not a reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from flowrl.rewards._vision.pixels import Preprocess

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Options of a network that looks at single images."""

    frames: int = 8
    """How many evenly spread frames of a video are scored."""
    device: str | None = None
    """Where the network runs; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ValueError(f"frames={self.frames} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ClipOptions(FrameOptions):
    """Options of a CLIP-like network, which takes a small square."""

    preprocess: Preprocess = "exact"
    """"exact": through 8 bits, as the published scores; "fast": float tensors, through which gradients flow."""
    dtype: Dtype = "float32"
    """Precision of the image tower. "bfloat16" is faster on a GPU and moves cosines by about 0.001 to 0.02."""

    @property
    def declared(self) -> dict[str, bool]:
        """Parts of the reward's card that these options decide."""
        return {"differentiable": self.preprocess == "fast", "half_precision": self.dtype != "float32"}
