"""The pull to the untouched network, of methods on the gradient of rewards: loss, count, both kinds of weights."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.losses.matching import elbo_weight
from flowrl.run.session import Session
from tests.training.test_gradient_batches import apart, gradient_of, open_session

LORA = "model.lora={rank: 4, alpha: 8}"
COEF = 3.0


def moved(session: Session) -> None:
    """Give the policy other weights than the reference's."""
    with torch.no_grad():
        for name, value in session.weights.parameters.items():
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            value += 0.02 * noise


def pulled(session: Session, untouched: list[Tensor]) -> dict[str, Tensor]:
    """Of COEF times the mean squared difference from the reference's outputs, by autograd alone."""
    rollout, policy = session.roll_out(1), session.networks.policy
    parameters, total = session.weights.parameters, torch.zeros((), dtype=torch.float64)
    batches = [*session.batches(rollout, session.credit(rollout), 8)]
    for batch, reference in zip(batches, untouched, strict=True):
        gap = policy.output(batch.latents, batch.step, batch.cond) - reference
        total = total + COEF * gap.double().square().flatten(1).mean(dim=1).sum()
    grads = torch.autograd.grad(total, [*parameters.values()])
    return dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_the_pull_is_the_mean_square_from_the_untouched_network_at_the_same_latents(lora):
    words = ("algorithm={name: drtune, window: 0.5, steps: 2}", *([LORA] if lora else []))
    with open_session(*words) as plain, open_session(*words, f"algorithm.kl.coef={COEF}") as anchored:
        assert "reference" not in plain.weights.copies
        assert ("reference" in anchored.weights.copies) is not lora
        assert apart(gradient_of(anchored), gradient_of(plain)) < 1e-6, "the policy is the reference"
        for session in (plain, anchored):
            moved(session)
        rollout = anchored.roll_out(1)
        batches = [*anchored.batches(rollout, anchored.credit(rollout), 8)]
        assert len(batches) == 2
        with torch.no_grad(), anchored.weights.using("reference"):
            untouched = [anchored.networks.policy.output(b.latents, b.step, b.cond) for b in batches]
        climb, pull, found = gradient_of(plain, 8), pulled(anchored, untouched), gradient_of(anchored, 8)
        assert apart(pull, climb) > 0.01
        assert apart(found, {name: climb[name] + pull[name] for name in climb}) < 1e-5


def test_the_weight_of_a_time_and_the_mean_over_redrawn_ends_count():
    words = ("algorithm.low_variance=1", f"algorithm.kl.coef={COEF}")
    with open_session(*words) as even, open_session(*words, "algorithm.kl.weight=elbo") as weighted:
        losses = []
        for session in (even, weighted):
            moved(session)
            rollout = session.roll_out(1)
            batch, _ = session.batches(rollout, session.credit(rollout), 8)
            found = session.method.loss(batch, session.networks)
            kl = found.metrics["policy/kl_reference"]
            climbs = -(batch.coefficient * session.networks.policy.output(batch.latents, batch.step, batch.cond)).sum()
            losses.append(((found.loss - climbs).detach(), kl, batch.step.sigma))
        (pull, kl, sigma), (other, same, _) = losses
        assert_close(pull, COEF * kl / 2, rtol=1e-4, atol=1e-7)
        assert torch.equal(kl, same)
        assert_close(other, pull * elbo_weight(sigma[:1])[0], rtol=1e-4, atol=1e-7)


def test_without_a_coefficient_no_reference_is_kept_or_evaluated_and_nothing_changes():
    with open_session() as plain, open_session("algorithm.kl={coef: 0, weight: elbo}") as off:
        rows = [session.step(1) for session in (plain, off)]
        assert off.method.roles == ()
        assert all(torch.equal(value, plain.weights.parameters[name]) for name, value in off.weights.parameters.items())
        assert rows[0]["nfe/train"] == rows[1]["nfe/train"] == 1
        assert not any("kl_reference" in row for row in rows)
    with open_session(f"algorithm.kl.coef={COEF}") as on:
        first, second = on.step(1), on.step(2)
        assert first["nfe/train"] == 2
        assert first["policy/kl_reference"] == 0 < second["policy/kl_reference"]
