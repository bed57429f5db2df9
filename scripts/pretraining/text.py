"""The words of the shapes world, and the tokenizers that the tiny models share."""

from __future__ import annotations

from flowrl import shapes

CLIP_LENGTH = 12
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,-!?'")


def captions() -> list[str]:
    """Every form of every caption of the world."""
    return [form for group in shapes.scenes().values() for scene in group for form in scene.forms]


def words() -> list[str]:
    return sorted({word for caption in captions() for word in caption.split() if word.isalpha()})


def require_whole_words(tokenizer, known: list[str] | None = None) -> None:
    """Every word, by default of the world of images, must be one token."""
    split = [word for word in known or words() if len(tokenizer.tokenize(word)) != 1]
    assert not split, f"words that are not one token: {split}"


def t5_tokenizer(known: list[str] | None = None):
    """Every word, by default of the world of images, is one token; other words fall back to their characters."""
    from transformers import T5TokenizerFast

    known = known or words()
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581" + word, -2.0) for word in known if len(word) > 1]
    pieces += [("\u2581a", -2.0), ("\u2581", -6.0)] + [(letter, -8.0) for letter in LETTERS]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=256)
    require_whole_words(tokenizer, known)
    return tokenizer


def t5_sizes(tokenizer) -> dict[str, int | float]:
    """Options of the T5Config of tiny-sd3 and of the UMT5Config of tiny-wan: one size of text encoder."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")}
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 192, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return {"vocab_size": len(tokenizer), **sizes, **ids}


def clip_tokenizer(known: list[str] | None = None):
    """Every word is one token, by default of the world of images; other words fall back to their characters.

    Where one word's pieces would cut another, `known` has the latter first.
    """
    from transformers import CLIPTokenizer

    # BPE applies the earliest merge first: long words lead, so that no short one cuts through them.
    known = known or sorted(words(), key=len, reverse=True)
    pieces = LETTERS + [letter + "</w>" for letter in LETTERS]
    merges: list[tuple[str, str]] = []
    for word in known:
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
    require_whole_words(tokenizer, known)
    return tokenizer


def clip_config(tokenizer, **sizes):
    """CLIPTextConfig with the tokenizer's own ids: the defaults lie outside the vocabulary."""
    from transformers import CLIPTextConfig

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=CLIP_LENGTH, **ids, **sizes)
