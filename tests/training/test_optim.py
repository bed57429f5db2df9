"""The optimizer step: schedules, clipping, skipping, averaging, state."""

import copy
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.models.weights.roles import Weights
from flowrl.training.optim import Optimizer, Spikes, StepReport
from flowrl.training.options import ClipConfig, EmaConfig, OptimConfig
from flowrl.training.world import World


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def make(total: int = 10, *, loss_scaling: bool = False, **options: Any) -> tuple[nn.Sequential, Weights, Optimizer]:
    module = network()
    weights = Weights(module, None, (), 0)
    return module, weights, Optimizer(weights, OptimConfig(**options), total, loss_scaling=loss_scaling)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def draw(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


SIZE = len(flat(network()))


def step(optimizer: Optimizer, gradient: Tensor) -> StepReport:
    """A step on a flat gradient, which stays as it is."""
    return optimizer.step(optimizer.pieces(gradient.clone()))


def rates(total: int, **options) -> list[float]:
    """Learning rates of `total` updates and of the one after."""
    _, _, optimizer = make(total, learning_rate=1.0, **options)
    found = [step(optimizer, draw(SIZE, k)).learning_rate for k in range(total)]
    return [*found, optimizer.learning_rate()]


# ---- learning rate


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0] * 7),
        ({"warmup_updates": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6, 0.0]),
        ({"schedule": "linear", "warmup_updates": 2}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(7)]),
    ],
)
def test_the_rate_rises_linearly_then_stays_or_falls_to_zero_after_the_last_update(options, expected):
    assert rates(6, **options) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_never_turns_negative_past_the_planned_end(schedule):
    _, _, optimizer = make(2, schedule=schedule)
    found = [step(optimizer, draw(SIZE, k)).learning_rate for k in range(5)]
    assert found[2:] == pytest.approx([0.0] * 3, abs=1e-12)


def test_the_reported_rate_is_the_one_that_moves_the_weights():
    """Adam's first step moves every weight by the rate (times sign), weight decay apart."""
    module, _, optimizer = make(4, learning_rate=0.1, warmup_updates=4, weight_decay=0.0, max_grad_norm=None)
    before, gradient = flat(module), draw(SIZE)
    report = step(optimizer, gradient)
    # eps 1e-8 against |g| > 1e-3; float32 subtraction of weights below 1.
    assert_close(before - flat(module), report.learning_rate * gradient.sign(), rtol=1e-4, atol=1e-6)
    assert report.learning_rate == pytest.approx(0.025)


# ---- the step


def test_steps_are_those_of_adamw():
    module, _, optimizer = make(learning_rate=0.01, weight_decay=0.1, betas=[0.8, 0.99], max_grad_norm=None)
    twin = network()
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    reference = torch.optim.AdamW(twin.parameters(), **options)
    for k in range(4):
        gradient = draw(SIZE, k)
        step(optimizer, gradient)
        for p, part in zip(twin.parameters(), gradient.split([p.numel() for p in twin.parameters()]), strict=True):
            p.grad = part.view_as(p)
        reference.step()
        assert torch.equal(flat(module), flat(twin))


@pytest.mark.parametrize(("norm", "limit", "kept"), [(10.0, 2.0, 2.0), (1.5, 2.0, 1.5), (10.0, None, 10.0)])
def test_a_gradient_is_clipped_by_its_norm_and_the_norm_before_is_reported(norm, limit, kept):
    _, weights, optimizer = make(max_grad_norm=limit)
    gradient = draw(SIZE)
    gradient = gradient * (norm / gradient.norm())
    report = step(optimizer, gradient)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    first = torch.cat([optimizer.adam.state[p]["exp_avg"].flatten() for p in weights.parameters.values()])
    # beta1 0.9: the first moment after one step is a tenth of what Adam was given.
    assert_close(first, 0.1 * gradient * (kept / norm), rtol=1e-5, atol=1e-7)


def test_gradients_are_not_copied_and_are_zeros_where_there_are_none():
    module, _, optimizer = make(learning_rate=0.1, weight_decay=0.0)
    module[1](torch.ones(1, 4)).sum().backward()
    found = optimizer.gradients()
    assert [float(part.sum()) for part in found] == [0.0, 0.0, 8.0, 2.0]  # the first layer took no part
    assert [part.shape for part in found] == [p.shape for p in module.parameters()]
    assert found[2] is module[1].weight.grad
    before = flat(module)
    optimizer.step(found)
    assert torch.equal(flat(module)[:16], before[:16])
    assert bool((flat(module)[16:] < before[16:]).all())
    assert all(p.grad is None for p in module.parameters())


