"""The one denoising loop: what it records, and that layout does not matter."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.flow_grpo import Config
from flowrl.core.types import Edges, SampleId, Samples
from flowrl.diffusion.flash import flash
from flowrl.diffusion.plan import StepPlan, solver_plan, window
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.diffusion.solver_base import Node
from flowrl.diffusion.solvers import SOLVERS
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.trajectories import Asked
from flowrl.training.metrics import Sums
from tests.toys import SHAPE, Session, ToyAdapter, learner_of, roll_out, rollout_of


def ids(prompts: int, group: int) -> list[SampleId]:
    return [SampleId(slot, sample) for slot in range(prompts) for sample in range(group)]


def walk(session: Session, plan: StepPlan | None = None, **options: Any) -> tuple[Samples, Edges]:
    """The session's samples, in one batch, along another plan if one is given."""
    asked = Asked(session.ids, session.cond, session.rows)
    options = {"batch_size": len(session.ids)} | options
    return run(session.policy, plan or session.plan, session.noise, asked, **options)


# ---- what is recorded


@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_the_child_of_a_step_is_the_parent_of_the_next_and_is_stored_once(batch_size):
    session = roll_out(ToyAdapter(), batch_size=batch_size)
    edges, trained = session.edges, len(session.plan.train)
    assert len(edges) == 6 * trained
    parent, child = edges.parent.reshape(6, trained), edges.child.reshape(6, trained)
    assert torch.equal(child[:, :-1], parent[:, 1:])
    # Every chain of K trained steps has K + 1 latents, and no latent twice.
    assert len(edges.nodes) == 6 * (trained + 1)
    assert torch.cat([parent[:, :1], child], dim=1).flatten().sort().values.tolist() == list(range(len(edges.nodes)))
    assert len(edges.nodes.flatten(1).unique(dim=0)) == len(edges.nodes)
    assert edges.sample.tolist() == [s for s in range(6) for _ in range(5)]
    assert edges.step.tolist() == list(range(5)) * 6


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_a_rollout_is_the_loop_written_by_hand(guidance_scale):
    """Steps 1, 2 and 4 stochastic, the others Euler, the noise drawn by key; latents, log-probs and x0 all agree."""
    adapter = ToyAdapter()
    session = roll_out(adapter, Config(sde_steps=[1, 2, 4]), batch_size=6, guidance_scale=guidance_scale)
    edges, sigmas = session.edges, session.plan.schedule.sigmas
    x, cond = session.noise.initial(session.ids), session.cond.index(session.rows)
    recorded = 0
    with torch.no_grad():
        for k in range(6):
            sigma, dt = sigmas[k], sigmas[k + 1] - sigmas[k]
            v = adapter.predict(x, torch.full((6,), float(1000 * sigma)), cond, guidance_scale)
            if k not in (1, 2, 4):
                x = x + v * dt
                continue
            g = 0.7 * (sigma / (1 - sigma)).sqrt()
            mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
            std = g * (-dt).sqrt()
            after = mean + std * session.noise.step(session.ids, k)
            chosen = edges.select((edges.step == k).nonzero().squeeze(1))
            assert_close(chosen.nodes[chosen.parent], x, rtol=1e-4, atol=1e-5)
            assert_close(chosen.nodes[chosen.child], after, rtol=1e-4, atol=1e-5)
            density = torch.distributions.Normal(mean, std).log_prob(after)
            assert_close(chosen.old_log_prob, density.flatten(1).mean(1), rtol=1e-4, atol=1e-4)
            recorded += len(chosen)
            x = after
    assert recorded == len(edges) == 18
    assert_close(session.samples.x0, x, rtol=1e-4, atol=1e-5)
    assert session.samples.x0.dtype == torch.float32
    assert not any(value.requires_grad for value in (session.samples.x0, edges.nodes, edges.old_log_prob))


def test_a_window_records_only_its_steps_and_links_only_neighbours():
    """Steps 1, 2 chain; step 4 starts from a latent of its own."""
    edges = roll_out(ToyAdapter(), Config(sde_steps=[1, 2, 4]), batch_size=6).edges
    parent, child = edges.parent.reshape(6, 3), edges.child.reshape(6, 3)
    assert torch.equal(child[:, 0], parent[:, 1])
    assert not torch.isin(parent[:, 2], child).any()
    assert len(edges.nodes) == 6 * 5
    assert edges.step.reshape(6, 3).tolist() == [[1, 2, 4]] * 6


