"""DPOK: the buffer, the critic, the clamped ratio, the two forms of the KL."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms.dpok import AnchorKL, BatchedCriticConfig, Config, build
from flowrl.core.types import Condition
from flowrl.credit.critic import Critic
from flowrl.data.prompts import Prompt, identity
from flowrl.losses.ratio import clamped_ratio_loss, clipped_ratio_loss
from flowrl.rollout.trajectories import Rollout
from flowrl.rollout.transitions import Table, Transitions
from flowrl.samplers import ddim
from flowrl.training.base import Iteration
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums
from flowrl.training.optim import Optimizer
from flowrl.training.transition_batches import TransitionBatches
from flowrl.training.world import World
from tests.toys import (
    ALONE,
    Session,
    ToyAdapter,
    context_of,
    draw_advantages,
    nudge,
    optim_of,
    roll_out,
    rollout_of,
)

DDIM = ddim.build(ddim.Config())
REWARDS = torch.tensor([[[0.9, 0.2, 0.4], [0.1, 0.8, 0.3]]])
PROMPTS = (Prompt("prompt 0"), Prompt("prompt 1"))
IDENTITIES = tuple(map(identity, PROMPTS))
SMALL = {"batch": 8, "policy_steps": 3, "critic": BatchedCriticConfig(learning_rate=1e-2, steps=4, batch_size=16)}


def session(vp: bool = True, **options) -> Session:
    return roll_out(ToyAdapter(vp=vp), algorithm=build(Config(**(SMALL | options))), sampler=DDIM)


def lookup(run: Session):
    def found(prompts) -> Condition:
        run.adapter.freed = False
        return run.adapter.encode([text for text, _ in prompts])

    return found


def rollout(run: Session, rewards: Tensor = REWARDS) -> Rollout:
    return dataclasses.replace(rollout_of(run, rewards), prompts=PROMPTS)


def recall(
    run: Session, rewards: Tensor = REWARDS, iteration: int = 1, world: World = ALONE, sums=None
) -> TransitionBatches:
    credit = run.algorithm.advantages(rewards, torch.ones(1), IDENTITIES)
    context = context_of(run, optim_of(1, 5), world=world, lookup=lookup(run))
    return TransitionBatches(context, Iteration(iteration, rollout(run, rewards), credit, sums or Sums()))


def table(first: int, count: int, prompt: int = 0) -> Table:
    """Transitions that are told apart by their reward."""
    values = torch.arange(first, first + count).float()
    x = values[:, None, None, None].expand(-1, 2, 4, 4).clone()
    step, number = torch.zeros(count, dtype=torch.int64), torch.full((count,), prompt)
    return Table(x, x + 0.5, step, values, values, number)


# ---- the buffer


def test_the_buffer_keeps_the_newest_and_never_more_than_its_length():
    kept = Transitions(7)
    for first, count in ((0, 3), (3, 3), (6, 5), (11, 20)):
        kept.add(table(first, count), [IDENTITIES[0]])
        newest = list(range(max(0, first + count - 7), first + count))
        assert kept.table is not None
        assert kept.table.reward.tolist() == newest
        assert kept.table.latents[:, 0, 0, 0].tolist() == newest
        assert len(kept) == len(newest) <= 7


def test_prompts_stay_with_their_transitions_and_leave_with_the_last_of_them():
    kept = Transitions(4)
    kept.add(table(0, 2, prompt=1), [("a", ()), ("b", ("x.png",))])
    kept.add(table(2, 2, prompt=0), [("c", ()), ("b", ("x.png",))])
    assert kept.table is not None
    assert [kept.prompts[k] for k in kept.table.prompt.tolist()] == [("b", ("x.png",))] * 2 + [("c", ())] * 2
    assert ("a", ()) not in kept.prompts
    kept.add(table(4, 3, prompt=1), [("d", ()), ("c", ())])
    assert [kept.prompts[k] for k in kept.table.prompt.tolist()] == [("c", ())] * 4
    assert kept.prompts == [("c", ())]


def test_an_iteration_adds_every_step_of_every_scored_sample_with_its_reward():
    run = session()
    rewards = REWARDS.clone()
    rewards[0, 1, 2] = float("nan")
    work = recall(run, rewards)
    work.prepare()
    kept = run.algorithm.transitions
    assert len(kept) == 5 * 6  # five scored samples, six steps, the last among them
    assert kept.table.step.tolist() == [0, 1, 2, 3, 4, 5] * 5
    assert_close(kept.table.reward, rewards[0][~rewards[0].isnan()].repeat_interleave(6))
    assert torch.equal(kept.table.latents, run.edges.nodes[run.edges.parent][:30])
    assert torch.equal(kept.table.next_latents, run.edges.nodes[run.edges.child][:30])
    assert torch.equal(kept.table.old_log_prob, run.edges.old_log_prob[:30])
    assert [kept.prompts[k] for k in kept.table.prompt.tolist()] == [IDENTITIES[0]] * 18 + [IDENTITIES[1]] * 12


def test_updates_draw_from_earlier_iterations_none_twice_and_each_anew():
    run = session()
    recall(run).prepare()
    second = recall(run, REWARDS + 10, iteration=2)
    second.prepare()
    drawn = []
    for _ in range(run.algorithm.passes):
        batches = [batch for batch, counts in second.batches(0) if counts]
        assert sum(len(batch) for batch in batches) == second.sizes[0] == 8
        drawn.append(torch.cat([batch.latents for batch in batches]).flatten(1))
    assert not torch.equal(drawn[0], drawn[1])
    rows = second._drawn(200, "policy", 0)
    assert sorted(rows.tolist()) == list(range(72))
    assert bool((run.algorithm.transitions.table.reward[second._drawn(8, "policy", 0)] < 5).any())


def test_the_advantage_is_the_reward_less_the_value_there():
    run = session()
    work = recall(run)
    work.prepare()
    rows = work._drawn(8, "policy", 0)
    with torch.no_grad():
        part, expected, _, _ = work._expected(rows)
    batches = [batch for batch, _ in work.batches(0)]
    assert_close(torch.cat([b.advantage for b in batches])[:, 0], part.reward - expected)
    assert torch.equal(torch.cat([b.next_latents for b in batches]), part.next_latents)
    assert torch.equal(torch.cat([b.cond["prompt"] for b in batches]), run.cond["prompt"][part.prompt])


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_a_draw_out_between_them(size):
    """The same transitions, each once; the critic is fitted alike on all."""
    whole, parts = session(), []
    work = recall(whole)
    work.prepare()
    expected = torch.cat([batch.latents for batch, _ in work.batches(0)])
    weights = []
    for rank in range(size):
        run = session()
        world: Any = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), gather=lambda own: [own])
        part = recall(run, world=world)
        part.prepare()
        parts += [batch.latents for batch, _ in part.batches(0)]
        assert part.sizes[0] == len(torch.arange(8).tensor_split(size)[rank])
        weights.append(run.algorithm.critic.network.out.weight)
    assert torch.equal(torch.cat(parts), expected)
    assert all(torch.equal(w, whole.algorithm.critic.network.out.weight) for w in weights)


# ---- the critic


def test_the_critic_learns_rewards_that_depend_on_latents_text_and_step():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(256, 6, generator=generator)
    step = torch.randint(0, 3, (256,), generator=generator)
    reward = features[:, 0] + torch.tensor([-1.0, 0.0, 2.0])[step] * features[:, 1]
    critic = Critic(6, 0, 3e-3, num_steps=3)
    before = float((critic(features, step) - reward).square().mean().detach())
    for _ in range(150):
        critic.descend(critic(features, step) - reward)
    after = float((critic(features, step) - reward).square().mean().detach())
    assert after < 0.05 * before
    # Told the wrong step it is wrong: the steps' gains are used.
    assert float((critic(features, (step + 1) % 3) - reward).square().mean().detach()) > 10 * after


def test_its_own_steps_bring_the_value_towards_the_rewards_of_the_run():
    run, errors = session(), []
    for iteration in range(1, 9):
        sums = Sums()
        recall(run, REWARDS + 3, iteration, sums=sums).prepare()
        errors.append(sums.means()["policy/critic_error"])
    assert errors[-1] < 0.2 * errors[0]


# ---- the loss


def hand(ratio: Tensor, advantage: Tensor, surrogate: str) -> Tensor:
    bounded = advantage * ratio.clamp(0.9, 1.1)
    return -100 * (bounded if surrogate == "clamp" else torch.min(advantage * ratio, bounded))


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("log_ratio", [-0.5, 0.5])
def test_outside_the_band_the_clamped_ratio_has_no_gradient_whatever_the_sign(advantage, log_ratio):
    """PPO's own form keeps it where the ratio went against the advantage."""
    value = torch.tensor([log_ratio], requires_grad=True)
    loss, clipped = clamped_ratio_loss(value, torch.tensor([advantage]), (0.1, 0.1))
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert gradient.tolist() == [0.0]
    assert clipped.tolist() == [True]
    other, _ = clipped_ratio_loss(value, torch.tensor([advantage]), (0.1, 0.1))
    (theirs,) = torch.autograd.grad(other.sum(), value)
    assert (theirs.tolist() == [0.0]) == (advantage * log_ratio > 0)


