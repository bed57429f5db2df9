"""Tiny random pipelines of the very classes, one builder a class, made in memory in a fraction of a second.

Denoisers and VAEs are diffusers' own at toy sizes; stubs.py says what stands in for the text encoders.
"""

from tests.tiny_pipelines.cases import CASES, IMAGED, PROMPTS, Case, make
from tests.tiny_pipelines.image_transformers import (
    aura_flow,
    cogview_4,
    lumina_2,
    pixart_sigma,
    sana,
    stable_diffusion_3,
    z_image,
)
from tests.tiny_pipelines.packed_images import (
    chroma,
    flux,
    flux_2,
    flux_2_klein,
    flux_kontext,
    qwen_image,
    qwen_image_edit,
    qwen_image_edit_plus,
)
from tests.tiny_pipelines.stubs import TOKENS, Encoder, Looking, Output, Seeing, clip, ddim, flow, t5, vae, words
from tests.tiny_pipelines.unets import stable_diffusion, stable_diffusion_xl
from tests.tiny_pipelines.videos import (
    cogvideox,
    cogvideox_image,
    hunyuan_video,
    hunyuan_video_1_5,
    hunyuan_video_1_5_image,
    hunyuan_video_image,
    ltx,
    ltx_image,
    mochi,
    sana_video,
    sana_video_image,
    wan,
    wan_2_2,
    wan_2_2_image,
    wan_image,
)

__all__ = [
    # the cases
    "CASES",
    "IMAGED",
    "PROMPTS",
    "Case",
    "make",
    # what several pipelines share
    "TOKENS",
    "Encoder",
    "Looking",
    "Output",
    "Seeing",
    "clip",
    "ddim",
    "flow",
    "t5",
    "vae",
    "words",
    # images
    "stable_diffusion",
    "stable_diffusion_xl",
    "stable_diffusion_3",
    "aura_flow",
    "cogview_4",
    "lumina_2",
    "pixart_sigma",
    "sana",
    "z_image",
    "chroma",
    "flux",
    "flux_2",
    "flux_2_klein",
    "flux_kontext",
    "qwen_image",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    # videos
    "cogvideox",
    "cogvideox_image",
    "hunyuan_video",
    "hunyuan_video_1_5",
    "hunyuan_video_1_5_image",
    "hunyuan_video_image",
    "ltx",
    "ltx_image",
    "mochi",
    "sana_video",
    "sana_video_image",
    "wan",
    "wan_2_2",
    "wan_2_2_image",
    "wan_image",
]
