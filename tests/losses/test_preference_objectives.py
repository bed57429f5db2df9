"""Losses on pairs and labels: their limits and gradients, in float64 on free outputs."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import dgpo, diffusion_dpo, diffusion_kto, online_dpo, seppo
from flowrl.algorithms._credit import given_signs
from flowrl.algorithms._matching import AnchorConfig
from flowrl.contracts.grids import flow_schedule
from flowrl.losses.batches import LossOutput, NoisedBatch
from flowrl.losses.matching import mean_square
from flowrl.losses.preference import anchor_sign, label_loss, pair_margin, preference_loss, reference_point
from flowrl.rollout.outputs import Outputs
from flowrl.samplers.ode import Ode
from tests.toys import Moves, ToyAdapter, draw, loss_and_gradient, loss_of, nudge, outputs_of, roll_out

PAIRS, DIMS, BETA = 3, 8, 7.0
SIGN = torch.tensor([1.0, -1.0] * PAIRS, dtype=torch.float64)
PAIR = torch.arange(PAIRS).repeat_interleave(2)
SIGMA = torch.tensor([0.2, 0.6, 0.9], dtype=torch.float64).repeat_interleave(2)


CLEAN, EPS, V, REF = draw(1), draw(2, PAIRS, DIMS).repeat_interleave(2, dim=0), draw(3), draw(4)


def said(v: Tensor, reference: Tensor, **options) -> Outputs:
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "group": PAIR, "advantage": SIGN}
    return outputs_of({"policy": v, "reference": reference}, **scene, **options)


def found(
    method, v: Tensor = V, reference: Tensor = REF, role: str = "reference", **options
) -> tuple[LossOutput, Tensor]:
    """(loss and metrics, gradient on v) of the mean over pairs, as the learner takes it."""
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "group": PAIR, "advantage": SIGN} | options
    output, gradient = loss_and_gradient(method, v, {role: reference}, **scene)
    return output, gradient / len(v)


def dpo(**options):
    return diffusion_dpo.build(diffusion_dpo.Config(beta=BETA, **options))


def error_gradient(v: Tensor) -> Tensor:
    """Of each row's l on its own output."""
    return 2 * (v - (EPS - CLEAN)) / DIMS


# ---- Diffusion-DPO


def test_at_the_reference_the_loss_is_log_2_and_the_margin_0():
    output, _ = found(dpo(), V, V)
    assert float(output.loss) / (2 * PAIRS) == pytest.approx(math.log(2), rel=1e-12)
    assert float(output.metrics["policy/margin"]) == 0
    assert float(output.metrics["policy/implicit_accuracy"]) == 0  # nothing is preferred yet


def test_at_the_reference_the_gradient_is_a_quarter_of_beta_times_that_of_the_difference():
    """L = -log sigmoid(-beta / 2 Delta): L' = beta / 2 sigmoid(0) = beta / 4, and a mean over three pairs."""
    _, gradient = found(dpo(), V, V)
    assert_close(gradient, BETA / 4 * SIGN[:, None] * error_gradient(V) / PAIRS, rtol=1e-6, atol=1e-12)


def test_swapping_winner_and_loser_flips_the_gradient_at_the_reference():
    assert_close(found(dpo(), V, V, advantage=-SIGN)[1], -found(dpo(), V, V)[1])


def test_a_pair_of_one_picture_twice_has_no_gradient_on_the_weights():
    """Its two rows are the same forward: their gradients cancel in the weights behind them."""
    twin = V[::2].repeat_interleave(2, dim=0)
    clean = CLEAN[::2].repeat_interleave(2, dim=0)
    _, gradient = found(dpo(), twin, REF[::2].repeat_interleave(2, dim=0), clean=clean)
    assert float(gradient.abs().max()) > 0
    assert_close(gradient[::2], -gradient[1::2])


@given(st.floats(0.1, 100), st.integers(0, 50))
def test_the_loss_is_that_of_the_paper_written_out(beta, seed):
    v, reference = draw(100 + seed), draw(200 + seed)
    target = EPS - CLEAN
    e, r = mean_square(v, target), mean_square(reference, target)
    delta = (e[::2] - e[1::2]) - (r[::2] - r[1::2])
    margin = pair_margin(SIGN, e, r, PAIR)
    assert_close(margin[::2], delta)
    assert_close(margin[1::2], delta)
    assert_close(preference_loss(margin[::2], beta), torch.log1p(torch.exp(beta / 2 * delta)), rtol=1e-6, atol=1e-9)


