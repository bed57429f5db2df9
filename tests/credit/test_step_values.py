"""Credit of a chain's steps by a judge of latents at every node."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import flowrl
from flowrl.core.errors import OptionError
from flowrl.credit.advantages import RuleConfig, advantages
from flowrl.credit.step_values import StepValues, by_gains
from flowrl.run.session import Session

JUDGE = str(Path(__file__).parents[1] / "toy_latent.py")


def open_session(*words: str) -> Session:
    return flowrl.Session(
        "configs/lab/flow_grpo.yaml",
        "rollout.num_inference_steps=4",
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=3",
        "rollout.batch_size=4",
        "algorithm.sde_steps=[0,1]",
        "data.max_prompts=3",
        "data.max_eval_prompts=1",
        "optim.batch_size=4",
        "optim.updates_per_iteration=1",
        f"rewards=[{{name: jpeg}}, {{path: {JUDGE}, weight: 0.0}}]",
        *words,
    )


def test_the_gain_of_a_step_is_the_judges_difference_over_it_and_credit_is_by_edge():
    with open_session("algorithm.step_values={output: toy_latent, weight: 0.5}") as session:
        rollout = session.roll_out(1)
        gains = rollout.gains
        assert gains is not None
        assert gains.shape == (2, 3, 4)
        assert gains[:, :, 2:].isnan().all(), "they are not trained"
        assert session.rewards is not None
        judge = session.rewards.entries[1].reward.on_latents
        assert judge is not None
        edges, sigmas = rollout.edges, rollout.plan.schedule.sigmas
        for e, (k, row) in enumerate(zip(edges.step.tolist(), edges.sample.tolist(), strict=True)):
            i = rollout.samples.ids[row]
            cond = session.parts.sampling.texts.lookup([rollout.prompts[i.slot]])
            ends = [(edges.nodes[edges.child[e]], sigmas[k + 1]), (edges.nodes[edges.parent[e]], sigmas[k])]
            after, before = (judge.value(x[None].float(), sigma.float()[None], cond)[0] for x, sigma in ends)
            assert_close(gains[i.slot, i.sample, k], after - before, rtol=1e-4, atol=1e-6)
        credit = session.credit(rollout)
        plain = advantages(rollout.rewards, torch.tensor([1.0, 0.0]), session.method.rule.config).values[:, :, 0]
        assert credit.steps is not None
        for k in (0, 1):
            own = advantages(gains[None, :, :, k], torch.ones(1), session.method.rule.config).values[:, :, 0]
            assert_close(credit.steps[:, :, k], plain + 0.5 * own)
        found = {}
        for batch in session.batches(rollout, credit):
            for step, value in zip(batch.steps.tolist(), batch.advantage[:, 0].tolist(), strict=True):
                found.setdefault(step, []).append(value)
        for k in (0, 1):
            assert sorted(found[k]) == pytest.approx(sorted(credit.steps[:, :, k].flatten().tolist()))
        assert session.update(rollout, credit)["grad/norm"] > 0


def test_without_the_option_nothing_is_asked_of_a_judge_at_a_node():
    with open_session() as session:
        rollout = session.roll_out(1)
        assert rollout.gains is None
        assert session.credit(rollout).steps is None


def test_a_step_without_a_gain_and_a_sample_without_a_reward_are_left_out():
    rewards = torch.tensor([[[1.0, 2.0, torch.nan], [3.0, 3.0, 3.0]]])
    gains = torch.tensor([0.5, -1.0, 2.0]).repeat(2, 1)[:, :, None].repeat(1, 1, 2)
    gains[0, 1, 1] = torch.nan
    rule = RuleConfig()
    credit = by_gains(advantages(rewards, torch.ones(1), rule), gains, rule, 1.0)
    assert credit.pruned is not None
    assert credit.steps is not None
    assert credit.pruned.tolist() == [[[False, False], [False, True], [True, True]], [[True, True]] * 3]
    assert torch.equal(credit.steps.isnan(), credit.pruned)


def test_a_weight_of_nothing_is_refused():
    with pytest.raises((ValueError, OptionError), match=r"weight=0.0 must be positive"):
        StepValues(output="a", weight=0.0)
