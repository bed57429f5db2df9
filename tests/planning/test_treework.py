"""What `flowrl plan` counts for trees, against the evaluations of a real rollout and its updates."""

from typing import Any

import pytest
import torch

from flowrl.algorithms.base import EdgeMethod
from flowrl.commands.plan import _samples_text, _steps_table, geometry, step_plan
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.diffusion.tree_shapes import Branching
from flowrl.planning.memory import estimate, skeleton
from flowrl.planning.tree_work import tree_work
from flowrl.rollout.loop import run
from flowrl.rollout.policy import Evaluations
from flowrl.rollout.trajectories import Asked
from flowrl.training.metrics import Sums
from tests.toys import Session, ToyAdapter, learner_of, roll_out, rollout_of

STEPS, PROMPTS = 6, 2
# Method -> (options, leaves).
METHODS = {
    "branch_grpo": ("name: branch_grpo, splits: [0, 2]", 4),
    "parent_top1": ("name: branch_grpo, splits: [0, 2], prune: parent_top1", 4),
    "three children": ("name: branch_grpo, splits: [1, 2], children: 3, prune: parent_top1", 9),
    "extremes": ("name: branch_grpo, splits: [0, 1, 2], prune: extremes, keep: 3", 8),
    "depth": ("name: branch_grpo, splits: [0, 1], depth: {size: 2}", 4),
    "mix": ("name: branch_grpo, splits: [0, 3], mix: {strategy: frozen, size: 2}", 4),
    "tree_grpo": ("name: tree_grpo, children: 2, window: 2", 4),
    "tempflow_grpo": ("name: tempflow_grpo, children: 2, steps: [0, 2, 3]", 6),
    "g2rpo": ("name: g2rpo, children: 3, strides: [1, 2], steps: [1, 2], merge: 2", 12),
    "tp_grpo": ("name: tp_grpo, window: 3", 4),
    "flow_grpo_fast": ("name: flow_grpo_fast, branch: 4, window_size: 2", 4),
}


def resolved(name: str, *changes: str) -> Resolved:
    options, leaves = METHODS[name]
    words = (
        f"algorithm={{{options}, clip_range: 1e-3}}",
        f"rollout={{sampler: {{name: dance_sde, eta: 0.5}}, num_inference_steps: {STEPS}, guidance_scale: 1.0}}",
        f"rollout.prompts_per_iteration={PROMPTS}",
        f"rollout.group_size={2 * leaves}",
    )
    return resolve(load_config("configs/lab/flow_grpo.yaml", [*words, *changes]))


def session_of(run_: Resolved, **options: Any) -> Session:
    counts: dict[str, Any] = {"prompts": PROMPTS, "group": run_.group_size, "num_steps": STEPS, **options}
    return roll_out(ToyAdapter(), algorithm=run_.algorithm.build(), sampler=run_.sampler.build(), **counts)


class Forwards(Evaluations):
    """Counts forwards as well as their rows."""

    calls = 0

    def _count(self, *given: Any) -> None:
        self.calls += 1
        Evaluations._count(self, *given)


@pytest.mark.parametrize("batch_size", [1, 13, 64])
@pytest.mark.parametrize("name", METHODS)
def test_the_plan_counts_the_evaluations_and_forwards_of_a_real_rollout(name, batch_size):
    run_ = resolved(name, f"rollout.batch_size={batch_size}")
    session = session_of(run_, batch_size=64)
    counter = Forwards(session.adapter.network)
    data = (session.policy, session.plan, session.noise, Asked(session.ids, session.cond, session.rows))
    _, edges = run(*data, batch_size=batch_size)
    work = tree_work(run_, session.plan)
    assert counter.rows == work.rollout_rows(len(session.ids))
    assert counter.calls == geometry(run_, session.plan, 1).rollout_forwards
    assert len(edges.nodes) == work.latents(len(session.ids))


@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_the_plan_counts_the_evaluations_and_forwards_of_real_updates(name, updates):
    run_ = resolved(name, f"optim.updates_per_iteration={updates}", "optim.batch_size=5")
    session = session_of(run_, batch_size=64)
    rewards = torch.rand(1, PROMPTS, run_.group_size, generator=torch.Generator().manual_seed(7))
    learner = learner_of(session, updates=updates, batch_size=5)
    counter = Forwards(session.adapter.network)
    credit, drawn = session.algorithm.advantages(rewards, torch.ones(1)), rollout_of(session, rewards)
    assert isinstance(session.algorithm, EdgeMethod)
    learner.update(1, drawn, session.algorithm.on_tree(credit, drawn.leaf_rewards(torch.ones(1)), 1), Sums())
    work = tree_work(run_, session.plan)
    assert counter.rows == work.update_rows(len(session.ids))
    assert counter.calls == geometry(run_, session.plan, 1).update_forwards
    assert geometry(run_, session.plan, 1, extra=2).frozen_forwards == 2 * counter.calls