def test_winner_and_loser_errors_and_the_accuracy_are_told_apart():
    output, _ = found(dpo())
    error, reference = mean_square(V, EPS - CLEAN), mean_square(REF, EPS - CLEAN)
    per_pair = {name: float(value) / 2 for name, value in output.metrics.items()}
    assert per_pair["matching/error_chosen"] == pytest.approx(float(error[::2].sum()))
    assert per_pair["matching/error_rejected"] == pytest.approx(float(error[1::2].sum()))
    right = (error - reference)[::2] < (error - reference)[1::2]
    assert per_pair["policy/implicit_accuracy"] == int(right.sum())


def test_in_the_space_of_eps_a_flows_margin_is_weighted_by_1_less_sigma_squared():
    """eps_hat - eps = (1 - sigma)(v - v*)."""
    at_v, at_eps = (loss_of(dpo(space=space), said(V, REF)).metrics for space in ("output", "eps"))
    error, reference = (mean_square(x, EPS - CLEAN) for x in (V, REF))
    margin = pair_margin(SIGN, error, reference, PAIR)
    assert float(at_v["policy/margin"]) == pytest.approx(float(margin.sum()))
    weighted = float((margin * (1 - SIGMA).square()).sum())
    assert float(at_eps["policy/margin"]) == pytest.approx(weighted, rel=1e-5)


def test_beta_is_by_default_that_of_the_process():
    """A loss of one pair tells which beta it was."""
    method = diffusion_dpo.build(diffusion_dpo.Config())
    for vp, beta in ((False, 2000.0), (True, 5000.0)):
        target = EPS if vp else EPS - CLEAN
        near = target + 1e-3 * V
        margin = pair_margin(SIGN, mean_square(near, target), torch.zeros(2 * PAIRS, dtype=torch.float64), PAIR)
        loss = loss_of(method, said(near, target, vp=vp)).loss
        assert float(loss) == pytest.approx(float(preference_loss(margin, beta).sum()), rel=1e-9)


def test_dgpo_with_two_samples_of_advantage_plus_and_minus_1_is_diffusion_dpo():
    """DGPO's gradient is over beta / G, its sum over rows: both are brought to a mean over pairs."""
    method = dgpo.build(dgpo.Config(beta=BETA, kl=AnchorConfig(coef=0.0), clip_range=1e9))
    scene = {"clean": CLEAN, "eps": EPS, "sigma": SIGMA, "group": PAIR, "advantage": SIGN}
    _, gradient = loss_and_gradient(method, V, {"reference": REF, "average": V}, **scene)
    assert_close(gradient * BETA / 2 / PAIRS, found(dpo())[1], rtol=1e-6, atol=1e-12)


def test_half_a_pair_is_left_out_whole():
    rewards = torch.tensor([[[1.0, 0.0], [math.nan, 0.0], [1.0, math.nan]]])
    credit = given_signs(rewards)
    assert credit.kept.tolist() == [[True, True], [False, False], [False, False]]
    assert credit.dead.tolist() == [False, True, True]
    assert credit.values[0].flatten().tolist() == [1.0, -1.0]


# ---- online DPO


def credited(rewards: list[list[float]], **options):
    method = online_dpo.build(online_dpo.Config(**options))
    return method.advantages(torch.tensor([rewards]), torch.ones(1))


def test_the_best_stands_against_the_worst_of_each_prompt():
    credit = credited([[0.2, 0.9, 0.5, 0.1], [3.0, 1.0, 2.0, math.nan]])
    assert credit.kept.tolist() == [[False, True, False, True], [True, True, False, False]]
    assert credit.values.squeeze(2).tolist() == [[0, 1, 0, -1], [1, -1, 0, 0]]


