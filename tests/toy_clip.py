"""Tiny CLIPs with random weights, built offline, for the rewards that use one."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

IMAGE_SIZE = 32
# open_clip's defaults are CLIP's own; others show that the folder's are read.
MEAN, STD = (0.4, 0.5, 0.45), (0.3, 0.25, 0.2)
TEXT_LENGTH = 40


def vocabulary() -> list[str]:
    """Letters; the end of a text is the last piece, as the pooling of texts expects."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    return [*letters, *[letter + "</w>" for letter in letters], "-", "-</w>", "<|startoftext|>", "<|endoftext|>"]


def drawn(build: Callable[[], Any], seed: int) -> Any:
    """A network with weights large enough that inputs tell apart; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
    return model.eval()


def save(folder: Path, seed: int = 0) -> str:
    """Write model and tokenizer to `folder`; weights large enough that pictures and texts tell apart."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    pieces = vocabulary()
    tokenizer = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(pieces) - 2, "eos_token_id": len(pieces) - 1, "pad_token_id": len(pieces) - 1}
    config = CLIPConfig(
        text_config=size | ends | {"vocab_size": len(pieces), "max_position_embeddings": TEXT_LENGTH},
        vision_config=size | {"image_size": IMAGE_SIZE, "patch_size": 8},
        projection_dim=16,
    )
    model = drawn(lambda: CLIPModel(config), seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def open_clip_config(**changes: Any) -> dict[str, Any]:
    """`model_cfg` of a tiny open_clip CLIP whose tokenizer lies in its folder."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": IMAGE_SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {
            "context_length": TEXT_LENGTH,
            "vocab_size": len(vocabulary()),
            "hf_tokenizer_name": "letters",
            "width": 32,
            "heads": 2,
            "layers": 2,
        },
    }
    return config | changes


def save_open_clip(folder: Path, seed: int = 0, resize_mode: str = "shortest", **changes: Any) -> str:
    """Write such a CLIP as open_clip itself does for the hub: its configuration, safetensors and tokenizer."""
    import open_clip
    from open_clip.push_to_hf_hub import save_for_hf
    from transformers import CLIPTokenizer

    config = open_clip_config(**changes)
    model = drawn(lambda: open_clip.CLIP(**config), seed)
    open_clip.set_model_preprocess_cfg(model, {"resize_mode": resize_mode, "mean": MEAN, "std": STD})
    model.visual.image_mean, model.visual.image_std = MEAN, STD
    # Of the tokenizer open_clip asks only `save_pretrained`.
    tokenizer: Any = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(vocabulary())}, merges=[])
    save_for_hf(model, tokenizer, config, str(folder), safe_serialization=True)
    return str(folder)


def read(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Embedding [D] that an open_clip CLIP gives a text, unpadded: behind its end nothing can be seen from it."""
    x = model.token_embedding(torch.tensor([tokens])) + model.positional_embedding[: len(tokens)]
    mask = torch.full((len(tokens),) * 2, -math.inf).triu(1)
    for block in model.transformer.resblocks:
        x = block(x, attn_mask=mask)
    return model.ln_final(x)[0, -1] @ model.text_projection
