"""Noise keyed by identity: statistics, independence of the batch, distinct keys."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core.rng import derive, normal, permutation

KEYS = [(iteration, slot, sample) for iteration in range(5) for slot in range(8) for sample in range(16)]

GOLDEN = [0.7678592801094055, -1.5055489540100098, 0.48883822560310364]


def test_keyed_noise_is_standard_normal():
    noise = normal((2, 8, 8), 0, "noise", KEYS).flatten().double()
    count = len(noise)  # 81 920 values: each bound is 4 standard errors
    assert abs(float(noise.mean())) < 4 / math.sqrt(count)
    assert abs(float(noise.var()) - 1) < 4 * math.sqrt(2 / count)
    assert abs(float(noise.pow(3).mean())) < 4 * math.sqrt(15 / count)
    assert abs(float(noise.pow(4).mean()) - 3) < 4 * math.sqrt(96 / count)
    grid = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    share = (noise[None] <= grid[:, None]).double().mean(dim=1)
    expected = 0.5 * (1 + torch.erf(grid / math.sqrt(2)))
    # Kolmogorov: sup |F_n - F| exceeds 1.95 / sqrt(n) in 0.1 % of samples.
    assert float((share - expected).abs().max()) < 1.95 / math.sqrt(count)


def test_draws_of_neighbouring_keys_are_uncorrelated():
    noise = normal((2, 8, 8), 0, "noise", KEYS).flatten(1).double()
    products = torch.corrcoef(noise)
    off = products[~torch.eye(len(products), dtype=torch.bool)]
    # 204 480 pairs of 128 values: the largest |r| of independent draws is about 5.1 / sqrt(128) = 0.45.
    assert float(off.abs().max()) < 6 / math.sqrt(128)
    assert abs(float(off.mean())) < 4 / math.sqrt(128 * len(off) / 2)


@pytest.mark.parametrize("shape", [(3,), (2, 4, 4), (16, 8, 8)])
def test_noise_does_not_depend_on_how_a_batch_is_split(shape):
    keys = KEYS[:12]
    whole = normal(shape, 7, "noise", keys)
    for size in (1, 5, 12):
        parts = [normal(shape, 7, "noise", keys[i : i + size]) for i in range(0, 12, size)]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(shape, 7, "noise", [keys[i] for i in order]), whole[order])


def test_noise_is_bitwise_the_same_in_every_version_of_the_code():
    """The published runs rest on these numbers: a change here changes every image."""
    assert derive(0, "noise", 1, 2) == 7454679448656141705
    found = normal((3,), 0, "rollout/initial", [(1, 0, 0)])[0]
    assert found.tolist() == GOLDEN


def test_drawing_noise_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    normal((4,), 0, "noise", KEYS[:3])
    permutation(5, 0, "order", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_seed_purpose_and_key_gives_another_draw():
    everything = [
        derive(seed, purpose, *key)
        for seed in (0, 1, 12)
        for purpose in ("rollout/initial", "rollout/step", "eval/initial", "eval/step", "updates", "prompts")
        for length in range(4)
        for key in itertools.product((0, 1, 2, 10, 12), repeat=length)
    ]
    assert len(set(everything)) == len(everything)
    assert all(0 <= value < 2**63 for value in everything)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 10**6), max_size=5).map(tuple), min_size=2, max_size=20, unique=True))
def test_keys_of_any_length_never_collide(keys):
    assert len({derive(3, "noise", *key) for key in keys}) == len(keys)


def test_a_draw_is_the_same_whatever_was_drawn_before():
    first = normal((4,), 0, "noise", [(1,), (2,)])
    normal((100,), 0, "noise", [(1,), (3,)])
    assert torch.equal(normal((4,), 0, "noise", [(2,)])[0], first[1])


def test_a_permutation_holds_every_number_once_and_differs_by_key():
    orders = [permutation(50, 0, "edges", iteration) for iteration in range(3)]
    assert all(order.sort().values.tolist() == list(range(50)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0], permutation(50, 0, "edges", 0))
    assert permutation(0, 0, "edges").tolist() == []


def test_noise_is_float32_on_the_cpu():
    noise = normal((2, 3), 0, "noise", [(1,)])
    assert (noise.dtype, noise.device.type) == (torch.float32, "cpu")
