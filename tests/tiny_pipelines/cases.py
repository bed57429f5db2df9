"""The tiny pipelines by name, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.tiny_pipelines.images import IMAGES
from tests.tiny_pipelines.stubs import TOKENS, Recipe
from tests.tiny_pipelines.videos import VIDEOS

PROMPTS = ["a red circle", "two blue squares on the left"]


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is called."""

    build: Recipe
    call: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((16, 16), (24, 16))
    fast: bool = False
    """Part of the default suite, for its code path."""
    free: float = 1.0
    """Guidance scale without guidance."""
    batches: tuple[int, ...] = (1, 2)
    own: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's own call, which the table of families gives the adapter."""
    scale: str | None = "guidance_scale"
    """Its argument for guidance; None: the guider's."""
    images: int = 0
    """With each prompt."""
    listed: bool = False
    """They are a list under one argument."""
    enlarged: int = 0
    """Pixels by which their sides are longer than in other cases."""

    def own_call(
        self, pipe: Any, size: tuple[int, int], scale: float, steps: int, batch: int | None = None
    ) -> dict[str, Any]:
        """Arguments of the pipeline's own call at that guidance, for a list of prompts; batch None: for one alone."""
        call: dict[str, Any] = {"height": size[0], "width": size[1], **self.call, **self.own}
        call |= {"num_inference_steps": steps, "output_type": "pt", "return_dict": False}
        if self.scale is None:
            pipe.guider.guidance_scale = scale
        else:
            call[self.scale] = scale
        if self.scale == "true_cfg_scale" and scale > 1:
            call["negative_prompt"] = ""
        if "negative_prompt" in call and batch is not None:
            call["negative_prompt"] = [call["negative_prompt"]] * batch
        return {name: value for name, value in call.items() if value is not None}


_TOKENS = {"max_sequence_length": TOKENS}
_LAYERS = {**_TOKENS, "text_encoder_out_layers": [1, 2]}
_CLIP = {"num_frames": 9, **_TOKENS}
_NO_BINS = {"use_resolution_binning": False}
CASES: dict[str, Case] = {
    "sd": Case(IMAGES["sd"], fast=True),
    "sdxl": Case(IMAGES["sdxl"]),
    "sd3": Case(IMAGES["sd3"], _TOKENS, fast=True),
    "flux": Case(IMAGES["flux"], _TOKENS, fast=True),
    "flux_true_cfg": Case(IMAGES["flux"], {**_TOKENS, "true_cfg_scale": 3.0, "negative_prompt": "blue"}),
    "chroma": Case(IMAGES["chroma"], _TOKENS),
    "qwen_image": Case(IMAGES["qwen_image"], _TOKENS, fast=True, scale="true_cfg_scale"),
    "wan": Case(VIDEOS["wan"], _CLIP, ((16, 16), (32, 16)), fast=True),
    "wan_2_2": Case(VIDEOS["wan_2_2"], _CLIP, ((16, 16), (32, 16))),
    "sana": Case(
        IMAGES["sana"], {**_TOKENS, "complex_human_instruction": []}, ((32, 32), (64, 32)), fast=True, own=_NO_BINS
    ),
    "z_image": Case(IMAGES["z_image"], _TOKENS, fast=True, free=0.0),
    "lumina_2": Case(IMAGES["lumina_2"], {**_TOKENS, "system_prompt": "a"}, ((32, 32), (48, 32))),
    "ltx": Case(VIDEOS["ltx"], {"num_frames": 9, **_TOKENS}, ((32, 32), (64, 32)), fast=True),
    "mochi": Case(VIDEOS["mochi"], {"num_frames": 7, "max_sequence_length": 16}, ((16, 16), (32, 16))),
    "hunyuan_video": Case(
        VIDEOS["hunyuan_video"],
        {"num_frames": 9, "prompt_template": {"template": "a {}", "crop_start": 1}, **_TOKENS},
        ((16, 16), (32, 16)),
    ),
    "hunyuan_video_1_5": Case(
        VIDEOS["hunyuan_video_1_5"], {"num_frames": 5}, ((16, 16), (32, 16)), batches=(1,), scale=None
    ),
    "cogvideox": Case(VIDEOS["cogvideox"], _CLIP, ((16, 16), (32, 16))),
    "cogview_4": Case(IMAGES["cogview_4"], {"max_sequence_length": 16}, ((16, 16), (32, 16))),
    "aura_flow": Case(IMAGES["aura_flow"], _TOKENS, ((16, 16), (24, 16))),
    "flux_2": Case(IMAGES["flux_2"], _LAYERS),
    "flux_2_klein": Case(IMAGES["flux_2_klein"], _LAYERS),
    "qwen_image_2_1": Case(IMAGES["qwen_image_2_1"], sizes=((32, 32), (64, 32)), batches=(1,), scale="true_cfg_scale"),
    "krea_2": Case(IMAGES["krea_2"], {"max_sequence_length": 16}, free=0.0),
    "ovis_image": Case(IMAGES["ovis_image"], {"max_sequence_length": 16}),
    "pixart_sigma": Case(IMAGES["pixart_sigma"], _TOKENS, own=_NO_BINS),
    "sana_video": Case(
        VIDEOS["sana_video"],
        {"frames": 9, "complex_human_instruction": [], "max_sequence_length": 16},
        ((32, 32), (64, 32)),
        own=_NO_BINS,
    ),
}

