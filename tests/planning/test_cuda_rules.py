"""CUDA's rules of mixed precision, as the plan follows them on the CPU, against torch's own on fake tensors of CUDA."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flowrl.planning.cuda_rules import FLOAT32, FLOAT32_RESULT, LOWER, NORMS, WIDEST, cuda_rules

HALF = torch.bfloat16
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(TORCH < (2, 14), reason="the rules are those of torch 2.14: docs/support.md")
OTHERS = (
    *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),  # of CUDA alone
    "binary_cross_entropy",  # refused on CUDA, where it would overflow
    "linalg_matrix_sqrth",  # in no denoiser
)
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "linear": lambda x, y, w: F.linear(y, w),
    "matmul": lambda x, y, w: y @ w,
    "layer_norm": lambda x, y, w: F.layer_norm(x, (8,), w[0], w[0]),
    "rms_norm": lambda x, y, w: F.rms_norm(x, (8,), w[0]),
    "group_norm": lambda x, y, w: F.group_norm(x, 2),
    "softmax": lambda x, y, w: x.softmax(-1),
    "softmax in its own dtype": lambda x, y, w: x.softmax(-1, dtype=HALF),
    "pow": lambda x, y, w: x.pow(2),
    "square": lambda x, y, w: x.square(),
    "rsqrt": lambda x, y, w: x.rsqrt(),
    "exp": lambda x, y, w: x.exp(),
    "mean": lambda x, y, w: x.mean(),
    "sum": lambda x, y, w: x.sum(dim=1),
    "cumsum": lambda x, y, w: x.cumsum(0),
    "norm": lambda x, y, w: x.norm(dim=-1),
    "norm of all": lambda x, y, w: torch.norm(x, 3),
    "mse_loss": lambda x, y, w: F.mse_loss(x, x),
    "upsampling": lambda x, y, w: F.interpolate(x[None, None], scale_factor=2.0),
    "silu": lambda x, y, w: F.silu(x),
    "gelu": lambda x, y, w: F.gelu(x),
    "widest": lambda x, y, w: torch.addcmul(x, x, y),
    "cat": lambda x, y, w: torch.cat([x, y]),
    "sin": lambda x, y, w: x.sin(),
}


def dtypes(device: str) -> dict[str, torch.dtype]:
    """Result of each operation on bfloat16 x [8, 8] and float32 y, w [8, 8], under autocast."""
    with FakeTensorMode(), torch.autocast(device, HALF):
        x = torch.empty(8, 8, dtype=HALF, device=device)
        y, w = (torch.empty(8, 8, device=device) for _ in range(2))
        return {name: operation(x, y, w).dtype for name, operation in OPERATIONS.items()}


def test_dtypes_on_the_cpu_are_those_of_cuda():
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
    ):
        expected = dtypes("cuda")
    before = dtypes("cpu")
    assert before != expected, "the rules would change nothing"
    with cuda_rules():
        assert dtypes("cpu") == expected
    assert dtypes("cpu") == before


def test_the_list_is_torchs():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    ours = {f"aten::{name}" for name in (*FLOAT32, *FLOAT32_RESULT, *WIDEST, *LOWER, *NORMS)}
    others = {f"aten::{name}" for name in OTHERS}
    assert {name for name in registered if name.startswith("aten::")} - others == ours


@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_of_rows_is_one_kernel_that_keeps_its_input(grad):
    from flowrl.models.memory.meter import measured

    def work() -> None:
        result = F.rms_norm(x, (64,), weight)
        if grad:
            result.backward(result)

    with FakeTensorMode(), cuda_rules():
        x, weight = torch.empty(32, 64, requires_grad=grad), torch.empty(64, requires_grad=grad)
        peak, _ = measured(work, grad=grad)
    rows = 32 * 4
    # Forward: the result and a number of each row. Backward: gradients of x and of the weight on top.
    assert peak == (2 * x.nbytes + weight.nbytes + rows if grad else x.nbytes + rows)
