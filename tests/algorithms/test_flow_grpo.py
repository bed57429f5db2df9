"""Flow-GRPO: the first ratio, the gradient, the KL to the reference."""

import copy
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import dance_grpo, ddpo, flow_dppo, flow_grpo_fast, grpo_guard, mix_grpo, sage_grpo
from flowrl.algorithms.flow_grpo import Config, KLConfig, build
from flowrl.contracts.grids import flow_schedule
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.saliency import SpatialConfig
from flowrl.diffusion.windows import MixWindow
from flowrl.samplers import dance_sde, flow_sde
from tests.toys import Session, ToyAdapter, assert_same_gradient, bitwise, draw_advantages, nudge, off_policy, roll_out

LEVEL = 0.7
GUIDANCE = [1.0, 3.0]


def official_mean(session: Session, network: torch.nn.Module, guidance_scale: float = 1.0) -> tuple[Tensor, ...]:
    """(mean, std, g, x') of every edge, with grad, by the expression of the official code and a plain CFG."""
    edges, schedule = session.edges, session.plan.schedule
    sigma, after = schedule.sigmas[edges.step], schedule.sigmas[edges.step + 1]
    bound = torch.where(sigma == 1, schedule.sigmas[1], sigma)
    g, dt = LEVEL * (sigma / (1 - bound)).sqrt(), after - sigma
    x, prompt = edges.nodes[edges.parent], session.cond.index(session.rows[edges.sample])["prompt"]
    v = network(x, 1000 * sigma, prompt)
    if guidance_scale > 1:
        u = network(x, 1000 * sigma, torch.zeros_like(prompt))
        v = u + guidance_scale * (v - u)
    s, d, g4 = (t[:, None, None, None] for t in (sigma, dt, g))
    mean = x * (1 + g4**2 / (2 * s) * d) + v * (1 + g4**2 * (1 - s) / (2 * s)) * d
    return mean, g4 * (-d).sqrt(), g, edges.nodes[edges.child]


def official_log_prob(session: Session, network: torch.nn.Module, guidance_scale: float = 1.0) -> Tensor:
    mean, std, _, after = official_mean(session, network, guidance_scale)
    return torch.distributions.Normal(mean, std).log_prob(after).flatten(1).mean(1)


def gradients(value: Tensor, network: torch.nn.Module) -> dict[str, Tensor]:
    names = [name for name, _ in network.named_parameters()]
    return dict(zip(names, torch.autograd.grad(value, list(network.parameters())), strict=True))


