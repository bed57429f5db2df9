"""Facts of pipeline classes that cannot be read from the pipeline itself, one entry per class in families.yaml.

A class that is not listed gets `Family()`, its guidance by its arguments, and a numerical test at first use whether
samples at different timesteps may share a forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from flowrl.core.assets import table
from flowrl.models.base import network_config

Guidance = Literal["cfg", "true_cfg", "embedded", "guider", "none"]
SCALES: dict[str, str] = {"cfg": "guidance_scale", "embedded": "guidance_scale", "true_cfg": "true_cfg_scale"}
"""Kind of guidance -> the argument of the call that gives its scale."""

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections of diffusers' transformers and UNets; a network is adapted where it has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    guidance: Guidance | None = None
    """Meaning of `predict`'s guidance_scale: `cfg` the argument guidance_scale (<= 1: none); `true_cfg` the argument
    true_cfg_scale with the negative prompt (<= 1: none); `embedded` an input of the network; `guider` the scale of
    the pipeline's guider object. None: read from the arguments."""
    free_at: float = 1.0
    """Largest scale of `cfg` with one forward per step; 0 where the scale s means s + 1."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Module suffixes; those that the network lacks are left out."""
    dead: tuple[str, ...] = ()
    """Adapted modules whose output is never used; {last} is the last of `transformer_blocks`."""
    patch: int | None = None
    """Latent pixels a side of one token; None: the network's patch_size."""
    channel_axis: int = 1
    """Axis of the latents [B, ...] that holds the channels: 2 for tokens [B, tokens, C], in order of frame, row and
    column, and for videos [B, F, C, h, w]."""
    per_step: str = ""
    """Reason why samples of different steps cannot share a forward; empty: they can."""
    decode_singly: str = ""
    """Reason why latents are decoded one by one; empty: in batches."""
    refused: dict[str, str] = field(default_factory=dict)
    """Argument of the call -> the reason why it cannot be set."""
    call: dict[str, Any] = field(default_factory=dict)
    """Arguments of the call that depart from the pipeline's defaults."""
    images: tuple[str, ...] = ()
    """Arguments of the call for the images of a prompt record, in their order."""
    needs_image: bool = False
    """The pipeline cannot be called without the first of them."""
    image_each: bool = False
    """A call for several prompts takes one image for each; otherwise one for all."""
    image_list: bool = False
    """The argument takes a list of any number of images, for all prompts."""
    image_methods: tuple[str, ...] = ()
    """Methods of the pipeline that encode the images, besides prepare_latents and encode_image."""
    frames: bool = False
    """Its images are frames of the video and fitted to its size (media/first_frame.py)."""
    sized_by_image: bool = False
    """The call has no size: that of the image decides it."""
    holds: bool = False
    """A part of the latents keeps the encoded image, and the scheduler steps the rest."""
    mask: tuple[str, int] | None = None
    """(entry of the pipeline's configuration, number of a part of prepare_latents' result): where the entry is set, the
    latents keep the encoded image where that part is 0, with timestep 0, though the scheduler steps all of them."""
    singly: str = ""
    """Reason why a call takes one prompt only; empty: it takes several."""
    unfit: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Entry of the pipeline's or the network's configuration -> the refused value, and the reason."""
    note: str = ""
    """A remark for docs/models.md."""


def _family(facts: dict[str, Any]) -> Family:
    """An entry of families.yaml, whose lists are tuples here."""
    tuples: dict[str, Any] = {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
    return Family(**facts | tuples)


_TABLES = table(Path(__file__).with_suffix(".yaml"))
DECIDED: dict[str, str] = _TABLES["decided"]
"""Arguments that flowrl decides -> the option that decides them."""
FAMILIES: dict[str, Family] = {kind: _family(facts) for kind, facts in _TABLES["families"].items()}
"""Families by the class of their pipeline."""


def family_of(pipeline: Any) -> Family:
    """The table's entry; the default for a class that is not listed."""
    return FAMILIES.get(type(pipeline).__name__, Family())


def mask_place(family: Family, pipeline: Any) -> int | None:
    """Number of the part of prepare_latents' result that masks kept latents; None: this model has none."""
    return family.mask[1] if family.mask is not None and pipeline.config.get(family.mask[0]) else None


def holds_image(family: Family, pipeline: Any) -> bool:
    """A part of a sample is the encoded image and none of flowrl's latents."""
    return family.holds or mask_place(family, pipeline) is not None


def guidance_of(family: Family, pipeline: Any, parameters: Any, network: nn.Module) -> Guidance:
    """The kind of the pipeline's guidance."""
    if family.guidance is not None:
        return family.guidance
    if pipeline.components.get("guider") is not None:
        return "guider"
    embeds = bool(network_config(network).get("guidance_embeds", False))
    if "guidance_scale" in parameters and (embeds or "true_cfg_scale" not in parameters):
        return "embedded" if embeds else "cfg"
    return "true_cfg" if "true_cfg_scale" in parameters else "none"