@pytest.mark.parametrize("surrogate", ["clamp", "ppo"])
def test_the_loss_of_a_batch_is_the_one_written_by_hand(surrogate):
    run = session(clip_range=0.1, surrogate=surrogate, kl=AnchorKL(coef=0.0))
    nudge(run.adapter.network, 5e-3)
    advantage = draw_advantages(len(run.edges))
    batch = run.batch(advantage)
    output = run.algorithm.loss(batch, run.networks)
    with torch.no_grad():
        ratio = run.algorithm.log_ratio(run.networks.transition(batch), batch, DDIM).exp()
    outside = (ratio - 1).abs() > 0.1
    assert 0 < int(outside.sum()) < len(outside)
    assert_close(output.loss.detach(), hand(ratio, advantage, surrogate).sum(), rtol=1e-5, atol=1e-4)
    if surrogate == "clamp":
        assert output.per_step["policy/clip_fraction"].bool().tolist() == outside.tolist()


@pytest.mark.parametrize("form", ["gaussian", "eps_mse"])
@pytest.mark.parametrize("vp", [True, False], ids=["vp", "flow"])
def test_the_kl_is_the_step_gaussians_or_the_plain_square_of_the_noise(form, vp):
    """They differ by (d mean / d eps)^2 / (2 std^2), step by step."""
    run = session(vp, kl=AnchorKL(coef=1.0, form=form))
    reference = copy.deepcopy(run.adapter.network)
    nudge(run.adapter.network)
    moved = run.adapter.network
    batch = run.batch(torch.zeros(len(run.edges)))
    found = run.algorithm.loss(batch, run.networks).metrics["policy/kl_reference"]
    process, x, prompt = run.adapter.process, batch.latents, batch.cond["prompt"]
    kind = run.adapter.prediction_type
    with torch.no_grad():
        said = [network(x, batch.start.timestep, prompt) for network in (moved, reference)]
        policy, anchor = (process.predict(raw, x, batch.start.sigma, kind) for raw in said)
    square = (policy.eps_hat - anchor.eps_hat).double().square().flatten(1).mean(1)[batch.parent]
    if form == "gaussian":
        step = batch.step
        std = (ddim.vp_std if vp else ddim.any_path_std)(step).double()
        # x0_hat = (x - s eps) / a; at the very start of a flow a = 0 and eps_hat = x whatever the network says.
        a, s, a2 = (v.double() for v in (step.alpha, step.sigma, step.alpha_next))
        gain = (step.sigma_next.double() ** 2 - std**2).clamp(min=0).sqrt() - a2 * s / a.clamp(min=1e-12)
        square = torch.where(a > 0, gain**2 / (2 * std**2) * square, torch.nan)
        if not vp:  # there the KL is finite, but not a multiple of the noise's square
            apart = (policy.x0_hat - anchor.x0_hat).double().square().flatten(1).mean(1)[batch.parent]
            square = square.where(a > 0, a2**2 * apart / (2 * std**2))
    assert_close(found.double(), square.sum(), rtol=1e-3, atol=0)


