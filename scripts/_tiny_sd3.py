"""The untrained parts of tiny-sd3: its tokenizers, and every network at its size."""

from __future__ import annotations

import torch

from flowrl import shapes

CLIP_LENGTH = 12


def words() -> list[str]:
    captions = [form for group in shapes.scenes().values() for scene in group for form in scene.forms]
    return sorted({word for caption in captions for word in caption.split() if word.isalpha()})


def clip_tokenizer():
    """Every word of the world is one token; other words fall back to their characters."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,-!?'")
    pieces = letters + [letter + "</w>" for letter in letters]
    merges: list[tuple[str, str]] = []
    # BPE applies the earliest merge first: long words lead, so that no short one cuts through them.
    for word in sorted(words(), key=len, reverse=True):
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols) > 1:
            pair = (symbols[0], symbols[1])
            if pair not in merges:
                merges.append(pair)
                if pair[0] + pair[1] not in pieces:
                    pieces.append(pair[0] + pair[1])
            symbols = [symbols[0] + symbols[1], *symbols[2:]]
    vocab = {piece: index for index, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)
    split = [word for word in words() if len(tokenizer.tokenize(word)) != 1]
    assert not split, f"words that are not one token: {split}"
    return tokenizer


def t5_tokenizer():
    from transformers import T5TokenizerFast

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,-!?'")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581" + word, -2.0) for word in words() if len(word) > 1]
    pieces += [("\u2581a", -2.0), ("\u2581", -6.0)] + [(letter, -8.0) for letter in letters]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=256)
    split = [word for word in words() if len(tokenizer.tokenize(word)) != 1]
    assert not split, f"words that are not one token: {split}"
    return tokenizer


def _clip(tokenizer):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    # SD3 reads hidden_states[-2]: three layers give two to the tokens.
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        projection_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def _t5(tokenizer):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)


def _vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _transformer():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=8,
    )


def build_pipeline(seed: int):
    """The untrained pipeline, about 3.6 M parameters, deterministic in `seed`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    torch.manual_seed(seed)
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    # The order of these calls is the order of the draws.
    t5, vae, transformer = _t5(tokenizer_3), _vae(), _transformer()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=tokenizer_3,
    )
