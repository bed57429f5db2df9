"""A tiny CLIP with random weights, built offline, for the rewards that use one."""

from pathlib import Path

import torch

IMAGE_SIZE = 32
TEXT_LENGTH = 40


def save(folder: Path, seed: int = 0) -> str:
    """Write model and tokenizer to `folder`; weights large enough that pictures and texts tell apart."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *[letter + "</w>" for letter in letters], "-", "-</w>", "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(pieces) - 2, "eos_token_id": len(pieces) - 1, "pad_token_id": len(pieces) - 1}
    config = CLIPConfig(
        text_config=size | ends | {"vocab_size": len(pieces), "max_position_embeddings": TEXT_LENGTH},
        vision_config=size | {"image_size": IMAGE_SIZE, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
