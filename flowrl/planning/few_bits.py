"""Linear layers with weights in few bits, on tensors without values: the tensors that the libraries' layers hold and
make, so that a plan can measure them without those libraries.

    float8   diffusers' layer-wise casting: the weight is cast up for the forward; autograd keeps that copy
    int8     torchao's weight-only Int8Tensor: int8 values, a float32 scale and an int8 zero point per row; the copy in
             the network's type is kept too
    nf4      bitsandbytes: two weights a byte, a float32 scale per 64; the copy is made again in the backward pass
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.models.base import ModelConfig, torch_dtype
from flowrl.models.memory.savings import FLOAT8

_NF4_BLOCK = 64


def quantise(networks: Iterable[Any], config: ModelConfig) -> None:
    """Linear weights as `memory.quantize` loads them; called before the adapter exists, which is not quantised."""
    if config.memory.quantize is None:
        return
    dtype = torch_dtype(config.dtype)
    for network in networks:
        # diffusers has the layers that it does not quantise in a private attribute alone.
        kept = tuple(network._keep_in_fp32_modules or ())
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear) and not any(f"{part}." in f"{name}." for part in kept):
                _to_int8(module) if config.memory.quantize == "int8" else _to_nf4(module, dtype)


def imitate_casting(networks: Iterable[nn.Module], config: ModelConfig) -> None:
    """Layers that `cast_frozen` has cast, without diffusers' hooks, which swap tensors: fake tensors cannot."""
    if config.memory.layerwise_casting is None:
        return
    stored, dtype = FLOAT8[config.memory.layerwise_casting], torch_dtype(config.dtype)
    for network in networks:
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.dtype == stored:
                given: Any = module
                given.forward = functools.partial(_cast, module, dtype)


def _cast(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    """The forward of a linear layer, or of an embedding of ids."""
    if isinstance(module, nn.Embedding):
        return F.embedding(x, module.weight.to(dtype))
    return F.linear(x, module.weight.to(dtype), None if module.bias is None else module.bias.to(dtype))


def _to_int8(module: Any) -> None:
    rows = module.out_features
    module.weight = nn.Parameter(torch.empty_like(module.weight, dtype=torch.int8), requires_grad=False)
    module.register_buffer("scale", torch.empty(rows, device=module.weight.device))
    module.register_buffer("zero_point", torch.empty(rows, dtype=torch.int8, device=module.weight.device))
    module.forward = functools.partial(_int8_linear, module)


def _int8_linear(module: Any, x: Tensor) -> Tensor:
    product = torch.mm(x.reshape(-1, x.shape[-1]), module.weight.t().to(x.dtype))
    output = (product * module.scale.to(product.dtype)).reshape(*x.shape[:-1], -1)
    if module.bias is not None:
        output += module.bias
    return output


def _to_nf4(module: Any, dtype: torch.dtype) -> None:
    values, device = module.weight.numel(), module.weight.device
    packed = torch.empty(-(-values // 2), 1, dtype=torch.uint8, device=device)
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.register_buffer("scale", torch.empty(-(-values // _NF4_BLOCK), device=device))
    module.forward = functools.partial(_nf4_linear, module, dtype)


def _nf4_linear(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    output = _Nf4.apply(x.to(dtype), module.weight, (module.out_features, module.in_features))
    return (output if module.bias is None else output + module.bias.to(dtype)).to(x.dtype)


class _Nf4(torch.autograd.Function):
    """x W' with a copy of W that lives for one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.dtype = shape, x.dtype
        return x @ packed.new_empty(shape, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ gradient.new_empty(ctx.shape, dtype=ctx.dtype), None, None
