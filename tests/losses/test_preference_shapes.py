"""Losses of a pair's margin by name, soft labels, the winner's term and beta by the size of margins."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import diffusion_dpo, online_dpo
from flowrl.algorithms._credit import given_signs
from flowrl.algorithms._pairs import SIZE, AutoBetaConfig
from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.losses.batches import LossOutput
from flowrl.losses.preference import LossName, preference_loss, shaped_loss
from tests.losses.test_preference_objectives import BETA, CLEAN, EPS, PAIR, PAIRS, REF, SIGMA, SIGN, V, found
from tests.tables import table
from tests.toys import ToyAdapter, loss_of, noising_of, outputs_of, roll_out, updated

METHODS: dict[str, Any] = {"diffusion_dpo": diffusion_dpo, "online_dpo": online_dpo}


def build(name: str = "diffusion_dpo", **options: Any):
    module = METHODS[name]
    return module.build(validate(module.Config, {"beta": BETA} | options, "algorithm"))


def at(m: float, name: LossName, flip: float = 0.0, **options: Any) -> tuple[float, float]:
    """(L, g = -dL/dm) at m, with beta 2: m = -Delta."""
    value = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    loss = shaped_loss(-value, 2.0, name, flip, **options)
    return float(loss.detach()), -float(torch.autograd.grad(loss, value)[0])


# ---- the losses


@pytest.mark.parametrize(
    ("name", "flip", "loss", "slope"),
    [
        ("sigmoid", 0.0, 0.513015, 0.401312),
        ("smoothed", 0.1, 0.553015, 0.301312),
        ("robust", 0.1, 0.463015, 0.526312),
        ("hinge", 0.0, 0.6, 1.0),
        ("ipo", 0.0, 0.01, 0.2),  # m = 0.4, and its target m = 1/2
    ],
)
def test_losses_and_slopes_at_a_margin_of_two_fifths(name, flip, loss, slope):
    assert at(0.4, name, flip) == (pytest.approx(loss, abs=1e-6), pytest.approx(slope, abs=1e-6))


@given(st.floats(-20, 20), st.floats(0.01, 0.45))
def test_the_robust_loss_is_the_clean_one_in_the_mean_over_flips(m, flip):
    (right, slope), (wrong, other) = at(m, "robust", flip), at(-m, "robust", flip)
    loss, clean = at(m, "sigmoid")
    assert (1 - flip) * right + flip * wrong == pytest.approx(loss, rel=1e-9, abs=1e-9)
    assert (1 - flip) * slope - flip * other == pytest.approx(clean, rel=1e-9, abs=1e-9)


def test_smoothing_ends_at_its_margin_the_hinge_at_1_and_the_robust_loss_nowhere():
    for flip in (0.05, 0.1, 0.3):
        end = math.log((1 - flip) / flip)
        assert at(end, "smoothed", flip)[1] == pytest.approx(0, abs=1e-12)
        assert at(end + 0.1, "smoothed", flip)[1] < 0 < at(end - 0.1, "smoothed", flip)[1]
        assert at(60.0, "robust", flip)[1] == pytest.approx(flip / (1 - 2 * flip))
    assert [at(m, "hinge")[1] for m in (0.99, 1.01)] == [1.0, 0.0]


def test_ipo_ends_where_the_difference_of_errors_is_its_target():
    assert at(0.05, "ipo", target=0.05) == (0.0, 0.0)
    assert at(0.02, "ipo", target=0.05)[1] == pytest.approx(2 * (0.05 - 0.02))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"loss": {"name": "sigmoid"}},
        {"loss": {"name": "smoothed", "flip": 0.0}},
        {"loss": {"name": "robust", "flip": 0.0}},
        {"winner": 0.0},
    ],
)
def test_a_rule_that_changes_nothing_is_bit_for_bit_diffusion_dpo(method, options):
    (one, first), (two, second) = found(build(method, **options)), found(build())
    assert float(one.loss) == float(two.loss)
    assert torch.equal(first, second)
    assert one.metrics.keys() == two.metrics.keys()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["smoothed", "robust", "ipo", "hinge"])
def test_the_option_is_the_loss_of_that_name(method, name):
    """`flip` is 0.1 where nothing is said, the target 1 / beta."""
    output, gradient = found(build(method, loss={"name": name}, kl={"coef": 1e-30}))
    delta = margins()
    flip = 0.1 if name in ("smoothed", "robust") else 0.0
    assert float(output.loss) == pytest.approx(float(shaped_loss(delta, BETA, name, flip).sum()), rel=1e-9)
    assert not torch.equal(gradient, found(build(method))[1])


def margins() -> Tensor:
    """Delta of each row of the scene."""
    error, reference = ((x - (EPS - CLEAN)).square().mean(dim=1) for x in (V, REF))
    each = SIGN * (error - reference)
    return (each[::2] + each[1::2]).repeat_interleave(2)


# ---- the winner's term


def test_the_winners_term_is_its_error_once_a_pair():
    (with_it, gradient), (without, plain) = found(build(winner=0.3)), found(build())
    error = (V - (EPS - CLEAN)).square().mean(dim=1)[SIGN > 0]
    # Loss: a sum over the rows, of which a pair has two; gradient: of the mean over them.
    assert float(with_it.loss - without.loss) == pytest.approx(2 * 0.3 * float(error.sum()), rel=1e-9)
    extra = gradient - plain
    assert float(extra[SIGN < 0].abs().max()) == 0
    own = 2 * (V - (EPS - CLEAN)) / V.shape[1] / PAIRS
    assert_close(extra[SIGN > 0], 0.3 * own[SIGN > 0], rtol=1e-5, atol=1e-9)


# ---- soft labels


def soft(apart: list[float], sign: Tensor = SIGN, **options: Any) -> LossOutput:
    """The loss with the rewards' differences [PAIRS]."""
    scene = outputs_of({"policy": V, "reference": REF}, clean=CLEAN, eps=EPS, sigma=SIGMA, group=PAIR, advantage=sign)
    known = torch.tensor(apart, dtype=torch.float64).repeat_interleave(2)
    scene = replace(scene, batch=replace(scene.batch, margin=known))
    return loss_of(build(**options), scene)