def test_prompts_without_a_difference_or_with_too_small_a_one_are_left_out():
    """Released code trains on noise pairs there."""
    rewards = [[0.5, 0.5, 0.5], [0.5, 0.55, 0.5], [0.1, 0.9, 0.5], [math.nan, 0.3, math.nan]]
    assert credited(rewards).kept.any(dim=1).tolist() == [False, True, True, False]
    assert credited(rewards, least_gap=0.1).kept.any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("order", [(60.0, 100.0, -60.0, -100.0), (100.0, 60.0, -100.0, -60.0)])
@pytest.mark.parametrize("rule", ["group", "median"])
def test_outliers_are_not_tied_by_a_clip(order, rule):
    """Next to 63 prompts of little spread both pairs of this one lie beyond 5 stds."""
    credit = credited([list(order), *[[0.0, 0.01, 0.02, 0.03]] * 63], advantages=online_dpo.RankConfig(name=rule))
    assert credit.values[0, :, 0].tolist() == [1.0 if r == 100 else -1.0 if r == -100 else 0.0 for r in order]


def test_several_equal_best_and_worst_give_one_pair():
    credit = credited([[1.0, 0.0, 1.0, 0.0]])
    assert credit.kept.sum() == 2
    assert sorted(credit.values[credit.kept].flatten().tolist()) == [-1.0, 1.0]


def test_its_loss_is_diffusion_dpos():
    online = online_dpo.build(online_dpo.Config(beta=BETA))
    (one, first), (two, second) = found(online), found(dpo())
    assert float(one.loss) == float(two.loss)
    assert torch.equal(first, second)


def test_a_lagging_behaviour_draws_and_is_the_reference_until_it_is_refreshed():
    weights: Any = Moves()
    method = online_dpo.build(online_dpo.Config(behaviour="lagged", ref_update=10))
    assert (method.behaviour, method.roles, method.against) == ("lagged", ("lagged",), "lagged")
    for updates in (4, 8, 12, 16, 20, 24):
        method.after_iteration(updates, weights)
    assert weights == [("lagged", 0.0)] * 2
    other = online_dpo.build(online_dpo.Config(behaviour="lagged", ref_update=10))
    other.load_state_dict(method.state_dict())
    other.after_iteration(24, weights)
    assert len(weights) == 2
    plain = online_dpo.build(online_dpo.Config(behaviour="reference"))
    assert (plain.behaviour, plain.roles) == ("reference", ("reference",))


# ---- Diffusion-KTO


def kto(**options):
    return diffusion_kto.build(diffusion_kto.Config(beta=BETA, **options))


def test_at_the_reference_a_label_costs_one_half_and_the_offset_is_0():
    output, gradient = found(kto(), V, V)
    assert float(output.loss) == pytest.approx(PAIRS, rel=1e-12)
    assert float(output.metrics["policy/offset"]) == 0
    # U = sigmoid: its slope is 1/4 at 0, for every utility 1/2 or 1/4.
    assert_close(gradient, BETA / 4 * SIGN[:, None] * error_gradient(V) / (2 * PAIRS), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("utility", "value", "slope"),
    [
        ("kahneman_tversky", lambda u: 1 - torch.sigmoid(u), 0.25),
        ("loss_averse", lambda u: -torch.log(torch.sigmoid(u)), 0.5),
        ("risk_seeking", lambda u: torch.log(torch.sigmoid(-u)), 0.5),
    ],
)
def test_utilities_are_what_they_are_called(utility, value, slope):
    gain = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        u = sign * BETA * (gain - 0.3)
        loss = label_loss(gain, torch.full((9,), sign), 0.3, BETA, utility)
        assert_close(loss, value(u), rtol=1e-6, atol=1e-9)
    at_offset = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(label_loss(at_offset, torch.ones(1), 0.3, BETA, utility).sum(), at_offset)
    assert float(gradient) == pytest.approx(-slope * BETA)


def test_the_offset_is_the_mean_gain_where_that_is_positive_and_has_no_gradient():
    error, reference = mean_square(V, EPS - CLEAN), mean_square(REF, EPS - CLEAN)
    gain = reference - error
    better, worse = (V, REF) if gain.mean() > 0 else (REF, V)
    for v, r, expected in ((better, worse, gain.mean().abs()), (worse, better, torch.zeros(()))):
        output, gradient = found(kto(), v, r)
        assert float(output.metrics["policy/offset"]) / (2 * PAIRS) == pytest.approx(float(expected))
        fixed = v.clone().requires_grad_(True)
        own = mean_square(r, EPS - CLEAN) - mean_square(fixed, EPS - CLEAN)
        loss = torch.sigmoid(-SIGN * BETA * (own - expected)).mean()
        assert_close(gradient, torch.autograd.grad(loss, fixed)[0], rtol=1e-6, atol=1e-12)


