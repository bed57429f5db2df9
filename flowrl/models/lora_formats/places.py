"""Where a module of diffusers lies in the original network of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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


def same(name: str) -> Place:
    """The place of a module whose original name is diffusers' own."""
    return Place(name, name)
