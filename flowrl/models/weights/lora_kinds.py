"""The kinds of `model.lora.kind`, as peft has them.

lora      W + alpha / rank * B A
rslora    W + alpha / sqrt(rank) * B A                           (arXiv 2312.03732)
dora      m * (W + alpha / rank * B A) / its norm by rows        (arXiv 2402.09353); m is trained, the norm is constant
lokr      W + alpha / rank * (w1 kron w2)                        (arXiv 2309.14859); w1 begins at 0, w2 is one matrix or
          the product of two of the rank
"""

import re
from collections.abc import Iterable
from typing import Any

import torch

from flowrl.models.base import LoraKind, LoraSettings
from flowrl.models.weights.precision import ADAPTER

LABELS: dict[LoraKind, str] = {"lora": "LoRA", "rslora": "rank-stabilised LoRA", "dora": "DoRA", "lokr": "LoKr"}
_PARTS = re.compile(r"\.(?:lora_(?:A|B|magnitude_vector)|lokr_\w+)\..*$")


def peft_config(lora: LoraSettings, targets: list[str]) -> Any:
    """peft's configuration of the adapter."""
    from peft import LoKrConfig, LoraConfig

    # Dictionaries, since peft declares alpha an integer and takes any number.
    options: dict[str, Any] = {"r": lora.rank, "target_modules": targets}
    if lora.kind == "lokr":
        options |= {"alpha": lora.alpha}
        return LoKrConfig(**options)
    options |= {"lora_alpha": lora.alpha, "use_rslora": lora.kind == "rslora", "use_dora": lora.kind == "dora"}
    return LoraConfig(**options, init_lora_weights="gaussian")


def adapted_modules(names: Iterable[str]) -> dict[str, None]:
    """Modules, in order, that parameters of these names adapt.

    >>> list(adapted_modules(["a.lora_A.default.weight", "a.lora_B.default.weight", "b.lokr_w1.default", "c.weight"]))
    ['a', 'b']
    """
    return {_PARTS.sub("", name): None for name in names if _PARTS.search(name)}


@torch.no_grad()
def measure_norms(layers: Iterable[Any]) -> None:
    """Set DoRA's magnitudes to the norms of the frozen weights in float32, where peft takes the type of the weights.

    The forward divides by norms in float32, so the update is exactly 0 at the start.
    """
    for layer in layers:
        inner, weight = layer.lora_magnitude_vector[ADAPTER], layer.get_base_layer().weight.float()
        inner.weight.data = inner.get_weight_norm(weight, torch.zeros_like(weight), 1.0)
