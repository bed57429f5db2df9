"""Rewards on latents: scored where samples are finished, differentiated without the decoder, refused for images."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.commands import eval as evaluation
from flowrl.commands import score
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import solver_plan
from flowrl.media import media
from flowrl.reward import Card, LatentReward, Reward
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.run.session import Session
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.gradient import RewardGradient
from flowrl.scoring.options import Gate
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch, Latents
from flowrl.scoring.weighted import WeightedReward
from tests.remedies import follows
from tests.toys import ToyAdapter

JUDGE = str(Path(__file__).parents[1] / "toy_latent.py")
ALONE = f"rewards=[{{path: {JUDGE}, weight: 2.0}}]"
BESIDE = f"rewards=[{{path: {JUDGE}, weight: 2.0}}, {{name: jpeg, weight: 1.0}}]"


def open_session(recipe: str, *words: str) -> Session:
    return flowrl.Session(
        f"configs/lab/{recipe}.yaml",
        "rollout.num_inference_steps=3",
        "rollout.prompts_per_iteration=2",
        "rollout.batch_size=3",
        "data.max_prompts=3",
        "data.max_eval_prompts=3",
        "eval.num_inference_steps=2",
        "eval.batch_size=4",
        "optim.batch_size=2",
        *words,
    )


GRPO = ("rollout.group_size=2", "algorithm.sde_steps=[0]", "optim.updates_per_iteration=1")


def no_decoder(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*given: object) -> Tensor:
        raise AssertionError("nobody asked for images")

    for name in ("decode", "decode_with_grad"):
        monkeypatch.setattr(session.model, name, decode)


# ---- a run


@pytest.mark.parametrize("rewards", [ALONE, BESIDE], ids=["alone", "beside images"])
def test_a_rollout_is_scored_by_its_own_latents_under_its_own_prompts(rewards, monkeypatch):
    with open_session("flow_grpo", *GRPO, rewards) as session:
        if rewards == ALONE:
            no_decoder(session, monkeypatch)
        rollout = session.roll_out(1)
        assert session.rewards is not None
        judge = session.rewards.entries[0].reward.on_latents
        assert judge is not None
        for row, i in enumerate(rollout.samples.ids):
            cond = session.parts.sampling.texts.lookup([rollout.prompts[i.slot]])
            alone = judge.value(rollout.samples.x0[row : row + 1], torch.zeros(1), cond)
            assert_close(rollout.raw["toy_latent"][i.slot, i.sample], alone[0])
        assert_close(rollout.rewards[0], rollout.raw["toy_latent"])
        assert rollout.raw["toy_latent"].unique().numel() == 4
        assert (rollout.image_std != rollout.image_std) == (rewards == ALONE), "nothing was decoded"
        row = session.update(rollout, session.credit(rollout))
        assert row["grad/norm"] > 0


def test_an_evaluation_scores_the_latents_that_it_has_drawn():
    with open_session("flow_grpo", *GRPO, "rewards=[{name: jpeg}]", f"eval.rewards=[{{path: {JUDGE}}}]") as session:
        evaluator, sampling = session.parts.evaluator, session.parts.sampling
        found = session.evaluate("base").scores["toy_latent"]
        ids = [SampleId(slot, k) for slot in range(3) for k in range(2)]
        noise = Noise(evaluator.seed, "eval", None, session.model.latent_shape())
        plan = solver_plan(session.model.schedule(2))
        drawn = sampling.draw(plan, noise, sampling.asked(evaluator.prompts, ids), batch_size=6, options=RunOptions())
        watched = session.parts.scorers.watched
        assert watched is not None
        judge = next(e.reward.on_latents for e in watched.entries if e.reward.on_latents is not None)
        own = judge.value(drawn.samples.x0, torch.zeros(6), drawn.cond.index(drawn.rows))
        assert_close(torch.from_numpy(found).float(), own.reshape(3, 2), rtol=1e-4, atol=1e-5)


def test_a_run_that_climbs_a_judge_of_latents_alone_decodes_nothing(monkeypatch):
    with open_session("draft", ALONE) as session:
        no_decoder(session, monkeypatch)
        row = session.step(1)
        assert row["grad/norm"] > 0
        assert row["reward_gradient/saturated_share"] == 0
        assert row["reward_gradient/value"] == pytest.approx(2 * row["reward/toy_latent_mean"], rel=1e-4)


# ---- the service


class Painted(ToyAdapter):
    """Clean latents are the colours of an image, cut off at 0 and 1."""

    decodes = 0

    def latent_shape(self) -> tuple[int, ...]:
        return (3, 2, 2)

    def decode_with_grad(self, latents: Tensor, cond: object = None) -> Tensor:
        self.decodes += 1
        return latents.clamp(0, 1)


NETWORK = torch.nn.Linear(12, 1)
"""Its parameters would take a gradient."""


def value(x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
    return NETWORK(x.flatten(1)).squeeze(1) + x.square().flatten(1).sum(dim=1) * cond["w"] + sigma


def on_latents(value: Any = value, name: str = "judge") -> Reward:
    card = Card(outputs=(name,), modality="latents", differentiable=True)
    return LatentReward(value, card, (3, 2, 2), NETWORK).as_reward()


def brightness(name: str = "bright") -> Reward:
    def score(images: Any, *others: Any) -> Tensor:
        return images.mean(dim=(1, 2, 3))

    return Reward(score, Card(outputs=(name,), differentiable=True))


def climb(*entries: WeightedReward, x0: Tensor, at_once: int = 2):
    adapter = Painted()
    cond, texts = Condition({"w": torch.tensor([1.0, -2.0])}), [Prompt("a")] * len(x0)
    rows = torch.arange(len(x0)) % 2
    gradient = RewardGradient(Scorer(entries), adapter, at_once)
    return gradient(Latents(x0, cond, rows), [(1.0, texts, cond, rows)]), adapter.decodes


X0 = torch.rand(3, 3, 2, 2, generator=torch.Generator().manual_seed(1)) * 1.4 - 0.2


def test_a_sum_of_both_kinds_is_the_sum_of_their_gradients_and_weights_take_none():
    judged = WeightedReward("judge", on_latents(), weight=2.0, scale=3.0)
    bright = WeightedReward("bright", brightness(), weight=0.5)
    one, decodes = climb(judged, x0=X0)
    assert decodes == 0
    assert not one.saturated.any()
    x = X0.clone().requires_grad_()
    w = torch.tensor([1.0, -2.0, 1.0])
    total = 6 * value(x, torch.zeros(3), Condition({"w": w}))
    assert_close(one.value, total.detach())
    assert_close(one.gradient, torch.autograd.grad(total.sum(), x)[0])
    two, _ = climb(bright, x0=X0)
    both, decodes = climb(judged, bright, x0=X0)
    assert decodes == 2
    assert_close(both.gradient, one.gradient + two.gradient)
    assert_close(both.saturated, two.saturated)
    assert two.saturated.any()
    assert all(p.grad is None for p in NETWORK.parameters())
    again, _ = climb(judged, bright, x0=X0, at_once=3)
    assert_close(again.gradient, both.gradient)


def test_gates_between_latents_and_images_open_by_scores_and_pass_no_gradient():
    judge, bright = WeightedReward("judge", on_latents(), weight=0.0), brightness()
    values = value(X0, torch.zeros(3), Condition({"w": torch.tensor([1.0, -2.0, 1.0])})).detach()
    edge = float(values.sort().values[:2].mean())
    found, _ = climb(WeightedReward("bright", bright, gate=Gate(output="judge", at_least=edge)), judge, x0=X0)
    assert found.gradient.flatten(1).any(dim=1).tolist() == (values > edge).tolist()
    gated = WeightedReward("judge", on_latents(), gate=Gate(output="bright", at_least=2.0))
    found, decodes = climb(gated, WeightedReward("bright", bright, weight=0.0), x0=X0)
    assert decodes == 2, "the gate looks at images"
    assert not found.gradient.any()


# ---- the scorer


def batch(x0: Tensor) -> Batch:
    latents = Latents(x0, Condition({"w": torch.tensor([1.0, -2.0])}), torch.arange(len(x0)) % 2)
    return Batch(torch.zeros(len(x0), 3, 4, 4), ["a"] * len(x0), [{} for _ in x0], latents)


def scores(reward: Reward, x0: Tensor, **options: Any):
    given = batch(x0)
    scorer = Scorer([WeightedReward("judge", reward, **options)], batch_size=2, on_error=lambda text: None)
    return scorer.score(given.images, given.prompts, given.metadata, given.latents)


def test_chunks_prefix_transform_and_clip_are_those_of_every_reward():
    own = value(X0, torch.zeros(3), Condition({"w": torch.tensor([1.0, -2.0, 1.0])})).detach()
    found = scores(on_latents().prefixed("a"), X0, scale=2.0, offset=1.0, clip=(-3.0, 3.0), weight=0.5)
    assert_close(found.raw["a_judge"], own)
    assert_close(found.values[0], (2 * own + 1).clamp(-3, 3))


def test_latents_that_are_not_finite_and_failed_rows_have_no_score():
    torn = X0.clone()
    torn[1, 0, 0, 0] = torch.nan
    assert scores(on_latents(), torn).raw["judge"].isnan().tolist() == [False, True, False]

    def raises(x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        if (cond["w"] < 0).any():
            raise ValueError("not this one")
        return value(x, sigma, cond)

    assert scores(on_latents(raises), X0).raw["judge"].isnan().tolist() == [False, True, False]


def test_what_works_in_place_spoils_neither_samples_nor_other_rewards():
    def spoils(x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        cond["w"].zero_()
        return x.zero_().flatten(1).sum(dim=1)

    given = batch(X0.clone())
    assert given.latents is not None
    scorer = Scorer([WeightedReward("a", on_latents(spoils)), WeightedReward("b", on_latents(name="other"))])
    found = scorer.score(given.images, given.prompts, given.metadata, given.latents)
    assert torch.equal(given.latents.x0, X0)
    assert_close(found.raw["other"], scores(on_latents(), X0).raw["judge"])


# ---- refused before anything is trained


@follows("flowrl/scoring/entries.py:reward_plan")
def test_scores_of_latents_are_not_kept():
    with pytest.raises(ConfigError, match=r"rewards.0.cache='memory': scores are kept by image") as refused:
        reward_plan({"path": JUDGE, "cache": "memory"}, "rewards.0")
    assert refused.value.remedies[0].settings == {"rewards.0.cache": None}
    reward_plan({"path": JUDGE, "cache": None}, "rewards.0")


def test_a_suite_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match=r"toy_latent judges a model's latents .* only images are at hand"):
        evaluation.command("tiny-sd3", suite="geneval", out=tmp_path / "out", judge=[JUDGE], limit=1, steps=1)


def test_flowrl_score_refuses_it(tmp_path):
    media.write(torch.zeros(3, 8, 8), tmp_path / "a.png")
    with pytest.raises(ConfigError, match="only images are at hand here"):
        score.command(tmp_path, reward=[JUDGE])


def test_a_scorer_that_is_given_images_alone_says_what_it_lacks():
    with pytest.raises(RewardError, match="'judge' judges a model's latents, and only images"):
        Scorer([WeightedReward("judge", on_latents())]).score(torch.zeros(1, 3, 4, 4), ["a"], [{}])


def test_a_judge_of_other_latents_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"'toy_latent' judges latents \[4, 4, 4\], and the model's are \[4, 8, 8\]"):
        open_session("flow_grpo", *GRPO, f"rewards=[{{path: {JUDGE}, size: 4}}]")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lambda x, sigma, cond: x.flatten(1).mean(1) - x.mean()", "depends on its batch: .* of latents"),
        ("lambda x, sigma, cond: x.detach().flatten(1).mean(1)", "its gradient does not arrive at the latents"),
        ("lambda x, sigma, cond: x.mean()", r"returned shape \(\)"),
        ("lambda x, cond: x.flatten(1).mean(1)", "must take"),
    ],
)
def test_a_judge_that_breaks_its_contract_is_named_by_the_probe(tmp_path, line, words):
    card = "CARD = Card(outputs=('mine',), modality='latents', differentiable=True)\n"
    file = write(tmp_path, f"{card}def build(config):\n    return LatentReward({line}, CARD, (4, 8, 8))\n")
    with pytest.raises(RewardError, match=words):
        open_session("draft", f"rewards=[{{path: {file}}}]")


def write(folder: Path, lines: str) -> Path:
    file = folder / "mine.py"
    head = "from dataclasses import dataclass\nfrom flowrl import Card, LatentReward, Reward\n"
    file.write_text(f"{head}@dataclass\nclass Config:\n    pass\n{lines}")
    return file


@pytest.mark.parametrize(
    ("card", "made", "words"),
    [
        ("modality='image'", "LatentReward(v, CARD, (4, 8, 8))", "nowhere else, so that it is known beforehand"),
        ("modality='latents', differentiable=True", "Reward(v, CARD)", "nowhere else"),
        ("modality='latents'", "LatentReward(v, CARD, (4, 8, 8))", "differentiable=True"),
    ],
)
def test_the_card_says_beforehand_that_latents_are_judged(tmp_path, card, made, words):
    lines = f"CARD = Card(outputs=('mine',), {card})\nv = lambda x, sigma, cond: x.flatten(1).mean(1)\n"
    file = write(tmp_path, f"{lines}def build(config):\n    return {made}\n")
    with pytest.raises(RewardError, match=words):
        reward_plan({"path": str(file)}, "rewards.0").build()


def test_two_entries_of_one_judge_share_it():
    with open_session(
        "flow_grpo", *GRPO, f"rewards=[{{path: {JUDGE}}}, {{path: {JUDGE}, weight: 0.0, scale: 2.0}}]"
    ) as s:
        assert s.rewards is not None
        assert len(s.rewards.distinct) == 1
        assert dataclasses.asdict(s.rewards.counts[0])["calls"] == 0
