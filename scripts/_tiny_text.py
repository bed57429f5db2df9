"""The words of the shapes world, and the CLIP tokenizer that the tiny models share."""

from __future__ import annotations

from flowrl import shapes

CLIP_LENGTH = 12
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789.,-!?'")


def captions() -> list[str]:
    """Every form of every caption of the world."""
    return [form for group in shapes.scenes().values() for scene in group for form in scene.forms]


def words() -> list[str]:
    return sorted({word for caption in captions() for word in caption.split() if word.isalpha()})


def require_whole_words(tokenizer) -> None:
    """Every word of the world must be one token."""
    split = [word for word in words() if len(tokenizer.tokenize(word)) != 1]
    assert not split, f"words that are not one token: {split}"


def clip_tokenizer():
    """Every word of the world is one token; other words fall back to their characters."""
    from transformers import CLIPTokenizer

    pieces = LETTERS + [letter + "</w>" for letter in LETTERS]
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
    require_whole_words(tokenizer)
    return tokenizer


def clip_config(tokenizer, **sizes):
    """CLIPTextConfig with the tokenizer's own ids: the defaults lie outside the vocabulary."""
    from transformers import CLIPTextConfig

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=CLIP_LENGTH, **ids, **sizes)
