"""What a device can do at most: matrix products of random numbers, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from scripts.bench.gpu.clock import timed
from scripts.bench.gpu.records import Records, Row, middle

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
"""Kind of matrix product -> type of its factors; tf32 is float32 rounded by the matrix units."""


def measure(device: torch.device, size: int, copied_mib: int, repeats: int, records: Records) -> None:
    """TFLOP/s of products of two [size, size] matrices of N(0, 1), and GB/s of copies of `copied_mib` MiB."""
    for name in DTYPES:
        records.attempt(lambda n=name: _product(n, device, size, repeats), what="matmul", kind=name)
    count = copied_mib * 2**20
    records.attempt(lambda: _copy(device, count, repeats), what="copy", kind="device to device")
    for pinned in (True, False) if device.type == "cuda" else ():
        kind = f"{'pinned' if pinned else 'pageable'} host to device"
        records.attempt(lambda p=pinned: _upload(device, count // 4, repeats, pinned=p), what="copy", kind=kind)


def _product(name: str, device: torch.device, size: int, repeats: int) -> Row:
    dtype = DTYPES[name]
    if name in ("tf32", "float8") and device.type != "cuda":
        raise ValueError(f"{name} products are a GPU's")
    # Never zeros: they run faster than numbers.
    drawn = torch.randn(2, size, size, device=device)
    with _rounding(name == "tf32"):
        times = timed(_multiply(drawn, dtype), device, repeats)
    return {"size": size, "ms": middle(times), "tflops": middle([2 * size**3 / ms / 1e9 for ms in times])}


def _multiply(drawn: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The product of two matrices [2, n, n] in a type; float8 with one scale for each factor and a bfloat16 result."""
    a, b = drawn.to(dtype)
    if dtype != torch.float8_e4m3fn:
        return lambda: a @ b
    one, columns = torch.ones((), device=drawn.device), b.t().contiguous().t()
    return lambda: torch.nn.functional.scaled_mm(
        a,
        columns,
        one,
        torch.nn.functional.ScalingType.TensorWise,
        one,
        torch.nn.functional.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )


@contextmanager
def _rounding(allowed: bool) -> Iterator[None]:
    """float32 products on the matrix units, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(device: torch.device, count: int, repeats: int) -> Row:
    """A copy inside the device; bytes read and bytes written both count."""
    source = torch.empty(count // 4, device=device).normal_()
    target = torch.empty_like(source)
    times = timed(lambda: target.copy_(source), device, repeats)
    return {"size": count, "ms": middle(times), "gbs": middle([2 * count / ms / 1e6 for ms in times])}


def _upload(device: torch.device, count: int, repeats: int, *, pinned: bool) -> Row:
    source = torch.randn(count // 4, pin_memory=pinned)
    target = torch.empty(count // 4, device=device)
    times = timed(lambda: target.copy_(source, non_blocking=True), device, repeats)
    return {"size": count, "ms": middle(times), "gbs": middle([count / ms / 1e6 for ms in times])}
