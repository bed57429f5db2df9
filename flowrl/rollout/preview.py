"""A cheaper copy of the denoiser for a preview of many samples: adapter merged, half precision, 8 bit, compiled.

The copy takes over the policy's weights, base + scale B A, before every preview. Its samples are never trained on.

    merged     one matrix product fewer per adapted layer, full precision
    bfloat16   merged, weights and activations in bfloat16
    int8       merged, dynamic 8-bit integers, by torchao
    float8     merged, dynamic 8-bit floats, by torchao; NVIDIA GPUs of compute capability 8.9 and later
    compiled   merged, by torch.compile
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError, Remedy
from flowrl.models.base import ModelAdapter
from flowrl.models.weights.roles import ADAPTER
from flowrl.rollout.options import PreviewKind


class Preview:
    """The copy of a native adapter, which calls `adapter.network` itself, and the adapter that runs with it inside
    `using`. The kind "policy" is no copy; `watch` is called with every new network, to count its forwards.

    Raises ModelError: a kind that this adapter, machine or installation does not support.
    """

    def __init__(
        self, adapter: ModelAdapter, kind: PreviewKind, watch: Callable[[nn.Module], None] = lambda network: None
    ) -> None:
        self.adapter, self.kind, self.watch = adapter, kind, watch
        self.network: Any = None
        if kind == "policy":
            return
        if not adapter.own_network:
            raise ModelError(
                f"rollout.exploration.network={kind!r}: the generic adapter enters the pipeline's own network",
                {"rollout.exploration.network": "policy"},
            )
        if isinstance(adapter.network, nn.ModuleDict):
            raise ModelError(
                f"rollout.exploration.network={kind!r}: a model with several experts has no copy",
                {"rollout.exploration.network": "policy"},
            )
        _require(kind)
        self._plain = _without_adapter(adapter.network)
        self._sources = _sources(adapter.network)

    @torch.no_grad()
    def follow(self) -> None:
        """Take over the present weights of the network."""
        if self.kind == "policy":
            return
        # Names of wrapped layers without peft's wrapper are those of the plain copy.
        target = dict(self._plain.named_parameters())
        for name, (parameter, layer) in self._sources.items():
            value = parameter if layer is None else parameter + layer.get_delta_weight(ADAPTER).to(parameter.dtype)
            target[name].copy_(value)
        if self.network is None or self.kind in ("int8", "float8"):
            self.network = self._made()
            self.watch(self.network)
        elif self.kind == "bfloat16":
            for own, plain in zip(self.network.parameters(), self._plain.parameters(), strict=True):
                own.copy_(plain)

    def _made(self) -> Any:
        if self.kind == "bfloat16":
            return _Cast(copy.deepcopy(self._plain).bfloat16())
        if self.kind == "compiled":
            return torch.compile(self._plain)
        if self.kind == "merged":
            return self._plain
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )

        kinds = {"int8": Int8DynamicActivationInt8WeightConfig, "float8": Float8DynamicActivationFloat8WeightConfig}
        result = copy.deepcopy(self._plain)
        quantize_(result, kinds[self.kind]())
        return result

    @contextmanager
    def using(self) -> Iterator[None]:
        """The adapter with the copy as its network; its weights are those of the last `follow`."""
        if self.kind == "policy":
            yield
            return
        kept = self.adapter.network
        self.adapter.network = self.network
        try:
            yield
        finally:
            self.adapter.network = kept


class _Cast(nn.Module):
    """A network in bfloat16 that takes float32 inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.network.parameters()).device.type, dtype=torch.bfloat16):
            return self.network(*(_half(a) for a in args), **{k: _half(v) for k, v in kwargs.items()})


def _half(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _require(kind: PreviewKind) -> None:
    if kind not in ("int8", "float8"):
        return
    try:
        import torchao  # noqa: F401
    except ImportError:
        raise ModelError(
            f"rollout.exploration.network={kind!r} needs torchao",
            [Remedy(command="pip install 'flowrl[quant]'"), {"rollout.exploration.network": "bfloat16"}],
        ) from None
    if kind == "float8" and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
        raise ModelError(
            "rollout.exploration.network='float8' needs an NVIDIA GPU of compute capability 8.9",
            {"rollout.exploration.network": "bfloat16"},
        )


def _without_adapter(network: nn.Module) -> nn.Module:
    """A frozen copy of the network as it was before peft wrapped its layers."""
    result: Any = copy.deepcopy(network)
    # The run's own count of evaluations; torch has no public list of hooks.
    result._forward_pre_hooks.clear()
    for part in result.modules():
        if vars(part).get("peft_config"):
            part.unload_lora()
    return result.requires_grad_(False).eval()


def _sources(network: nn.Module) -> dict[str, tuple[nn.Parameter, Any]]:
    """Name in the plain copy -> (parameter of the network, its adapted layer if it is a weight that LoRA changes)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: part for name, part in network.named_modules() if isinstance(part, BaseTunerLayer)}
    result: dict[str, tuple[nn.Parameter, Any]] = {}
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            continue
        place, _, kind = name.rpartition(".base_layer.")
        result[name.replace(".base_layer.", ".")] = (parameter, layers.get(place) if kind == "weight" else None)
    return result
