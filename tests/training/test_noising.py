"""Finished samples on their way to the updates: identity, whole units, shares, old values, memory."""

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrl.algorithms import awm, crd, dgpo, diffusion_dpo, diffusion_kto, diffusion_nft, fpo
from flowrl.contracts.grids import flow_schedule
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.selection import FilterConfig
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.training_times import TimesConfig
from flowrl.losses.batches import NoisedBatch
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.ode import Ode
from flowrl.training.metrics import Sums
from flowrl.training.sample_batches import SampleBatches
from tests.toys import (
    SHAPE,
    ToyAdapter,
    assert_same_gradient,
    learner_of,
    noising_of,
    nudge,
    roll_out,
    rollout_of,
    terms_gradient,
)

TIMES = TimesConfig(name="discrete", count=3)
METHODS = {
    "term": lambda: awm.build(awm.Config(times=TIMES)),
    "sample": lambda: awm.build(awm.Config(times=TIMES, ratio="sample")),
    "group": lambda: dgpo.build(dgpo.Config(times=TIMES)),
    "group with noise of its own": lambda: crd.build(crd.Config(times=TIMES)),
}


def rewards_of(prompts: int = 3, group: int = 4) -> Tensor:
    return torch.randn(1, prompts, group, generator=torch.Generator().manual_seed(3))


def session_of(algorithm, **options):
    return roll_out(ToyAdapter(), algorithm=algorithm, prompts=3, group=4, **options)


def terms(part: SampleBatches, share: int = 0) -> list[NoisedBatch]:
    return [batch for batch, counts in part.batches(share) if counts]


def by_identity(batches: list[NoisedBatch]) -> dict[tuple[int, float], tuple[Tensor, Tensor]]:
    """(sample, sigma) -> (eps, advantage)."""
    return {
        (int(b.sample[row]), float(b.sigma[row])): (b.eps[row], b.advantage[row])
        for b in batches
        for row in range(len(b))
    }


# ---- identity


@pytest.mark.parametrize("method", METHODS)
def test_a_terms_time_and_noise_depend_neither_on_batches_nor_on_processes(method):
    algorithm, rewards = METHODS[method](), rewards_of()
    session = session_of(algorithm)
    whole = by_identity(terms(noising_of(session, rewards, batch_size=12)))
    assert len(whole) == 12 * 3
    apart = [noising_of(session, rewards, batch_size=5, rank=rank, size=2) for rank in (0, 1)]
    parts = by_identity([batch for part in apart for batch in terms(part)])
    assert parts.keys() == whole.keys()
    for key, (eps, advantage) in whole.items():
        assert torch.equal(parts[key][0], eps)
        assert float(parts[key][1]) == float(advantage)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (7, 1), (36, 1), (7, 2), (5, 3)])
def test_the_gradient_is_the_same_for_any_batches_and_any_processes(method, batch_size, size):
    """One update's gradient to rtol 1e-5, after a change of the policy, so that every part acts."""
    session, rewards = session_of(METHODS[method]()), rewards_of()
    nudge(session.adapter.network)
    expected = terms_gradient(session, noising_of(session, rewards, batch_size=12))
    parts = [noising_of(session, rewards, batch_size=batch_size, rank=rank, size=size) for rank in range(size)]
    assert_same_gradient(terms_gradient(session, *parts), expected)


def test_noise_is_shared_inside_a_prompt_at_one_time_and_nowhere_else():
    """DGPO shares the noise of a prompt at each time, CRD the times only (docs/algorithms/dgpo.md, crd.md)."""
    for method, shared in (("group", True), ("group with noise of its own", False)):
        session = session_of(METHODS[method]())
        found: dict[int, list[Tensor]] = {}
        for batch in terms(noising_of(session, rewards_of(), batch_size=4)):
            for row in range(len(batch)):
                found.setdefault(int(batch.group[row]), []).append(batch.eps[row])
        assert len(found) == 3 * 3
        assert all(len(members) == 4 for members in found.values())
        same = [torch.equal(members[0], other) for members in found.values() for other in members[1:]]
        assert all(same) if shared else not any(same)
        firsts = [members[0] for members in found.values()]
        assert not any(torch.equal(a, b) for k, a in enumerate(firsts) for b in firsts[:k])


