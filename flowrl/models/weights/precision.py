"""A denoiser in half precision (`model.precision`): in its own dtype, or under torch.autocast.

native      The network's weights, activations and norms are those of its pipeline's own call. LoRA weights stay float32
            and are cast where they are used; with s = alpha / rank a layer is one product more than its frozen one:

                y = base(x) + s (x A') B'  =  addmm(base(x), x A', B', alpha=s)

autocast    torch.autocast around the forward, peft's own LoRA layers, which compute their product in float32 and add it
            in further passes over the output. For weights that are all trained: they are float32.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.core.errors import ModelError
from flowrl.models.base import ModelAdapter, ModelConfig

ADAPTER = "default"
"""peft's name of the trained LoRA; others are frozen."""
_ATTENTION_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
"""diffusers' names of the norms of queries and keys."""


def autocasts(config: ModelConfig, *, trained: bool) -> bool:
    """Whether the network runs under torch.autocast; `trained`: its trained weights are the run's.

    Raises ModelError: native arithmetic of float32 weights in half precision.
    """
    masters = trained and config.lora is None and config.dtype != "float32"
    if masters and config.precision == "native":
        raise ModelError(
            f"model.precision=native with model.dtype={config.dtype} and model.lora=null: weights that are all trained "
            "are float32, so the network has no half-precision dtype of its own to run in",
            [{"model.precision": "autocast"}, {"model.lora": {}}, {"model.dtype": "float32"}],
        )
    return masters or config.precision == "autocast"


def fit_network(adapter: ModelAdapter, networks: Iterable[nn.Module], layers: Iterable[Any]) -> None:
    """Fit denoisers and their LoRA layers, peft's own, to `adapter.autocasts`."""
    if adapter.autocasts:
        cast_attention_norms(networks)
    else:
        join_products(layers)


def cast_attention_norms(networks: Iterable[nn.Module]) -> None:
    """Let the norms of queries and keys return the type of their input.

    CUDA's autocast runs torch's norms in float32. Values keep half precision, and attention kernels that do not cast
    (FlashAttention, xFormers) take tensors of one type only.
    """
    for network in networks:
        for name, part in network.named_modules():
            if name.rpartition(".")[2] in _ATTENTION_NORMS:
                part.register_forward_hook(lambda _, given, output: output.to(given[0].dtype))


def join_products(layers: Iterable[Any]) -> None:
    """Give peft's LoRA layers on linear ones the forward with one addmm, in the type of their frozen layer's output.

    Their classes are replaced by subclasses, so names of parameters, files and peft's own methods stay. LoRA on
    convolutions, DoRA and LoKr keep peft's forward, which computes in float32 and casts back.
    """
    for layer in layers:
        base = layer.get_base_layer()
        if isinstance(base, nn.Linear) and _is_plain(layer):
            layer.__class__ = _joined(type(layer))
            # Layers with weights in few bits may return a view, which must not be written to.
            layer.adds_in_place = type(base) is nn.Linear and base.weight.is_floating_point()
            layer.adds_in_place &= type(base.weight) is nn.Parameter


def _is_plain(layer: Any) -> bool:
    """Whether the update of a layer is scale B A and nothing else."""
    from peft.tuners.lora.layer import LoraLayer

    return isinstance(layer, LoraLayer) and ADAPTER not in layer.lora_variant


class _Joined:
    """The forward of a LoRA on a linear layer; a mix-in for peft's classes."""

    base_layer: Any
    lora_A: Any
    lora_B: Any
    scaling: Any
    disable_adapters: Any
    active_adapters: Any
    adds_in_place: bool

    def forward(self, x: Tensor) -> Tensor:
        """Output [..., out] of inputs [..., in] in half precision or float32."""
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self.base_layer(rows)
        name = self.active_adapters[0]
        if not self.disable_adapters and name in self.lora_A:
            dtype, down, up = result.dtype, self.lora_A[name].weight, self.lora_B[name].weight
            inner = F.linear(rows.to(dtype), down.to(dtype))
            add = result.addmm_ if self.adds_in_place else result.addmm
            result = add(inner, up.to(dtype).t(), alpha=self.scaling[name])
        return result.view(*x.shape[:-1], result.shape[-1])


@functools.cache
def _joined(kind: type) -> type:
    """The class of a LoRA layer with the joined forward, under its own name."""
    return kind if issubclass(kind, _Joined) else type(kind.__name__, (_Joined, kind), {})