def test_at_the_reference_the_kl_and_its_gradient_are_zero():
    for form in ("gaussian", "eps_mse"):
        run = session(kl=AnchorKL(coef=1.0, form=form))
        zeros = torch.zeros(len(run.edges))
        assert all(float(g.abs().max()) == 0 for g in run.gradient(zeros).values())


# ---- a whole iteration, and the checkpoint


def learner(run: Session) -> Learner:
    context = context_of(run, dataclasses.replace(optim_of(1, 5), learning_rate=1e-4), lookup=lookup(run))
    return Learner(training_of(run.algorithm), context, Optimizer(run.weights, context.optim, 100))


def iterate(run: Session, work: Learner, iteration: int, gate=None) -> Sums:
    sums = Sums()
    credit = run.algorithm.advantages(REWARDS, torch.ones(1), IDENTITIES)
    work.update(iteration, rollout(run), credit, sums, gate=gate)
    return sums


def test_an_iteration_takes_its_policy_steps_through_the_parity_gate():
    run = session()
    before = [p.detach().clone() for p in run.adapter.network.parameters()]
    work = learner(run)
    sums = iterate(run, work, 1, gate=torch.float32)
    assert work.optimizer.updates == 3
    assert sums.means()["policy/ratio_mean"] == pytest.approx(1.0, abs=0.1)
    assert {"policy/critic_error", "policy/kl_reference", "policy/clip_fraction"} <= set(sums.means())
    assert all(not torch.equal(a, b) for a, b in zip(before, run.adapter.network.parameters(), strict=True))