def test_terms_are_noised_as_they_say_and_carry_their_prompt():
    session = session_of(METHODS["term"]())
    for batch in terms(noising_of(session, rewards_of(), batch_size=5)):
        assert torch.equal(batch.clean, session.samples.x0[batch.sample])
        assert_close(batch.timestep, 1000 * batch.sigma)
        assert torch.equal(batch.cond["prompt"], session.cond["prompt"][session.rows[batch.sample]])


def test_another_iteration_has_other_noise_and_every_pass_the_same():
    session, rewards = session_of(METHODS["term"]()), rewards_of()
    part = noising_of(session, rewards)
    first, again = by_identity(terms(part)), by_identity(terms(part))
    assert all(torch.equal(first[key][0], again[key][0]) for key in first)
    other = by_identity(terms(noising_of(session, rewards, iteration=2)))
    assert not any(torch.equal(eps, drawn) for eps, _ in first.values() for drawn, _ in other.values())


def test_advantages_go_to_the_samples_by_their_identity_whatever_the_part_of_a_process():
    session, rewards = session_of(METHODS["term"]()), rewards_of()
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    marked = replace(credit, values=torch.arange(12.0).reshape(3, 4, 1))
    for rank in (0, 1):
        for batch in terms(noising_of(session, rewards, marked, rank=rank, size=2)):
            assert batch.advantage.tolist() == batch.sample.tolist()


# ---- units and shares


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_shares_hold_every_term_once_and_forwards_hold_units_whole(method, updates):
    session, batch_size = session_of(METHODS[method]()), 5
    part = noising_of(session, rewards_of(), updates=updates, batch_size=batch_size)
    seen = []
    for number in range(updates):
        batches = terms(part, number)
        assert part.sizes[number] == sum(map(len, batches))
        for batch in batches:
            assert len(batch) <= batch_size
            keys = list(zip(batch.sample.tolist(), batch.sigma.tolist(), strict=True))
            seen += keys
            if part.method.unit == "sample":
                assert all(batch.sample.tolist().count(sample) == 3 for sample in batch.sample.tolist())
            if part.method.unit == "group":
                assert all(batch.group.tolist().count(group) == 4 for group in batch.group.tolist())
    assert len(seen) == len(set(seen)) == 12 * 3
    assert seen != sorted(seen, key=lambda key: key[0]), "the order of units is not the samples' own"
    nothing = noising_of(session, torch.zeros(1, 3, 4), updates=updates)
    assert nothing.sizes == [0] * updates
    assert terms(nothing) == [], "and no forward"
    unit = 12 if part.method.unit == "group" else 3  # samples, or groups of four, are shared out
    assert max(part.sizes) - min(part.sizes) in (0, unit)


@pytest.mark.parametrize("method", METHODS)
def test_masked_samples_and_dead_groups_add_nothing_and_are_not_counted(method):
    """Their place in the rollout is kept, so every other term is what it was; the mean is over the others."""
    session, rewards = session_of(METHODS[method]()), rewards_of()
    rewards[0, 1] = 0.5  # dead
    rewards[0, 2, 3] = torch.nan
    part = noising_of(session, rewards, batch_size=12)
    found = {sample for batch in terms(part) for sample in batch.sample.tolist()}
    assert found == {0, 1, 2, 3, 8, 9, 10}
    assert part.sizes == [7 * 3]
    expected = by_identity(terms(noising_of(session, rewards_of(), batch_size=12)))
    assert all(torch.equal(eps, expected[key][0]) for key, (eps, _) in by_identity(terms(part)).items())


def test_a_group_that_the_filter_leaves_out_adds_no_gradient_and_no_count():
    """The gradient is that of the other groups alone, over their own number."""
    rule = FilterConfig(least_std=0.05, most_mean=0.9)
    rewards = torch.tensor([[[0.2, 0.8, 0.4, 0.1], [0.5, 0.52, 0.5, 0.51], [0.99, 0.95, 1.0, 0.7]]])

    def gradient(config, rewards):
        session = session_of(diffusion_nft.build(config))
        nudge(session.adapter.network)
        part = noising_of(session, rewards, batch_size=12)
        return part.sizes, terms_gradient(session, part)

    plain = AdvantageConfig(std="group")
    sizes, found = gradient(diffusion_nft.Config(filter=rule, advantages=plain), rewards)
    assert sizes == [4 * 5]  # six steps, five terms a sample
    alone = rewards.clone()
    alone[0, 1:] = torch.nan
    expected = gradient(diffusion_nft.Config(advantages=plain), alone)[1]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---- old values


