"""Noise-prediction grids: against diffusers' own schedulers, published numbers, and between the nodes."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.process import PredictionType, VPProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.training_times import TimesConfig, draw
from flowrl.diffusion.vp_schedules import Spacing, alphas_cumprod, betas, last_end, level_at, spaced, vp_schedule
from flowrl.models._schedulers import Path, schedule_of, vp_grid
from flowrl.samplers import ddim
from flowrl.samplers.base import step_std

SD = ("scaled_linear", 0.00085, 0.012)
KINDS = [SD, ("linear", 0.0001, 0.02), ("squaredcos_cap_v2", 0.0001, 0.02)]
VP = VPProcess()


def table(kind: tuple = SD, *, zero_snr: bool = False) -> torch.Tensor:
    return alphas_cumprod(betas(*kind), zero_snr=zero_snr)


def grid_of(own: torch.Tensor, timesteps: torch.Tensor, end: float | None = 1.0) -> Schedule:
    return vp_schedule(own, timesteps, last_end(own, timesteps, end))


def scheduler(kind: tuple = SD, **options: Any) -> Any:
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    name, start, end = kind
    return DDIMScheduler(beta_schedule=name, beta_start=start, beta_end=end, clip_sample=False, **options)


def steps_of(grid: Schedule, eta: float):
    return StepPlan(grid, (eta,) * len(grid), ()).steps(torch.arange(len(grid)), VP)


# ---- the tables and the timesteps


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_are_those_of_diffusers(kind, zero_snr):
    own, other = table(kind, zero_snr=zero_snr), scheduler(kind, rescale_betas_zero_snr=zero_snr).alphas_cumprod
    # diffusers multiplies a thousand factors in float32: its relative error grows like that of a random walk.
    assert_close(own[:-1].float(), other[:-1], rtol=2e-4 if zero_snr else 3e-5, atol=2e-8)
    assert (float(own[-1]) == 0) == zero_snr
    assert bool((own.diff() < 0).all())


def test_the_first_and_last_values_are_the_published_ones():
    """SD1.x."""
    found = [float(table()[t]) for t in (0, 1, 981, 999)]
    assert found == pytest.approx([0.99915, 0.998296, 0.005776, 0.004660], abs=1e-6)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_the_timesteps_are_those_of_diffusers(spacing, offset):
    other = scheduler(timestep_spacing=spacing, steps_offset=offset)
    for num_steps in (*range(1, 60), 100, 125, 250, 333):
        other.set_timesteps(num_steps)
        assert spaced(num_steps, spacing, steps_offset=offset).tolist() == other.timesteps.tolist(), num_steps


def test_diffusers_one_timestep_too_many_is_left_out():
    other, path = scheduler(timestep_spacing="trailing"), Path(VP, "eps")
    for num_steps in (61, 103, 457):
        other.set_timesteps(num_steps)
        assert int(other.timesteps[-1]) == -1
        steps = spaced(num_steps, "trailing")
        assert steps.tolist() == other.timesteps[:-1].tolist()
        assert torch.equal(schedule_of(path, other, other.timesteps, None).timesteps, steps.float())


def test_the_timesteps_of_a_consistency_model_are_those_of_its_scheduler():
    from diffusers.schedulers.scheduling_lcm import LCMScheduler

    other = LCMScheduler()
    for num_steps in range(1, 51):
        other.set_timesteps(num_steps)
        assert spaced(num_steps, "lcm").tolist() == other.timesteps.tolist()


@pytest.mark.parametrize(
    ("num_steps", "spacing", "words"),
    [(0, "leading", "1..1000"), (1001, "trailing", "1..1000"), (51, "lcm", r"1\.\.50"), (1000, "leading", "past the")],
)
def test_a_grid_that_cannot_be_is_refused(num_steps, spacing, words):
    with pytest.raises(ValueError, match=words):
        spaced(num_steps, spacing, steps_offset=1)


# ---- the step


def test_ddpos_stds_are_the_published_ones():
    """T = 50, eta 1, the last step ending at the first training step."""
    grid = grid_of(table(), spaced(50, "leading", steps_offset=1), None)
    std = dict(
        zip(grid.timesteps.int().tolist(), step_std(ddim.build(ddim.Config()), VP, steps_of(grid, 1.0)), strict=True)
    )
    expected = {981: 0.4545, 481: 0.2877, 181: 0.1771, 41: 0.0999, 21: 0.0395, 1: 0.0206}
    assert {t: float(std[t]) for t in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("to_one", [False, True])
@pytest.mark.parametrize(
    ("spacing", "num_steps", "zero_snr", "prediction"),
    [
        ("leading", 50, False, "epsilon"),
        ("leading", 7, False, "v_prediction"),
        ("trailing", 50, False, "sample"),
        ("trailing", 50, True, "v_prediction"),
        ("trailing", 10, True, "v_prediction"),
    ],
)
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_diffusers(kind, eta, spacing, num_steps, zero_snr, prediction, to_one):
    """x', with the same noise. At terminal SNR 0 a float32 sigma alone would be off by up to 1e-4."""
    options = {"timestep_spacing": spacing, "steps_offset": int(spacing == "leading"), "set_alpha_to_one": to_one}
    other = scheduler(kind, rescale_betas_zero_snr=zero_snr, prediction_type=prediction, **options)
    other.set_timesteps(num_steps)
    kinds: dict[str, PredictionType] = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
    kind_of = kinds[prediction]
    grid = schedule_of(Path(VP, kind_of), other, other.timesteps, None)
    own = table(kind, zero_snr=zero_snr)
    end = 1.0 if to_one else float(own[0])
    # Its float32 coefficients are too coarse to judge by: sqrt(1 - abar' - std^2) is 2e-4 instead of 0 at alpha = 0.
    other.alphas_cumprod, other.final_alpha_cumprod = own, torch.tensor(end, dtype=torch.float64)
    exact = grid_of(own, spaced(num_steps, spacing, steps_offset=options["steps_offset"]), end)
    assert_close(exact.alphas, grid.alphas, rtol=1e-4, atol=1e-6)
    step, generator = steps_of(exact, eta), torch.Generator().manual_seed(0)
    raw, x, noise = torch.randn(3, num_steps, 64, generator=generator)
    belief = VP.predict(raw, x, step.sigma, kind_of, step.alpha)
    found = ddim.build(ddim.Config()).transition(VP, belief, x, step).sample(noise)
    for k, t in enumerate(other.timesteps):
        expected = other.step(raw[k], t, x[k], eta=eta, variance_noise=noise[k]).prev_sample
        assert_close(found[k], expected, rtol=1e-4, atol=2e-5)


