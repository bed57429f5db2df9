"""A pretended CUDA card: product code runs on it unchanged, and every wait of the host for the card is counted.

    with card() as gpu:
        adapter.to(CUDA)
        ...
    gpu.waits  # what the host waited for, in order, with the line of flowrl

A tensor of the card says that it is on `cuda:0` and keeps its values in host memory, so control flow is the real one
and results are those of the CPU. Followed are the rules of CUDA that the CPU does not have:

    devices       tensors of card and host in one operation are refused, except where CUDA takes them
    dtypes        autocast has CUDA's list of operations (flowrl/planning/cuda_rules.py)
    attention     query, key and value must have one dtype, that of the model (`Card.half`): flash takes no other
    waits         values read by the host (item, tolist, bool), copies to the host, operations whose result has a
                  size that depends on values (nonzero, unique, masks as indices), copies of pageable host memory

torch's FakeTensorMode knows the devices too, but its tensors have no values, and their backward pass asks for a card:
C++ sees a tensor of this card on `meta`, so autograd runs it on the calling thread.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.planning.cuda_rules import kernels

CUDA, HOST, _META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
_ATEN = torch.ops.aten

_SIZED_BY_VALUES = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "equal",
}  # fmt: skip
"""Operations whose result has a size, or is a Python value, that the host must wait for."""
_TAKES_HOST = {"_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations that take tensors of the host beside those of the card."""


_OF_CARD = {
    op: decomposition_table[op] for op in (_ATEN._fused_rms_norm.default, _ATEN._fused_rms_norm_backward.default)
}
"""Operations that the CPU has not, in terms of others."""


class OnCard(Tensor):
    """A tensor of the card; `value` is where its values are."""

    value: Tensor
    device = property(lambda self: CUDA)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]
    is_meta = is_cpu = property(lambda self: False)  # pyright: ignore[reportAssignmentType]
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(value: Tensor) -> OnCard:
        """The tensor of the card with the values of a host tensor, in the same memory."""
        reach = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        shell = torch.empty(value.storage_offset() + reach if value.numel() else 0, dtype=value.dtype, device="meta")
        shell = shell.as_strided(value.shape, value.stride(), value.storage_offset() if value.numel() else 0)
        made = Tensor._make_subclass(OnCard, shell, False, device_for_backend_keys=CUDA)  # pyright: ignore
        made.value = value
        return made

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        Tensor.data.__set__(self, new)  # pyright: ignore
        assert isinstance(new, OnCard)
        self.value = new.value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the card outside `card()`")


@dataclass(frozen=True)
class Wait:
    """The host waits for the card."""

    what: str
    where: str
    """file:line of flowrl, or of the caller outside it."""

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class Card(TorchDispatchMode):
    """The card inside `card()`."""

    def __init__(self) -> None:
        super().__init__()
        self.half: torch.dtype | None = None
        """The only dtype that attention takes; None: any, if query, key and value have the same."""
        self.waits: list[Wait] = []
        self.marks: list[tuple[str, int]] = []
        """(name, number of waits before it)."""
        self.attention: Counter[torch.dtype] = Counter()
        """Number of calls by dtype."""
        self.pinned: dict[int, Tensor] = {}
        """By storage."""
        self.paused = self.asleep = False
        self.at_work = False
        """A call of torch is under way that names the card, or has a tensor of it."""

    # ---- counting

    def mark(self, name: str) -> None:
        self.marks.append((name, len(self.waits)))

    def between(self, name: str) -> list[list[Wait]]:
        """The waits between neighbouring marks of a name."""
        places = [place for own, place in self.marks if own == name]
        return [self.waits[low:high] for low, high in pairwise(places)]

    def wait(self, what: str, *_: object) -> None:
        if not self.paused:
            self.waits.append(Wait(what, _caller()))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Work inside the block is on the host alone: a pipeline is loaded, part by part on `meta`."""
        before, self.asleep = self.asleep, True
        try:
            yield
        finally:
            self.asleep = before

    # ---- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if self.asleep:
            return func(*args, **kwargs)
        given: list[Tensor] = []
        _mapped(given.append, (*args, *kwargs.values()))
        asked, ours = kwargs.get("device"), any(isinstance(leaf, OnCard) for leaf in given)
        here = asked is not None and asked.type == "meta" and (self.at_work or ours)
        if not here and not ours:
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = HOST
        self._check(func, name, given)
        self._count(name, args, kwargs, here)
        shells: dict[int, OnCard] = {}

        def inner(leaf: Tensor) -> Tensor:
            if not isinstance(leaf, OnCard):
                return leaf
            shells[id(leaf.value)] = leaf
            return leaf.value

        options = {name: _mapped(inner, value) for name, value in kwargs.items()}
        result = _OF_CARD.get(func, func)(*_mapped(inner, args), **options)
        if asked is not None and not here:
            return result
        if name == "copy_" and not isinstance(args[0], OnCard):
            return args[0]

        def outer(leaf: Tensor) -> OnCard:
            known = shells.get(id(leaf))
            return OnCard.of(leaf) if known is None else known

        return _mapped(outer, result)

    def _check(self, func: Any, name: str, given: list[Tensor]) -> None:
        """Refuse tensors of both devices as CUDA does: the host's are scalars, indices or the source of a copy."""
        strangers = [leaf for leaf in given if not isinstance(leaf, OnCard) and leaf.ndim]
        if strangers and len(strangers) < len(given) and name not in _TAKES_HOST:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu")

    def _count(self, name: str, args: Any, kwargs: dict[str, Any], here: bool) -> None:
        if name == "_local_scalar_dense":
            self.wait("value read by the host")
        elif name in _SIZED_BY_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        elif name == "_to_copy":
            self._copied(args[0], here or ("device" not in kwargs), kwargs.get("non_blocking", False))
        elif name == "copy_":
            blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._copied(args[1], isinstance(args[0], OnCard), blocking and self.is_pinned(args[0]))
        elif name in _TAKES_HOST:
            for index in args[1]:
                if isinstance(index, OnCard) and index.dtype in (torch.bool, torch.uint8):
                    self.wait("mask as index")
                elif index is not None and not isinstance(index, OnCard):
                    self.wait("index of the host")

    def _copied(self, source: Tensor, to_card: bool, non_blocking: bool) -> None:
        if isinstance(source, OnCard) and not to_card and not non_blocking:
            self.wait("copy to the host")
        if not isinstance(source, OnCard) and to_card and not self.is_pinned(source):
            self.wait("copy of pageable host memory")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in memory that the card reads without the host."""
        copy = tensor if self.is_pinned(tensor) else tensor.clone()
        self.pinned[copy.untyped_storage()._cdata] = copy
        return copy


_NAMES_ONLY = (torch.device, torch._C._nn._parse_to)  # pyright: ignore[reportAttributeAccessIssue]
"""Functions that read the name of a device, and make no tensor there."""


class _Functions(TorchFunctionMode):
    """What C++ must not see: the name of the card's device, and calls that a subclass of tensors lacks."""

    def __init__(self, gpu: Card) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NAMES_ONLY or self.gpu.asleep:
            return func(*args, **kwargs)
        given, special = (*args, *kwargs.values()), _SPECIAL.get(func)
        named = any(_names_card(value) for value in given)
        if named and special is None:
            args = tuple(_META if _names_card(value) else value for value in args)
            kwargs = {name: _META if _names_card(value) else value for name, value in kwargs.items()}
        # A tensor that is meant to be on `meta`, such as those of a network before its weights are read, is none of
        # the card's.
        before = self.gpu.at_work
        self.gpu.at_work = before or named or any(_of_card(value) for value in given)
        try:
            return func(*args, **kwargs) if special is None else special(self.gpu, func, *args, **kwargs)
        finally:
            self.gpu.at_work = before


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with each of its tensors changed, also those in lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, each) for each in value)
    return value


