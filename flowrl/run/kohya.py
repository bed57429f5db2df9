"""Kohya's layout of a LoRA of SD3 on a pipeline: from the modules of the original MMDiT to those of diffusers.

The original MMDiT keeps query, key and value in one matrix. Three updates of rank r become one of rank 3r,
down [A_q; A_k; A_v] and up block-diagonal (B_q, B_k, B_v), with three times the alpha: the same function. Back, each of
the three has the whole `down` and its third of the rows of `up`.

Source: names as comfyanonymous/ComfyUI:comfy/lora.py (lora_unet_ + module path with underscores) and
kohya-ss/sd-scripts:networks/lora_sd3.py expect them; the same pairs of names as diffusers' SD3 converter.
"""

from __future__ import annotations

import re

from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.models.lora_formats.sd3 import FUSED, PLAIN

PREFIX = "lora_unet_joint_blocks_"
"""How the names of its tensors begin."""


def from_kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' LoRA tensors `transformer.<module>.lora_A.weight` and `lora_B`: the inverse of `writing.renamed`.

    Each alpha is in the values of its `lora_B`, so that alpha and rank are equal.

    Raises:
        ModelError: a name that the original MMDiT does not have, or half of a pair.
    """
    places: dict[str, list[str]] = {}
    for ours, (original, _) in FUSED.items():
        places.setdefault(original, []).append(ours)
    places |= {original: [ours] for ours, original in PLAIN.items()}
    known = {original.replace(".", "_"): ours for original, ours in places.items()}
    rest, result = dict(tensors), dict[str, Tensor]()
    for key in sorted(name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")):
        match = re.fullmatch(rf"{PREFIX}(\d+)_(.+)", key)
        if match is None or match.group(2) not in known or f"{key}.lora_up.weight" not in rest:
            raise ModelError(f"{key} is no module of SD3's original network, or has no lora_up")
        down, up = rest.pop(f"{key}.lora_down.weight"), rest.pop(f"{key}.lora_up.weight")
        alpha = rest.pop(f"{key}.alpha", None)
        up = up if alpha is None else up * (alpha.item() / len(down))
        modules = known[match.group(2)]
        for module, part in zip(modules, up.chunk(len(modules)), strict=True):
            name = f"transformer.transformer_blocks.{match.group(1)}.{module}"
            result[f"{name}.lora_A.weight"], result[f"{name}.lora_B.weight"] = down.clone(), part.contiguous()
    if rest:
        raise ModelError(f"{len(rest)} tensors are of no module of SD3's blocks, such as {sorted(rest)[0]}")
    return result