def test_a_stochastic_step_that_is_not_trained_is_walked_but_not_recorded():
    session = roll_out(ToyAdapter(), batch_size=6)
    plan = StepPlan(session.plan.schedule, session.plan.noise_level, (1, 3))
    samples, edges = walk(session, plan)
    assert torch.equal(samples.x0, session.samples.x0)
    assert edges.step.reshape(6, 2).tolist() == [[1, 3]] * 6
    assert len(edges.nodes) == 6 * 4
    kept = torch.isin(session.edges.step, torch.tensor([1, 3]))
    assert torch.equal(edges.old_log_prob, session.edges.old_log_prob[kept])
    assert torch.equal(edges.nodes[edges.child], session.edges.nodes[session.edges.child[kept]])


def test_a_deterministic_plan_records_nothing_and_draws_no_step_noise(monkeypatch):
    session = roll_out(ToyAdapter())
    monkeypatch.setattr(Noise, "step", lambda *a: pytest.fail("step noise was drawn"))
    samples, edges = walk(session, solver_plan(session.plan.schedule))
    assert len(edges) == len(edges.nodes) == 0
    assert samples.x0.shape == (6, *SHAPE)


def test_the_mean_under_the_old_policy_is_recorded_if_asked_for():
    session = roll_out(ToyAdapter(), columns=("mean_old",), batch_size=4)
    edges = session.edges
    step = session.plan.steps(edges.step, session.adapter.process)
    with torch.no_grad():
        cond = session.cond.index(session.rows[edges.sample])
        mean = session.policy.transition(edges.nodes[edges.parent], step, cond).mean
    assert_close(edges.columns["mean_old"], mean, rtol=1e-5, atol=1e-6)
    assert roll_out(ToyAdapter()).edges.columns == {}


def test_an_unknown_column_is_refused():
    with pytest.raises(ValueError, match="'mean_ref' is unknown"):
        roll_out(ToyAdapter(), columns=("mean_ref",))


def test_progress_counts_every_sample():
    counts: list[int] = []
    walk(roll_out(ToyAdapter()), batch_size=4, options=RunOptions(progress=counts.append))
    assert counts == [4, 2]


# ---- layout


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_rollout_does_not_depend_on_the_batch_size(batch_size):
    """Noise bitwise, latents up to rounding."""
    whole = roll_out(ToyAdapter(), batch_size=6)
    split = roll_out(ToyAdapter(), batch_size=batch_size)
    assert_close(split.samples.x0, whole.samples.x0, rtol=0, atol=1e-6)
    a, b = whole.edges, split.edges
    for name in ("step", "sample"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert_close(b.nodes[b.parent], a.nodes[a.parent], rtol=0, atol=1e-6)
    assert_close(b.nodes[b.child], a.nodes[a.child], rtol=0, atol=1e-6)
    # (x' - mean) / std is the noise itself, exact to rounding: 1e-6 / std with std > 0.2 on this grid.
    assert_close(b.old_log_prob, a.old_log_prob, rtol=0, atol=2e-5)
    starts = a.step == 0
    assert torch.equal(b.nodes[b.parent[starts]], a.nodes[a.parent[starts]])


def test_a_share_of_the_samples_gives_their_rows_of_the_whole():
    """As another process would draw them: slots 1 and 2 alone, in another order."""
    whole = roll_out(ToyAdapter(), prompts=3, batch_size=9)
    chosen = [5, 3, 8]
    part = [whole.ids[i] for i in chosen]
    asked = Asked(part, whole.cond, whole.rows[chosen])
    samples, edges = run(whole.policy, whole.plan, whole.noise, asked, batch_size=2)
    assert samples.ids == tuple(part)
    assert_close(samples.x0, whole.samples.x0[chosen], rtol=0, atol=1e-6)
    mine = edges.nodes[edges.child].reshape(3, 5, *SHAPE)
    theirs = whole.edges.nodes[whole.edges.child].reshape(9, 5, *SHAPE)[chosen]
    assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_noise_is_keyed_by_identity_and_not_by_batch_position():
    noise = Noise(0, "rollout", 1, SHAPE)
    everyone = ids(3, 4)
    first, step = noise.initial(everyone), noise.step(everyone, 2)
    for at in (0, 5, 11):
        assert torch.equal(noise.initial(everyone[at : at + 1])[0], first[at])
        assert torch.equal(noise.step(everyone[at : at + 1], 2)[0], step[at])


def test_every_draw_of_a_run_differs_from_every_other():
    """By seed, purpose, iteration (evaluations have none), slot, sample, step, and between the start and the steps."""
    who = ids(2, 2)
    draws = []
    for seed in (0, 1):
        for purpose, iteration in (("rollout", 1), ("rollout", 2), ("eval", None), ("eval", 0)):
            noise = Noise(seed, purpose, iteration, SHAPE)
            draws += [noise.initial(who), noise.step(who, 0), noise.step(who, 1)]
    rows = torch.cat(draws).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows) == 2 * 4 * 3 * 4