# ---- skipping


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(bad):
    module, weights, optimizer = make(ema=EmaConfig())
    step(optimizer, draw(SIZE))
    tensors, _ = copy.deepcopy(optimizer.state())
    before, average = flat(module), {k: v.clone() for k, v in weights.copies["ema"].items()}
    gradient = draw(SIZE)
    gradient[3] = bad
    report = step(optimizer, gradient)
    assert report.skipped
    assert not math.isfinite(report.grad_norm)
    assert torch.equal(flat(module), before)
    assert all(torch.equal(v, average[k]) for k, v in weights.copies["ema"].items())
    assert all(torch.equal(v, tensors[k]) for k, v in optimizer.state()[0].items())
    assert (optimizer.updates, optimizer.skipped) == (1, 1)
    assert not step(optimizer, draw(SIZE)).skipped


def test_the_loss_scale_halves_on_overflow_to_1_and_doubles_after_two_thousand_good_steps():
    _, _, optimizer = make(loss_scaling=True)
    for scale in (2.0**16, 2.0**15):
        assert optimizer.scale == scale
        step(optimizer, torch.full((SIZE,), math.inf))
    optimizer.load_state({}, {"updates": 0, "skipped": 1, "scale": 2.0**15, "good": 1998})
    for scale in (2.0**15, 2.0**16):
        step(optimizer, draw(SIZE))
        assert optimizer.scale == scale
    for _ in range(40):
        step(optimizer, torch.full((SIZE,), math.inf))
    assert optimizer.scale == 1.0
    _, _, plain = make()
    step(plain, torch.full((SIZE,), math.nan))
    assert plain.scale == 1.0


# ---- the average


@pytest.mark.parametrize(
    "options",
    [
        {"every": 1},
        {"every": 3},
        {"every": 3, "warmup": False},
        {"every": 3, "first": 2, "repeats": 2},
        {"every": 2, "warmup_terms": [0.0, 18.0]},
    ],
)
def test_the_average_follows_its_formula(options):
    """ema = w ema + (1 - w) p with w = min((a + n) / (b + n), decay)^repeats at update n = first, first + every, ..."""
    module, weights, optimizer = make(ema=EmaConfig(decay=0.3, **options), learning_rate=0.05)
    expected, (a, b) = flat(module).double(), options.get("warmup_terms", (1, 10))
    for n in range(1, 9):
        step(optimizer, draw(SIZE, n))
        if n in range(options.get("first", options["every"]), 9, options["every"]):
            weight = min((a + n) / (b + n), 0.3) if options.get("warmup", True) else 0.3
            weight **= options.get("repeats", 1)
            expected = weight * expected + (1 - weight) * flat(module).double()
        found = torch.cat([weights.copies["ema"][name].flatten() for name in weights.parameters])
        # float32 lerp against float64, up to eight times.
        assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_evaluation_uses_the_average_only_where_there_is_one():
    assert make()[2].role == "policy"
    assert "ema" not in make()[1].copies
    assert make(ema=EmaConfig())[2].role == "ema"


# ---- state


def test_a_run_goes_on_bitwise_after_a_round_trip_through_a_file(tmp_path):
    options = {"ema": EmaConfig(decay=0.5, every=2), "schedule": "cosine", "learning_rate": 0.05}
    module, weights, optimizer = make(8, **options)
    for k in range(3):
        step(optimizer, draw(SIZE, k))
    tensors, counters = optimizer.state()
    save_file(tensors, tmp_path / "optim.safetensors")
    save_file(weights.state(), tmp_path / "weights.safetensors")

    again, its_weights, its_optimizer = make(8, **options)
    its_weights.load_state(load_file(tmp_path / "weights.safetensors"))
    its_optimizer.load_state(load_file(tmp_path / "optim.safetensors"), counters)
    assert its_optimizer.state()[1] == counters
    for k in range(3, 8):
        assert step(its_optimizer, draw(SIZE, k)) == step(optimizer, draw(SIZE, k))
        assert torch.equal(flat(again), flat(module))
    assert all(torch.equal(v, weights.copies["ema"][k]) for k, v in its_weights.copies["ema"].items())


