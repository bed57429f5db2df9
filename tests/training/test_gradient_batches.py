"""Methods on the gradient of rewards on tiny-sd3: autograd through the whole rollout, chunks, hinges, failures."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Kept
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.process import euler_mean
from flowrl.losses.reward_gradients import levers
from flowrl.models.base import ModelError
from flowrl.models.memory.meter import Meter
from flowrl.reward import Card, Reward
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.run.session import Session
from flowrl.scoring.gradient import RewardGradient, Slope
from flowrl.scoring.options import Gate
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Latents
from flowrl.scoring.weighted import WeightedReward
from tests.toys import ToyAdapter, roll_out

STEPS, SAMPLES = 4, 3
COLOURS = torch.tensor([1.0, -2.0, 0.5])


def open_session(*words: str, model: str = "sd3") -> Session:
    place = {
        "sd3": "path: tiny-sd3, max_sequence_length: 9",
        "generic": "path: tiny-sd3, call: {max_sequence_length: 9}",
    }
    return flowrl.Session(
        "configs/lab/draft.yaml",
        f"model={{name: {model}, {place[model]}, lora: null}}",
        f"rollout.num_inference_steps={STEPS}",
        f"rollout.prompts_per_iteration={SAMPLES}",
        "rollout.batch_size=8",
        "data.max_prompts=3",
        "data.max_eval_prompts=1",
        "optim.batch_size=2",
        *words,
    )


def gradient_of(session: Session, batch_size: int = 2) -> dict[str, Tensor]:
    """Of the summed loss, by the name of the weight."""
    parameters = session.weights.parameters
    for p in parameters.values():
        p.grad = None
    rollout = session.roll_out(1)
    for batch in session.batches(rollout, session.credit(rollout), batch_size):
        session.method.loss(batch, session.networks).loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def by_autograd(session: Session, steps: int) -> dict[str, Tensor]:
    """Of minus the summed reward, through decoder and the last steps of the very rollout, in one graph."""
    rollout, policy = session.roll_out(1), session.networks.policy
    plan, process = rollout.plan, policy.adapter.process
    last = levers(plan.schedule) - 1
    first, cond = last - steps + 1, rollout.cond.index(rollout.rows)
    x = rollout.samples.kept[first].x
    for k in range(first, last + 1):
        step = plan.steps(torch.full((len(x),), k), process)
        prediction = policy.predict(x, step, cond)
        x = prediction.x0_hat if k == last else euler_mean(process, prediction, step)
    # The value is the recorded sample's, and only the gradient that of the jump.
    x = x + (rollout.samples.x0 - x).detach()
    images = policy.adapter.decode_with_grad(x)
    scorer = session.rewards
    assert scorer is not None
    texts = [rollout.prompts[i.slot].text for i in rollout.samples.ids]
    total = scorer.entries[0].reward.score(images, texts, [{}] * len(texts))
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(-total.sum(), [*session.weights.parameters.values()])
    return dict(zip(session.weights.parameters, grads, strict=True))


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    a, b = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_at_a_time_gives_the_gradient_of_the_whole_graph(steps):
    with open_session(f"algorithm.steps={steps}", "algorithm.decoded_at_once=1") as session:
        found = gradient_of(session)
        assert apart(found, by_autograd(session, steps)) < 1e-4
        assert apart(gradient_of(session, batch_size=8), found) < 1e-4


def test_native_and_generic_agree_through_two_steps_and_the_decoder():
    with open_session("algorithm.steps=2") as native, open_session("algorithm.steps=2", model="generic") as generic:
        assert apart(gradient_of(generic), gradient_of(native)) < 1e-3


def test_checkpointing_of_the_decoder_changes_no_gradient():
    with open_session() as plain, open_session("model.memory.vae_checkpointing=true") as sparing:
        assert apart(gradient_of(sparing), gradient_of(plain)) == 0


def test_an_update_holds_no_more_than_without_decoder_or_than_one_image_needs_to_climb(monkeypatch):
    """Bytes alive in the update of K = 1, for any number of steps: the rewards' graphs are gone before the network."""
    options = ("algorithm.decoded_at_once=1", "model.memory.vae_checkpointing=true")

    def peak(session: Session) -> int:
        for p in session.weights.parameters.values():
            p.grad = None
        rollout = session.roll_out(1)
        credit = session.credit(rollout)
        with Meter() as meter:
            for batch in session.batches(rollout, credit, 2):
                session.method.loss(batch, session.networks).loss.backward()
        return meter.peak

    calls: list[int] = []
    of_one = RewardGradient.__call__

    def climb(self: RewardGradient, *given: Any) -> Slope:
        with Meter() as meter:
            found = of_one(self, *given)
        calls.append(meter.peak)
        return found

    def flat(self: RewardGradient, latents: Latents, *given: Any) -> Slope:
        count = torch.zeros(len(latents.x0))
        return Slope(count, torch.ones_like(latents.x0), count)

    with open_session(*options) as session:
        whole = peak(session)
        monkeypatch.setattr(RewardGradient, "__call__", climb)
        peak(session)
        monkeypatch.setattr(RewardGradient, "__call__", flat)
        without, gradients = peak(session), sum(4 * p.numel() for p in session.weights.parameters.values())
    assert whole <= max(1.15 * without, max(calls) + gradients)
    monkeypatch.undo()
    with open_session(*options, "rollout.num_inference_steps=8") as longer:
        assert peak(longer) == whole


