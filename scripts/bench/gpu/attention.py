"""Backends of scaled_dot_product_attention at the shapes of the models: time, error, the default, equal bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.gpu.clock import timed
from scripts.bench.gpu.records import Records, Row, middle

BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MOST_MATH = 5000
"""Tokens up to which the whole matrix of weights is made."""
_COMPARED = 256
"""Queries whose result is compared with float32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention of a model."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    masked: bool = False
    """With texts of different lengths: the last tokens of every other row are masked."""

    def smaller(self, divisor: int) -> Shape:
        """The same with fewer rows, heads and tokens."""
        batch, heads = max(self.batch // divisor, 2), max(self.heads // divisor, 1)
        return Shape(self.name, batch, heads, max(self.tokens // divisor, 16), self.width, self.masked)


SHAPES = (
    Shape("sd3", 16, 24, 1229, 64),
    Shape("flux", 4, 24, 4608, 128),
    Shape("wan", 1, 12, 32760, 128),
    Shape("qwen", 4, 24, 4400, 128),
    Shape("qwen, masked", 4, 24, 4400, 128, masked=True),
)


def measure(device: torch.device, dtype: torch.dtype, divisor: int, repeats: int, records: Records) -> None:
    """Results of all shapes, whose sizes are divided by `divisor`."""
    for whole in SHAPES:
        shape = whole if divisor == 1 else whole.smaller(divisor)
        size = [shape.batch, shape.heads, shape.tokens, shape.width]
        names = {"shape": shape.name, "size": size, "dtype": str(dtype).removeprefix("torch.")}
        for backend in BACKENDS:
            if backend == "math" and shape.tokens > MOST_MATH:
                continue
            records.attempt(
                lambda s=shape, b=backend: of_backend(s, b, device, dtype, repeats),
                what="attention",
                **names,
                backend=backend,
            )
        records.attempt(lambda s=shape: of_default(s, device, dtype), what="attention default", **names)


def _drawn(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(q, k and v [3, B, H, L, D], the mask [B, 1, 1, L] or None)."""
    size, generator = (3, shape.batch, shape.heads, shape.tokens, shape.width), torch.Generator(device).manual_seed(0)
    qkv = torch.randn(size, device=device, dtype=dtype, generator=generator)
    if not shape.masked:
        return qkv, None
    kept = torch.full((shape.batch,), shape.tokens, device=device)
    kept[::2] -= min(40, shape.tokens // 2)
    return qkv, (torch.arange(shape.tokens, device=device) < kept[:, None])[:, None, None]


def _choosing(backend: str) -> Any:
    kind = BACKENDS[backend]
    return nullcontext() if kind is None else sdpa_kernel(kind)


def of_backend(shape: Shape, backend: str, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    qkv, mask = _drawn(shape, device, dtype)
    with _choosing(backend):
        with torch.no_grad():
            forward = middle(timed(lambda: scaled_dot_product_attention(*qkv, attn_mask=mask), device, repeats))
            output = scaled_dot_product_attention(*qkv, attn_mask=mask)
        leaf = qkv.clone().requires_grad_()
        held = scaled_dot_product_attention(*leaf, attn_mask=mask)
        direction = torch.randn_like(held)
        backward = middle(timed(lambda: torch.autograd.grad(held, leaf, direction, retain_graph=True), device, repeats))
    flop = 4 * shape.batch * shape.heads * shape.tokens**2 * shape.width
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": round(flop / forward / 1e9, 3),
        "deviation": _deviation(output, qkv, mask),
    }


def _deviation(output: Tensor, qkv: Tensor, mask: Tensor | None) -> float:
    """|output - reference| / |reference| over the first queries; the reference is float32."""
    q, k, v = qkv[0, :, :, :_COMPARED].float(), qkv[1].float(), qkv[2].float()
    with sdpa_kernel(SDPBackend.MATH):
        reference = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    part = output[:, :, :_COMPARED].float()
    return float(f"{float((part - reference).norm() / reference.norm()):.3g}")


class Operators(TorchDispatchMode):
    """The attention operators that were called inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def of_default(shape: Shape, device: torch.device, dtype: torch.dtype) -> Row:
    """The operators that torch chooses, and whether bits are equal with and without gradient, and from run to run."""
    qkv, mask = _drawn(shape, device, dtype)
    leaf = qkv.clone().requires_grad_()
    with torch.no_grad(), Operators() as plain:
        without = scaled_dot_product_attention(*qkv, attn_mask=mask)
    with Operators() as graded:
        output = scaled_dot_product_attention(*leaf, attn_mask=mask)
    result: Row = {
        "no_grad": ", ".join(plain.names) or "math",
        "grad": ", ".join(graded.names) or "math",
        "same_output": torch.equal(without, output.detach()),
    }
    for name, warn_only in (("strict", False), ("warn_only", True)):
        with _deterministic(warn_only=warn_only):
            result[f"{name}_gradients_equal"] = _twice(leaf, mask)
    return result


def _twice(leaf: Tensor, mask: Tensor | None) -> bool | str:
    """Whether two gradients have equal bits; the message of a refusal."""
    try:
        found = []
        for _ in range(2):
            output = scaled_dot_product_attention(*leaf, attn_mask=mask)
            found.append(torch.autograd.grad(output.float().square().sum(), leaf)[0])
        return torch.equal(*found)
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]


@contextmanager
def _deterministic(*, warn_only: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