def test_shared_noise_is_one_start_per_prompt_and_still_separate_steps():
    """Shared noise drops `sample` from the key: a group shares its start, prompts do not."""
    session = roll_out(ToyAdapter(), shared_start=True)
    edges = session.edges
    starts = edges.nodes[edges.parent[edges.step == 0]].reshape(2, 3, *SHAPE)
    assert torch.equal(starts[:, :1].expand_as(starts), starts)
    assert not torch.equal(starts[0, 0], starts[1, 0])
    assert len(session.samples.x0.flatten(1).unique(dim=0)) == 6
    apart = roll_out(ToyAdapter()).edges
    assert torch.equal(apart.nodes[apart.parent[apart.step == 0]].reshape(2, 3, *SHAPE)[:, 0], starts[:, 0])


@pytest.mark.parametrize("first", [0, 2])
def test_samples_of_one_start_are_forwarded_once_until_a_stochastic_step_parts_them(first):
    """2 prompts x 3 samples, 6 steps: 2 rows up to the first stochastic step, 6 behind it; results as drawn alone."""
    adapter = ToyAdapter()
    counter = Evaluations(adapter.network)
    shared = roll_out(adapter, Config(sde_steps=[first]), batch_size=6, shared_start=True)
    assert counter.rows == 2 * (first + 1) + 6 * (5 - first)
    assert len(shared.edges.nodes) == 2 + 6
    assert shared.edges.parent.tolist() == [0, 0, 0, 1, 1, 1]
    alone = roll_out(ToyAdapter(), Config(sde_steps=[first]), batch_size=1, shared_start=True)
    assert_close(shared.samples.x0, alone.samples.x0, rtol=0, atol=1e-6)
    for column in ("parent", "child"):
        mine, theirs = (e.nodes[getattr(e, column)] for e in (shared.edges, alone.edges))
        assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert_close(shared.edges.old_log_prob, alone.edges.old_log_prob, rtol=0, atol=2e-5)


# ---- windows and solvers


def dance_grid(num_steps: int) -> Schedule:
    sigmas = shifted_linspace(num_steps, 3.0)
    return Schedule(sigmas, 1000 * sigmas[:-1])


