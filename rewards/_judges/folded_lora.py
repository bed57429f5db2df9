"""LoRA weights as PEFT saves them, folded into the weights they adapt. A helper, not a reward."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from flowrl.reward import RewardError

_FACTOR = re.compile(r"^(?P<layer>.+)\.lora_(?P<part>[AB])(\.default)?\.weight$")
_TRAINED_WHOLE = ".modules_to_save.default."
_REPLACED = (".original_module.", ".modules_to_save.")


def merged_weights(tensors: Mapping[str, Tensor], *, scale: float, reward: str) -> dict[str, Tensor]:
    """The weights of the plain network: W + scale * B A where a layer was adapted.

    Args:
        tensors: layer.weight or layer.base_layer.weight with layer.lora_A and layer.lora_B (with PEFT's adapter name
            "default", or without one), and layer.modules_to_save where a layer was trained whole.
        scale: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA.
        reward: its name, for messages.

    Raises:
        RewardError: half a pair, a pair without its weight, or an adapter of another kind.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if match := _FACTOR.match(name):
            factors.setdefault(match["layer"], {})[match["part"]] = value
        elif _TRAINED_WHOLE in name:
            whole[name.replace(_TRAINED_WHOLE, ".")] = value
        elif "lora_" in name:
            raise RewardError(f"reward {reward!r}: the adapter has {name}, which is not of a LoRA on a linear layer")
        elif not any(part in name for part in _REPLACED):
            plain[name.replace(".base_layer.", ".")] = value
    plain |= whole
    for layer, pair in factors.items():
        weight = plain.get(f"{layer}.weight")
        if weight is None or pair.keys() != {"A", "B"}:
            lack = "its weight" if weight is None else "one of its two factors"
            raise RewardError(f"reward {reward!r}: the adapter of {layer} lacks {lack}")
        update = pair["B"].float() @ pair["A"].float()
        plain[f"{layer}.weight"] = (weight.float() + scale * update).to(weight.dtype)
    return plain
