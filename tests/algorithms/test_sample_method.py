"""The base of methods on finished samples: what a method has that writes its loss alone."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flowrl.algorithms import awm, crd, diffusion_nft, ram
from flowrl.algorithms._matching import AnchorConfig, LagConfig
from flowrl.algorithms._options import Options
from flowrl.algorithms.base import Networks, SampleMethod
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import LossOutput, NoisedBatch, summed
from tests.toys import Moves, ToyAdapter, assert_same_gradient, noising_of, roll_out, terms_gradient

REWARDS = torch.tensor([[[0.9, 0.2, 0.4], [0.1, 0.8, 0.3]]])
OFF = AnchorConfig(coef=0.0)


class Weighted(SampleMethod):
    """Matching errors, weighted by advantages."""

    def loss(self, batch: NoisedBatch, networks: Networks) -> LossOutput:
        outputs = self.outputs(batch, networks)
        loss = batch.advantage.double() * outputs.error()
        return summed(loss, {"policy/loss": loss} | outputs.metrics())


def test_a_method_that_is_its_loss_alone_is_awm_on_policy_without_its_stabilisers():
    times = TimesConfig(name="logit_normal", count=1)
    options = {"weighting": "uniform", "advantage_max": 5.0, "kl": OFF, "ema_kl": OFF, "solver": "ode"}
    found = []
    for method in (Weighted(Options()), awm.build(awm.Config(times=times, **options))):
        session = roll_out(ToyAdapter(), algorithm=method)
        found.append(terms_gradient(session, noising_of(session, REWARDS)))
    assert_same_gradient(*found)


@dataclass(frozen=True, kw_only=True)
class Lagging(Options):
    reference_guidance: float | None = 2.0


class Followed(SampleMethod[Lagging]):
    """A method with a role of each kind."""

    compared = ("reference", "slow")
    remembers = ("refreshes", "behaviour")

    def __init__(self, config: Lagging) -> None:
        super().__init__(config)
        self.behaviour = "drawing"
        self.lags, self.refresh = {"slow": LagConfig(start=0.5)}, ("drawing", 10)


def test_roles_are_those_that_are_compared_that_lag_and_that_draw_each_once():
    method = Followed(Lagging())
    assert method.roles == ("reference", "slow", "drawing")
    assert method.frozen == 2


def test_a_role_is_refreshed_when_it_is_due_and_a_checkpoint_knows_how_often_it_was():
    moves: Any = Moves()
    method = Followed(Lagging())
    for updates in (4, 11, 19, 35):
        resumed = Followed(Lagging())
        resumed.load_state_dict(method.state_dict())
        method = resumed
        method.after_iteration(updates, moves)
    assert [role for role, _ in moves] == ["slow", "slow", "drawing", "slow", "slow", "drawing"]
    assert dict(moves)["drawing"] == 0.0
    assert method.state_dict() == {"refreshes": 3, "behaviour": "drawing"}


@pytest.mark.parametrize("state", [{}, {"refreshes": 1}, {"refreshes": 1, "behaviour": "nobody"}])
def test_a_state_with_less_or_with_a_role_that_there_is_not_is_refused(state):
    with pytest.raises(ValueError, match="the checkpoint"):
        Followed(Lagging()).load_state_dict(state)


@pytest.mark.parametrize(
    ("method", "options", "role", "expected"),
    [
        (awm, {}, "anchor", {0: 0.0, 100: 0.1, 300: 0.3, 5000: 0.3}),
        (crd, {}, "old", {0: 0.25, 100: 0.75, 149: 0.995, 1000: 0.999}),  # "0-0.25-0.005-0.999"
        (crd, {}, "sampling", {74: 0.0, 75: 0.0, 175: 0.75, 1000: 0.999}),  # "75-0.0-0.0075-0.999"
        (diffusion_nft, {"old": "ramp"}, "old", {120: 0.12, 600: 0.5}),
        (diffusion_nft, {"old": "late"}, "old", {74: 0.0, 75: 0.0, 208: 0.9975, 209: 0.999}),
        (diffusion_nft, {"old": "none"}, "old", {0: 0.0, 1: 0.0, 1000: 0.0}),
        (ram, {}, "old", {0: 0.0, 50: 0.5, 90: 0.9, 500: 0.9}),
    ],
)
def test_roles_follow_as_published(method, options, role, expected):
    lag = method.build(method.Config(**options)).lags[role]
    assert {updates: lag.decay(updates) for updates in expected} == pytest.approx(expected)
