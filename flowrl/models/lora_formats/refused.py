"""Kinds of LoRA files that are not read, each with its name and a remedy."""

import re

_UPDATES = (
    (r"dora_scale|lora_magnitude_vector", "is a DoRA: merge it into the model"),
    (r"\.lokr_", "is a LoKr: merge it into the model"),
    (r"\.hada_", "is a LoHa: merge it into the model"),
    (r"oft_|boft", "is an OFT or BOFT: merge it into the model"),
    (r"\.(a1|a2|b1|b2)\.weight$", "is a GLoRA: merge it into the model"),
    (r"lora_mid", "is a LoCon with lora_mid, of convolutions: merge it into the model"),
)
_KINDS = (
    *_UPDATES,
    (r"\.diff(_b)?$|\.w_norm$|\.b_norm$|\.set_weight$|\.reshape_weight$", "holds whole changes of weights: merge it"),
    (r"\.lora_(B|up)\.bias$", "trains biases of a LoRA (lora_B.bias), which model.lora has not: merge it"),
    (r"^(lora_te\d?_|text_encoder|lora_prior_te)", "adapts a text encoder, which is not trained here: remove its keys"),
    (r"\.transformer_[12]\.", "holds both experts in one file: split it into NAME_high_noise and NAME_low_noise"),
)


def refuse_keys(keys: list[str]) -> str | None:
    """Why a file with these tensors is not read; None where nothing speaks against it."""
    return _first(_KINDS, keys)


def other_update(keys: list[str]) -> str | None:
    """What a file is that is no product of two matrices; None for a LoRA."""
    return _first(_UPDATES, keys)


def _first(kinds: tuple[tuple[str, str], ...], keys: list[str]) -> str | None:
    for pattern, reason in kinds:
        found = next((key for key in sorted(keys) if re.search(pattern, key)), None)
        if found is not None:
            return f"{reason} ({found})"
    return None


def refuse_header(about: dict[str, str]) -> str | None:
    """Why a file with this header is not read."""
    if re.search(r"split_qkv\W+true", about.get("ss_network_args", ""), re.IGNORECASE):
        return (
            "was trained with split_qkv=True, whose alpha is written for one part and read for the fused rank "
            "(sd-scripts#2204): train with split_qkv=False, or merge it with sd-scripts"
        )
    return None
