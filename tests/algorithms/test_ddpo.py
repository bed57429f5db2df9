"""DDPO: all noisy steps trained on the guided prediction, clipped ratio or score function."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.algorithms import flow_grpo
from flowrl.algorithms.ddpo import Config, build
from flowrl.algorithms.flow_grpo import KLConfig
from flowrl.contracts.grids import flow_schedule, vp_schedule
from flowrl.core.types import SampleId
from flowrl.diffusion.schedules import Schedule
from flowrl.samplers import ddim
from flowrl.samplers.base import KLDivisor, StepDistribution
from tests.algorithms.test_flow_grpo import assert_gradients_close, gradients
from tests.toys import Session, ToyAdapter, draw_advantages, nudge, roll_out, updated

DDIM = ddim.build(ddim.Config())
GUIDANCE = 5.0


def session(config: Config | None = None, *, vp: bool = True, guidance_scale: float = GUIDANCE, **options) -> Session:
    adapter = ToyAdapter(vp=vp, key_per_step=options.pop("key_per_step", False))
    algorithm = build(config or Config())
    return roll_out(adapter, algorithm=algorithm, sampler=DDIM, guidance_scale=guidance_scale, **options)


def log_prob(run: Session, network: torch.nn.Module, form: str = "mean") -> Tensor:
    """Of every edge of a VP rollout, with grad: the published step and a plain CFG, written by hand."""
    edges, sigmas = run.edges, run.plan.schedule.sigmas.double()
    s, s2 = (sigmas[k][:, None, None, None] for k in (edges.step, edges.step + 1))
    a, a2 = (1 - s**2).sqrt(), (1 - s2**2).sqrt()
    x, prompt = edges.nodes[edges.parent], run.cond.index(run.rows[edges.sample])["prompt"]
    timestep = run.plan.schedule.timesteps[edges.step]
    eps, away = network(x, timestep, prompt), network(x, timestep, torch.zeros_like(prompt))
    eps = (away + GUIDANCE * (eps - away)).double()
    std = ((s2**2 / s**2) * (1 - a**2 / a2**2)).sqrt()
    mean = a2 * (x.double() - s * eps) / a + (s2**2 - std**2).sqrt() * eps
    density = torch.distributions.Normal(mean, std).log_prob(edges.nodes[edges.child].double()).flatten(1)
    return density.mean(dim=1) if form == "mean" else density.sum(dim=1)


# ---- which steps


def test_every_step_of_a_noise_prediction_model_is_trained_the_last_too():
    """The last step ends at the first training step's noise, std 0.0206 with 50 steps."""
    plan = build(Config()).plan(vp_schedule(50), DDIM, 1, 0)
    assert plan.train == tuple(range(50))
    assert plan.stochastic == (True,) * 50
    step = plan.steps(torch.tensor([49]), ToyAdapter(vp=True).process)
    assert float(ddim.vp_std(step)) == pytest.approx(0.0206, abs=5e-5)


def test_on_a_path_that_ends_at_clean_data_the_last_step_is_deterministic():
    for schedule in (flow_schedule(6), ending_clean(vp_schedule(6))):
        plan = build(Config()).plan(schedule, DDIM, 1, 0)
        assert plan.train == (0, 1, 2, 3, 4)
        assert plan.stochastic == (True,) * 5 + (False,)


def ending_clean(schedule: Schedule) -> Schedule:
    """As with set_alpha_to_one."""
    return Schedule(torch.cat([schedule.sigmas[:-1], torch.zeros(1)]), schedule.timesteps)


def test_a_last_step_that_ends_at_clean_data_is_refused_with_the_steps_that_can_be_trained():
    with pytest.raises(ValueError, match=r"last step \(5\).*train steps 0\.\.4 .*final_alpha=first.*set_alpha_to_one"):
        build(Config(sde_steps=[0, 5])).plan(ending_clean(vp_schedule(6)), DDIM, 1, 0)
    assert build(Config(sde_steps=[0, 5])).plan(vp_schedule(6), DDIM, 1, 0).train == (0, 5)
    # Other methods may train it as well, and leave it out unless told to.
    assert flow_grpo.build(flow_grpo.Config(sde_steps=[5])).plan(vp_schedule(6), DDIM, 1, 0).train == (5,)
    assert flow_grpo.build(flow_grpo.Config()).plan(vp_schedule(6), DDIM, 1, 0).train == (0, 1, 2, 3, 4)


def test_a_sample_keeps_its_share_of_the_steps_whoever_trains_it():
    algorithm: Any = build(Config(timestep_fraction=0.5))  # whose mask is not None
    plan, ids = algorithm.plan(vp_schedule(6), DDIM, 1, 0), [SampleId(slot, 0) for slot in range(30)]
    mask = algorithm.kept_edges(ids, plan, 3, 7).reshape(30, 6)
    assert mask.sum(dim=1).tolist() == [3] * 30
    assert len(mask.unique(dim=0)) > 5
    assert torch.equal(algorithm.kept_edges(ids[4:9], plan, 3, 7).reshape(5, 6), mask[4:9])
    assert not torch.equal(algorithm.kept_edges(ids, plan, 4, 7).reshape(30, 6), mask)
    whole: Any = build(Config())
    assert whole.kept_edges(ids, plan, 3, 7).all()


# ---- ratio and gradient


