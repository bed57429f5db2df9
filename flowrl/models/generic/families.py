"""Facts of pipeline classes that cannot be read off the pipeline itself, one entry a class.

A class that is not listed gets `Family()`, its guidance by its arguments, and a numerical proof at first use that
samples at different timesteps may share a forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Guidance = Literal["cfg", "true_cfg", "embedded", "guider", "none"]

ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
"""Attention projections of diffusers' transformers and UNets; a network is adapted where it has them."""

_FEW_STEPS = "depends on the step's number, which a single step does not know"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    guidance: Guidance | None = None
    """What `guidance_scale` of `predict` is: `cfg` the argument guidance_scale (<= 1: none); `true_cfg` the argument
    true_cfg_scale with the negative prompt (<= 1: none); `embedded` an input of the network; `guider` the scale of
    the pipeline's guider object. None: read off the arguments."""
    free_at: float = 1.0
    """Largest scale of `cfg` at which the pipeline makes one forward; 0 where the scale s means s + 1."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Module suffixes, as far as the network has them."""
    dead: tuple[str, ...] = ()
    """Adapted modules whose output is never used; {last} is the last of `transformer_blocks`."""
    patch: int | None = None
    """Latent pixels a side that make one token; None: the network's patch_size."""
    channel_axis: int = 1
    """Axis of the latents [B, ...] that holds the channels: 2 for tokens [B, tokens, C], read row by row, frame by
    frame, and for clips [B, F, C, h, w]."""
    per_step: str = ""
    """Why samples of different steps cannot share a forward."""
    decode_singly: str = ""
    """Why pictures are decoded one by one."""
    refused: dict[str, str] = field(default_factory=dict)
    """Argument of the call -> why it cannot be set."""
    call: dict[str, Any] = field(default_factory=dict)
    """Arguments of the call that depart from the pipeline's defaults."""
    images: tuple[str, ...] = ()
    """Arguments of the call that take the pictures of a prompt record, in their order."""
    needs_image: bool = False
    """The pipeline cannot be called without the first of them."""
    image_each: bool = False
    """A call for several prompts wants one picture for each; otherwise it takes one for all."""
    image_list: bool = False
    """The argument takes a list of any number of pictures, for all prompts."""
    image_methods: tuple[str, ...] = ()
    """Methods of the pipeline, beside prepare_latents and encode_image, that make something of the pictures."""
    sized_by_image: bool = False
    """The call has no size: the picture's own decides it, so pictures are cropped to model.height x model.width."""
    holds: bool = False
    """A part of the latents stays what the picture made it, and the scheduler steps the rest."""
    singly: str = ""
    """Why a call takes one prompt only."""
    unfit: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Entry of the pipeline's or the network's configuration -> the value that is refused, and why."""
    note: str = ""
    """What a user should know, for docs/models.md."""


_LAST_TEXT_QUERY = ("transformer_blocks.{last}.attn.add_q_proj",)
_LAST_TEXT = ("transformer_blocks.{last}.attn.add_q_proj", "transformer_blocks.{last}.attn.to_add_out")
_SKIP_LAYERS = dict.fromkeys(
    ("skip_guidance_layers", "skip_layer_guidance_scale", "skip_layer_guidance_start", "skip_layer_guidance_stop"),
    _FEW_STEPS,
)
_NO_BINNING = {"use_resolution_binning": False}
_NO_HEAD_AXIS = "its VAE's attention mask has no head axis and fails for a batch"
_DYNAMIC_CFG = {"use_dynamic_cfg": "depends on the number of steps"}
_DRAWN = "the picture's latents are one draw of its VAE's posterior, the same at every use"
_REFERENCES = {"images": ("image",), "image_list": True, "image_methods": ("prepare_image_latents",)}
_FIRST_FRAME = {"images": ("image",), "needs_image": True}

FAMILIES: dict[str, Family] = {
    "StableDiffusionPipeline": Family(),
    "StableDiffusionXLPipeline": Family(refused={"denoising_end": _FEW_STEPS}),
    "StableDiffusion3Pipeline": Family(
        lora_targets=tuple(f"attn.{name}" for name in ATTENTION), dead=_LAST_TEXT_QUERY, refused=_SKIP_LAYERS
    ),
    "FluxPipeline": Family(guidance="embedded", patch=2, channel_axis=2),
    "FluxKontextPipeline": Family(guidance="embedded", patch=2, channel_axis=2, images=("image",)),
    "Flux2Pipeline": Family(guidance="embedded", patch=2, channel_axis=2, **_REFERENCES),
    "Flux2KleinPipeline": Family(guidance="cfg", patch=2, channel_axis=2, **_REFERENCES),
    "ChromaPipeline": Family(guidance="cfg", patch=2, channel_axis=2),
    "QwenImagePipeline": Family(guidance="true_cfg", patch=2, channel_axis=2, dead=_LAST_TEXT),
    "QwenImageEditPipeline": Family(
        guidance="true_cfg",
        patch=2,
        channel_axis=2,
        dead=_LAST_TEXT,
        images=("image",),
        needs_image=True,
        image_each=True,
    ),
    "QwenImageEditPlusPipeline": Family(
        guidance="true_cfg",
        patch=2,
        channel_axis=2,
        dead=_LAST_TEXT,
        images=("image",),
        needs_image=True,
        image_list=True,
        singly="its call refuses several",
    ),
    "SanaPipeline": Family(call=_NO_BINNING),
    "SanaVideoPipeline": Family(call=_NO_BINNING),
    "SanaImageToVideoPipeline": Family(call=_NO_BINNING, holds=True, **_FIRST_FRAME),
    "PixArtSigmaPipeline": Family(call=_NO_BINNING),  # full weights only: its network takes no adapter
    "WanPipeline": Family(),
    "WanImageToVideoPipeline": Family(
        images=("image", "last_image"),
        needs_image=True,
        unfit={"expand_timesteps": (True, "gives each frame a timestep of its own, and decodes with the picture")},
    ),
    "HunyuanVideoPipeline": Family(guidance="embedded"),
    "HunyuanVideoImageToVideoPipeline": Family(
        **_FIRST_FRAME,
        image_each=True,
        unfit={"image_condition_type": ("token_replace", "puts the picture back after every step")},
        note="its own call starts from the noise with 0.1 % of the picture, flowrl from the noise",
    ),
    "HunyuanVideo15Pipeline": Family(
        guidance="guider",
        dead=_LAST_TEXT,
        decode_singly=_NO_HEAD_AXIS,
    ),
    "HunyuanVideo15ImageToVideoPipeline": Family(
        guidance="guider",
        dead=_LAST_TEXT,
        decode_singly=_NO_HEAD_AXIS,
        **_FIRST_FRAME,
        image_methods=("prepare_cond_latents_and_mask",),
        sized_by_image=True,
    ),
    "LTXPipeline": Family(patch=1, channel_axis=2),
    "LTXImageToVideoPipeline": Family(patch=1, channel_axis=2, holds=True, **_FIRST_FRAME, note=_DRAWN),
    "CogVideoXPipeline": Family(channel_axis=2, refused=_DYNAMIC_CFG),
    "CogVideoXImageToVideoPipeline": Family(
        channel_axis=2, refused=_DYNAMIC_CFG, **_FIRST_FRAME, image_each=True, note=_DRAWN
    ),
    "CogView4Pipeline": Family(),
    "ZImagePipeline": Family(free_at=0.0, patch=2),
    "Lumina2Pipeline": Family(refused={"cfg_trunc_ratio": _FEW_STEPS}),
    "AuraFlowPipeline": Family(),
    "MochiPipeline": Family(dead=("transformer_blocks.{last}.attn1.add_q_proj",)),
}


def family_of(pipeline: Any) -> Family:
    """The table's entry, with what is left open read off the pipeline."""
    return FAMILIES.get(type(pipeline).__name__, Family())


def guidance_of(family: Family, pipeline: Any, parameters: Any, network: nn.Module) -> Guidance:
    """How the pipeline is guided."""
    if family.guidance is not None:
        return family.guidance
    if pipeline.components.get("guider") is not None:
        return "guider"
    embeds = bool(network.config.get("guidance_embeds", False))
    if "guidance_scale" in parameters and (embeds or "true_cfg_scale" not in parameters):
        return "embedded" if embeds else "cfg"
    return "true_cfg" if "true_cfg_scale" in parameters else "none"


def dead_modules(family: Family, network: nn.Module, prefix: str) -> tuple[str, ...]:
    """The family's unused modules by their names in the network."""
    return tuple(prefix + name.format(last=len(network.transformer_blocks) - 1) for name in family.dead)