@pytest.mark.parametrize("loss", [{}, {"name": "smoothed"}, {"name": "ipo"}, {"name": "hinge"}])
def test_swapping_winner_and_loser_with_the_other_margin_is_the_same_pair(loss):
    one = soft([0.3, 2.0, 0.0], loss=loss, margin={"gamma": 1.7})
    other = soft([-0.3, -2.0, -0.0], -SIGN, loss=loss, margin={"gamma": 1.7})
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-12)


def test_a_soft_label_weighs_both_orders_by_the_sigmoid_of_its_margin():
    delta, p = margins(), torch.sigmoid(1.7 * torch.tensor([0.3, 2.0, 0.0], dtype=torch.float64)).repeat_interleave(2)
    expected = p * preference_loss(delta, BETA) + (1 - p) * preference_loss(-delta, BETA)
    assert float(soft([0.3, 2.0, 0.0], margin={"gamma": 1.7}).loss) == pytest.approx(float(expected.sum()), rel=1e-9)
    sure = soft([1e9] * 3, margin={}).loss
    assert float(sure) == float(found(build())[0].loss)


def test_a_beta_by_the_margin_is_none_for_a_tie_and_whole_for_a_clear_pair():
    """PNAPO: beta (2 sigmoid(gamma d) - 1), in the losses of which beta is a factor of Delta alone."""
    own = {"gamma": 1.7, "form": "beta"}
    weight = torch.tanh(1.7 / 2 * torch.tensor([0.3, 2.0, 0.0], dtype=torch.float64)).repeat_interleave(2)
    for name in ("sigmoid", "smoothed", "hinge"):
        flip = 0.1 if name == "smoothed" else 0.0
        expected = torch.stack(
            [shaped_loss(d, BETA * float(w), name, flip) for d, w in zip(margins(), weight, strict=True)]
        )
        loss = soft([0.3, 2.0, 0.0], loss={"name": name}, margin=own).loss
        assert float(loss) == pytest.approx(float(expected.sum()), rel=1e-9)
    assert float(soft([0.0] * 3, margin=own).loss) == pytest.approx(2 * PAIRS * math.log(2), rel=1e-12)
    assert float(soft([1e9] * 3, margin=own).loss) == float(found(build())[0].loss)
    with pytest.raises(ConfigError, match=r"margin\.form=beta: the target of loss\.name=ipo"):
        build(loss={"name": "ipo"}, margin=own)


def test_the_gradient_factor_is_a_half_at_the_reference_and_falls_with_the_margin():
    def factor(v: Tensor) -> float:
        scene = outputs_of(
            {"policy": v, "reference": REF}, clean=CLEAN, eps=EPS, sigma=SIGMA, group=PAIR, advantage=SIGN
        )
        return float(loss_of(build(), scene).metrics["policy/gradient_factor"]) / (2 * PAIRS)

    assert factor(REF) == pytest.approx(0.5, rel=1e-12)
    liked = REF + 0.1 * (SIGN > 0)[:, None] * (EPS - CLEAN - REF)
    assert 0 < factor(liked) < 0.5


def test_graded_pairs_keep_their_order_in_a_tie_and_lose_halves():
    credit = given_signs(torch.tensor([[[0.7, 0.0], [0.0, 0.0], [math.nan, 0.0]]]), graded=True)
    assert credit.values.squeeze(2).tolist() == [[1, -1], [1, -1], [0, -1]]
    assert credit.margin is not None
    assert credit.margin.tolist() == [pytest.approx(0.7), 0.0, 0.0]
    assert credit.kept.tolist() == [[True, True], [True, True], [False, False]]
    assert given_signs(torch.tensor([[[1.0, 0.0]]])).margin is None