def nodes_of(edges: Edges, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents before and after step k, of every sample."""
    chosen = edges.select((edges.step == k).nonzero().squeeze(1))
    return edges.nodes[chosen.parent], edges.nodes[chosen.child]


def test_latents_at_the_windows_entry_are_those_of_the_ode():
    """Bitwise, since both take the same steps in the same batch."""
    session = roll_out(ToyAdapter())
    entry, _ = nodes_of(walk(session, window(session.plan.schedule, 0.7, [3, 4]))[1], 3)
    x = session.noise.initial(session.ids)
    with torch.no_grad():
        for k in range(3):
            step = session.plan.steps(torch.full((6,), k), session.adapter.process)
            belief = session.policy.predict(x, step, session.cond.index(session.rows))
            x = SOLVERS["ode"].step(belief, Node(x, belief.x0_hat, step), None)[0]
    assert torch.equal(entry, x)


def test_a_group_with_one_start_is_bitwise_one_latent_at_the_windows_entry():
    """The shared prefix of a branch bundle."""
    session = roll_out(ToyAdapter(), shared_start=True)
    entry, after = nodes_of(walk(session, window(session.plan.schedule, 0.7, [2]))[1], 2)
    entry, after = entry.reshape(2, 3, *SHAPE), after.reshape(2, 3, *SHAPE)
    assert torch.equal(entry, entry[:, :1].expand_as(entry))
    assert not torch.equal(entry[0], entry[1])
    assert len(after.flatten(0, 1).flatten(1).unique(dim=0)) == 6


def test_the_decoded_latent_is_the_last_belief_whatever_the_last_noise(monkeypatch):
    """DanceGRPO (arXiv 2505.07818): the deterministic last step gives x0_hat(sigma_{S-1}) exactly."""
    session, beliefs = roll_out(ToyAdapter()), []
    predict, step_noise = Policy.predict, Noise.step

    def watched(self, x, step, cond):
        beliefs.append(predict(self, x, step, cond))
        return beliefs[-1]

    def other_last(self, ids, index):
        return step_noise(self, ids, index) * (100.0 if index == 5 else 1.0)

    monkeypatch.setattr(Policy, "predict", watched)
    plan = window(dance_grid(6), 0.7)
    samples, edges = walk(session, plan)
    assert torch.equal(samples.x0, beliefs[-1].x0_hat)
    monkeypatch.setattr(Noise, "step", other_last)
    again = walk(session, plan)
    assert torch.equal(again[0].x0, samples.x0)
    assert torch.equal(again[1].nodes, edges.nodes)


@pytest.mark.parametrize("solver", ["dpm1", "dpm2_midpoint", "dpm2_heun"])
def test_a_solver_goes_on_from_the_beliefs_of_the_window_before_it(solver):
    """MixGRPO-Flash (arXiv 2507.21802), by hand: x0_hat of stochastic steps is kept; order 1 on the last step."""
    session = roll_out(ToyAdapter())
    plan = flash(dance_grid(10), 0.7, (1, 2), ratio=0.6, shift=3.0, solver=solver)
    assert len(plan) == 2 + int(8 * 0.6)
    samples, edges = walk(session, plan)
    cond, x, history = session.cond.index(session.rows), session.noise.initial(session.ids), None
    with torch.no_grad():
        for k in range(len(plan)):
            step = plan.steps(torch.full((6,), k), session.adapter.process)
            belief = session.policy.predict(x, step, cond)
            if k in (1, 2):
                assert torch.equal(nodes_of(edges, k)[0], x)
                x = session.policy.distribution(belief, x, step).sample(session.noise.step(session.ids, k))
            else:
                kind = "ode" if k == 0 else "dpm1" if k == len(plan) - 1 else solver
                x, _ = SOLVERS[kind].step(belief, Node(x, belief.x0_hat, step), history)
            history = Node(x, belief.x0_hat, step)
    assert torch.equal(samples.x0, x)


def test_the_steps_of_a_flash_plan_up_to_its_window_are_those_of_the_full_grid():
    """Latents and log-probs bitwise; the images differ, and the window's grid costs less."""
    session = roll_out(ToyAdapter())
    full = walk(session, window(dance_grid(10), 0.7, (1, 2)))
    short = walk(session, flash(dance_grid(10), 0.7, (1, 2), ratio=0.5, shift=3.0))
    assert torch.equal(short[1].nodes, full[1].nodes)
    assert torch.equal(short[1].old_log_prob, full[1].old_log_prob)
    assert not torch.equal(short[0].x0, full[0].x0)


# ---- counting


@pytest.mark.parametrize(("guidance_scale", "doubled"), [(1.0, 1), (3.0, 2)])
def test_evaluations_are_counted_per_sample_and_doubled_by_guidance(guidance_scale, doubled):
    """As many as steps in a rollout, as trained steps in the update, and as steps of the shorter plan in Flash."""
    adapter = ToyAdapter()
    counter = Evaluations(adapter.network)
    session = roll_out(adapter, Config(sde_steps=[1, 3]), guidance_scale=guidance_scale)
    assert counter.rows == doubled * 6 * 6
    session.gradient(torch.ones(len(session.edges)))
    assert counter.rows == doubled * (6 * 6 + 2 * 6)
    before = counter.rows
    walk(session, flash(dance_grid(10), 0.7, (1, 2), ratio=0.5, shift=3.0))
    assert counter.rows - before == doubled * 6 * (2 + 4)


@pytest.mark.parametrize(("recompute", "forwards"), [("rollout", 1), ("recompute", 2)])
def test_training_is_counted_per_sample_without_the_parity_gate(recompute, forwards):
    """The gate runs once per start of a program, so a count with it would differ in a resumed run."""
    config = Config(sde_steps=[1, 3], old_log_prob=recompute)
    session, counts = roll_out(ToyAdapter(), config), []
    rewards = torch.arange(6.0).reshape(1, 2, 3)
    learner, rollout = learner_of(session), rollout_of(session, rewards)
    for gate in (torch.float32, None):
        sums = Sums()
        learner.update(1, rollout, session.algorithm.advantages(rewards, torch.ones(1)), sums, gate=gate)
        counts.append(sums.means()["nfe/train"])
    assert counts == [2 * forwards] * 2


def test_evaluations_are_counted_by_the_first_argument_however_it_is_passed_and_of_every_expert():
    class Denoiser(torch.nn.Module):
        def forward(self, hidden_states, timestep):
            return hidden_states

    network = torch.nn.ModuleDict({"transformer": Denoiser(), "transformer_2": torch.nn.Linear(2, 2)})
    counter, first = Evaluations(network), network["transformer"]
    first(torch.zeros(3, 2), timestep=torch.zeros(1))
    first(hidden_states=torch.zeros(4, 2), timestep=torch.zeros(1))
    first(hidden_states=[torch.zeros(2, 2)] * 5, timestep=torch.zeros(1))
    network["transformer_2"](torch.zeros(6, 2))
    assert counter.rows == 3 + 4 + 5 + 6
