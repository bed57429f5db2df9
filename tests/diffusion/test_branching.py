"""Trees of rollouts: their shape, the noise of siblings, what the loop records, and the updates on it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import branch_grpo, flow_grpo_fast, g2rpo, tempflow_grpo, tp_grpo, tree_grpo
from flowrl.config.load import load_config, resolve
from flowrl.contracts.grids import flow_schedule
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.tree_shapes import Branching, completions, offshoots, splits
from flowrl.diffusion.windows import MixWindow, mix_window
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import dance_sde, ddim, flow_sde
from tests.tables import table
from tests.toys import SHAPE, Session, ToyAdapter, replay_of, roll_out, rollout_of

SCALE: dict[str, Any] = {"clip_range": 1e-3}
METHODS = {
    "branch_grpo": branch_grpo.build(branch_grpo.Config(splits=[0, 2], **SCALE)),
    "tree_grpo": tree_grpo.build(tree_grpo.Config(children=2, window=2, **SCALE)),
    "tempflow_grpo": tempflow_grpo.build(tempflow_grpo.Config(children=2, steps=[0, 2, 3], **SCALE)),
    "g2rpo": g2rpo.build(g2rpo.Config(children=3, strides=[1, 2], steps=[1, 2], merge=2, **SCALE)),
    "tp_grpo": tp_grpo.build(tp_grpo.Config(window=3, **SCALE)),
    "flow_grpo_fast": flow_grpo_fast.build(flow_grpo_fast.Config(branch=4, window_size=2, **SCALE)),
}
LEAVES = {"branch_grpo": 4, "tree_grpo": 4, "tempflow_grpo": 6, "g2rpo": 12, "tp_grpo": 4, "flow_grpo_fast": 4}


def tree_rollout(name: str, *, trees: int = 2, prompts: int = 2, batch_size: int = 64, vp: bool = False) -> Session:
    sampler = ddim.build(ddim.Config(eta=0.7)) if vp else dance_sde.build(dance_sde.Config(eta=0.5))
    options: dict[str, Any] = {"prompts": prompts, "group": trees * LEAVES[name], "batch_size": batch_size}
    return roll_out(ToyAdapter(vp=vp), algorithm=METHODS[name], sampler=sampler, **options)


def rewards_of(session: Session, seed: int = 3) -> torch.Tensor:
    group = max(i.sample for i in session.ids) + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, len(session.ids) // group, group, generator=generator)


def credit_of(session: Session, rewards: torch.Tensor, iteration: int = 1) -> Advantages:
    credit = session.algorithm.advantages(rewards, torch.ones(len(rewards)))
    return session.algorithm.on_tree(
        credit, rollout_of(session, rewards).leaf_rewards(torch.ones(len(rewards))), iteration
    )


# ---- shape


@pytest.mark.parametrize(
    ("num_steps", "at", "children", "leaves", "forwards", "edges"),
    [
        (20, (0, 3, 6, 9), 2, 16, 203, 218),  # 0.634 of the 320 forwards of chains
        (20, (0, 5, 10, 15), 2, 16, 135, 150),
        (20, (), 2, 1, 20, 20),
        (6, (0,), 5, 5, 26, 30),
    ],
)
def test_counts_of_a_tree(num_steps, at, children, leaves, forwards, edges):
    tree = splits(num_steps, {k: children for k in at}, range(num_steps))
    assert (tree.leaves, tree.forwards, tree.edges) == (leaves, forwards, edges)


@pytest.mark.parametrize(("num_steps", "children"), [(10, 6), (5, 2)])
def test_offshoots_at_every_step_cost_what_tempflow_says(num_steps, children):
    tree = offshoots(num_steps, range(num_steps - 1), children)
    assert tree.forwards == (num_steps - 1) + children * num_steps * (num_steps - 1) // 2
    assert tree.leaves == children * (num_steps - 1)


def test_strides_and_a_merged_step_by_hand():
    tree = offshoots(8, [1], 2, strides=(1, 3), merge=2)
    assert tree.ends[1].tolist() == [3] * 4
    assert tree.node[2].tolist() == [-1] * 4, "the merged step passes by"
    assert tree.node[3].tolist() == [0, 0, 2, 2]
    assert tree.ends[3].tolist() == [4, 6, 4, 6]
    assert tree.ends[6].tolist() == [7, 8, 7, 8], "the last stride ends with the grid"
    assert tree.stochastic == (False, True) + (False,) * 6
    assert tree.splits == (False, True) + (False,) * 6


def test_completions_by_hand():
    tree = completions(5, [1, 2])
    assert tree.node.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert tree.noisy[1:3].tolist() == [[False, True, True], [False, False, True]]
    assert not any(tree.splits), "no node has two noisy children"


def test_images_are_finished_in_as_many_steps_as_asked_for_or_all_that_are_left():
    """From places 0, 1 and 2 of 8 in three steps: 0 3 5 8, 1 3 6 8, 2 4 6 8."""
    tree = completions(8, [0, 1], 3)
    for leaf, stops in enumerate(([0, 3, 5, 8], [0, 1, 3, 6, 8], [0, 1, 2, 4, 6, 8])):
        assert (tree.node[:, leaf] >= 0).nonzero().flatten().tolist() == stops
        assert tree.ends[stops[:-1], leaf].tolist() == stops[1:]
        assert (tree.ends[:, leaf] >= 0).nonzero().flatten().tolist() == stops[:-1]
    assert torch.equal(tree.noisy, completions(8, [0, 1]).noisy)
    assert tree.forwards == 3 + 3 + 3
    for finish in (8, 100):
        whole = completions(8, [0, 1], finish)
        assert torch.equal(whole.node, completions(8, [0, 1]).node)
        assert torch.equal(whole.ends, completions(8, [0, 1]).ends)


def test_a_rollout_finishes_its_images_in_the_steps_asked_for():
    """The chain itself, and what is trained of it, are those of a rollout that finishes by all."""
    short, whole = (
        roll_out(ToyAdapter(), algorithm=tp_grpo.build(tp_grpo.Config(window=2, finish=finish)), num_steps=8, group=6)
        for finish in (2, None)
    )
    # Forwards hold other rows, so they round otherwise.
    assert_close(short.edges.nodes, whole.edges.nodes, rtol=1e-5, atol=1e-6)
    assert_close(short.edges.old_log_prob, whole.edges.old_log_prob, rtol=1e-5, atol=1e-6)
    assert short.plan.tree is not None
    assert whole.plan.tree is not None
    assert (short.plan.tree.forwards, whole.plan.tree.forwards) == (6, 21)
    assert not torch.equal(short.samples.x0, whole.samples.x0)


def changed(**change: object) -> StepPlan:
    return replace(window(flow_schedule(6), 0.5), **change)


TREE = splits(6, {0: 2}, range(5))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: splits(5, {1: 2}, [0]), "splits at step 1, which is deterministic"),
        (lambda: splits(5, {5: 2}, range(5)), "splits at step 5"),
        (lambda: splits(5, {1: 0}, range(5)), "at least one child"),
        (lambda: offshoots(5, [4], 2, merge=2), "cannot leave at steps"),
        (lambda: offshoots(5, [3], 2, strides=(1, 2)), "would take the same steps"),
        (lambda: completions(5, [1, 3]), "neighbouring steps"),
        (
            lambda: Branching(torch.zeros(3, 2).long(), torch.ones(2, 2).long(), torch.ones(2, 2).bool()),
            "each leaf alone",
        ),
        (lambda: changed(tree=splits(5, {0: 2}, range(5))), "the tree has 5 steps, the plan 6"),
        (lambda: changed(tree=splits(6, {0: 2}, range(3))), "step 3 without noise"),
        (lambda: changed(tree=TREE, solver=("dpm1",) * 6), "by `ode`"),
        (lambda: changed(tree=TREE, sibling_noise=-1.0), "sibling_noise=-1.0"),
        (lambda: changed(tree=TREE, inflation=0.0), "inflation=0.0"),
        (
            lambda: StepPlan(
                flow_schedule(6), (0.0,) * 3 + (0.5,) + (0.0,) * 2, (3,), tree=offshoots(6, [3], 2, merge=3)
            ),
            "ends at clean data",
        ),
    ],
)
def test_impossible_trees_and_plans_that_do_not_fit_them_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ---- the loop


def by_hand(session: Session, leaf: int) -> torch.Tensor:
    """A leaf's own way through its tree, step by step and alone."""
    plan, tree, adapter = session.plan, session.plan.tree, session.adapter
    assert tree is not None
    first = leaf - leaf % tree.leaves
    sample, cond = session.ids[first], session.cond.index(session.rows[[leaf]])
    x, k = session.noise.initial([sample]), 0
    with torch.no_grad():
        while k < len(plan):
            place = leaf - first
            end, child = int(tree.ends[k, place]), int(tree.child(k)[place])
            step = plan.steps(torch.tensor([k]), adapter.process, ends=torch.tensor([end]))
            prediction = session.policy.predict(x, step, cond)
            if not tree.noisy[k, place]:
                x = step.alpha_next * prediction.x0_hat + step.sigma_next * prediction.eps_hat
            else:
                law, lead = session.policy.distribution(prediction, x, step), session.ids[first + child]
                xi = session.noise.step([lead], k)
                if plan.sibling_noise is not None and tree.splits[k]:
                    common = session.noise.common([session.ids[first + int(tree.node[k, place])]], k)
                    xi = (common + plan.sibling_noise * xi) / math.sqrt(1 + plan.sibling_noise**2)
                x = law.mean + law.std * xi
            k = end
    return x[0]