def test_a_hinge_that_is_off_leaves_no_gradient_and_one_that_is_on_changes_none():
    with open_session("algorithm.hinge=-1") as off:
        assert all(not value.any() for value in gradient_of(off).values())
        row = off.step(1)
        assert row["grad/norm"] == 0
        assert row["reward_gradient/flat_share"] == 1
    with open_session("algorithm.hinge=2") as on, open_session() as without:
        assert apart(gradient_of(on), gradient_of(without)) < 1e-6


def test_low_variance_is_a_mean_over_the_sample_and_its_redrawn_ends():
    """Of 1 + n parts the first is DRaFT-1's; the others climb from their own predictions."""
    with open_session() as plain, open_session("algorithm.low_variance=2") as several:
        rollout = [each.roll_out(1) for each in (plain, several)][1]
        batches = [*several.batches(rollout, several.credit(rollout), 8)]
        (alone,) = plain.batches(rollout, plain.credit(rollout), 8)
        assert len(batches) == 3
        assert_close(3 * batches[0].coefficient, alone.coefficient, rtol=1e-5, atol=1e-9)
        assert torch.equal(batches[0].latents, alone.latents)
        for one in batches[1:]:
            assert not torch.equal(one.latents, alone.latents)
            assert torch.equal(one.steps, alone.steps)
        again = [*several.batches(rollout, several.credit(rollout), 2)]
        found = torch.cat([batch.latents for batch in again if len(batch) == 1])
        assert any(torch.equal(found[1], row) for row in batches[1].latents), "its noise is of the sample alone"


# ---- the service


class Painted(ToyAdapter):
    """Clean latents are the colours of an image, cut off at 0 and 1."""

    def latent_shape(self) -> tuple[int, ...]:
        return (3, 2, 2)

    def decode_with_grad(self, latents: Tensor, cond: object = None) -> Tensor:
        return latents.clamp(0, 1)


def colour(images: Any, prompts: Any, metadata: Any) -> Tensor:
    """NaN for the prompt "lost"."""
    values = (images.mean(dim=(2, 3)) * COLOURS).sum(dim=1)
    return torch.where(torch.tensor([text == "lost" for text in prompts]), torch.nan, values)


def service(score=colour, at_once: int = 2, hinge: float | None = None, **options) -> RewardGradient:
    reward = Reward(score, Card(outputs=("colour",), differentiable=True))
    return RewardGradient(Scorer([WeightedReward("colour", reward, **options)]), Painted(), at_once, hinge)


def climb(gradient: RewardGradient, x0: Tensor, texts: list[str]):
    cond = Painted().encode(["any"])
    rows = torch.zeros(len(x0), dtype=torch.int64)
    return gradient(Latents(x0, cond, rows), [(1.0, [Prompt(text) for text in texts], cond, rows)])


