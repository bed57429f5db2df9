"""SD1.x, SD2.x and SDXL: kohya names SD1 and SD2 as diffusers does, SDXL as the original (sgm); ComfyUI reads both.

Source: kohya-ss/sd-scripts:networks/lora.py; diffusers:loaders/lora_conversion_utils.py for the blocks' numbers.
"""

from __future__ import annotations

import re

from flowrl.models.lora_formats.places import Family, Place

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


def place(name: str) -> Place | None:
    original = _original(name)
    return None if original is None else Place(name, original)


def place_xl(name: str) -> Place | None:
    original = _original(name)
    return None if original is None else Place(original, original)


FAMILY = Family("Stable Diffusion", "UNet2DConditionModel", "networks.lora", place)
FAMILY_XL = Family("SDXL", "UNet2DConditionModel", "networks.lora", place_xl)
