"""CUDA's rules of mixed precision and its fused kernels, for work on tensors of another device.

`torch.autocast` has a list of operations for each kind of device. Most of those that run in float32 on CUDA are not on
the CPU's list, so work under the CPU's autocast stores less than the same work on a GPU. Inside `cuda_rules()` the
CPU's list is extended by CUDA's, and RMSNorm is one kernel, as on CUDA.

Source: torch, aten/src/ATen/autocast_mode.h; docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flowrl.core.assets import table

_LISTS = table(Path(__file__).with_suffix(".yaml"))
FLOAT32, FLOAT32_RESULT, WIDEST, LOWER = (
    tuple(_LISTS[name]) for name in ("float32", "float32_result", "widest", "lower")
)
NORMS: dict[str, str] = _LISTS["norms"]
"""Operations without a dtype -> the forms that take one, here float32."""


def operator(name: str) -> Any:
    """The operator `name` or `name.overload` of torch.

    >>> operator("softmax.int").name()
    'aten::softmax.int'
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _eligible(value):
        return value.to(dtype)
    if isinstance(value, list | tuple):
        return [_cast(each, dtype) for each in value]
    return {name: _cast(each, dtype) for name, each in value.items()} if isinstance(value, dict) else value


_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by place and by name."""


def _float32(lower: torch.dtype, *args: Any, **kwargs: Any) -> _Call:
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


def _float32_result(lower: torch.dtype, *args: Any, **kwargs: Any) -> _Call:
    given = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    return args, kwargs if given or not _eligible(args[0]) else kwargs | {"dtype": torch.float32}


def _norm(lower: torch.dtype, x: Tensor, p: Any = 2, *rest: Any) -> _Call:
    dims = () if not rest else (*rest, False)[:2]
    return (x, p, *dims), {"dtype": torch.float32 if _eligible(x) else x.dtype}


def _widest(lower: torch.dtype, *args: Any, **kwargs: Any) -> _Call:
    found = [value.dtype for value in (*args, *kwargs.values()) if _eligible(value)]
    dtype = torch.float32 if torch.float32 in found else lower
    return _cast(args, dtype), _cast(kwargs, dtype)


def _lower(lower: torch.dtype, *args: Any, **kwargs: Any) -> _Call:
    return _cast(args, lower), _cast(kwargs, lower)


def _kernel(device: str, op: Any, rule: Callable[..., _Call]) -> Callable[..., Any]:
    """The operator on what a rule makes of its arguments, under the autocast of a device."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = rule(torch.get_autocast_dtype(device), *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return op(*args, **kwargs)

    return kernel


class _RmsNorm(torch.autograd.Function):
    """The shapes of CUDA's kernel, without values: it keeps x and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = x.shape[: x.ndim - len(shape)]
        scale = x.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x), scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weight) if ctx.needs_input_grad[2] else None


def kernels(device: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(operator, its kernel under autocast of `device`) of the whole of CUDA's list."""
    for names, rule in ((FLOAT32, _float32), (FLOAT32_RESULT, _float32_result), (WIDEST, _widest), (LOWER, _lower)):
        for name in names:
            yield name, _kernel(device, operator(name), rule)
    for name, form in NORMS.items():
        yield name, _kernel(device, operator(form), _norm)


@contextmanager
def cuda_rules() -> Iterator[None]:
    """CUDA's dtypes under the CPU's autocast inside the block, and RMSNorm as one kernel; for fake tensors on the CPU.

    Casts to lower precision stay the CPU's, which keeps a cast weight as CUDA does.
    """
    library = Library("aten", "IMPL")
    lower = set(LOWER) - {"mv", "addmv", "addr", "einsum"}
    try:
        for name, kernel in kernels("cpu"):
            if name not in lower:
                library.impl(name, kernel, "AutocastCPU")
        norm: Callable[..., Any] = lambda x, shape, weight=None, eps=None: _RmsNorm.apply(x, shape, weight)  # noqa: E731
        library.impl("_fused_rms_norm", norm, "AutogradCPU")
        yield
    finally:
        library._destroy()