def test_its_memory_and_its_critic_come_back_from_a_checkpoint():
    run, other = session(), session()
    iterate(run, learner(run), 1)
    other.algorithm.load_state_dict(run.algorithm.state_dict())
    other.algorithm.load_tensors({k: v.clone() for k, v in run.algorithm.tensors().items()})
    # Saved again before anything was drawn, nothing is lost.
    for name, value in run.algorithm.tensors().items():
        assert torch.equal(other.algorithm.tensors()[name], value), name
    parts = []
    for each in (run, other):
        work = recall(each, REWARDS + 1, iteration=2)
        work.prepare()
        parts.append([batch for batch, _ in work.batches(0)])
    for mine, theirs in zip(*parts, strict=True):
        assert torch.equal(mine.advantage, theirs.advantage)
        assert torch.equal(mine.latents, theirs.latents)


def test_a_run_whose_every_sample_failed_leaves_the_weights_alone():
    run = session()
    work = learner(run)
    nothing = torch.full_like(REWARDS, torch.nan)
    work.update(1, rollout(run, nothing), run.algorithm.advantages(nothing, torch.ones(1)), Sums())
    assert work.optimizer.updates == 0
    assert len(run.algorithm.transitions) == 0


# ---- options


def test_its_buffer_is_counted_again_once_the_last_step_is_known_to_be_trained():
    config = Config()
    config.check_trained(20, 50)
    with pytest.raises(ValueError, match="buffer=1000 holds less than the 1020 transitions"):
        config.check_trained(20, 51)


def test_defaults_are_those_of_the_released_code():
    """The KL's form is the paper's."""
    config = Config()
    assert (config.buffer, config.batch, config.policy_steps, config.reward_weight) == (1000, 24, 5, 100.0)
    assert (config.critic.learning_rate, config.critic.steps, config.critic.batch_size) == (1e-4, 5, 256)
    assert config.clip(DDIM) == (1e-4, 1e-4)
    assert (config.surrogate, config.kl.coef, config.kl.form) == ("clamp", 0.01, "gaussian")