def test_the_gradient_has_weight_and_transform_and_none_where_pixels_are_cut_off():
    x0 = torch.full((3, 3, 2, 2), 0.5)
    x0[1, 0] = 1.5
    found = climb(service(weight=2.0, scale=3.0, offset=1.0), x0, ["a", "b", "c"])
    expected = (6 * COLOURS / 4)[:, None, None].expand(3, 2, 2)
    assert_close(found.gradient[0], expected)
    assert not found.gradient[1, 0].any()
    assert_close(found.gradient[1, 1:], expected[1:])
    assert_close(found.saturated, torch.tensor([0.0, 1 / 3, 0.0]))
    assert_close(found.value, torch.tensor([2 * (3 * -0.25 + 1), 2 * (3 * 0.25 + 1), 2 * (3 * -0.25 + 1)]))
    for at_once in (1, 3):
        again = climb(service(at_once=at_once, weight=2.0, scale=3.0, offset=1.0), x0, ["a", "b", "c"])
        assert all(map(torch.equal, found, again))


def test_a_failed_row_has_no_gradient_and_leaves_the_others_theirs():
    x0 = torch.rand(3, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    found = climb(service(), x0, ["a", "lost", "c"])
    assert found.value.isnan().tolist() == [False, True, False]
    assert found.gradient.flatten(1).any(dim=1).tolist() == [True, False, True]
    x0[1] = 0.5
    steep = climb(service(lambda images, *_: (images - 0.5).flatten(1).norm(dim=1)), x0, ["a"] * 3)
    assert steep.gradient.flatten(1).any(dim=1).tolist() == [True, False, True]
    steep = climb(service(lambda images, *_: (images - 0.5).square().flatten(1).sum(dim=1).sqrt()), x0, ["a"] * 3)
    assert steep.value.isnan().tolist() == [False, True, False], "its slope is infinite"
    assert steep.gradient.flatten(1).any(dim=1).tolist() == [True, False, True]


def test_the_hinge_and_the_clip_of_an_entry_end_the_gradient_of_their_rows():
    x0 = torch.full((2, 3, 2, 2), 0.5)
    x0[1, 1] = 0.0  # the second is worth 0.75, the first -0.25
    for bounded in (service(hinge=0.5), service(clip=(-9.0, 0.5))):
        found = climb(bounded, x0, ["a", "b"])
        assert found.gradient.flatten(1).any(dim=1).tolist() == [True, False]


def test_a_gate_is_scored_without_a_gradient_and_a_reward_that_is_only_looked_at_not_at_all():
    calls = []

    def judged(images: Any, prompts: Any, metadata: Any) -> Tensor:
        calls.append(images.requires_grad)
        return torch.tensor([float(text == "b") for text in prompts])

    def never(images: Any, prompts: Any, metadata: Any) -> Tensor:
        raise AssertionError("weight 0")

    first = Reward(colour, Card(outputs=("colour",), differentiable=True))
    entries = [
        WeightedReward("colour", first, gate=Gate(output="judged", at_least=0.5)),
        WeightedReward("judged", Reward(judged, Card(outputs=("judged",))), weight=0.0),
        WeightedReward("never", Reward(never, Card(outputs=("never",))), weight=0.0),
    ]
    found = climb(RewardGradient(Scorer(entries), Painted(), 4), torch.full((2, 3, 2, 2), 0.5), ["a", "b"])
    assert found.gradient.flatten(1).any(dim=1).tolist() == [False, True]
    assert calls == [False]


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda images, prompts, metadata: colour(images.detach(), prompts, metadata), "does not arrive"),
        (lambda images, prompts, metadata: 0 * colour(images, prompts, metadata), "does not arrive"),
        (lambda images, prompts, metadata: (images - images).flatten(1).sum(1).sqrt(), "is not finite"),
    ],
)
def test_a_reward_that_declares_a_gradient_and_has_none_is_named_by_the_probe(score, words):
    cond, prompt, cpu = Painted().encode(["any"]), Prompt("a"), torch.device("cpu")
    with pytest.raises(RewardError, match=f"'colour': its gradient {words} at the latents; keep the way"):
        service(score).probe(cond, prompt, cpu)
    service().probe(cond, prompt, cpu)