def _names_card(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def _of_card(value: object) -> bool:
    return isinstance(value, OnCard) or (isinstance(value, list | tuple) and any(_of_card(item) for item in value))


def _tolist(gpu: Card, func: Any, tensor: Tensor) -> Any:
    if not isinstance(tensor, OnCard):
        return func(tensor)
    gpu.wait("tolist")
    return tensor.value.tolist()


def _moved(gpu: Card, func: Any, data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor` and `torch.as_tensor`, which on `meta` would forget the values."""
    made = data if isinstance(data, OnCard) else func(data, *args, **options)
    return made.to(_META if _names_card(device) else device)


def _attended(gpu: Card, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    if isinstance(query, OnCard):
        found = {query.dtype, key.dtype, value.dtype}
        if len(found) > 1 or (gpu.half is not None and found != {gpu.half}):
            raise RuntimeError(
                f"attention of query {query.dtype}, key {key.dtype} and value {value.dtype}: {_caller()}"
            )
        gpu.attention[query.dtype] += 1
    return func(query, key, value, *args, **options)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.tolist: _tolist,
    torch.tensor: _moved,
    torch.as_tensor: _moved,
    torch.nn.functional.scaled_dot_product_attention: _attended,
}


def _caller() -> str:
    """Line of flowrl that is at work; else the innermost one outside torch and this file."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/flowrl/" in file and "/tests/" not in file:
            return f"{file[file.rindex('/flowrl/') + 1 :]}:{frame.f_lineno}"
        if not other and "/torch/" not in file and file != __file__:
            other = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return other


def _available() -> bool:
    """There is a card for flowrl; a library would go on to ask it."""
    file = sys._getframe(1).f_code.co_filename
    return "/flowrl/" in file and "/tests/" not in file


@contextmanager
def card() -> Iterator[Card]:
    """A card inside the block, whose tensors live no longer than it."""
    gpu, library = Card(), Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for name, kernel in kernels("cuda"):
            library.impl(name, kernel, "AutocastCUDA")
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        # Methods of tensors, since a thread has no modes.
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda own, *_: gpu.pin(own)))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda own, *_: gpu.is_pinned(own)))
        stack.enter_context(mock.patch("torch.cuda.is_available", _available))
        for name in ("reset_peak_memory_stats", "max_memory_allocated", "empty_cache"):
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=0))
        for name in ("torch.cuda.synchronize", "torch.accelerator.synchronize"):
            stack.enter_context(mock.patch(name, partial(gpu.wait, "synchronize")))
        # A module keeps its parameters when it moves, as on CUDA.
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(gpu)
        stack.enter_context(_Functions(gpu))
        yield gpu
