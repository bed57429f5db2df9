"""The tiny pipelines by name, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.tiny_pipelines import image_transformers, packed_images, unets, videos
from tests.tiny_pipelines.stubs import TOKENS

PROMPTS = ["a red circle", "two blue squares on the left"]


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is called."""

    build: Callable[[], Any]
    call: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((16, 16), (24, 16))
    fast: bool = False
    """Stands for a code path in the default suite."""
    free: float = 1.0
    """Guidance scale without guidance."""
    batches: tuple[int, ...] = (1, 2)


_TOKENS = {"max_sequence_length": TOKENS}
_CLIP = {"num_frames": 9, **_TOKENS}
CASES: dict[str, Case] = {
    "sd": Case(unets.stable_diffusion, fast=True),
    "sdxl": Case(unets.stable_diffusion_xl),
    "sd3": Case(image_transformers.stable_diffusion_3, _TOKENS, fast=True),
    "flux": Case(packed_images.flux, _TOKENS, fast=True),
    "flux_true_cfg": Case(packed_images.flux, {**_TOKENS, "true_cfg_scale": 3.0, "negative_prompt": "blue"}),
    "chroma": Case(packed_images.chroma, _TOKENS),
    "qwen_image": Case(packed_images.qwen_image, _TOKENS, fast=True),
    "wan": Case(videos.wan, _CLIP, ((16, 16), (32, 16)), fast=True),
    "wan_2_2": Case(videos.wan_2_2, _CLIP, ((16, 16), (32, 16))),
    "sana": Case(
        image_transformers.sana, {**_TOKENS, "complex_human_instruction": []}, ((32, 32), (64, 32)), fast=True
    ),
    "z_image": Case(image_transformers.z_image, _TOKENS, fast=True, free=0.0),
    "lumina_2": Case(image_transformers.lumina_2, {**_TOKENS, "system_prompt": "a"}, ((32, 32), (48, 32))),
    "ltx": Case(videos.ltx, {"num_frames": 9, **_TOKENS}, ((32, 32), (64, 32)), fast=True),
    "mochi": Case(videos.mochi, {"num_frames": 7, "max_sequence_length": 16}, ((16, 16), (32, 16))),
    "hunyuan_video": Case(
        videos.hunyuan_video,
        {"num_frames": 9, "prompt_template": {"template": "a {}", "crop_start": 1}, **_TOKENS},
        ((16, 16), (32, 16)),
    ),
    "hunyuan_video_1_5": Case(videos.hunyuan_video_1_5, {"num_frames": 5}, ((16, 16), (32, 16)), batches=(1,)),
    "cogvideox": Case(videos.cogvideox, _CLIP, ((16, 16), (32, 16))),
    "cogview_4": Case(image_transformers.cogview_4, {"max_sequence_length": 16}, ((16, 16), (32, 16))),
    "aura_flow": Case(image_transformers.aura_flow, _TOKENS, ((16, 16), (24, 16))),
    "flux_2": Case(packed_images.flux_2, {**_TOKENS, "text_encoder_out_layers": [1, 2]}),
    "flux_2_klein": Case(packed_images.flux_2_klein, {**_TOKENS, "text_encoder_out_layers": [1, 2]}),
    "pixart_sigma": Case(image_transformers.pixart_sigma, _TOKENS),
    "sana_video": Case(
        videos.sana_video,
        {"frames": 9, "complex_human_instruction": [], "max_sequence_length": 16},
        ((32, 32), (64, 32)),
    ),
}

PICTURED: dict[str, Case] = {
    "flux_kontext": Case(packed_images.flux_kontext, {**_TOKENS, "_auto_resize": False}, fast=True, batches=(1,)),
    "qwen_image_edit": Case(packed_images.qwen_image_edit, _TOKENS, fast=True, batches=(1,)),
    # Its network takes whatever follows the 512 tokens of text for the picture.
    "wan_image": Case(videos.wan_image, {"num_frames": 5}, ((16, 16), (32, 16)), fast=True, batches=(1,)),
}
"""Those that take a picture with each prompt; the pipeline's own call takes the same one for a whole batch."""


def make(name: str, seed: int = 0) -> Any:
    """The pipeline of a case: random weights, none of them zero."""
    torch.manual_seed(seed)
    made = (CASES | PICTURED)[name].build()
    for part in made.components.values():
        if isinstance(part, nn.Module):
            part.eval()
            for p in part.parameters():
                if not bool(p.any()):
                    # Gates and last layers that start at zero would hide everything before them.
                    nn.init.normal_(p, std=0.1)
    made.set_progress_bar_config(disable=True)
    return made
