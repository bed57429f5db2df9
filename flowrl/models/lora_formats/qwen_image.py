"""Qwen-Image: the original names are diffusers'. Source: kohya-ss/musubi-tuner, networks/lora_qwen_image.py."""

from __future__ import annotations

from flowrl.models.lora_formats.places import Family, Place, same


def place(name: str) -> Place | None:
    return same(name) if name.startswith("transformer_blocks.") else None


FAMILY = Family("Qwen-Image", "QwenImageTransformer2DModel", "networks.lora_qwen_image", place, ("lora_A", "lora_B"))
