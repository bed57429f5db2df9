"""The families' tables: where a module of diffusers lies in the original network, and the names of other programs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A module's original matrix, and the rows of it that the module has."""

    kohya: str
    """Module name in kohya's files, with dots for the underscores."""
    dotted: str
    """Module name in the original checkpoint."""
    slot: int = 0
    widths: tuple[int, ...] = (1,)
    """Rows of each slot, in units of the input width; one slot: the whole matrix, of any height."""

    @property
    def underscored(self) -> str:
        return "lora_unet_" + self.kohya.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a family's modules.

    Args:
        name: of the family, in words.
        network: class of its denoiser in diffusers.
        module: kohya's name of its trainer for this family, for a file's header.
        place: from diffusers' module name to its place; None where the original has no such module.
        halves: suffixes of A and B in the dotted layout.
    """

    name: str
    network: str
    module: str
    place: Callable[[str], Place | None]
    halves: tuple[str, str] = ("lora_down", "lora_up")


Fused = Mapping[str, tuple[str, int, tuple[int, ...]]]
"""diffusers' module in a block -> (original module, slot among its rows, widths of all slots)."""


def same(name: str) -> Place:
    """The place of a module whose original name is diffusers' own."""
    return Place(name, name)


def _in_block(block: str, own: str, plain: Mapping[str, str], fused: Fused | None = None) -> Place | None:
    """The place of a module of a block: a whole matrix, or rows of one."""
    if fused is not None and own in fused:
        module, slot, widths = fused[own]
        return Place(block + module, block + module, slot, widths)
    return same(block + plain[own]) if own in plain else None


# ---- SD1.x, SD2.x and SDXL: kohya names SD1 and SD2 as diffusers does, SDXL as the original (sgm); ComfyUI reads both.
# Source: kohya-ss/sd-scripts:networks/lora.py; diffusers:loaders/lora_conversion_utils.py for the blocks' numbers.

_PER_LEVEL = 3
"""Original blocks of a level: two of layers, one that changes the size."""


def _original(name: str) -> str | None:
    match = re.fullmatch(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.attentions\.(\d+)\.(.+)", name)
    if match is None:
        return None
    side, level, middle, layer, tail = match.groups()
    if middle:
        return f"middle_block.1.{tail}"
    number = _PER_LEVEL * int(level) + int(layer)
    return f"input_blocks.{number + 1}.1.{tail}" if side == "down" else f"output_blocks.{number}.1.{tail}"


def _sd(name: str) -> Place | None:
    original = _original(name)
    return None if original is None else Place(name, original)


def _sdxl(name: str) -> Place | None:
    original = _original(name)
    return None if original is None else same(original)


# ---- SD3 and SD3.5: the original MMDiT keeps query, key and value of an attention in one matrix.
# Source: names as Comfy-Org/ComfyUI:comfy/lora.py and kohya-ss/sd-scripts:networks/lora_sd3.py expect them; the same
# pairs of names as diffusers' SD3 converter.

_SD3_FUSED: Fused = {
    f"{attention}.{ours}": (f"{block}.{attention}.qkv", third, (1, 1, 1))
    for attention, block, names in (
        ("attn", "x_block", ("to_q", "to_k", "to_v")),
        ("attn", "context_block", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("attn2", "x_block", ("to_q", "to_k", "to_v")),
    )
    for third, ours in enumerate(names)
}
_SD3_PLAIN = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm1.linear": "x_block.adaLN_modulation.1",
}
_SD3_OUTSIDE = {
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
}
"""Of modules outside the blocks. `norm_out.linear` is left out: the original has its rows in another order."""


def _sd3(name: str) -> Place | None:
    match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return same(_SD3_OUTSIDE[name]) if name in _SD3_OUTSIDE else None
    return _in_block(f"joint_blocks.{match[1]}.", match[2], _SD3_PLAIN, _SD3_FUSED)


# ---- FLUX.1: fused query, key and value in double blocks; with the first MLP matrix too in single blocks (`linear1`).
# Source: kohya-ss/sd-scripts:networks/lora_flux.py; diffusers:loaders/lora_conversion_utils.py reads the same names.

_DOUBLE: Fused = {
    **{f"attn.to_{x}": ("img_attn.qkv", slot, (1, 1, 1)) for slot, x in enumerate("qkv")},
    **{f"attn.add_{x}_proj": ("txt_attn.qkv", slot, (1, 1, 1)) for slot, x in enumerate("qkv")},
}
_DOUBLE_PLAIN = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
}
_SINGLE: Fused = {
    name: ("linear1", slot, (1, 1, 1, 4))
    for slot, name in enumerate(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
}
_SINGLE_PLAIN = {"proj_out": "linear2", "norm.linear": "modulation.lin"}


def _flux(name: str) -> Place | None:
    match = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return None
    if match[1]:
        return _in_block(f"single_blocks.{match[2]}.", match[3], _SINGLE_PLAIN, _SINGLE)
    return _in_block(f"double_blocks.{match[2]}.", match[3], _DOUBLE_PLAIN, _DOUBLE)


# ---- Qwen-Image: the original names are diffusers'. Source: kohya-ss/musubi-tuner, networks/lora_qwen_image.py.


def _qwen_image(name: str) -> Place | None:
    return same(name) if name.startswith("transformer_blocks.") else None


# ---- Wan 2.1 and 2.2: other names, nothing fused.
# Source: diffusers:loaders/lora_conversion_utils.py:_convert_non_diffusers_wan_lora_to_diffusers.

_TAILS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "add_k_proj": "k_img", "add_v_proj": "v_img"}
_WAN = {
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in _TAILS.items() if "add" not in ours},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in _TAILS.items()},
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}


def _wan(name: str) -> Place | None:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return None if match is None else _in_block(f"blocks.{match[1]}.", match[2], _WAN)


# ---- all of them

_UNET, _PEFT = "UNet2DConditionModel", ("lora_A", "lora_B")
BY_PIPELINE = {
    "StableDiffusionPipeline": Family("Stable Diffusion", _UNET, "networks.lora", _sd),
    "StableDiffusionXLPipeline": Family("SDXL", _UNET, "networks.lora", _sdxl),
    "StableDiffusion3Pipeline": Family("SD3", "SD3Transformer2DModel", "networks.lora_sd3", _sd3),
    "FluxPipeline": Family("FLUX.1", "FluxTransformer2DModel", "networks.lora_flux", _flux),
    "QwenImagePipeline": Family(
        "Qwen-Image", "QwenImageTransformer2DModel", "networks.lora_qwen_image", _qwen_image, _PEFT
    ),
    "WanPipeline": Family("Wan", "WanTransformer3DModel", "networks.lora_wan", _wan, _PEFT),
}


def family_of(network: Any) -> Family | None:
    """The family of a denoiser; None for one without a table."""
    kind = type(network).__name__
    if kind == _UNET and network.config.addition_embed_type == "text_time":
        return BY_PIPELINE["StableDiffusionXLPipeline"]
    return next((family for family in BY_PIPELINE.values() if family.network == kind), None)
