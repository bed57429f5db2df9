"""Training times: strata, axes, and that a draw belongs to its sample."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms import diffusion_dpo, diffusion_kto, seppo, sft
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import SampleId
from flowrl.diffusion.schedules import Schedule, shift_sigmas
from flowrl.diffusion.training_times import GRID, WITHIN, Times, TimesConfig, draw, strata

SIGMA = ("logit_normal", "uniform", "power")
IDS = [SampleId(slot, sample) for slot in range(3) for sample in range(4)]
MANY = [SampleId(0, sample) for sample in range(2000)]


def nodes_of(times: Times, num_steps: int) -> torch.Tensor:
    """Place on the grid of each time, [B, T]; each must be a node."""
    grid = flow_schedule(num_steps)
    same = times.sigma[..., None] == grid.sigmas[:-1]
    assert bool((same.sum(dim=-1) == 1).all())
    place = same.int().argmax(dim=-1)
    assert torch.equal(times.timestep, grid.timesteps[place])
    return place


# ---- strata


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("discrete", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        ("discrete_wo_init", [[1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        ("discrete_with_init", [[0], [1, 2], [3, 4], [5, 6], [7, 8], [9, 10, 11]]),
    ],
)
def test_the_strata_of_14_steps_with_fraction_0_9_and_6_terms_are_the_published_ones(name, table):
    """with_init: floor(linspace(1, 12, 6)) = 1, 3, 5, 7, 9, 12."""
    config = TimesConfig(name=name)
    assert (config.nodes(14), config.terms(14)) == (range(12), 6)
    assert [list(stratum) for stratum in strata(name, range(12), 6)] == table
    found = nodes_of(draw(config, flow_schedule(14), MANY, (0, 1)), 14)
    assert [sorted(column.unique().tolist()) for column in found.T] == table


@settings(max_examples=200, deadline=None)
@given(nodes=st.integers(1, 60), count=st.integers(1, 60), name=st.sampled_from(GRID[:3]))
def test_strata_share_out_every_node_once_and_none_is_empty(nodes, count, name):
    if count > nodes - (name == "discrete_wo_init"):
        return
    shared = strata(name, range(nodes), count)
    found = [node for stratum in shared for node in stratum]
    first = 1 if name == "discrete_wo_init" else 0
    last = 1 if name == "discrete_with_init" and count == 1 else nodes
    assert found == list(range(first, last))
    assert all(len(stratum) > 0 for stratum in shared)


@pytest.mark.parametrize(("count", "start"), [(3, 0), (12, 0), (1, 0)])
def test_without_the_initial_node_it_is_never_drawn_and_with_it_always(count, start):
    grid = flow_schedule(14)
    wanted = TimesConfig(name="discrete_with_init", count=count)
    assert bool((nodes_of(draw(wanted, grid, IDS, (0, 1)), 14)[:, start] == 0).all())
    if count < 12:
        without = TimesConfig(name="discrete_wo_init", count=count)
        assert int(nodes_of(draw(without, grid, MANY[:200], (0, 1)), 14).min()) == 1


# ---- other rules on the grid


def test_the_permutation_takes_all_but_a_few_of_all_nodes_in_an_order_of_each_sample():
    """N = 10 gives 9 terms, and sigma = 1 is among the nodes."""
    config = TimesConfig(name="permutation", count=None, fraction=0.99)
    found = nodes_of(draw(config, flow_schedule(10), MANY[:300], (0, 1)), 10)
    assert found.shape == (300, 9)
    assert all(len(set(row)) == 9 for row in found.tolist())
    assert set(found[:, 0].tolist()) == set(range(10))
    left_out = [45 - sum(row) for row in found.tolist()]
    assert set(left_out) == set(range(10))


def test_the_subset_stays_in_its_share_of_the_grid_without_repeats():
    config = TimesConfig(name="subset", count=4, fraction=0.7)
    found = nodes_of(draw(config, flow_schedule(10), MANY[:300], (0, 1)), 10)
    assert all(len(set(row)) == 4 for row in found.tolist())
    assert sorted(found.unique().tolist()) == list(range(7))


@pytest.mark.parametrize("name", WITHIN)
def test_noisy_nodes_that_are_left_out_are_never_drawn_and_all_others_are(name):
    config = TimesConfig(name=name, count=4, begin=0.33, fraction=0.8)
    found = nodes_of(draw(config, flow_schedule(25), MANY[:300], (0, 1)), 25)
    assert sorted(found.unique().tolist()) == list(range(8, 20))
    assert all(len(set(row)) == 4 for row in found.tolist())


def test_too_many_terms_for_what_is_left_out_are_refused():
    with pytest.raises(ValueError, match=r"fraction 1 from 0.5 on of 10 steps has 5 nodes, too few for 6 terms"):
        TimesConfig(name="subset", begin=0.5, fraction=1.0).terms(10)


@pytest.mark.parametrize("name", GRID)
def test_grid_rules_work_on_a_noise_process(name):
    grid = vp_schedule(10)
    found = draw(TimesConfig(name=name, count=4), grid, IDS, (0, 1))
    assert set(found.sigma.flatten().tolist()) <= set(grid.sigmas[:-1].tolist())
    assert set(found.timestep.flatten().tolist()) <= set(grid.timesteps.tolist())


@pytest.mark.parametrize(
    ("options", "steps", "fits"),
    [
        ({"name": "discrete", "count": 6}, 6, 5),  # int(6 * 0.9) = 5
        ({"name": "discrete_wo_init", "count": 9}, 10, 8),
        ({"name": "discrete_with_init", "count": 10}, 10, 9),
        ({"name": "subset", "count": 8, "fraction": 0.7}, 10, 7),
        ({"name": "permutation", "count": None, "fraction": 0.4}, 2, None),
    ],
)
def test_more_terms_than_nodes_are_refused_with_the_remedy(options, steps, fits):
    with pytest.raises(ValueError, match=r"too few for \d+ terms; lower times.count, raise times.fraction, or take"):
        TimesConfig(**options).terms(steps)
    if fits is not None:
        assert TimesConfig(**options | {"count": fits}).terms(steps) == fits


# ---- rules on sigma


def test_a_shift_above_1_moves_times_towards_noise():
    """The axis is sigma, so shift 3 has a mean above one half; the median is shift(1/2) = 3/4."""
    grid = flow_schedule(10)
    plain, shifted = (
        draw(TimesConfig(name="logit_normal", shift=shift), grid, MANY, (0, 1)).sigma for shift in (1.0, 3.0)
    )
    # 12000 draws, stratified by six: the standard error is below 0.002.
    assert float(plain.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(plain.median()) == pytest.approx(0.5, abs=0.01)
    assert float(shifted.mean()) > 0.65
    assert float(shifted.median()) == pytest.approx(0.75, abs=0.01)
    assert torch.allclose(shifted, shift_sigmas(plain.double(), 3.0).clamp(min=0.01).float(), atol=1e-6)
    spread = torch.special.logit(plain.double())
    assert float(spread.std()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_power_law_has_the_mean_of_its_density(power):
    """p(sigma) = (1 + a) sigma^a on (0, 1] has mean (1 + a) / (2 + a)."""
    found = draw(TimesConfig(name="power", power=power, count=4), flow_schedule(10), MANY, (0, 1)).sigma
    assert float(found.mean()) == pytest.approx((1 + power) / (2 + power), abs=0.01)
    assert 0 < float(found.min()) < float(found.max()) <= 1


def test_uniform_times_are_stratified_from_their_least():
    """One in each sixth of [0.2, 1], in an order of each sample."""
    config = TimesConfig(name="uniform", shift=1.0)
    found = draw(config, flow_schedule(10), MANY[:300], (0, 1)).sigma.double()
    ranks = ((found.sort(dim=1).values - 0.2) / 0.8 * 6).sub(1e-9).floor()
    assert torch.equal(ranks, torch.arange(6).expand(300, 6).double())
    assert 0.2 < float(found.min()) < 0.21
    assert len({tuple(row) for row in found.argsort(dim=1).tolist()}) > 200
    shifted = draw(TimesConfig(name="uniform", shift=3.0), flow_schedule(10), MANY[:300], (0, 1)).sigma.double()
    assert torch.allclose(shifted, shift_sigmas(found, 3.0), atol=1e-6)


@pytest.mark.parametrize("name", SIGMA)
def test_times_on_sigma_are_fed_in_the_networks_units_and_refused_where_these_are_unknown(name):
    found = draw(TimesConfig(name=name), flow_schedule(10), IDS, (0, 1))
    assert torch.allclose(found.timestep, 1000 * found.sigma)
    assert found.sigma.dtype == found.timestep.dtype == torch.float32
    assert bool(((found.sigma > 0) & (found.sigma <= 1)).all())
    unknown = Schedule(vp_schedule(10).sigmas, vp_schedule(10).timesteps)
    with pytest.raises(ValueError, match=rf"times.name={name}: .* try times.name=discrete, or "):
        draw(TimesConfig(name=name), unknown, IDS, (0, 1))


# ---- rules on the timesteps of training


@pytest.mark.parametrize("count", [1, 4])
def test_timesteps_are_uniform_over_all_of_training_and_stratified(count):
    """t ~ U{0 .. 999}, 0 and 999 among them, each with the table's own sigma."""
    grid = vp_schedule(10)
    ids = [SampleId(slot, sample) for slot in range(20) for sample in range(1000)]
    found = draw(TimesConfig(name="timesteps", count=count), grid, ids, (0, 1))
    step = found.timestep.long()
    assert torch.equal(step.float(), found.timestep)
    assert grid.table is not None
    assert torch.equal(found.sigma, (1 - grid.table[step]).sqrt().float())
    share = step.flatten().bincount(minlength=1000) / (20_000 * count)
    # 20 draws of each: std 4.5, so none is 5 std away
    assert len(share) == 1000
    assert float((share - 1e-3).abs().max()) < 5 * math.sqrt(1e-3 / (20_000 * count))
    assert torch.equal(step.sort(dim=1).values * count // 1000, torch.arange(count).expand(len(ids), count))


def test_a_flow_has_no_timesteps_of_training():
    with pytest.raises(ValueError, match=r"times\.name=timesteps: a flow is not trained at numbered timesteps"):
        draw(TimesConfig(name="timesteps"), flow_schedule(10), IDS, (0, 1))


@pytest.mark.parametrize(
    ("module", "count"), [(diffusion_dpo, 1), (diffusion_kto, 1), (sft, 1), (seppo, 4)], ids=lambda m: str(m)[-30:]
)
def test_methods_on_given_pictures_take_the_times_of_the_models_training(module, count):
    method = module.build(module.Config())
    flow, vp = TimesConfig(name="logit_normal", count=count), TimesConfig(name="timesteps", count=count)
    for grid, times in ((flow_schedule(10), flow), (vp_schedule(10), vp)):
        named = draw(times, grid, IDS, (7, 3), shared=method.shared_times)
        assert torch.equal(method.times(grid, IDS, 3, 7).timestep, named.timestep)
    assert module.build(module.Config(times=TimesConfig(name="power", count=3))).config.terms(10) == 3


# ---- identity


@pytest.mark.parametrize("name", [*GRID, *SIGMA, "timesteps"])
@pytest.mark.parametrize("shared", ["sample", "group", "all"])
def test_a_draw_belongs_to_its_sample_whatever_the_batch_and_the_order(name, shared):
    config, grid = TimesConfig(name=name, count=4), vp_schedule(12) if name == "timesteps" else flow_schedule(12)
    whole = draw(config, grid, IDS, (5, 2), shared=shared).sigma
    order = [7, 0, 11, 4]
    part = draw(config, grid, [IDS[k] for k in order], (5, 2), shared=shared).sigma
    assert torch.equal(part, whole[order])
    distinct = {"sample": 12, "group": 3, "all": 1}[shared]
    assert len({tuple(row) for row in whole.tolist()}) <= distinct
    if name != "discrete_with_init":
        assert len({tuple(row) for row in whole.tolist()}) > distinct // 2
    by_prompt = whole.reshape(3, 4, -1)
    if shared != "sample":
        assert torch.equal(by_prompt, by_prompt[:, :1].expand_as(by_prompt))


@pytest.mark.parametrize("key", [(6, 2), (5, 3)])
def test_another_seed_or_iteration_draws_other_times(key):
    config, grid = TimesConfig(name="logit_normal"), flow_schedule(12)
    assert not torch.equal(draw(config, grid, IDS, (5, 2)).sigma, draw(config, grid, IDS, key).sigma)


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"count": None}, "count=null: the rule 'discrete' needs a number"),
        ({"count": 0}, "count=0 must be at least 1"),
        ({"fraction": 0.0}, "fraction=0.0 must be in"),
        ({"fraction": 1.1}, "fraction=1.1 must be in"),
        ({"begin": 0.9}, r"begin=0.9 must be in \[0, fraction\), fraction=0.9"),
        ({"begin": -0.1}, "begin=-0.1 must be in"),
        ({"begin": 0.3, "name": "permutation"}, "begin=0.3: only the rules discrete and subset leave out noisy nodes"),
        ({"shift": 0.0}, "shift=0.0 must be positive"),
        ({"low": 1.0}, "low=1.0 must be in"),
        ({"power": -1.0}, "power=-1.0 must be above -1"),
        ({"shift": math.nan}, "shift=nan must be positive"),
    ],
)
def test_options_without_a_meaning_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        TimesConfig(**({"name": "discrete"} | options))
