"""Each reward's share of the variance inside groups."""

import pytest
import torch

from flowrl.credit.shares import variance_shares

SOME = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.tensor([1.0, 0.5, -2.0])
ALL = torch.ones(5, 8, dtype=torch.bool)


def test_shares_add_up_to_one_and_ignore_what_a_prompt_adds_to_all_its_samples():
    shares = variance_shares(SOME, WEIGHTS, ALL)
    assert shares is not None
    # Sums of 120 float64 values.
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    shifted = SOME.double() + torch.randn(3, 5, 1, generator=torch.Generator().manual_seed(1)).double()
    assert variance_shares(shifted, WEIGHTS, ALL) == pytest.approx(shares, abs=1e-9)


def test_a_share_is_the_part_of_the_variance_of_the_sum():
    shares = variance_shares(SOME[:2], torch.tensor([1.0, 10.0]), ALL)
    assert shares is not None
    first, total = SOME[0].double(), SOME[0].double() + 10 * SOME[1].double()
    first, total = (x - x.mean(dim=1, keepdim=True) for x in (first, total))
    assert shares[0] == pytest.approx(float((first * total).sum() / total.square().sum()), rel=1e-9)


def test_a_masked_sample_counts_nowhere():
    valid = ALL.clone()
    valid[:, 3] = False
    holed = SOME.clone()
    holed[:, :, 3] = torch.nan
    rest = [n for n in range(8) if n != 3]
    assert variance_shares(holed, WEIGHTS, valid) == pytest.approx(
        variance_shares(SOME[:, :, rest], WEIGHTS, ALL[:, rest]), rel=1e-12
    )


def test_equal_rewards_have_no_shares():
    assert variance_shares(torch.ones(2, 3, 4), torch.ones(2), torch.ones(3, 4, dtype=torch.bool)) is None
    assert variance_shares(torch.randn(2, 3, 4), torch.zeros(2), torch.ones(3, 4, dtype=torch.bool)) is None
