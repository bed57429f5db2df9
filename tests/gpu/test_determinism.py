"""Deterministic mode on a GPU: attention's backward pass too gives the same bits twice."""

import pytest
import torch
from torch import nn

from flowrl.training.determinism import prepare, strict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_microbatch_has_the_same_gradient_twice(dtype: torch.dtype):
    """One attention of SD3's size on 1,229 tokens, with its projections."""
    prepare()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4, 1229, 1536, device="cuda", generator=generator)
    weights = nn.Linear(1536, 3 * 1536).to("cuda")

    def gradient() -> list[torch.Tensor]:
        weights.zero_grad()
        with strict(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            q, k, v = weights(x).reshape(4, 1229, 3, 24, 64).permute(2, 0, 3, 1, 4)
            nn.functional.scaled_dot_product_attention(q, k, v).float().square().sum().backward()
        return [p.grad.clone() for p in weights.parameters() if p.grad is not None]

    first, second = gradient(), gradient()
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
