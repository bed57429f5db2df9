"""ImageReward on a tiny random BLIP under the published names of weights."""

import json
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flowrl.rewards.image_reward import Config, build

from flowrl.reward import Reward

WIDTH, LAYERS, PATCH, SIDE = 128, 2, 8, 4
TEXT, TEXT_HEADS, VOCABULARY = 24, 3, 34


def published_weights() -> dict[str, torch.Tensor]:
    """Random weights under the names of ImageReward.pt, with those that take no part in a score."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, outputs: int, inputs: int, std: float = 0.12) -> None:
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * std
        weights[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.1

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.1
        weights[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1

    eye, book = "blip.visual_encoder", "blip.text_encoder"
    weights[f"{eye}.cls_token"] = torch.randn(1, 1, WIDTH, generator=generator)
    weights[f"{eye}.pos_embed"] = torch.randn(1, SIDE**2 + 1, WIDTH, generator=generator)
    linear(f"{eye}.patch_embed.proj", WIDTH, 3 * PATCH**2)
    weights[f"{eye}.patch_embed.proj.weight"] = weights[f"{eye}.patch_embed.proj.weight"].view(WIDTH, 3, PATCH, PATCH)
    # Small enough that the first norm's epsilon matters.
    weights |= {name: value * 0.03 for name, value in weights.items()}
    for n in range(LAYERS):
        block = f"{eye}.blocks.{n}"
        norm(f"{block}.norm1", WIDTH)
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        norm(f"{block}.norm2", WIDTH)
        linear(f"{block}.mlp.fc1", 96, WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, 96)
    norm(f"{eye}.norm", WIDTH)
    weights[f"{book}.embeddings.word_embeddings.weight"] = torch.randn(VOCABULARY, TEXT, generator=generator)
    weights[f"{book}.embeddings.position_embeddings.weight"] = torch.randn(40, TEXT, generator=generator)
    weights[f"{book}.embeddings.position_ids"] = torch.arange(40)[None]
    norm(f"{book}.embeddings.LayerNorm", TEXT)
    for n in range(LAYERS):
        layer = f"{book}.encoder.layer.{n}"
        for part, source in (("attention", TEXT), ("crossattention", WIDTH)):
            linear(f"{layer}.{part}.self.query", TEXT, TEXT, 0.3)
            linear(f"{layer}.{part}.self.key", TEXT, source, 0.3)
            linear(f"{layer}.{part}.self.value", TEXT, source, 0.3)
            linear(f"{layer}.{part}.output.dense", TEXT, TEXT, 0.3)
            norm(f"{layer}.{part}.output.LayerNorm", TEXT)
        linear(f"{layer}.intermediate.dense", 40, TEXT, 0.3)
        linear(f"{layer}.output.dense", TEXT, 40, 0.3)
        norm(f"{layer}.output.LayerNorm", TEXT)
    for layer, (outputs, inputs) in zip("02467", ((32, TEXT), (16, 32), (8, 16), (4, 8), (1, 4)), strict=True):
        linear(f"mlp.layers.{layer}", outputs, inputs, 0.35)
    linear("blip.vision_proj", 5, WIDTH)
    linear("blip.text_proj", 5, TEXT)
    return weights


def save(folder: Path) -> Path:
    """Write weights, configuration and a BERT tokenizer whose words are single letters."""
    from transformers import BertTokenizer

    torch.save(published_weights(), folder / "ImageReward.pt")
    sizes = {
        "hidden_size": TEXT,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": TEXT_HEADS,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "encoder_width": 768,
    }
    (folder / "med_config.json").write_text(json.dumps(sizes))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    return folder


def configured(folder: Path, **options: Any) -> Config:
    return Config(model=str(folder), tokenizer=str(folder), device="cpu", **options)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    save(folder)
    return {way: build(configured(folder, preprocess=way)) for way in ("exact", "fast")}
