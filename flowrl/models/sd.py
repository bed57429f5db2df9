"""Stable Diffusion 1.x, 2.x, SD-Turbo and LCMs of them (UNet, one CLIP encoder): StableDiffusionPipeline in parts.

Process: VP, predicting eps (1.x, 2.x at 512 px) or v (2.x at 768 px); grids and distilled checkpoints: models/_unet.py.
timestep is that of training, 0..999. `guidance_scale` is the pipeline's own CFG scale (<= 1: none); of a consistency
model the value that is embedded. Text: CLIP, 77 tokens; 2.x has OpenCLIP's with its last layer left out, which is how
its checkpoints are stored. The safety checker is not loaded: it would blacken images before they are scored.
"""

from dataclasses import dataclass
from typing import Any

from flowrl.models._native import Family
from flowrl.models._unet import UNet, UNetConfig, on_noise

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(UNetConfig):
    """Options of every UNet family."""


def sd(pipeline: Any, config: Config) -> UNet:
    """The adapter of the family."""
    made = UNet(pipeline, config)
    pipeline.safety_checker = None
    return made


FAMILY = Family(
    adapter=sd,
    pipeline="StableDiffusionPipeline",
    denoiser="unet",
    channels=(4, 4),
    left_out=lambda config: {"safety_checker": None, "requires_safety_checker": False},
    fits=on_noise,
)
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
