"""The families: where a module of diffusers lies in the original network (families.yaml), and other programs' names."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.core.assets import table


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


_TABLES = table(Path(__file__).with_suffix(".yaml"))
"""Kind of block -> the original names of its modules, whole or fused."""


def same(name: str) -> Place:
    """The place of a module whose original name is diffusers' own."""
    return Place(name, name)


def _in_block(kind: str, block: str, own: str) -> Place | None:
    """The place of a module of a block: a whole matrix, or rows of one."""
    names = _TABLES[kind]
    if own in names.get("fused", ()):
        module, slot, widths = names["fused"][own]
        return Place(block + module, block + module, slot, tuple(widths))
    return same(block + names["plain"][own]) if own in names["plain"] else None


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


def _sd3(name: str) -> Place | None:
    match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return _in_block("sd3_outside", "", name)
    return _in_block("sd3", f"joint_blocks.{match[1]}.", match[2])


# ---- FLUX.1: fused query, key and value in double blocks; with the first MLP matrix too in single blocks (`linear1`).
# Source: kohya-ss/sd-scripts:networks/lora_flux.py; diffusers:loaders/lora_conversion_utils.py reads the same names.


def _flux(name: str) -> Place | None:
    match = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return None
    if match[1]:
        return _in_block("flux_single", f"single_blocks.{match[2]}.", match[3])
    return _in_block("flux_double", f"double_blocks.{match[2]}.", match[3])


# ---- Qwen-Image: the original names are diffusers'. Source: kohya-ss/musubi-tuner, networks/lora_qwen_image.py.


def _qwen_image(name: str) -> Place | None:
    return same(name) if name.startswith("transformer_blocks.") else None


# ---- Wan 2.1 and 2.2: other names, nothing fused.
# Source: diffusers:loaders/lora_conversion_utils.py:_convert_non_diffusers_wan_lora_to_diffusers.


def _wan(name: str) -> Place | None:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return None if match is None else _in_block("wan", f"blocks.{match[1]}.", match[2])


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