def test_a_state_before_the_first_update_is_empty_and_a_loaded_one_shares_no_memory():
    _, _, optimizer = make()
    assert optimizer.state()[0] == {}
    empty, start = optimizer.state()
    step(optimizer, draw(SIZE))
    tensors, counters = optimizer.state()
    kept = {k: v.clone() for k, v in tensors.items()}
    _, _, other = make()
    other.load_state(tensors, counters)
    step(other, draw(SIZE))
    assert all(torch.equal(tensors[k], kept[k]) for k in kept)
    optimizer.load_state(empty, start)
    assert optimizer.updates == 0
    assert optimizer.state()[0] == {}


# ---- norms that stand out


def spikes_after(norms: list[float], **options: Any) -> Spikes:
    known: dict[str, Any] = {"name": "zscore"} | options
    spikes = Spikes(ClipConfig(**known))
    for norm in norms:
        spikes.clipped(norm)
    return spikes


def test_equal_norms_are_never_clipped_and_dead_iterations_do_not_enter():
    spikes = Spikes(ClipConfig(name="zscore", warmup=2))
    assert [spikes.clipped(norm) for norm in [0.03, 0.0] * 200] == [0.03, 0.0] * 200
    assert spikes.mean == pytest.approx(0.03)


def test_a_spike_is_clipped_to_the_golden_norm_and_enters_clipped():
    norms = [float(x) for x in 0.03 + 0.003 * draw(25, 3)]
    mean = sum(norms) / 25
    variance = sum((x - mean) ** 2 for x in norms) / 25
    for name in ("zscore", "mean"):
        spikes = spikes_after(norms, name=name)
        assert (spikes.mean, spikes.variance) == pytest.approx((mean, variance))
        score = (0.3 - mean) / (variance**0.5 + 1e-6 * mean)
        golden = mean + (2.5**2 * variance**0.5 / score if name == "zscore" else 0.0)
        assert spikes.clipped(0.3) == pytest.approx(golden)
        after = 0.97 * mean + 0.03 * golden
        assert spikes.mean == pytest.approx(after)
        assert spikes.variance == pytest.approx(0.97 * variance + 0.03 * (golden - after) ** 2)


def test_a_spike_moves_the_weights_as_its_clipped_gradient_and_is_reported_as_it_was():
    options: dict[str, Any] = {"weight_decay": 0.0, "betas": [0.0, 0.999]}
    clip = ClipConfig(name="mean", warmup=2)
    (one, _, first), (other, _, second) = make(clip=clip, **options), make(max_grad_norm=None, **options)
    unit = draw(SIZE) / draw(SIZE).norm()
    for size, kept in ((0.4, 0.4), (0.6, 0.6), (9.0, 0.5)):
        assert step(first, size * unit).grad_norm == pytest.approx(size)
        step(second, kept * unit)
        assert_close(flat(one), flat(other))


def test_the_statistics_of_norms_are_in_the_counters_and_older_checkpoints_have_none():
    norms = [float(x) for x in 0.5 + 0.1 * draw(9, 3)]
    _, _, optimizer = make(clip=ClipConfig(name="zscore", warmup=4))
    for norm in norms:
        step(optimizer, norm * draw(SIZE) / draw(SIZE).norm())
    tensors, counters = optimizer.state()
    _, _, again = make(clip=ClipConfig(name="zscore", warmup=4))
    again.load_state(tensors, json.loads(json.dumps(counters)))
    assert vars(again.spikes) == vars(optimizer.spikes)
    assert "norms" not in make()[2].state()[1]
    again.load_state(tensors, {"updates": 9, "skipped": 0, "scale": 1.0, "good": 9})
    assert again.spikes.count == 0


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"limit": 0.0}, {"warmup": 1}])
def test_a_clip_without_a_meaning_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ClipConfig(**options)


@dataclass(frozen=True)
class OfFour(World):
    """One of four processes whose parts are alike."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return 4 * tensor


def test_split_weights_are_clipped_by_the_norm_of_the_whole_gradient():
    module = network()
    weights = Weights(module, None, (), 0)
    weights.split = True
    config = OptimConfig(clip=ClipConfig(name="mean", warmup=2), max_grad_norm=None)
    optimizer = Optimizer(weights, config, 10, world=OfFour(0, 4, torch.device("cpu")))
    assert step(optimizer, draw(SIZE) / draw(SIZE).norm()).grad_norm == pytest.approx(2.0)
    assert optimizer.spikes.mean == pytest.approx(2.0)