_LISTED = {"batches": (1,), "images": 2, "listed": True}
_FRAME = {"batches": (1,), "images": 1}
_WIDE = ((16, 16), (32, 16))
_UNSIZED: dict[str, Any] = {"height": None, "width": None}
IMAGED: dict[str, Case] = {
    "flux_kontext": Case(
        IMAGES["flux_kontext"],
        {**_TOKENS, "_auto_resize": False},
        fast=True,
        **_FRAME,
    ),
    # Images of at least 64 pixels a side.
    "flux_2_references": Case(IMAGES["flux_2"], _LAYERS, fast=True, enlarged=56, **_LISTED),
    "flux_2_klein_references": Case(IMAGES["flux_2_klein"], _LAYERS, enlarged=56, **_LISTED),
    "qwen_image_edit": Case(IMAGES["qwen_image_edit"], _TOKENS, fast=True, scale="true_cfg_scale", **_FRAME),
    "qwen_image_edit_plus": Case(IMAGES["qwen_image_edit_plus"], _TOKENS, fast=True, scale="true_cfg_scale", **_LISTED),
    # Its network takes whatever follows the 512 tokens of text for the image.
    "wan_image": Case(VIDEOS["wan_image"], {"num_frames": 5}, _WIDE, fast=True, **_FRAME),
    "wan_2_2_image": Case(VIDEOS["wan_2_2_image"], {"num_frames": 5, **_TOKENS}, _WIDE, **_FRAME),
    "wan_2_2_frame": Case(VIDEOS["wan_2_2_frame"], _CLIP, _WIDE, fast=True, **_FRAME),
    # Images that are not enlarged more than twice.
    "ltx_image": Case(
        VIDEOS["ltx_image"], {"num_frames": 9, **_TOKENS}, ((32, 32), (64, 32)), fast=True, enlarged=4, **_FRAME
    ),
    "hunyuan_video_image": Case(
        VIDEOS["hunyuan_video_image"],
        {
            "num_frames": 9,
            # Longer than a probing prompt: a batch with a longer one fails in the pipeline itself.
            "max_sequence_length": 200,
            "prompt_template": {
                "template": "<|end_header_id|> <image> <|end_header_id|> {} left right on <|end_header_id|>",
                "crop_start": 3,
                "image_emb_start": 1,
                "image_emb_end": 5,
                "image_emb_len": 4,
            },
        },
        _WIDE,
        scale="true_cfg_scale",
        **_FRAME,
    ),
    "hunyuan_video_1_5_image": Case(
        VIDEOS["hunyuan_video_1_5_image"], {"num_frames": 5}, ((16, 16), (24, 8)), scale=None, own=_UNSIZED, **_FRAME
    ),
    "cogvideox_image": Case(VIDEOS["cogvideox_image"], _CLIP, _WIDE, **_FRAME),
    "sana_video_image": Case(
        VIDEOS["sana_video_image"],
        {"frames": 9, "complex_human_instruction": [], "max_sequence_length": 16},
        ((32, 32), (64, 32)),
        own=_NO_BINS,
        enlarged=4,
        **_FRAME,
    ),
}
"""Those that are called with images; the pipelines' own calls take the same ones for a whole batch."""

# 4 frames of sound for 9 of the video.
SOUNDING: dict[str, Case] = {"ltx_2": Case(VIDEOS["ltx_2"], {"num_frames": 9, **_TOKENS}, ((32, 32),))}
"""Those that step two tensors, which are refused."""


def make(name: str, seed: int = 0) -> Any:
    """The pipeline of a case: random weights, none of them zero."""
    torch.manual_seed(seed)
    made = (CASES | IMAGED | SOUNDING)[name].build()
    for part in made.components.values():
        if isinstance(part, nn.Module):
            part.eval()
            for p in part.parameters():
                if not bool(p.any()):
                    # Gates and last layers that start at zero would hide everything before them.
                    nn.init.normal_(p, std=0.1)
    made.set_progress_bar_config(disable=True)
    return made


@contextmanager
def stepped(pipe: Any, given: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """What leaves each step of the pipeline's own calls inside; `given` is made of their first latents."""
    left: list[Tensor] = []
    step, prepare = pipe.scheduler.step, pipe.prepare_latents

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        left.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    def preparing(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        assert given is not None
        return (given(found[0]), *found[1:]) if isinstance(found, tuple) else given(found)

    pipe.scheduler.step = stepping
    if given is not None:
        pipe.prepare_latents = preparing
    try:
        yield left
    finally:
        del pipe.scheduler.step
        if given is not None:
            del pipe.prepare_latents
