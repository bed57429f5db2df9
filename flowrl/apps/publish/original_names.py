"""A LoRA under the original names of its family.

Slots of one matrix are fused: n updates of rank r become one of rank n * r, A stacked and B block-diagonal, with n
times the alpha: the same function. A slot that was not trained has zero rows and columns, since readers divide the rank
by n.
"""

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ModelError, Remedy
from flowrl.models.lora_formats.families import Family, Place

Layout = Literal["kohya", "comfyui"]


def renamed(tensors: dict[str, Tensor], scale: float, family: Family, layout: Layout) -> dict[str, Tensor]:
    """diffusers' LoRA tensors (`<module>.lora_A.weight` [r, in], `lora_B` [out, r]) under the original names.

    Args:
        tensors: by module, without the component's prefix.
        scale: alpha / r; each written alpha is scale times the written rank.
        family: whose table is used.
        layout: kohya: `lora_unet_` and underscores; comfyui: `diffusion_model.` and dots.

    Raises ModelError: a module without a place in the table, a convolution, or tensors that are no plain LoRA.
    """
    modules = sorted(k.removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight"))
    known = {f"{name}.lora_{half}.weight" for name in modules for half in "AB"}
    if set(tensors) != known:
        odd = sorted(set(tensors) ^ known)[0]
        raise ModelError(f"{odd}: only a plain LoRA has names in the layout {layout}", Remedy(flag="--format merged"))
    groups: dict[str, tuple[Place, dict[int, tuple[Tensor, Tensor]]]] = {}
    for name in modules:
        pair = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
        place = family.place(name)
        if place is None or pair[0].ndim != 2:
            raise ModelError(
                f"{name} is not in the table of {family.name} for the layout {layout}",
                [Remedy(flag="--format diffusers"), Remedy(flag="--format merged")],
            )
        groups.setdefault(place.dotted, (place, {}))[1][place.slot] = pair
    result: dict[str, Tensor] = {}
    for place, parts in groups.values():
        down, up = parts[0] if place.widths == (1,) else fuse(parts, place.widths)
        key, halves = place.underscored, ("lora_down", "lora_up")
        if layout == "comfyui":
            key, halves = f"diffusion_model.{place.dotted}", family.halves
        result[f"{key}.{halves[0]}.weight"] = down.contiguous()
        result[f"{key}.{halves[1]}.weight"] = up.contiguous()
        result[f"{key}.alpha"] = torch.tensor(scale * len(down))
    return result


def fuse(parts: dict[int, tuple[Tensor, Tensor]], widths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(A [n r, in], B [out, n r]) of some of n slots; others are not updated. Raises ModelError: several ranks."""
    first = next(iter(parts.values()))[0]
    rank, into = first.shape
    if {len(down) for down, _ in parts.values()} != {rank}:
        raise ModelError(
            "modules that share a matrix of the original network have several ranks", Remedy(flag="--format merged")
        )
    down, up = torch.zeros(len(widths) * rank, into), torch.zeros(sum(widths) * into, len(widths) * rank)
    row = 0
    for slot, width in enumerate(widths):
        if slot in parts:
            columns = slice(slot * rank, (slot + 1) * rank)
            down[columns], up[row : row + width * into, columns] = parts[slot]
        row += width * into
    return down, up
