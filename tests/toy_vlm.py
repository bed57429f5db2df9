"""Tiny vision-language models with random weights and their processors, built offline, for the judges."""

from pathlib import Path
from typing import Any, Literal

import torch

Family = Literal["llava", "qwen2_vl"]
IMAGE_SIZE = 16
_SPECIAL = ("<pad>", "<end>", "<image>", "<vision>", "</vision>", "<no-thinking>")
_MERGES = [("Y", "e"), ("Ye", "s"), ("N", "o"), ("\u0120", "Yes"), ("\u0120", "No")]
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}"
    "<no-thinking>{% endif %}{% endif %}"
)
_SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer() -> Any:
    """Byte-level BPE whose only words are Yes and No, with and without a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=_MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<end>",
        extra_special_tokens=list(_SPECIAL[2:]),
        padding_side="right",
    )


def _llava(words: Any) -> tuple[Any, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_SIZE, image_size=IMAGE_SIZE, patch_size=8),
        text_config=LlamaConfig(**_SIZE, vocab_size=len(words), pad_token_id=0, bos_token_id=None, eos_token_id=1),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        ),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE.replace("IMAGE", "<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def _qwen2_vl(words: Any) -> tuple[Any, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words.add_special_tokens({"extra_special_tokens": [*_SPECIAL[2:], "<|image_pad|>", "<|video_pad|>"]})
    known = words.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config=_SIZE
        | {"vocab_size": len(words), "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=known("<|image_pad|>"),
        video_token_id=known("<|video_pad|>"),
        vision_start_token_id=known("<vision>"),
        vision_end_token_id=known("</vision>"),
    )
    pixels = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessorPil(**pixels),
        words,
        Qwen2VLVideoProcessor(**pixels),
        chat_template=_TEMPLATE.replace("IMAGE", "<vision><|image_pad|></vision>"),
    )
    return Qwen2VLForConditionalGeneration(config), processor


def save(folder: Path, family: Family, seed: int = 0) -> str:
    """Write model and processor to `folder`; weights large enough that pictures and texts tell apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = {"llava": _llava, "qwen2_vl": _qwen2_vl}[family](tokenizer())
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