@pytest.mark.parametrize("vp", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_every_leaf_is_its_own_way_walked_alone(name, vp):
    session = tree_rollout(name, vp=vp)
    for leaf in range(len(session.ids)):
        assert_close(session.samples.x0[leaf], by_hand(session, leaf), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_rollout_evaluates_each_node_once_and_an_edge_is_recorded_once(name):
    session = tree_rollout(name)
    counter = Evaluations(session.adapter.network)
    data = (session.policy, session.plan, session.noise, Asked(session.ids, session.cond, session.rows))
    run(*data, batch_size=64)
    tree, trees = session.plan.tree, 4
    assert tree is not None
    assert counter.rows == trees * tree.forwards
    assert len(session.edges) == trees * sum(len(tree.noisy_children(k)) for k in session.plan.train)
    edges = session.edges
    assert (edges.sample * 100 + edges.step).diff().gt(0).all(), "in the order (sample, step)"
    assert len(edges.nodes.flatten(1).unique(dim=0)) == len(edges.nodes), "no latent twice"
    starts = edges.nodes[edges.parent]
    step = session.plan.steps(edges.step, session.adapter.process)
    with torch.no_grad():
        law = session.policy.transition(starts, step, session.cond.index(session.rows[edges.sample]))
    assert_close(law.log_prob(edges.nodes[edges.child]), edges.old_log_prob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("batch_size", [1, 13])
def test_batches_hold_whole_trees_and_change_nothing(name, batch_size):
    whole, parts = tree_rollout(name), tree_rollout(name, batch_size=batch_size)
    assert_close(parts.samples.x0, whole.samples.x0, rtol=1e-4, atol=1e-5)
    for column in ("step", "sample"):
        assert torch.equal(getattr(parts.edges, column), getattr(whole.edges, column))
    assert_close(parts.edges.old_log_prob, whole.edges.old_log_prob, rtol=1e-4, atol=1e-4)
    assert_close(parts.edges.nodes[parts.edges.child], whole.edges.nodes[whole.edges.child], rtol=1e-4, atol=1e-5)
    half = Asked(whole.ids[: LEAVES[name] + 2], whole.cond, whole.rows[: LEAVES[name] + 2])
    with pytest.raises(ValueError, match=f"whole trees of {LEAVES[name]}"):
        run(whole.policy, whole.plan, whole.noise, half, batch_size=batch_size)


def rolled(plan: StepPlan, group: int, *, shared_start: bool = False) -> tuple:
    adapter = ToyAdapter()
    policy = Policy(adapter, dance_sde.build(dance_sde.Config(eta=0.5)), 1.0)
    ids = [SampleId(0, k) for k in range(group)]
    noise, cond = Noise(0, "rollout", 1, SHAPE, shared_start), adapter.encode(["prompt"])
    return run(policy, plan, noise, Asked(ids, cond, torch.zeros(group, dtype=torch.int64)), batch_size=16)


@pytest.mark.parametrize(
    ("group", "shared_start", "change"),
    [
        (5, True, {"tree": splits(6, {0: 5}, range(5))}),
        (3, False, {"tree": splits(6, {}, range(5)), "sibling_noise": 4.0}),
    ],
    ids=["a split at step 0 without common noise: chains from a shared start", "trees of one leaf: chains"],
)
def test_trees_without_an_inner_split_are_bitwise_chains(group, shared_start, change):
    plain = window(flow_schedule(6), 0.5)
    chains, edges = rolled(plain, group, shared_start=shared_start)
    leaves, branches = rolled(replace(plain, **change), group)
    assert torch.equal(leaves.x0, chains.x0)
    assert torch.equal(branches.old_log_prob, edges.old_log_prob)
    assert torch.equal(branches.nodes[branches.parent], edges.nodes[edges.parent])


# ---- the noise of siblings


def siblings(spread: float | None, inflation: float = 1.0, count: int = 400) -> tuple[torch.Tensor, Session]:
    """Standardised noise of the two children of the root, [trees, 2, dims]."""
    config = branch_grpo.Config(splits=[0], spread=spread, split_inflation=inflation, **SCALE)
    sampler = dance_sde.build(dance_sde.Config(eta=0.5))
    options = {"prompts": 1, "group": 2 * count, "batch_size": 2 * count, "columns": ("mean_old",), "num_steps": 3}
    session = roll_out(ToyAdapter(), algorithm=branch_grpo.build(config), sampler=sampler, **options)
    edges = session.edges.select((session.edges.step == 0).nonzero().squeeze(1))
    std = sampler.transition  # the plain law's std at step 0
    step = session.plan.steps(torch.zeros(1, dtype=torch.int64), session.adapter.process)
    zeros = torch.zeros(1, *SHAPE)
    plain = std(session.adapter.process, session.policy.predict(zeros, step, session.cond), zeros, step).std
    xi = (edges.nodes[edges.child] - edges.columns["mean_old"]) / plain
    return xi.flatten(1).unflatten(0, (-1, 2)), session


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, None])
def test_siblings_correlate_by_1_over_1_plus_s_squared_and_each_is_standard_normal(spread):
    xi, _ = siblings(spread)
    count = xi[:, 0].numel()
    expected = 0.0 if spread is None else 1 / (1 + spread**2)
    assert float((xi[:, 0] * xi[:, 1]).mean()) == pytest.approx(expected, abs=(4 if spread else 6) / math.sqrt(count))
    assert torch.equal(xi[:, 0], xi[:, 1]) == (spread == 0)
    for child in (0, 1):
        assert float(xi[:, child].mean()) == pytest.approx(0, abs=4 / math.sqrt(count))
        assert float(xi[:, child].square().mean()) == pytest.approx(1, abs=6 / math.sqrt(count))


def test_inflated_splits_are_wider_and_scored_so():
    """Compatibility with the released code: its draw, and the density of that draw."""
    xi, session = siblings(None, inflation=4.0)
    assert float(xi.square().mean()) == pytest.approx(16, rel=0.05)
    edges = session.edges
    step = session.plan.steps(edges.step, session.adapter.process)
    law = session.policy.transition(edges.nodes[edges.parent], step, session.cond.index(session.rows[edges.sample]))
    assert_close(law.log_prob(edges.nodes[edges.child]), edges.old_log_prob, rtol=1e-4, atol=1e-4)
    scale = step.std_scale
    assert scale is not None
    assert scale.unique().tolist() == [1.0, 4.0]


# ---- updates


@pytest.mark.parametrize("name", ["branch_grpo", "tree_grpo"])
def test_the_log_ratio_is_bitwise_0_at_the_rollouts_own_batches(name):
    session = tree_rollout(name, trees=1, prompts=1, batch_size=4)
    adapter = ToyAdapter(key_per_step=True)
    for batch in replace(session, adapter=adapter).batches(torch.ones(len(session.edges))):
        ratio = session.algorithm.log_ratio(session.networks.transition(batch), batch, session.policy.sampler)
        assert ratio.tolist() == [0.0] * len(batch)


@pytest.mark.parametrize("name", METHODS)
def test_grouped_and_single_edges_have_the_same_gradient(name):
    """One forward for all children of a node, or one for each edge."""
    session = tree_rollout(name)
    advantage = torch.randn(len(session.edges), generator=torch.Generator().manual_seed(5))
    counter = Evaluations(session.adapter.network)
    grouped, rows = session.gradient(advantage, batch_size=64), counter.rows
    session.adapter.network.zero_grad()
    for k in range(len(session.edges)):
        for batch in session.batches(advantage, order=torch.tensor([k])):
            (session.algorithm.loss(batch, session.networks).loss / len(session.edges)).backward()
    assert rows == len(session.edges.parent.unique()) <= len(session.edges)
    largest = max(float(value.abs().max()) for value in grouped.values())
    for key, parameter in session.adapter.network.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, grouped[key], rtol=0, atol=1e-6 * max(largest, 1))