def test_the_mean_of_class_means_does_not_depend_on_their_sizes():
    """bce_offset of the official code; columns: g, liked g, liked, disliked g, disliked, as means over 4 : 1 labels."""
    gain, liked = torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    means = torch.stack([gain, liked * gain, liked, (1 - liked) * gain, 1 - liked], dim=1).mean(dim=0)
    assert float(reference_point(means, "mean")) == pytest.approx(2.0)
    assert float(reference_point(means, "class_means")) == pytest.approx(3.5)
    alone = torch.tensor([-2.0, -2.0, 1.0, 0.0, 0.0])
    assert float(reference_point(alone, "class_means")) == -2


def test_the_mean_of_class_means_may_be_negative_and_the_plain_mean_may_not():
    """The official code clamps in its default branch alone."""
    gain, liked = torch.tensor([-1.0, -3.0, 0.5]), torch.tensor([1.0, 1.0, 0.0])
    means = torch.stack([gain, liked * gain, liked, (1 - liked) * gain, 1 - liked], dim=1).mean(dim=0)
    assert float(reference_point(means, "class_means")) == pytest.approx((-2.0 + 0.5) / 2)
    assert float(reference_point(means, "mean")) == 0
    # Through the method: everything got worse than the reference, and z follows.
    error, reference = mean_square(V, EPS - CLEAN), mean_square(REF, EPS - CLEAN)
    better, worse = (V, REF) if (reference - error).mean() > 0 else (REF, V)
    own = mean_square(better, EPS - CLEAN) - mean_square(worse, EPS - CLEAN)
    expected = torch.stack([own[SIGN > 0].mean(), own[SIGN < 0].mean()]).mean()
    assert expected < 0
    output, _ = found(kto(offset="class_means"), worse, better)
    assert float(output.metrics["policy/offset"]) / (2 * PAIRS) == pytest.approx(float(expected))


# ---- SePPO


def own(**options):
    return seppo.build(seppo.Config(beta=BETA, **options))


def test_a_gain_of_0_counts_as_fitted():
    gains = torch.tensor([0.2, 0.0, -0.2])
    assert anchor_sign(gains, "sign").tolist() == [1, 1, -1]
    assert anchor_sign(gains, "indicator").tolist() == [1, 1, 0]
    assert anchor_sign(gains, "loser").tolist() == [1, 1, 1]


def test_without_the_criterion_it_is_diffusion_dpo():
    (one, first), (two, second) = found(own(anchor="loser"), role="earlier"), found(dpo())
    assert float(one.loss) == float(two.loss)
    assert torch.equal(first, second)


def test_at_the_earlier_self_its_own_sample_loses():
    output, gradient = found(own(), V, V, role="earlier")
    assert float(output.metrics["policy/anchor_sign"]) == 2 * PAIRS
    assert_close(gradient, found(dpo(), V, V)[1])


def test_where_the_earlier_self_fits_the_data_better_both_errors_fall():
    """s = -1: the gradients on both errors have one sign; the indicator leaves the second one out."""
    target = EPS - CLEAN
    worse = target + 2 * (REF - target)  # twice the reference's distance everywhere
    _, gradient = found(own(), worse, REF, role="earlier")
    along = (gradient * (worse - target)).sum(dim=1)
    assert bool((along > 0).all()), "a step against the gradient lowers every error"
    _, gradient = found(own(anchor="indicator"), worse, REF, role="earlier")
    assert bool((gradient[::2].abs().amax(dim=1) > 0).all())
    assert float(gradient[1::2].abs().max()) == 0
    better = target + 0.5 * (REF - target)
    _, gradient = found(own(), better, REF, role="earlier")
    assert bool(((gradient * (better - target)).sum(dim=1)[1::2] < 0).all()), "here its own sample is pushed away"