@pytest.mark.parametrize("vp", [True, False], ids=["vp", "flow"])
def test_the_ratio_is_bitwise_one_before_the_first_update_at_every_step(vp):
    """At the rollout's batches, under guidance."""
    run = session(vp=vp, key_per_step=True)
    seen = set()
    for batch in run.batches(draw_advantages(len(run.edges))):
        found = run.algorithm.loss(batch, run.networks).per_step["policy/ratio"]
        assert found.tolist() == [1.0] * len(batch)
        seen |= set(batch.step.index.tolist())
    assert seen == set(run.plan.train) == set(range(6 if vp else 5))


@pytest.mark.parametrize("estimator", ["importance", "score"])
@pytest.mark.parametrize("batch_size", [1, 7, 36])
def test_the_first_gradient_is_reinforce_averaged_over_samples_and_steps(estimator, batch_size):
    """Both forms, in any microbatches, against one backward pass written by hand."""
    run = session(Config(estimator=estimator))
    advantage, network = draw_advantages(len(run.edges)), run.adapter.network
    assert len(run.edges) == 6 * 6
    found = run.gradient(advantage, batch_size=batch_size)
    expected = gradients(-(advantage * log_prob(run, network)).mean(), network)
    # Last-step terms weigh 1 / 0.02^2 and cancel in part; the hand-written side is float64 behind the network.
    assert_gradients_close(found, expected, rtol=2e-3)


def test_off_policy_the_gradient_is_that_of_the_clipped_ratio():
    """After an update."""
    run = session(Config(clip_range=0.02))
    advantage, network = draw_advantages(len(run.edges)), run.adapter.network
    nudge(network, 2e-3)
    ratio = (log_prob(run, network) - run.edges.old_log_prob).exp()
    gone = torch.where(advantage > 0, ratio > 1.02, ratio < 0.98)
    assert 0 < int(gone.sum()) < len(gone)
    kept = torch.where(gone, 0.0, advantage)
    assert_gradients_close(run.gradient(advantage), gradients(-(kept * ratio).mean(), network), rtol=2e-3)


def test_the_score_form_is_not_clipped_and_keeps_no_ratio():
    run = session(Config(estimator="score", clip_range=1e-6))
    advantage = draw_advantages(len(run.edges))
    nudge(run.adapter.network, 2e-3)
    expected = gradients(-(advantage * log_prob(run, run.adapter.network)).mean(), run.adapter.network)
    assert_gradients_close(run.gradient(advantage), expected, rtol=2e-3)
    assert "policy/clip_fraction" not in run.algorithm.loss(run.batch(advantage), run.networks).metrics


def test_an_update_counts_every_sample_and_every_step_once(monkeypatch):
    """Each transition with its own old log-prob, once a pass."""
    run, seen = session(Config(passes=2)), Counter()
    loss = run.algorithm.loss

    def counting(batch, networks):
        seen.update(zip(batch.step.index.tolist(), batch.old_log_prob.tolist(), strict=True))
        return loss(batch, networks)

    monkeypatch.setattr(run.algorithm, "loss", counting)
    sums = updated(run, torch.arange(6.0).reshape(1, 2, 3), updates=1)
    assert sums.means()["nfe/train"] == 2 * 6 * 2  # passes, steps, CFG
    assert seen == {key: 2 for key in zip(run.edges.step.tolist(), run.edges.old_log_prob.tolist(), strict=True)}
    assert len(seen) == len(run.edges) == 6 * 6


@pytest.mark.parametrize("vp", [True, False], ids=["vp", "flow"])
def test_left_out_the_divisor_is_the_gaussian_kls_on_vp_and_flow_grpos_on_a_flow(vp):
    found = []
    published: tuple[KLDivisor, ...] = ("variance", "flow_grpo") if vp else ("flow_grpo", "variance")
    for divisor in (None, *published):
        run = session(Config(kl=KLConfig(coef=0.5, divisor=divisor)), vp=vp)
        nudge(run.adapter.network, 2e-3)
        found.append(float(run.algorithm.loss(run.batch(), run.networks).metrics["policy/kl_reference"]))
    assert found[0] == found[1] > 0
    assert found[0] != pytest.approx(found[2], rel=0.5)


# ---- numerics of the mean log-prob


def test_the_density_ratio_has_mean_one_and_the_mean_log_ratio_drifts_below_zero():
    """E[rho] = 1; E[log rho / D] = -m / (2 D), std sqrt(m) / D, with m = |delta|^2."""
    dims, count, shift = 64, 40_000, 0.05
    old = StepDistribution(torch.zeros(count, dims), torch.full((count,), 0.3))
    new = StepDistribution(torch.full((count, dims), shift * 0.3), old.std)
    x = old.sample(torch.randn(count, dims, generator=torch.Generator().manual_seed(0)))
    m = dims * shift**2
    rho = (new.log_prob(x, "sum") - old.log_prob(x, "sum")).double()
    # Standard errors over the draws: sqrt((e^m - 1) / n) and sqrt(m / n) / D; four of them are allowed.
    assert float(rho.exp().mean()) == pytest.approx(1.0, abs=4 * math.sqrt(math.expm1(m) / count))
    mean = (new.log_prob(x) - old.log_prob(x)).double()
    assert float(mean.mean()) == pytest.approx(-m / (2 * dims), abs=4 * math.sqrt(m / count) / dims)
    assert float(mean.std()) == pytest.approx(math.sqrt(m) / dims, rel=0.02)
