"""SD3 and SD3.5: the original MMDiT keeps query, key and value of an attention in one matrix.

Source: names as Comfy-Org/ComfyUI:comfy/lora.py and kohya-ss/sd-scripts:networks/lora_sd3.py expect them; the same
pairs of names as diffusers' SD3 converter.
"""

from __future__ import annotations

import re

from flowrl.models.lora_formats.places import Family, Place

# diffusers' module in a block -> (original module, which third of its rows)
FUSED = {
    f"{attention}.{ours}": (f"{block}.{attention}.qkv", third)
    for attention, block, names in (
        ("attn", "x_block", ("to_q", "to_k", "to_v")),
        ("attn", "context_block", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ("attn2", "x_block", ("to_q", "to_k", "to_v")),
    )
    for third, ours in enumerate(names)
}
PLAIN = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "norm1.linear": "x_block.adaLN_modulation.1",
}
OUTSIDE = {
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
}
"""Of modules outside the blocks. `norm_out.linear` is left out: the original has its rows in another order."""


def place(name: str) -> Place | None:
    if name in OUTSIDE:
        return Place(OUTSIDE[name], OUTSIDE[name])
    match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
    if match is None:
        return None
    block, own = f"joint_blocks.{match[1]}.", match[2]
    if own in FUSED:
        module, third = FUSED[own]
        return Place(block + module, block + module, third, (1, 1, 1))
    return Place(block + PLAIN[own], block + PLAIN[own]) if own in PLAIN else None


FAMILY = Family("SD3", "SD3Transformer2DModel", "networks.lora_sd3", place)
