"""Kinds of LoRA files that are not read, each with its name and a remedy."""

import re
from collections.abc import Sequence
from pathlib import Path

from flowrl.core.assets import table

KNOWN = table(Path(__file__).with_name("known.yaml"))
"""What files of LoRAs are told by."""


def refuse_keys(keys: list[str]) -> str | None:
    """Why a file with these tensors is not read; None where nothing speaks against it."""
    return _first(KNOWN["updates"] + KNOWN["others"], keys)


def other_update(keys: list[str]) -> str | None:
    """What a file is that is no product of two matrices; None for a LoRA."""
    return _first(KNOWN["updates"], keys)


def _first(kinds: Sequence[Sequence[str]], keys: list[str]) -> str | None:
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
