"""Bytes and operations of work on tensors: real ones, or fake ones that have shapes and no values."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_LISTS, _WHOLE = (torch.tensor, torch.arange), (torch.int32, torch.int64)


def _scores(q: torch.Tensor, k: torch.Tensor) -> int:
    """Scores of queries [B, H, T, D] over keys [B, H or fewer, S, D]."""
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def _widths(q: torch.Tensor, v: torch.Tensor, of_keys: int, of_values: int) -> int:
    """Operations of a score in so many products over the width of keys and over that of values."""
    return 2 * (of_keys * q.shape[-1] + of_values * v.shape[-1])


_FLOP = {
    **flop_registry,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],  # a LoRA's product, added in place
    # torch counts attention on a GPU only, and before 2.12 refuses keys that several heads share.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: _scores(q, k) * _widths(q, v, 1, 1),
    # The scores again, then the gradients of values, of scores, of queries and of keys.
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        _scores(q, k) * _widths(q, v, 3, 2)
    ),
}


class Meter(TorchDispatchMode):
    """Bytes of the storages made inside the block: `now` still alive, `peak` the most at any moment; and `flop`.

    torch's own FlopCounterMode keeps activations alive under gradient checkpointing, so it cannot be used with this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flop = 0
        self.moment = self.peak_after = 0
        """A number that the work may set, and its value when the peak was reached."""
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FLOP.get(func.overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **kwargs, out_val=result)
        # A storage's address in C++: fake tensors have no data_ptr, and Python objects of one storage differ.
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._alive:
                continue  # a view, or written in place
            self._alive.add(key)
            self.now += size
            if self.now > self.peak:
                self.peak, self.peak_after = self.now, self.moment
            weakref.finalize(storage, self._free, key, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


class KnownValues(TorchFunctionMode):
    """Inside, what is computed from tensors with values alone has values too: a loop reads its timesteps and numbers of
    rows. So have new lists and rows of whole numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        known = func in _LISTS or (func is torch.zeros and kwargs.get("dtype") in _WHOLE)
        if any(isinstance(value, FakeTensor) for value in given) or not (given or known):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@contextmanager
def faked(*modules: nn.Module) -> Iterator[None]:
    """Fake tensors inside the block; the meta parameters of `modules` become fake ones on the CPU."""
    # Small tables and constants outside modules stay as they are.
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        for part in (sub for module in modules for sub in module.modules()):
            for name, p in list(part.named_parameters(recurse=False)):
                setattr(part, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad))
            for name, b in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty(b.shape, dtype=b.dtype))
            for name, t in list(vars(part).items()):
                if isinstance(t, torch.Tensor):  # tables that are not buffers, such as Qwen-Image's rotary ones
                    setattr(part, name, torch.empty(t.shape, dtype=t.dtype))
        yield


def measured(work: Callable[[], Any], *, grad: bool) -> tuple[int, float]:
    """(peak bytes, operations) of `work`."""
    with torch.set_grad_enabled(grad), Meter() as meter:
        work()
    return meter.peak, float(meter.flop)