def test_the_chain_goes_on_where_it_arrived_also_on_an_uneven_grid():
    """diffusers' DDIM steps to t - N // K there, and then goes on as if it stood elsewhere."""
    uneven: dict[Spacing, int] = {"linspace": 10, "trailing": 7}
    for spacing, num_steps in uneven.items():
        grid = grid_of(table(), spaced(num_steps, spacing), 1.0)
        step = steps_of(grid, 1.0)
        assert torch.equal(step.alpha[1:], step.alpha_next[:-1])
        assert_close(step.alpha.square() + step.sigma.square(), torch.ones(num_steps))


# ---- where the last step ends


def test_the_last_step_can_be_trained_where_it_keeps_noise_and_the_refusal_says_how():
    timesteps = spaced(10, "leading", steps_offset=1)
    first, clean = grid_of(table(), timesteps, None), grid_of(table(), timesteps, 1.0)
    assert float(clean.sigmas[-1]) == 0
    assert window(first, 1.0, range(10)).train == tuple(range(10))
    assert float(step_std(ddim.build(ddim.Config()), VP, steps_of(first, 1.0))[-1]) > 0.01
    with pytest.raises(ValueError, match=r"std 0 there.*model\.final_alpha=first"):
        window(clean, 1.0, range(10))


def test_a_last_step_that_stands_still_is_refused_with_the_spacings_that_do_not():
    with pytest.raises(ModelError, match=r"timestep 0 and ends at the table's first entry"):
        vp_grid(Path(VP, "eps"), table(), spaced(10, "linspace"), float(table()[0]))


@pytest.mark.parametrize("kind", ["eps", "v", "x0"])
def test_a_noise_prediction_cannot_start_at_pure_noise_and_the_others_can(kind):
    arguments = (Path(VP, kind), table(zero_snr=True), spaced(10, "trailing"), 1.0)
    if kind == "eps":
        with pytest.raises(ModelError, match=r"timestep 999, is pure noise .*use a v-prediction checkpoint"):
            vp_grid(*arguments)
        return
    grid = vp_grid(*arguments)
    assert grid.alphas is not None
    assert float(grid.alphas[0]) == 0
    step, (raw, x) = steps_of(grid, 1.0), torch.randn(2, 10, 64)
    law = ddim.build(ddim.Config()).transition(VP, VP.predict(raw, x, step.sigma, kind, step.alpha), x, step)
    assert bool(law.mean.isfinite().all())
    assert bool((law.std[:-1] > 0).all())