def log_ratios(session, part: SampleBatches, share: int) -> Tensor:
    algorithm = session.algorithm
    found = []
    with torch.no_grad():
        for batch in terms(part, share):
            assert batch.old is not None
            found.append(algorithm.old(batch, session.networks) - batch.old)
    return torch.cat(found)


@pytest.mark.parametrize("method", ["awm", "fpo"])
def test_before_the_first_update_the_log_ratio_is_exactly_0_and_the_second_update_sees_another(method):
    """At the batches of the update; AWM's clip changes nothing at a ratio of 1."""
    module = {"awm": awm, "fpo": fpo}[method]
    # Without sigma 1, where no network changes the noise that it implies.
    times = TimesConfig(name="discrete_wo_init", count=3)
    session = session_of(module.build(module.Config(times=times, passes=1)))
    part = noising_of(session, rewards_of(), updates=2)
    part.prepare()
    assert all(batch.old is None for batch in terms(part, 0)), "the first update is that network's own"
    assert torch.equal(log_ratios(session, part, 1), torch.zeros(18, dtype=torch.float64))
    nudge(session.adapter.network)
    assert float(log_ratios(session, part, 1).abs().min()) > 0


def test_old_values_are_those_of_the_network_that_drew_the_samples():
    config = awm.Config(times=TIMES, off_policy=True)
    session = session_of(awm.build(config))
    nudge(session.adapter.network)  # the average stays where it was
    part = noising_of(session, rewards_of(), updates=1)
    part.prepare()
    assert float(log_ratios(session, part, 0).abs().min()) > 0
    with session.weights.using("anchor"):
        assert torch.equal(log_ratios(session, part, 0), torch.zeros(36, dtype=torch.float64))