def assert_gradients_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-4) -> None:
    """Within rtol of each tensor's largest entry: single entries are sums that nearly cancel."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(value.abs().max()) > 0, f"{name} has no gradient: the comparison would be empty"
        assert_close(found[name], value, rtol=rtol, atol=rtol * float(value.abs().max()))


# ---- the ratio


def test_edges_that_share_a_start_have_the_gradient_of_edges_forwarded_one_by_one():
    """One forward per place, log-probs per edge."""
    session = roll_out(ToyAdapter(), Config(sde_steps=[0]), batch_size=6, shared_start=True)
    nudge(session.adapter.network)
    advantage, network = draw_advantages(len(session.edges)), session.adapter.network

    def gradient(batches) -> dict[str, Tensor]:
        loss: Any = sum(session.algorithm.loss(batch, session.networks).loss for batch in batches)
        return gradients(loss, network)

    together = session.batches(advantage)
    assert [(len(batch.latents), len(batch)) for batch in together] == [(2, 6)]
    apart = [session.batches(advantage, order=torch.tensor([e]))[0] for e in range(6)]
    assert_gradients_close(gradient(together), gradient(apart))


# ---- the gradient


@pytest.mark.parametrize("batch_size", [1, 7, 30])
@pytest.mark.parametrize("guidance_scale", GUIDANCE)
def test_the_first_gradient_is_minus_the_mean_of_advantage_times_grad_log_prob(guidance_scale, batch_size):
    """Against the log-prob written by hand; both CFG branches carry gradient."""
    session = roll_out(ToyAdapter(), guidance_scale=guidance_scale)
    advantage, network = draw_advantages(len(session.edges)), session.adapter.network
    found = session.gradient(advantage, batch_size=batch_size)
    objective = -(advantage * official_log_prob(session, network, guidance_scale)).mean()
    assert_gradients_close(found, gradients(objective, network))


@pytest.mark.parametrize("key_per_step", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_gradient_of_an_update_does_not_depend_on_the_batch_split(batch_size, key_per_step):
    """To rtol 1e-5, here after an update, where ratios differ from 1."""
    found = []
    for size, apart in ((30, False), (batch_size, key_per_step)):
        session = roll_out(ToyAdapter(key_per_step=apart), Config(clip_range=0.5, kl=KLConfig(coef=0.1)))
        nudge(session.adapter.network)
        found.append(session.gradient(draw_advantages(len(session.edges)), batch_size=size))
    assert_same_gradient(found[1], found[0])


@pytest.mark.parametrize(("clip_range", "low", "high"), [(0.02, 0.98, 1.02), ([0.01, 0.05], 0.99, 1.05)])
def test_off_policy_the_gradient_is_that_of_the_clipped_ratio_written_by_hand(clip_range, low, high):
    """Per sample max(-A r, -A clamp(r, low, high))."""
    session = roll_out(ToyAdapter(), Config(clip_range=clip_range))
    advantage, network = draw_advantages(len(session.edges)), session.adapter.network
    nudge(network, 0.05)
    found = session.gradient(advantage, batch_size=30)
    ratio = (official_log_prob(session, network) - session.edges.old_log_prob).exp()
    gone = torch.where(advantage > 0, ratio > high, ratio < low)
    assert 0 < int(gone.sum()) < len(gone)
    kept = torch.where(gone, 0.0, advantage)
    assert_gradients_close(found, gradients(-(kept * ratio).mean(), network))
    output = session.algorithm.loss(session.batches(advantage, batch_size=30)[0], session.networks)
    assert output.per_step["policy/clip_fraction"].bool().tolist() == gone.tolist()
    assert float(output.metrics["policy/clip_fraction"]) == int(gone.sum())
    assert float(output.metrics["policy/ratio_mean"]) == pytest.approx(float(ratio.detach().sum()), rel=1e-4)
    half_square = 0.5 * ratio.detach().log().square().sum()
    assert float(output.metrics["policy/approx_kl"]) == pytest.approx(float(half_square), rel=1e-2)


def test_separate_rewards_are_refused_by_the_merged_loss():
    """One merged reward, [E, 1]: nothing is broadcast over two."""
    session = roll_out(ToyAdapter())
    batch = session.batches(draw_advantages(len(session.edges)))[0]
    with pytest.raises(ValueError, match="must agree"):
        session.algorithm.loss(dataclasses.replace(batch, advantage=batch.advantage.expand(-1, 2)), session.networks)


# ---- the KL


@pytest.mark.parametrize("divisor", ["flow_grpo", "variance", "none"])
def test_at_the_reference_the_kl_and_its_gradient_are_zero(divisor):
    session = roll_out(ToyAdapter(), Config(kl=KLConfig(coef=0.5, divisor=divisor)))
    zeros = torch.zeros(len(session.edges))
    for batch in session.batches(zeros):
        assert float(session.algorithm.loss(batch, session.networks).metrics["policy/kl_reference"]) == 0.0
    assert all(float(g.abs().max()) == 0 for g in session.gradient(zeros).values())


@pytest.mark.parametrize("divisor", ["flow_grpo", "variance", "none"])
def test_the_kl_gradient_is_that_of_the_squared_mean_difference(divisor):
    """The reference is the network as it was, without gradient."""
    session = roll_out(ToyAdapter(), Config(kl=KLConfig(coef=0.5, divisor=divisor)))
    network, reference = session.adapter.network, copy.deepcopy(session.adapter.network)
    nudge(network)
    found = session.gradient(torch.zeros(len(session.edges)))
    mean, std, g, _ = official_mean(session, network)
    with torch.no_grad():
        anchor = official_mean(session, reference)[0]
    square = (mean - anchor).square().flatten(1).mean(1)
    scale = {"flow_grpo": 2 * g**2, "variance": 2 * std.flatten() ** 2, "none": torch.ones_like(g)}[divisor]
    assert_gradients_close(found, gradients(0.5 * (square / scale).mean(), network), rtol=1e-3)


@pytest.mark.parametrize("spatial", [None, SpatialConfig(ratio="position")], ids=["sample", "position"])
def test_the_kl_is_added_per_edge_with_its_weight_to_the_policy_loss(spatial):
    outputs = []
    for coef in (0.0, 0.25):
        session = roll_out(ToyAdapter(), plain(spatial=spatial, kl=KLConfig(coef=coef)))
        nudge(session.adapter.network)
        advantage = draw_advantages(len(session.edges))
        advantage = advantage if spatial is None else advantage[:, None, None].expand(-1, 4, 4)
        outputs.append(session.algorithm.loss(session.batches(advantage)[0], session.networks))
    without, with_kl = outputs
    kl = with_kl.metrics["policy/kl_reference"]
    assert float(kl) > 0
    assert_close(with_kl.loss, without.loss + 0.25 * kl, rtol=1e-5, atol=1e-7)


# ---- reductions


def plain(**options: Any) -> Config:
    known: dict[str, Any] = {"clip_range": 0.02}
    return Config(**(known | options))


REDUCTIONS = {
    "all steps of DanceGRPO": (dance_grpo.Config(clip_range=0.02, timestep_fraction=1.0), plain(), dance_sde),
    "importance form of DDPO": (ddpo.Config(clip_range=0.02), plain(), flow_sde),
    "no window of Fast": (flow_grpo_fast.Config(clip_range=0.02, window_size=0), plain(), flow_sde),
    "full window of Fast": (flow_grpo_fast.Config(clip_range=0.02, window_size=5, high=5), plain(), flow_sde),
    "full window of MixGRPO, which never holds the last two steps": (
        mix_grpo.Config(clip_range=0.02, window=MixWindow(strategy="frozen", size=4)),
        plain(sde_steps=[0, 1, 2, 3]),
        flow_sde,
    ),
    "GRPO-Guard": (grpo_guard.Config(clip_range=0.02, ratio_norm=False, reweight="none"), plain(), flow_sde),
    "SAGE-GRPO": (
        sage_grpo.Config(clip_range=0.02, equalise=False, trust=sage_grpo.TrustConfig(coef=0.0)),
        plain(),
        flow_sde,
    ),
}


def built(config):
    return importlib.import_module(type(config).__module__).build(config)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_with_its_own_parts_off_a_method_is_flow_grpo_bitwise(name):
    config, same, law = REDUCTIONS[name]
    found, expected = (off_policy(built(each), law.build(law.Config())) for each in (config, same))
    assert bitwise(found, expected)


@pytest.mark.parametrize(("size", "same"), [(0.0, True), (0.02, False)])
def test_at_threshold_0_flow_dppo_is_flow_grpo_on_policy_alone(size, same):
    found, expected = (off_policy(built(each), size=size) for each in (flow_dppo.Config(threshold=0.0), plain()))
    assert bitwise(found, expected) == same


OTHER_METHODS = {
    "score form of DDPO": ddpo.Config(clip_range=0.02, estimator="score"),
    "RatioNorm": grpo_guard.Config(clip_range=0.02, reweight="none"),
    "weights of GRPO-Guard": grpo_guard.Config(clip_range=0.02, ratio_norm=False),
    "equaliser": sage_grpo.Config(clip_range=0.02, trust=sage_grpo.TrustConfig(coef=0.0)),
    "trust region": sage_grpo.Config(
        clip_range=0.02, equalise=False, trust=sage_grpo.TrustConfig(coef=1.0, adaptive=False)
    ),
    "one step less": plain(sde_steps=[0, 1, 2, 3]),
    "clip range": plain(clip_range=0.01),
    "KL": plain(kl=KLConfig(coef=0.1)),
}


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_what_the_reductions_compare_tells_every_switch_from_flow_grpo(name):
    """Their bitwise comparison is not empty."""
    assert not bitwise(off_policy(built(OTHER_METHODS[name])), off_policy(build(plain())))


# ---- what it declares


def test_the_plan_trains_all_steps_but_the_last_at_the_samplers_level():
    """T_train = int(T * 0.99)."""
    plan = build(Config()).plan(flow_schedule(10), flow_sde.build(flow_sde.Config(noise_level=0.9)), 1, 0)
    assert plan.train == tuple(range(9))
    assert plan.noise_level == (0.9,) * 9 + (0.0,)


def test_rewards_are_merged_raw_and_then_normalised():
    """Weighted sum of raw rewards, one group normalisation with the configured rule."""
    rewards = torch.tensor([[[0.0, 1.0], [0.0, 3.0]], [[0.0, 10.0], [0.0, 0.0]]])
    algorithm = build(Config(advantages=AdvantageConfig(std="none", clip=2.0)))
    found = algorithm.advantages(rewards, torch.tensor([1.0, 0.1]))
    assert_close(found.values, torch.tensor([[-1.0, 1.0], [-1.5, 1.5]])[:, :, None])
    assert float(
        build(Config(advantages=AdvantageConfig(std="none", clip=1.2)))
        .advantages(rewards, torch.tensor([1.0, 0.1]))
        .values.max()
    ) == pytest.approx(1.2)
