"""torch.autocast on the CPU with the operations that CUDA's runs in float32, on tensors with values."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.library import Library

from flowrl.planning.cuda_rules import LOWER, kernels


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """CUDA's dtypes under the CPU's autocast inside the block: `cuda_rules`, but for its RMSNorm without values."""
    library = Library("aten", "IMPL")
    try:
        for name, kernel in kernels("cpu"):
            if name not in LOWER:
                library.impl(name, kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()