@pytest.mark.parametrize(("updates", "passes", "needed"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_one_update_on_policy_needs_no_pass_for_old_values_and_others_are_of_one_noise(updates, passes, needed):
    session = session_of(METHODS["term"]())
    session.algorithm.passes = passes
    part = noising_of(session, rewards_of(), updates=updates)
    part.prepare()
    assert (part.old is not None) == needed
    if needed:  # a ratio with another noise is not 1
        part.iteration = replace(part.iteration, number=2)
        assert float(log_ratios(session, part, updates - 1).abs().min()) > 0


# ---- the learner


def test_every_pass_is_an_optimizer_step_per_share_and_the_ratio_leaves_1_after_the_first():
    session = session_of(fpo.build(fpo.Config(times=TIMES, passes=3)))
    rewards, sums, ratios = rewards_of(), Sums(), []
    learner, loss = learner_of(session, updates=2, batch_size=36), session.algorithm.loss

    def watched(batch, networks):
        output = loss(batch, networks)
        ratios.append(float(output.metrics["policy/ratio_mean"]) / len(batch))
        return output

    session.algorithm.loss = watched
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner.update(1, rollout_of(session, rewards), credit, sums)
    assert learner.optimizer.updates == 6
    assert ratios[0] == 1.0
    assert 1.0 not in ratios[1:]


def test_lagging_roles_follow_once_an_iteration_after_the_last_step():
    lag = diffusion_nft.LagConfig(slope=0.25, limit=0.9)
    session = session_of(diffusion_nft.build(diffusion_nft.Config(old=lag)))
    rewards = rewards_of()
    learner, before = learner_of(session, updates=2), session.weights.copies["old"]
    before = {name: value.clone() for name, value in before.items()}
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner.update(1, rollout_of(session, rewards), credit, Sums())
    for name, p in session.weights.parameters.items():
        expected = 0.5 * before[name] + 0.5 * p.detach()  # slope 0.25, two steps
        assert_close(session.weights.copies["old"][name], expected)
        assert not torch.equal(p.detach(), before[name])


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_following_mixes_a_role_with_the_policy(decay):
    session = session_of(METHODS["term"]())
    before = {name: value.clone() for name, value in session.weights.copies["anchor"].items()}
    nudge(session.adapter.network)
    session.weights.follow("anchor", decay)
    for name, p in session.weights.parameters.items():
        found = session.weights.copies["anchor"][name]
        assert_close(found, decay * before[name] + (1 - decay) * p.detach())
        assert torch.equal(found, p.detach()) == (decay == 0.0)


def test_evaluations_of_every_network_and_pass_are_counted():
    """Policy, reference and average at every term; another of the policy for the old values of the second update."""
    session = session_of(METHODS["term"]())
    rewards, sums = rewards_of(), Sums()
    credit = session.algorithm.advantages(rewards, torch.ones(1))
    learner_of(session, updates=2).update(1, rollout_of(session, rewards), credit, sums)
    assert sums.means()["nfe/train"] == 3 * (3 + 1 / 2)


# ---- memory


class Alive(TorchDispatchMode):
    """The most bytes of latents that were alive at once, of whatever any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.shape[-3:] == SHAPE:
                storage = tensor.untyped_storage()
                self.held[storage.data_ptr()] += 1
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(tensor, self.held.subtract, [storage.data_ptr()])
        self.peak = max(self.peak, sum(self.sizes[place] for place, count in self.held.items() if count > 0))
        return found


@pytest.mark.parametrize("solver", ["ode", "dpm2_midpoint", "sa"])
def test_a_rollout_keeps_its_samples_and_not_its_trajectories(solver):
    """As many latents are alive at once in 25 steps as in 5, and no edge is stored."""
    peaks = []
    for num_steps in (5, 25):
        adapter, grid = ToyAdapter(), flow_schedule(num_steps)
        plan = solver_plan(grid, solver, 0.4)
        ids, rows = [SampleId(0, k) for k in range(6)], torch.zeros(6, dtype=torch.int64)
        noise, cond = Noise(0, "rollout", 1, SHAPE), adapter.encode(["prompt"])
        with Alive() as alive:
            samples, edges = run(Policy(adapter, Ode(), 1.0), plan, noise, Asked(ids, cond, rows), batch_size=2)
        assert len(edges.nodes) == len(edges) == 0
        assert samples.x0.untyped_storage().nbytes() == 6 * 32 * 4
        peaks.append(alive.peak)
    assert 0 < peaks[0] == peaks[1]


def gather_with(part: SampleBatches, gather: Callable) -> None:
    """A part that gathers values by `gather`."""
    world: Any = SimpleNamespace(device=torch.device("cpu"), gather=gather)
    part.context = replace(part.context, world=world)


def test_means_over_an_update_are_those_of_all_processes_and_so_is_the_gradient():
    """Diffusion-KTO's offset of five images on two processes, after the policy has moved."""
    method = diffusion_kto.build(diffusion_kto.Config(beta=10.0))
    session = roll_out(ToyAdapter(), algorithm=method, prompts=5, group=1)
    nudge(session.adapter.network, 0.05)
    labels = torch.tensor([[[1.0], [0.0], [1.0], [1.0], [0.0]]])
    alone, parts = noising_of(session, labels), [noising_of(session, labels, rank=rank, size=2) for rank in (0, 1)]
    (batch, _), *_ = alone.batches(0)
    sent: list = []
    own = []
    for part in parts:
        gather_with(part, lambda value: sent.append(value) or [value])
        own.append(next(iter(part.batches(0)))[0].centre)
    assert not torch.equal(own[0], own[1]), "the two have other images"
    for part in parts:
        gather_with(part, lambda value: sent)
        assert_close(next(iter(part.batches(0)))[0].centre, batch.centre)
    expected, found = terms_gradient(session, alone), terms_gradient(session, *parts)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_process_without_terms_takes_part_in_the_means_and_in_nothing_else():
    method = diffusion_kto.build(diffusion_kto.Config())
    session = roll_out(ToyAdapter(), algorithm=method, prompts=2, group=1)
    part = noising_of(session, torch.tensor([[[math.nan], [math.nan]]]))
    asked: list = []
    gather_with(part, lambda value: asked.append(value) or [value])
    assert list(part.batches(0)) == []
    assert [count for _, count in asked] == [0]


@pytest.mark.parametrize(("unit", "sizes"), [("group", [2] * 6), ("prompt", [6, 6])])
def test_a_unit_holds_a_pair_at_one_time_or_all_its_terms(unit, sizes):
    method = diffusion_dpo.build(diffusion_dpo.Config(times=TimesConfig(name="logit_normal", count=3)))
    method.unit = unit
    session = roll_out(ToyAdapter(), algorithm=method, prompts=2, group=2)
    part = noising_of(session, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    assert [len(one) for one in part.shares[0]] == sizes
    for batch, _ in part.batches(0):
        assert set(Counter(batch.group.tolist()).values()) == {2}, "both of a pair"
        if unit == "prompt":
            assert set(Counter((batch.sample // 2).tolist()).values()) == {6}, "and at all its times"