def test_sigmas_that_round_to_one_are_told_apart_by_their_alphas():
    grid = vp_schedule(torch.tensor([0.9, 0.25, 1e-10, 0.0]), torch.tensor([3, 2, 1]), end=1.0)
    assert grid.sigmas[0] == grid.sigmas[1] == 1
    assert grid.alphas is not None
    assert grid.alphas[:2].tolist() == pytest.approx([0, 1e-5])
    with pytest.raises(ValueError, match="fall strictly"):
        Schedule(grid.sigmas, grid.timesteps)


# ---- between the nodes


@pytest.mark.parametrize("zero_snr", [False, True])
def test_the_timestep_of_a_node_is_its_index_and_between_two_the_log_snr_is_linear(zero_snr):
    own = table(zero_snr=zero_snr)
    grid = grid_of(own, spaced(10, "trailing"), 1.0)
    index = torch.arange(1000)
    found = grid.timestep_at((1 - own).sqrt())
    # Next to pure noise 1 - sigma^2 leaves the table's last entries few digits, in float64 too.
    assert_close(found[:-1], index[:-1].float(), atol=1e-4, rtol=0)
    assert float(found[-1]) == 999
    assert_close(grid.timestep_at((1 - own).sqrt().float())[:900], index[:900].float(), atol=2e-2, rtol=0)
    alpha, sigma = level_at(own, torch.tensor([0.0, 300.0, 300.25, 999.0]))
    assert_close(alpha[[0, 1, 3]], own[[0, 300, 999]].sqrt().float())
    middle = ((sigma / alpha)[2] / (sigma / alpha)[1]).log() / (((1 - own) / own)[301] / ((1 - own) / own)[300]).log()
    assert float(2 * middle) == pytest.approx(0.25, abs=1e-3)
    assert float(grid.timestep_at(sigma[2])) == pytest.approx(300.25, abs=1e-2)
    if not zero_snr:  # beyond the table is its end
        assert grid.timestep_at(torch.tensor([0.0, 0.001, 0.99999, 1.0])).tolist() == [0.0, 0.0, 999.0, 999.0]


@pytest.mark.parametrize("kind", [SD, ("squaredcos_cap_v2", 0.0001, 0.02)])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_drawn_times_of_a_noise_prediction_never_reach_alpha_0(kind, zero_snr):
    own = table(kind, zero_snr=zero_snr)
    grid = vp_grid(Path(VP, "eps"), own, spaced(10, "leading", steps_offset=1), 1.0)
    sigma = grid.at_flow(torch.tensor([0.5, 0.9999, 1.0]))
    assert bool((VP.alpha(sigma) > 0).all())
    assert 990 < float(grid.timestep_at(sigma)[-1]) <= 999
    same = vp_grid(Path(VP, "v"), own, spaced(10, "leading", steps_offset=1), 1.0).table
    assert same is not None
    assert torch.equal(same, own)


@pytest.mark.parametrize("name", ["logit_normal", "uniform", "power"])
def test_times_on_sigma_have_the_snr_of_a_flows_and_stay_inside_the_table(name):
    grid = grid_of(table(), spaced(10, "leading", steps_offset=1), 1.0)
    flow = Schedule(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1000.0, 500.0]))
    ids = [SampleId(0, k) for k in range(50)]
    found, other = (draw(TimesConfig(name=name, count=4), each, ids, (0, 1)) for each in (grid, flow))
    assert grid.table is not None
    low, high = (1 - grid.table[[0, -1]]).sqrt().tolist()
    assert low - 1e-6 <= float(found.sigma.min()) < float(found.sigma.max()) <= high + 1e-6
    inside = (found.sigma > low + 1e-6) & (found.sigma < high - 1e-6)
    assert inside.float().mean() > 0.5
    ratio = found.sigma / VP.alpha(found.sigma)
    assert_close(ratio[inside], (other.sigma / (1 - other.sigma))[inside], rtol=1e-3, atol=1e-5)
    assert bool((found.timestep >= 0).all() & (found.timestep <= 999).all())
    assert not torch.equal(found.timestep, found.timestep.round())
