"""HPSv3: how much people prefer the image for its prompt, by a Qwen2-VL 7B tuned on 1.17 million comparisons.

raw = mu, the first of two outputs of a small head at the token <|Reward|>; about -5 to 15 on the authors' images, and
a messy image can exceed that (MizzenAI/HPSv3#19). Trained on a tenth of it. A video [F, 3, H, W] has the mean over
its frames 0, 4, 8, ...

The released code passes no positions to the language model, which then counts tokens one by one ("sequential"), in
training as in scoring; Qwen2-VL's own positions in time, height and width ("mrope") are what some ports use.

With preprocess "fast" the network's input differs from the released processor's by at most 2 of 255 levels, 0.4 on
average (tests/rewards/test_rewards_hpsv3.py): what rounding to 8 bits takes.

Source: arXiv:2508.03789; MizzenAI/HPSv3 (hpsv3 1.0.0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from flowrl.rewards._judges import qwen_vl
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.arrays import eight_bit, finite
from flowrl.rewards._vision.pixels import Preprocess
from PIL import Image
from torch import Tensor, nn

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "experimental"
MARK = "<|Reward|>"
PIXELS = 256 * 28 * 28
PROMPT = Path(__file__).parent / "prompts" / "hpsv3.txt"
PROMPT_SHA256 = "ed13a1b1b6f42463518c1f55de40a864b97876aa12e6e2f367f0a0e44aa4196e"
_FRAME_INTERVAL = 4

CARD = Card(
    outputs=("hpsv3",),
    transform=(0.1, 0.0),
    modality="any",
    resolution="its own aspect in about 448 x 448 pixels",
    memory_gib=16.0,
    level=LEVEL,
    licence="Apache-2.0 (weights), MIT (code and prompt)",
    source="arXiv:2508.03789",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[str, NAME_OR_PATH] = "MizzenAI/HPSv3"
    """HPSv3.safetensors: the file, its folder or a hub id (17 GB)."""
    base: Annotated[str, NAME_OR_PATH] = "Qwen/Qwen2-VL-7B-Instruct"
    """Configuration and tokenizer: a folder or a hub id; its weights are not used."""
    dtype: qwen_vl.Dtype = "bfloat16"
    """Precision of the backbone; the head is float32."""
    preprocess: Preprocess = "exact"
    """"exact": through 8 bits, as released; "fast": float tensors, through which gradients flow."""
    positions: qwen_vl.Positions = "sequential"
    """"sequential": as released; "mrope": Qwen2-VL's own, with which scores differ."""
    device: str | None = None
    """Where the network runs; none takes the GPU if there is one."""


def head(hidden_size: int) -> nn.Module:
    """The published head: (mu, what stands for sigma) of a hidden state."""
    return nn.Sequential(
        nn.Linear(hidden_size, 1024),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def load(config: Config) -> qwen_vl.Regressor:
    """The network with the published weights, frozen.

    Raises:
        RewardError: a file is missing or holds other weights.
    """
    path = checkpoints.find(config.model, "HPSv3.safetensors", reward="hpsv3")
    published = checkpoints.read(path, reward="hpsv3")
    return qwen_vl.load(
        {new: value for name, value in published.items() if (new := qwen_vl.local_name(name)) is not None},
        head,
        base=config.base,
        marks=(MARK,),
        dtype=config.dtype,
        positions=config.positions,
        device=config.device,
        reward="hpsv3",
        source=path,
    )


def resized(image: Tensor, preprocess: Preprocess = "exact") -> Tensor | None:
    """[1, 3, h, w] of an image [3, H, W]: uint8 by PIL's bicubic filter, or floats; None where it is not finite."""
    if not finite(image):
        return None
    height, width = qwen_vl.smart_resize(*image.shape[-2:], min_pixels=PIXELS, max_pixels=PIXELS)
    if preprocess == "fast":
        pixels = image[None].float()
        for size in ((image.shape[1], width), (height, width)):  # PIL's two passes, each cut off
            pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
        return pixels
    pixels = np.array(Image.fromarray(eight_bit(image)).resize((width, height), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def card_of(config: Config) -> Card:
    return replace(CARD, differentiable=config.preprocess == "fast")


def build(config: Config) -> Reward:
    prompt = qwen_vl.read_prompt(PROMPT, PROMPT_SHA256, reward="hpsv3")
    model = load(config)

    def one(image: Tensor, tokens: list[int]) -> Tensor:
        if image.ndim not in (3, 4) or image.shape[-3] != 3:
            raise RewardError(f"reward 'hpsv3' takes [3, H, W] or [F, 3, H, W], got {list(image.shape)}")
        if image.ndim == 4:
            return torch.stack([one(frame, tokens) for frame in image[::_FRAME_INTERVAL]]).mean()
        pixels = resized(image, config.preprocess)
        values = torch.tensor([[math.nan]]) if pixels is None else model.outputs(tokens, pixels, "image")
        return values[0, 0].double()

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        # All texts first: one that the model cannot be asked is found before the slow part.
        asked = [model.tokens(qwen_vl.with_caption(prompt, caption), "image") for caption in prompts]
        return torch.stack([one(image, tokens) for image, tokens in zip(images, asked, strict=True)]).float()

    return Reward(score=score, card=card_of(config))