def test_the_criterion_is_of_the_slot_over_all_its_times():
    """Two slots of three times: slot 0 has gains +3, -1, -1 on its anchor, slot 1 has -3, +1, +1."""
    gains = {0: (3.0, -1.0, -1.0), 1: (-3.0, 1.0, 1.0)}
    rows = [(slot, sample, time) for slot in (0, 1) for sample in (0, 1) for time in range(3)]
    target = torch.zeros(12, DIMS, dtype=torch.float64)
    reference = target + 10
    policy = torch.stack([torch.full((DIMS,), (100 - gains[s][t] * (k == 0)) ** 0.5) for s, k, t in rows]).double()
    scene: dict[str, Any] = {
        "clean": target,
        "eps": target,
        "sigma": torch.full((12,), 0.5),
        "sample": torch.tensor([2 * s + k for s, k, _ in rows]),
        "group": torch.tensor([3 * s + t for s, _, t in rows]),
        "advantage": torch.tensor([1.0 if k == 0 else -1.0 for _, k, _ in rows]),
    }
    found = own().own_sign(outputs_of({"policy": policy, "earlier": reference}, **scene))
    assert found.tolist() == [1.0] * 6 + [-1.0] * 6


def test_its_reference_is_drawn_uniformly_from_the_kept_checkpoints():
    """Of k checkpoints each with chance 1 / k, of more than `keep` the newest alone."""
    draws = torch.tensor([seppo.drawn_checkpoint(4, 7, seed) for seed in range(2000)])
    counts = draws.bincount(minlength=5)
    assert counts[4] == 0
    # 500 each; std sqrt(2000 * 3/16) = 19.4
    assert bool(((counts[:4] - 500).abs() < 4 * 19.4).all()), counts
    newest = {seppo.drawn_checkpoint(9, 3, seed) for seed in range(200)}
    assert newest == {6, 7, 8}


def test_checkpoints_are_kept_at_their_time_and_the_oldest_is_overwritten():
    weights: Any = Moves()
    method = own(every=4, keep=3)
    for updates in range(2, 19, 2):
        method.after_iteration(updates, weights)
    assert weights == [(f"checkpoint_{place}", 0.0) for place in (1, 2, 0, 1)]
    assert method.made == 5
    method.plan(flow_schedule(4), Ode(), 1, 0)
    other = own(every=4, keep=3)
    other.load_state_dict(method.state_dict())
    assert (other.behaviour, other.made, other.last) == (method.behaviour, 5, 16)


def test_a_rounds_reference_is_one_of_the_checkpoints_that_are_still_there():
    """Of five, in three places, the fourth stands in the first one's place and the fifth in the second one's."""
    method = own(every=4, keep=3)
    method.made = 5
    found = {}
    for seed in range(50):
        method.plan(flow_schedule(4), Ode(), 1, seed)
        found[method.behaviour] = seppo.drawn_checkpoint(5, 3, seed)
    assert found == {"checkpoint_2": 2, "checkpoint_0": 3, "checkpoint_1": 4}


def test_held_out_pairs_are_judged_against_the_untouched_network_whatever_the_rounds_reference_is():
    """At a round's first iteration the newest checkpoint is the policy itself, which it cannot be told from."""
    method = own(every=1, keep=2)
    session = roll_out(ToyAdapter(), algorithm=method)
    nudge(session.adapter.network)
    session.weights.follow(method.behaviour, 0.0)
    batch = NoisedBatch(
        clean=session.samples.x0[:4],
        eps=torch.randn(2, *session.samples.x0.shape[1:]).repeat_interleave(2, dim=0),
        sigma=torch.full((4,), 0.6),
        timestep=torch.full((4,), 600.0),
        cond=session.cond.index(session.rows[:4]),
        advantage=SIGN[:4].float(),
        sample=torch.arange(4),
        group=PAIR[:4],
    )
    with torch.no_grad():
        found, expected = (one.preferred(batch, session.networks) for one in (method, dpo()))
        assert torch.equal(found, expected)
        assert bool((found != 0).all())
        told = method.outputs(batch, session.networks).by_role
    assert set(told) == {"policy", "earlier"}, "the updates pay for no other network"
    assert method.frozen == 1
    assert own(kl=AnchorConfig(coef=0.1)).frozen == 2