def test_each_term_of_a_pair_has_its_margin():
    algorithm = build(margin={"gamma": 1.0}, times={"name": "logit_normal", "count": 3})
    session = roll_out(ToyAdapter(), algorithm=algorithm, num_steps=4, group=2)
    rewards = torch.tensor([[[0.7, 0.0], [0.0, 0.0]]])
    work = noising_of(session, rewards)
    terms = sorted(
        (int(n) // 2, float(x))
        for batch, _ in work.batches(0)
        if batch.margin is not None
        for n, x in zip(batch.sample, batch.margin, strict=True)
    )
    assert terms == [(0, pytest.approx(0.7))] * 6 + [(1, 0.0)] * 6
    plain = roll_out(ToyAdapter(), algorithm=build(), num_steps=4, group=2)
    assert all(batch.margin is None for batch, _ in noising_of(plain, torch.tensor([[[1.0, 0.0]] * 2])).batches(0))


def test_each_term_of_a_sample_is_noised_along_the_noise_that_the_sample_was_drawn_from():
    session = roll_out(ToyAdapter(), algorithm=build(times={"name": "logit_normal", "count": 3}), num_steps=4, group=2)
    samples = session.samples
    own = torch.arange(samples.x0.numel(), dtype=torch.float32).reshape(samples.x0.shape)
    session = replace(session, samples=replace(samples, initial=own))
    for batch, _ in noising_of(session, torch.tensor([[[1.0, 0.0]] * 2])).batches(0):
        assert torch.equal(batch.eps, own[batch.sample])


def test_online_the_margin_is_that_of_the_weighted_rewards():
    rewards = torch.tensor([[[0.2, 0.9, 0.5]], [[1.0, 3.0, 2.0]]])
    credit = build("online_dpo", margin={}).advantages(rewards, torch.tensor([1.0, 0.5]))
    assert credit.margin.tolist() == [pytest.approx(0.7 + 1.0)]


# ---- beta by the size of margins


@pytest.mark.parametrize("method", METHODS)
def test_beta_gives_a_constant_margin_the_gradient_factor(method):
    algorithm: Any = build(method, auto_beta={})
    algorithm.after_update(1, None, {SIZE: 0.0})  # at the reference: nothing is known
    output, _ = found(algorithm)
    assert float(output.metrics["policy/beta"]) == pytest.approx(2 * PAIRS * BETA)
    for update in range(2, 6):
        algorithm.after_update(update, None, {SIZE: 0.5})
    output, _ = found(algorithm)
    beta = float(output.metrics["policy/beta"]) / (2 * PAIRS)
    assert beta == pytest.approx(2 * 1.386294 / 0.5)
    assert float(torch.sigmoid(torch.tensor(-beta / 2 * 0.5))) == pytest.approx(0.2)
    assert float(output.metrics[SIZE]) == pytest.approx(float(margins().abs().sum()))
    assert float(output.loss) == pytest.approx(float(preference_loss(margins(), beta).sum()), rel=1e-9)


def test_the_size_is_a_running_mean_from_the_first_margins_and_beta_has_bounds():
    config = AutoBetaConfig(decay=0.9)
    assert config.follow(0.0, 0.3) == 0.3
    assert config.follow(0.3, 0.5) == pytest.approx(0.32)
    assert config.beta(1e-12, 256) == 256.0
    assert config.beta(1e12, 256) == pytest.approx(0.256)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_keeps_the_size_and_without_the_option_the_state_is_as_before(method):
    algorithm: Any = build(method, auto_beta={})
    algorithm.after_update(1, None, {SIZE: 0.1 + 0.2})
    algorithm.after_update(2, None, {SIZE: 1 / 3})
    other: Any = build(method, auto_beta={})
    other.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert other.size == algorithm.size > 0.3
    assert build(method).state_dict().keys() == ({"refreshes"} if method == "online_dpo" else set())
    assert build(method).feedback == ()


def test_the_learner_tells_the_size_over_all_pairs():
    """The first update is at the reference; the second, which meets margins, starts the running mean."""
    session = roll_out(ToyAdapter(), algorithm=build(auto_beta={}), num_steps=4, group=2)
    sums = updated(session, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), updates=2)
    size: Any = session.algorithm
    assert 0 < size.size == pytest.approx(2 * sums.means()[SIZE], rel=1e-5)  # its mean is over both updates


# ---- what is refused


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("options", "words"), table(__file__, "refused_shapes"))
def test_options_that_make_no_sense_are_refused(method, options, words):
    with pytest.raises(ConfigError, match=words):
        build(method, **options)
