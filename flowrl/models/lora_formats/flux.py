"""FLUX.1: fused query, key and value in double blocks; with the first MLP matrix too in single blocks (`linear1`).

Source: kohya-ss/sd-scripts:networks/lora_flux.py; diffusers:loaders/lora_conversion_utils.py reads the same names.
"""

from __future__ import annotations

import re

from flowrl.models.lora_formats.places import Family, Place

_DOUBLE: dict[str, tuple[str, int]] = {
    **{f"attn.to_{x}": ("img_attn.qkv", slot) for slot, x in enumerate("qkv")},
    **{f"attn.add_{x}_proj": ("txt_attn.qkv", slot) for slot, x in enumerate("qkv")},
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
_SINGLE = {"attn.to_q": 0, "attn.to_k": 1, "attn.to_v": 2, "proj_mlp": 3}
_SINGLE_PLAIN = {"proj_out": "linear2", "norm.linear": "modulation.lin"}


def place(name: str) -> Place | None:
    match = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return None
    block, own = f"{'single' if match[1] else 'double'}_blocks.{match[2]}.", match[3]
    if match[1] and own in _SINGLE:
        return Place(f"{block}linear1", f"{block}linear1", _SINGLE[own], (1, 1, 1, 4))
    if not match[1] and own in _DOUBLE:
        module, slot = _DOUBLE[own]
        return Place(block + module, block + module, slot, (1, 1, 1))
    plain = (_SINGLE_PLAIN if match[1] else _DOUBLE_PLAIN).get(own)
    return None if plain is None else Place(block + plain, block + plain)


FAMILY = Family("FLUX.1", "FluxTransformer2DModel", "networks.lora_flux", place)
