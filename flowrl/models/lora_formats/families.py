"""The families: where a module of diffusers lies in the original network (families.yaml), and other programs' names."""

import re
from collections.abc import Sequence
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
        blocks: (pattern of diffusers' names with the module's own as `own`, original name of the block, its table).
        own_in_kohya: kohya's files have diffusers' names.
        halves: suffixes of A and B in the dotted layout.
    """

    name: str
    network: str
    module: str
    blocks: Sequence[tuple[str, str, str]] = ()
    own_in_kohya: bool = False
    halves: Sequence[str] = ("lora_down", "lora_up")

    def place(self, name: str) -> Place | None:
        """The place of diffusers' module `name`; None where the original has no such module."""
        if self.network == _UNET:
            original = _in_unet(name)
            return None if original is None else Place(name if self.own_in_kohya else original, original)
        for pattern, block, kind in self.blocks:
            if match := re.fullmatch(pattern, name):
                names, block, own = _TABLES["blocks"][kind], match.expand(block), match["own"]
                if own in names.get("fused", ()):
                    module, slot, widths = names["fused"][own]
                    return Place(block + module, block + module, slot, tuple(widths))
                found = own if kind == "same" else names["plain"].get(own)
                return None if found is None else Place(block + found, block + found)
        return None


def _in_unet(name: str) -> str | None:
    match = re.fullmatch(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.attentions\.(\d+)\.(.+)", name)
    if match is None:
        return None
    side, level, middle, layer, tail = match.groups()
    if middle:
        return f"middle_block.1.{tail}"
    number = _PER_LEVEL * int(level) + int(layer)
    return f"input_blocks.{number + 1}.1.{tail}" if side == "down" else f"output_blocks.{number}.1.{tail}"


_UNET = "UNet2DConditionModel"
_PER_LEVEL = 3
"""Original blocks of a UNet's level: two of layers, one that changes the size."""
_TABLES = table(Path(__file__).with_suffix(".yaml"))
BY_PIPELINE = {pipeline: Family(**facts) for pipeline, facts in _TABLES["families"].items()}
"""Families by the class of their pipeline."""


def family_of(network: Any) -> Family | None:
    """The family of a denoiser; None for one without a table."""
    kind = type(network).__name__
    if kind == _UNET and network.config.addition_embed_type == "text_time":
        return BY_PIPELINE["StableDiffusionXLPipeline"]
    return next((family for family in BY_PIPELINE.values() if family.network == kind), None)