def test_counts_of_the_published_tree():
    """arXiv 2509.06040: 218 edges from 203 nodes, 16 of the last step untrained here; pruning counted by hand."""
    published = ["rollout.num_inference_steps=20", "rollout.group_size=16"]

    def work(options: str) -> tuple[int, float, float]:
        words = [f"algorithm={{name: branch_grpo, clip_range: 1e-3{options}}}", *published]
        run_ = resolve(load_config("configs/lab/flow_grpo.yaml", words))
        found = tree_work(run_, step_plan(run_, None))
        # Mix: both ends of steps 0 to 3, 6 and 9.
        assert found.kept == (203 if "mix" not in options else 1 + 2 + 2 + 2 + 4 + 4 + 8 + 8 + 16)
        return sum(found.nodes), sum(found.edges), sum(found.parents)

    assert work("") == (203, 202, 187)
    # After the last split half of 9 x 16 edges; its own 16 and all before it stay.
    assert work(", prune: parent_top1") == (203, 202 - 72, 187 - 72)
    assert work(", prune: extremes") == (203, 202 - 72, 187 - 72)
    # Steps 9..12: the last split and three of the suffix.
    assert work(", depth: {}") == (203, 202 - 4 * 16, 187 - 8 - 3 * 16)
    assert work(", mix: {strategy: frozen}") == (203, 34, 19)
    # A late first split: the one node of each step before it has nothing to be compared with, in a tree of its own.
    late = "algorithm={name: branch_grpo, clip_range: 1e-3, splits: [3, 6, 9, 12]"
    alone, pooled = (
        tree_work(run_, step_plan(run_, None))
        for run_ in (
            resolve(load_config("configs/lab/flow_grpo.yaml", [late + scale, *published, "rollout.group_size=32"]))
            for scale in ("}", ", scale: {pool: prompt}}")
        )
    )
    assert alone.edges[:4] == (0, 0, 0, 2)
    assert alone.parents[:4] == (0, 0, 0, 1)
    assert pooled.edges[:4] == (1, 1, 1, 2)


def test_trees_stay_whole_where_processes_share_them_out():
    """One prompt with three trees of four on two processes: the busiest has two of them."""
    words = ("rollout.prompts_per_iteration=1", "rollout.group_size=12", "rollout.batch_size=4")
    run_ = resolved("branch_grpo", *words, "optim.updates_per_iteration=1")
    plan = step_plan(run_, None)
    counts = geometry(run_, plan, 2)
    assert counts.samples == 8
    assert counts.rollout_forwards == 2 * STEPS


def test_memory_and_compute_are_those_of_the_tree():
    run_ = resolved("mix")
    adapter = skeleton(run_)
    plan = step_plan(run_, adapter)
    found: Any = estimate(run_, adapter, plan, prompts=2)  # nothing of it is None
    work, samples = tree_work(run_, plan), PROMPTS * run_.group_size
    forward = found.rollout_flop / work.rollout_rows(samples)
    assert 2.5 < found.update_flop / work.update_rows(samples) / forward < 3.5, "backward is twice a forward"
    values = torch.Size(skeleton(run_).latent_shape()).numel()
    assert found.latents == 4 * values * (work.latents(samples) + samples)


# ---- what is shown


def cells(run_: Resolved, column: str) -> list[str]:
    adapter = skeleton(run_)
    table = _steps_table(run_, adapter, step_plan(run_, adapter))
    return next([str(cell) for cell in c.cells] for c in table.columns if c.header == column)


def test_the_table_shows_splits_merged_steps_and_what_is_trained():
    run_ = resolved("depth")
    assert cells(run_, "kind") == ["sde, 2 children each"] * 2 + ["sde"] * 3 + ["ode"]
    assert cells(run_, "nodes") == ["1", "2", "4", "4", "4", "4"]
    assert cells(run_, "edges trained") == ["2", "0", "0", "4", "4", "0"], "the window starts at the last split"
    merged = resolved("g2rpo")
    assert cells(merged, "kind")[1:3] == ["sde to step 3, 3 children each; ode", "sde to step 4, 3 children each"]
    sigmas, ends = cells(merged, "sigma"), cells(merged, "next sigma")
    assert (ends[1], ends[2]) == (sigmas[3], sigmas[4])
    assert cells(resolved("tp_grpo"), "kind") == ["sde; ode"] * 3 + ["ode"] * 3


def test_an_inflated_split_is_shown_with_its_std():
    run_ = resolved("branch_grpo")
    wide = resolved("branch_grpo", "algorithm.split_inflation=4.0")
    plain, found = ([float(text) for text in cells(each, "std")] for each in (run_, wide))
    assert found[0] == pytest.approx(4 * plain[0], rel=1e-4)
    assert found[1] == plain[1]


def test_the_title_counts_trees_and_leaves():
    run_ = resolved("mix")
    text = _samples_text(run_, step_plan(run_, None), 1.0, 3)
    assert "16 samples per iteration = 2 prompts x 8 = 4 trees of 4 leaves, each " in text
    assert "(chains: 24)" in text
    assert text.endswith("2 updates of 2 trees")


@pytest.mark.parametrize(("name", "chains"), [("g2rpo", 3 * 2 * (5 + 4)), ("tp_grpo", 24)])
def test_leaves_as_chains_take_the_steps_of_their_ways(name, chains):
    """G2RPO with merge 2: a child of step 1 takes steps 0 and 1, and those from 3 on at stride 1 or 2."""
    run_ = resolved(name)
    plan = step_plan(run_, None)
    assert plan.tree is not None
    walked = sum(len(alone(plan.tree, leaf)) for leaf in range(plan.leaves))
    assert plan.tree.chain_forwards == walked == chains
    assert f"(chains: {chains})" in _samples_text(run_, plan, 1.0, 3)


def alone(tree: Branching, leaf: int) -> list[int]:
    """Places at which a leaf's own way asks the network."""
    found, place = [], 0
    while place < tree.num_steps:
        found.append(place)
        place = int(tree.ends[place, leaf])
    return found