def test_an_adapter_without_a_gradient_says_so():
    class Plain(Painted):
        decode_with_grad = flowrl.models.base.ModelAdapter.decode_with_grad

    gradient = service()
    gradient.adapter = Plain()
    with pytest.raises(ModelError, match="Plain gives no gradient of its images"):
        gradient.probe(Painted().encode(["any"]), Prompt("a"), torch.device("cpu"))


# ---- refused before a model is loaded


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            "rewards=[{name: clip_score, model: tiny-clip}]",
            "'clip_score' has none: preprocess=exact goes through 8 bits",
        ),
        ("rewards=[{name: pickscore}]", "'pickscore' has none: preprocess=exact"),
        ("rewards=[{name: image_reward}]", "'image_reward' has none: preprocess=exact"),
        (
            "rewards=[{name: clip_score, model: tiny-clip, preprocess: fast, cache: memory}]",
            "kept scores have no gradient",
        ),
        ("rewards=[{name: clip_score, model: tiny-clip, preprocess: fast}, {name: jpeg}]", "rewards.1: draft climbs"),
        ("rollout.shared_noise=true", "equal noise gives equal samples"),
        ("rollout.sampler={name: flow_sde}", "its rollout is deterministic"),
        ("model.memory.group_offload=[vae]", "leave the device before"),
        ("algorithm.passes=2", "passes"),
        ("algorithm.steps=9", "num_inference_steps is 4"),
        ("algorithm.low_variance=1 algorithm.steps=2", "of the last step alone"),
    ],
)
def test_what_has_no_gradient_is_named_with_its_option(words, match):
    with pytest.raises((ConfigError, RewardError), match=match):
        open_session(*words.split(" algorithm")[:1], *[f"algorithm{word}" for word in words.split(" algorithm")[1:]])


def test_a_reward_that_is_only_looked_at_needs_no_gradient():
    with open_session(
        "rewards=[{name: clip_score, model: tiny-clip, preprocess: fast}, {name: jpeg, weight: 0}]"
    ) as session:
        assert session.step(1)["grad/norm"] > 0


# ---- what a rollout keeps


@cache
def drawn(keep: tuple[int, ...], shared: bool = False, batch_size: int = 4):
    session = roll_out(ToyAdapter(), shared_start=shared)
    asked = flowrl.rollout.trajectories.Asked(session.ids, session.cond, session.rows)
    plan = dataclasses.replace(session.plan, keep=keep)
    noise = Noise(0, "rollout", 1, session.adapter.latent_shape(), shared)
    return session, plan, run(session.policy, plan, noise, asked, batch_size=batch_size)


@pytest.mark.parametrize("shared", [False, True])
def test_kept_steps_are_the_latents_and_predictions_of_every_sample_and_change_nothing(shared):
    session, plan, (samples, edges) = drawn((0, 2, 5), shared)
    _, _, (plain, same) = drawn((), shared)
    assert torch.equal(samples.x0, plain.x0)
    assert torch.equal(edges.nodes, same.nodes)
    assert torch.equal(edges.old_log_prob, same.old_log_prob)
    assert plain.kept == {}
    assert sorted(samples.kept) == [0, 2, 5]
    first = edges.select((edges.step == 2).nonzero().squeeze(1))
    assert torch.equal(samples.kept[2].x[first.sample], edges.nodes[first.parent])
    for k, kept in samples.kept.items():
        assert isinstance(kept, Kept)
        step = plan.steps(torch.full((len(kept.x),), k), session.adapter.process)
        found = session.policy.predict(kept.x, step, session.cond.index(session.rows)).x0_hat
        assert_close(kept.x0_hat, found, rtol=1e-5, atol=1e-6)


def test_a_plan_keeps_steps_that_are_there():
    grid = ToyAdapter().schedule(4)
    with pytest.raises(ValueError, match=r"keeps step 4, but there are only steps 0..3"):
        dataclasses.replace(solver_plan(grid), keep=(4,))