def test_the_gradient_of_a_node_is_one_vector_jacobian_product():
    """At the old policy: -sum_i A_i xi_i / (std D) . d mean / d theta."""
    session = roll_out(
        ToyAdapter(),
        algorithm=tempflow_grpo.build(tempflow_grpo.Config(children=4, steps=[1], noise_weight="none", **SCALE)),
        sampler=flow_sde.build(flow_sde.Config(noise_level=0.7)),
        prompts=1,
        group=4,
    )
    advantage = torch.tensor([1.0, -0.5, 0.25, -0.75])
    found = session.gradient(advantage)
    session.adapter.network.zero_grad()
    (batch,) = session.batches(advantage)
    law = session.networks.transition(batch)
    xi = (batch.next_latents - law.mean.detach()) / law.std[:, None, None, None]
    vector = (advantage[:, None, None, None] * xi / law.std[:, None, None, None]).sum(0) / xi[0].numel()
    mean = session.policy.transition(batch.latents, batch.start, batch.cond).mean
    (-(mean[0] * vector).sum() / 4).backward()
    for name, parameter in session.adapter.network.named_parameters():
        assert_close(parameter.grad, found[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_shares_hold_whole_trees_and_every_credited_edge_once(name, updates):
    session = tree_rollout(name)
    rewards = rewards_of(session)
    credit = credit_of(session, rewards)
    replay = replay_of(session, rewards, credit, updates=updates, batch_size=64)
    everything = torch.cat(replay.shares)
    place = (session.edges.sample, session.edges.step)
    assert credit.pruned is not None
    assert credit.steps is not None
    trained = ~credit.pruned.flatten(0, 1)[place]
    assert everything.sort().values.tolist() == trained.nonzero().squeeze(1).tolist()
    owners = [set((session.edges.sample[share] // LEAVES[name]).tolist()) for share in replay.shares]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert torch.equal(replay.advantage[trained, 0], credit.steps.flatten(0, 1)[place][trained])


# ---- configuration


@pytest.mark.parametrize(
    ("algorithm", "words"),
    table(__file__, "refused_trees"),
)
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(algorithm, words):
    changes = [f"algorithm={{name: {algorithm}, clip_range: 1e-3}}", "rollout.group_size=24"]
    with pytest.raises(ConfigError, match=words):
        resolve(load_config("configs/lab/flow_grpo.yaml", changes))


def test_a_pruning_whose_mix_reaches_behind_the_last_split_some_day_is_taken():
    for mix in ("{size: 2}", "{strategy: random, size: 1}", "{strategy: frozen, size: 4}"):
        words = f"algorithm={{name: branch_grpo, splits: [0, 2], prune: parent_top1, clip_range: 1e-3, mix: {mix}}}"
        resolve(load_config("configs/lab/flow_grpo.yaml", [words, "rollout.group_size=24"]))


@pytest.mark.parametrize("options", [{}, {"strategy": "random"}, {"strategy": "frozen"}, {"shift": 0}, {"shift": 3}])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("roll_back", [False, True])
def test_the_last_step_of_a_moving_window_is_the_last_it_ever_holds(options, size, roll_back):
    config = MixWindow(interval=1, size=size, roll_back=roll_back, **options)
    for num_steps in (3, 6, 9, 11):
        held = set().union(*(mix_window(config, num_steps, 0, iteration) for iteration in range(1, 100)))
        assert config.last(num_steps) == max(held)


@pytest.mark.parametrize(
    ("algorithm", "accepted", "refused", "words"),
    [
        (
            "branch_grpo, splits: [0, 1], split_inflation: 4.0",
            *("rollout.sampler={name: dance_sde}", "rollout.sampler={name: cps}"),
            r"split_inflation=4\.0.*; try algorithm\.split_inflation=1\.0",
        ),
        ("tp_grpo, window: 5", "rollout.group_size=12", "rollout.group_size=6", "try rollout.group_size=12"),
        (  # 8 prompts x 24 samples in trees of 12: an update without a tree would be none
            "flow_grpo_fast, branch: 12",
            *("optim.updates_per_iteration=16", "optim.updates_per_iteration=12"),
            "does not divide the 16 trees .*=4, or .*=8, or .*=16",
        ),
    ],
)
def test_what_does_not_fit_the_rest_of_a_run_is_refused(algorithm, accepted, refused, words):
    own = [f"algorithm={{name: {algorithm}, clip_range: 1e-3}}", "rollout.group_size=24"]
    resolve(load_config("configs/lab/flow_grpo.yaml", [*own, accepted]))
    with pytest.raises(ConfigError, match=words):
        resolve(load_config("configs/lab/flow_grpo.yaml", [*own, refused]))


def test_the_clip_range_of_branch_grpo_is_its_own_with_its_law_and_the_familys_elsewhere():
    config = branch_grpo.Config()
    assert config.clip(dance_sde.build(dance_sde.Config())) == (1e-3, 1e-3)
    assert config.clip(flow_sde.build(flow_sde.Config())) == (1e-4, 1e-4)
    assert branch_grpo.Config(clip_range=[0.5, 0.7]).clip(dance_sde.build(dance_sde.Config())) == (0.5, 0.7)
