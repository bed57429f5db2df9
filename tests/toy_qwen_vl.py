"""A tiny Qwen2-VL with random weights and its tokenizer, built offline, for the rewards that regress on one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

HIDDEN = 32
CHAT = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]


def save_base(folder: Path, texts: Iterable[str]) -> str:
    """Write config.json and a byte-level tokenizer trained on `texts`, as a Qwen2-VL's folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    words.train_from_iterator(list(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 640,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    config.save_pretrained(folder)
    return str(folder)


def network(base: str, marks: Iterable[str], seed: int = 0) -> tuple[Any, Any]:
    """(Qwen2VLForConditionalGeneration, tokenizer) with the marks added; weights large enough to tell inputs apart."""
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    config: Any = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.15)
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_q.weight" in name:
                torch.nn.init.ones_(weight)
    return model, tokenizer


def published(model: Any) -> dict[str, torch.Tensor]:
    """Its weights under the names of transformers 4.45, which the released checkpoints have."""
    names = {}
    for name, value in model.state_dict().items():
        old = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        names[old] = value.clone()
    return names


def read(
    model: Any, tokenizer: Any, text: str, *, kind: str, pixels: torch.Tensor, grid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [L] and last hidden states [L, D] of a chat text, as the released code runs it: no positions are given.

    `pixels` and `grid` [1, 3] are from transformers' own processor; `kind` is "image" or "video".
    """
    place = f"<|{kind}_pad|>"
    ids = tokenizer(text.replace(place, place * int(grid.prod() // 4)), return_tensors="pt").input_ids
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        seen = model.model.visual(pixels, grid_thw=grid).pooler_output
        places = ids == tokenizer.convert_tokens_to_ids(place)
        embedded = embedded.masked_scatter(places[..., None].expand_as(embedded), seen)
        hidden = model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return ids[0], hidden[0]
