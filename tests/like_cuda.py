"""torch.autocast on the CPU with a rule of CUDA's that the CPU's lacks: norms compute, and answer, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_NORMS = ("layer_norm", "rms_norm", "group_norm")


@contextmanager
def norms_in_float32() -> Iterator[None]:
    """CUDA's rule inside the block, for all calls through torch.nn.functional under autocast."""
    plain = {name: getattr(F, name) for name in _NORMS}

    def raised(name: str) -> Any:
        def norm(*args: Any, **kwargs: Any) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                args = tuple(a.float() if isinstance(a, Tensor) else a for a in args)
                kwargs = {key: a.float() if isinstance(a, Tensor) else a for key, a in kwargs.items()}
            return plain[name](*args, **kwargs)

        return norm

    for name in _NORMS:
        setattr(F, name, raised(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(F, name, function)
