"""Wan 2.1 and 2.2: other names, nothing fused.

Source: diffusers:loaders/lora_conversion_utils.py:_convert_non_diffusers_wan_lora_to_diffusers.
"""

from __future__ import annotations

import re

from flowrl.models.lora_formats.places import Family, Place, same

_TAILS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "add_k_proj": "k_img", "add_v_proj": "v_img"}
_NAMES = {
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in _TAILS.items() if "add" not in ours},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in _TAILS.items()},
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}


def place(name: str) -> Place | None:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return None if match is None or match[2] not in _NAMES else same(f"blocks.{match[1]}.{_NAMES[match[2]]}")


FAMILY = Family("Wan", "WanTransformer3DModel", "networks.lora_wan", place, ("lora_A", "lora_B"))
