"""SRPO and PRFL on tiny-sd3 and its judge: autograd through the published compositions, words, batches, refusals."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt, identity, reworded
from flowrl.losses.batches import GradientBatch
from flowrl.losses.reward_gradients import Recovery
from flowrl.run.session import Session
from flowrl.scoring.surroundings import Latents
from tests.training.test_gradient_batches import apart, gradient_of, open_session

JUDGE = "rewards=[{name: latent_judge, model: tiny-judge}]"
CLIP = "rewards=[{name: clip_score, model: tiny-clip, preprocess: fast}]"
NEAR = "data.prompts=shapes-train-near.jsonl"
SRPO = {"positive": "['{prompt}']", "negative": "['{near_1}']", "low": 0.3, "high": 0.95}
PRFL = "algorithm={name: prfl, anchored: false}"


def srpo(**options: object) -> str:
    given = SRPO | options
    return f"algorithm={{name: srpo, {', '.join(f'{key}: {value}' for key, value in given.items())}}}"


def judged(session: Session, x: Tensor, sigma: Tensor, prompts: list[Prompt]) -> Tensor:
    """Logits [B] of the judge, straight from its network."""
    assert session.rewards is not None
    judge = session.rewards.entries[0].reward.on_latents
    assert judge is not None
    return judge.value(x, sigma, session.parts.sampling.texts.lookup(prompts))


def prompts_of(session: Session) -> list[Prompt]:
    rollout = session.roll_out(1)
    return [rollout.prompts[i.slot] for i in rollout.samples.ids]


def recoveries(session: Session) -> tuple[Recovery, ...]:
    method: Any = session.method
    return method.route(3, 1, session.config.seed).recoveries


def by_autograd(session: Session) -> dict[str, Tensor]:
    """Of minus the mean of both branches, in one graph: noised, one step, its own noise taken out, judged twice."""
    rollout, policy = session.roll_out(1), session.networks.policy
    x0, eps, cond = rollout.samples.x0, rollout.samples.kept[0].x, rollout.cond.index(rollout.rows)
    total, prompts, clean = torch.zeros(()), prompts_of(session), torch.zeros(len(x0))
    for branch in recoveries(session):
        a, b = branch.start, branch.end
        x = (1 - a) * x0 + a * eps
        v = policy.adapter.predict(x, torch.full((len(x),), 1000 * a), cond, policy.guidance_scale)
        end = (x + (b - a) * v - b * eps) / (1 - b)
        for factor, wording in branch.readings:
            total = total + factor * judged(session, end, clean, [reworded(p, wording) for p in prompts]).sum() / 2
    grads = torch.autograd.grad(-total, [*session.weights.parameters.values()])
    return dict(zip(session.weights.parameters, grads, strict=True))


def batches_of(session: Session, size: int = 8) -> list[GradientBatch]:
    rollout = session.roll_out(1)
    return [*session.batches(rollout, session.credit(rollout), size)]


# ---- SRPO


def test_both_branches_give_the_gradient_of_the_published_composition_in_any_batches():
    with open_session(JUDGE, NEAR, srpo()) as session:
        found = gradient_of(session, batch_size=8)
        assert apart(found, by_autograd(session)) < 1e-4
        assert apart(gradient_of(session, batch_size=1), found) < 1e-4
        denoised, inverted = batches_of(session)
        down, up = recoveries(session)
        assert down.start > down.end == up.end > up.start
        assert [text for _, text in down.readings] == [text for _, text in reversed(up.readings)]
        assert_close(denoised.step.sigma, torch.full((3,), down.start))
        assert bool((denoised.step.sigma > denoised.step.sigma_next).all())
        assert bool((inverted.step.sigma < inverted.step.sigma_next).all())
        assert_close(denoised.step.timestep, 1000 * denoised.step.sigma)


def test_the_true_velocity_gives_the_sample_back_at_every_level_and_the_branches_have_opposite_signs(monkeypatch):
    """Rewards see the very sample, whatever the noise: v = eps - x0 stands in for the network."""
    with open_session(JUDGE, NEAR, srpo(low=0.01, high=0.99)) as session:
        rollout, seen = session.roll_out(1), list[Tensor]()
        climb = session.parts.learner.context.climb
        assert climb is not None
        of_one = type(climb).__call__

        def noted(self, latents: Latents, *given: Any):
            seen.append(latents.x0)
            return of_one(self, latents, *given)

        monkeypatch.setattr(type(climb), "__call__", noted)
        truth = rollout.samples.kept[0].x - rollout.samples.x0

        def rows(x: Tensor) -> list[int]:
            """The samples on whose straight paths to their noise these latents lie."""
            off = x[:, None] - rollout.samples.x0
            level = (off * truth).flatten(2).sum(dim=2) / truth.square().flatten(1).sum(dim=1)
            missed = (off - level[..., None, None, None] * truth).abs().flatten(2).amax(dim=2)
            assert bool((missed.amin(dim=1) < 1e-3).all())
            return missed.argmin(dim=1).tolist()

        session.roll_out(1)
        batches = session.batches(rollout, session.credit(rollout), 8)
        monkeypatch.setattr(session.model, "predict", lambda x, *given: truth[rows(x)])
        denoised, inverted = batches
        assert len(seen) == 2
        for clean, batch in zip(seen, (denoised, inverted), strict=True):
            order = rows(batch.latents)
            assert_close(clean, rollout.samples.x0[order], atol=1e-3, rtol=0)
        same = torch.nn.functional.cosine_similarity(*(b.coefficient.flatten(1) for b in (denoised, inverted)))
        assert bool((same > 0).all()), "words exchanged and sign turned: both push the same way"


def test_equal_words_without_a_surplus_have_no_gradient_and_the_surplus_is_the_plain_reward():
    alike = {"negative": "['{prompt}']", "inversion": "null"}
    with open_session(JUDGE, srpo(**alike, surplus=[0, 0])) as session:
        assert all(not value.any() for value in gradient_of(session).values())
    with open_session(JUDGE, srpo(**alike, surplus=[0.5, 0.5])) as session:
        (batch,), prompts = batches_of(session), prompts_of(session)
        rollout, branch = session.roll_out(1), recoveries(session)[0]
        apart = (batch.latents[:, None] - noised(session, branch.start)).abs().flatten(2).amax(dim=2)
        order = apart.argmin(dim=1).tolist()
        assert bool((apart.amin(dim=1) < 1e-5).all())
        with torch.no_grad():
            v = session.networks.policy.output(batch.latents, batch.step, batch.cond)
        eps = rollout.samples.kept[0].x[order]
        end = (batch.latents + (branch.end - branch.start) * v - branch.end * eps) / (1 - branch.end)
        end.requires_grad_()
        logits = judged(session, end, torch.zeros(3), [prompts[k] for k in order])
        (slope,) = torch.autograd.grad(logits.sum(), end)
        gain = (branch.end - branch.start) / (1 - branch.end)
        assert_close(batch.coefficient, 0.5 * gain * slope, rtol=1e-4, atol=1e-7)
        assert_close(batch.metrics["reward_gradient/value"], 0.5 * logits.detach(), rtol=1e-4, atol=1e-5)


def noised(session: Session, level: float) -> Tensor:
    samples = session.roll_out(1).samples
    return (1 - level) * samples.x0 + level * samples.kept[0].x


def test_images_are_decoded_once_for_both_words_and_no_text_is_encoded_for_them(monkeypatch):
    with open_session(CLIP, NEAR, srpo(inversion="null")) as session:
        decodes, decode = list[int](), session.model.decode_with_grad

        def noted(x: Tensor, cond: Condition | None = None) -> Tensor:
            decodes.append(len(x) if torch.is_grad_enabled() else 0)
            return decode(x)

        monkeypatch.setattr(session.model, "decode_with_grad", noted)

        def lookup(*given: Any) -> Condition:
            raise AssertionError("no judge of latents asks for embeddings")

        context = replace(session.parts.learner.context, lookup=lookup)
        monkeypatch.setattr(session.parts.learner, "context", context)
        (batch,) = batches_of(session)
        assert sum(decodes) == 3
        assert batch.coefficient.any()


def test_words_and_levels_are_drawn_alike_everywhere_and_take_turns():
    words = "positive: ['a {prompt}', 'b {prompt}'], negative: ['c', 'd', 'e']"
    with open_session(CLIP, "algorithm={name: srpo, " + words + "}") as session:
        method: Any = session.method
        drawn = [method.route(3, iteration, 0).recoveries for iteration in range(1, 400)]
        assert drawn == [method.route(3, iteration, 0).recoveries for iteration in range(1, 400)]
        assert drawn != [method.route(3, iteration, 1).recoveries for iteration in range(1, 400)]
        assert [down.readings[0][1][0] for down, _ in drawn[:4]] == ["a", "b", "a", "b"]
        assert [down.readings[1][1] for down, _ in drawn[:4]] == ["c", "d", "e", "c"]
        assert [up.readings[0][1] for _, up in drawn[:4]] == ["c", "d", "e", "c"]
        width = 0.9643 - 0.75
        for down, up in drawn:
            place = (down.end - 0.75) / width
            apart = min(0.1, place, 1 - place)
            assert (down.start - down.end) / width == pytest.approx(apart)
            assert (up.end - up.start) / width == pytest.approx(apart)
            assert down.readings[0][0] == pytest.approx(1.1 + 0.15 * place)
            assert up.readings[0][0] == pytest.approx(1.3 - 0.29 * place)
            assert {down.readings[1][0], up.readings[1][0]} == {-1.0}
        places = sorted((down.end - 0.75) / width for down, _ in drawn)
        assert places[0] < 0.02
        assert places[-1] > 0.98
        assert max(b - a for a, b in pairwise(places)) < 0.05


def test_a_wording_that_asks_for_what_the_prompts_lack_is_refused_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match=r"'\{near_1\}' does not fit .*; its record has prompt$"):
        open_session(JUDGE, srpo())
    with pytest.raises(ConfigError, match=r"'\{' does not fit"):
        reworded(Prompt("a cat"), "{")


def test_texts_that_are_embedded_ahead_hold_the_words_of_a_judge_of_latents():
    with open_session(JUDGE, NEAR, srpo(), "data.cache_text=true") as session:
        texts = session.parts.sampling.texts
        assert texts.ready
        assert texts.knows(reworded(session.parts.data.prompts.train[0], "{near_1}"))
        found = gradient_of(session)
    with open_session(JUDGE, NEAR, srpo(), "data.cache_text=false") as session:
        assert apart(gradient_of(session), found) < 1e-4
    with open_session(CLIP, NEAR, srpo(), "data.cache_text=true") as session:
        near = reworded(session.parts.data.prompts.train[0], "{near_1}")
        own = {identity(prompt) for prompt in session.parts.data.prompts.train}
        assert session.parts.sampling.texts.knows(near) is (identity(near) in own)


# ---- PRFL


def test_the_judge_of_noisy_latents_is_climbed_at_the_next_step_by_the_length_of_this_one():
    with open_session(JUDGE, PRFL) as session:
        (batch,), rollout = batches_of(session), session.roll_out(1)
        m = int(batch.steps[0])
        sigma, kept = rollout.plan.schedule.sigmas, rollout.samples.kept
        order = [int((kept[m].x == x).flatten(1).all(dim=1).nonzero()) for x in batch.latents]
        after = kept[m + 1].x[order].clone().requires_grad_()
        assert float(sigma[m + 1]) > 0.05
        levels, prompts = sigma[m + 1].expand(3), [prompts_of(session)[k] for k in order]
        logits = judged(session, after, levels, prompts)
        (slope,) = torch.autograd.grad(logits.sum(), after)
        assert_close(batch.coefficient, (sigma[m + 1] - sigma[m]) * slope, rtol=1e-5, atol=1e-7)
        assert_close(batch.metrics["reward_gradient/value"], logits.detach(), rtol=1e-5, atol=1e-5)
        elsewhere = judged(session, after, torch.zeros(3), prompts)
        assert bool(((elsewhere - logits).abs() > 1e-3).all()), "the same latents at another level"
        found = gradient_of(session, batch_size=8)
        assert apart(gradient_of(session, batch_size=1), found) < 1e-4


def test_prfl_is_autograd_through_the_step_and_the_judge():
    with open_session(JUDGE, PRFL) as session:
        rollout, policy = session.roll_out(1), session.networks.policy
        method: Any = session.method
        m = method.route(3, 1, session.config.seed).end
        sigma, x = rollout.plan.schedule.sigmas, rollout.samples.kept[m].x
        step = rollout.plan.steps(torch.full((3,), m), policy.adapter.process)
        after = x + (sigma[m + 1] - sigma[m]) * policy.output(x, step, rollout.cond.index(rollout.rows))
        total = judged(session, after, sigma[m + 1].expand(3), prompts_of(session)).sum()
        grads = torch.autograd.grad(-total, [*session.weights.parameters.values()])
        assert apart(gradient_of(session), dict(zip(session.weights.parameters, grads, strict=True))) < 1e-4


def test_the_last_step_of_a_grid_ends_at_clean_latents_where_prfl_is_draft():
    words = ("rollout.num_inference_steps=1", "algorithm.kl.coef=0")
    with open_session(JUDGE, PRFL, *words) as session, open_session(JUDGE, *words) as draft:
        (found,), (expected,) = batches_of(session), batches_of(draft)
        assert_close(found.coefficient, expected.coefficient)


@pytest.mark.parametrize("method", [PRFL, srpo()])
def test_a_step_trains_the_policy_alone(method):
    with open_session(JUDGE, NEAR, method) as session:
        assert session.rewards is not None
        judge = session.rewards.entries[0].reward.on_latents
        assert judge is not None
        assert judge.network is not None
        row, tensors = session.step(1), [*judge.network.parameters()]
        assert row["grad/norm"] > 0
        assert tensors
        assert all(p.grad is None and not p.requires_grad for p in tensors)


def test_prfl_asks_for_given_images_and_for_a_judge_of_latents():
    with pytest.raises(ConfigError, match=r"data\.anchor=null: prfl is a step up a judge and a step on given images"):
        open_session(JUDGE, "algorithm={name: prfl}")
    with pytest.raises(ConfigError, match=r"rewards\.0: prfl climbs at noisy latents, and this reward looks"):
        open_session(CLIP, PRFL)
