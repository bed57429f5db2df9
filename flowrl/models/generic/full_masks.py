"""Forwards on fake tensors of networks that sort their tokens by a mask: every mask counts as full.

HunyuanVideo 1.5 gathers the valid tokens of its texts before the others. How many are valid is a value, which fake
tensors have not; all of them together are as many either way, so shapes, operations and bytes are those of a forward
with values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name
from torch.overrides import TorchFunctionMode

_INVERSIONS = (torch.Tensor.__invert__, torch.Tensor.bitwise_not, torch.bitwise_not)
_GATHERS = (torch.Tensor.__getitem__,)
_TESTS = (torch.all, torch.Tensor.all)


class FullMasks(TorchFunctionMode):
    """Inside, a mask of fake tensors picks everything, its inverse nothing, and `torch.all` of one is true."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, and kept, so that no other tensor takes the place of one.
        self._inverse: dict[int, Tensor] = {}
        self._true: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, FakeTensor):
            return func(*args, **(kwargs or {}))
        if func in _GATHERS and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            mask = args[1]
            flat = first.flatten(0, mask.ndim - 1)
            return flat[:0] if id(mask) in self._inverse else flat
        if func is torch.Tensor.__bool__ and id(first) in self._true:
            return True
        result = func(*args, **(kwargs or {}))
        if func in _INVERSIONS and first.dtype == torch.bool:
            self._inverse[id(result)] = result
        elif func in _TESTS:
            self._true[id(result)] = result
        return result
