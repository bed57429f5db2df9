"""The tree of an evaluation: its noise and credit, its file, and what stays unchanged."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.config.schema import EvalConfig
from flowrl.core import registry
from flowrl.core.errors import Abandoned
from flowrl.core.types import SampleId
from flowrl.credit.advantages import AdvantageConfig
from flowrl.credit.history import HistoryConfig
from flowrl.credit.tree_credit import (
    Scale,
    by_grain,
    by_path,
    depthwise,
    extremes,
    fuse,
    log_probs_on_paths,
    propagated,
)
from flowrl.data.prompts import Prompt
from flowrl.diffusion.tree_shapes import Branching
from flowrl.evaluation.evaluation_tree import EvalTree
from flowrl.evaluation.evaluator import Evaluator
from flowrl.media import media
from flowrl.media.eight_bits import eight_bit, unit_floats
from flowrl.reward import Card, Reward
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.trajectories import Asked
from flowrl.run.folder import RunFolder
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.signals import Stop
from tests.credit import rules
from tests.toys import ALONE, OneOf, ToyAdapter, nudge, sampling_of

NAN = float("nan")
CPU = torch.device("cpu")


def light(images, prompts, metadata) -> dict[str, torch.Tensor]:
    return {"light": images.mean((1, 2, 3)), "corner": images[:, 0, 0, 0]}


class Place:
    """The parts of a run that the tree needs, on the toy; `self.record()` is its file."""

    def __init__(self, folder: Path, name: str, *, num_steps=6, world=None, sharded=False, score=light, **options):
        self.module = registry.load("algorithms", name)
        self.config = self.module.Config(**options)
        sampler = registry.load("samplers", self.config.default_sampler)
        self.folder, self.adapter = folder, ToyAdapter()
        self.algorithm, self.sampler = self.module.build(self.config), sampler.build(sampler.Config())
        self.prompts = (Prompt("held out"), Prompt("never drawn"))
        reward = Reward(score=score, card=Card(outputs=("light", "corner")))
        self.scorer = Scorer([WeightedReward("toy", reward, 2.0)])
        world = world or ALONE
        sampling = sampling_of(self.adapter, self.prompts, self.sampler, num_steps, world=world, sharded=sharded)
        self.policy, self.schedule, self.evaluations = sampling.policy, sampling.schedule, sampling.counter
        rollout, build = SimpleNamespace(batch_size=5), lambda: self.module.build(self.config)
        resolved: Any = SimpleNamespace(
            run=SimpleNamespace(seed=0, rollout=rollout), algorithm=SimpleNamespace(name=name, build=build)
        )
        self.grow = EvalTree(
            resolved,
            self.algorithm,
            self.scorer.entries,
            Evaluator(sampling, self.scorer, folder, self.prompts, EvalConfig(), seed=3),
        )

    def plan(self, iteration: int = 1):
        return self.algorithm.plan(self.schedule, self.sampler, iteration, 0)

    def record(self, tag: str = "base", iteration: int = 0) -> dict:
        self.grow(tag, iteration)
        text = (self.folder / "eval" / f"tree-{tag}.json").read_text()
        return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    def drawn(self, iteration: int = 1):
        """The same tree by the rollout itself."""
        plan = self.plan(iteration)
        ids = [SampleId(0, leaf) for leaf in range(plan.leaves)]
        noise = Noise(3, "tree", None, self.adapter.latent_shape())
        cond, rows = self.adapter.encode(["held out"]), torch.zeros(plan.leaves, dtype=torch.int64)
        samples, edges = run(self.policy, plan, noise, Asked(ids, cond, rows), batch_size=64)
        return plan, ids, samples, edges


def on_edges(tree: Branching, record: dict, values: torch.Tensor) -> list:
    """values [L, K] of leaves and steps, in the order of the file's edges."""
    nodes, edges = record["nodes"], record["edges"]
    return [
        float(values[nodes["leaf"][child], nodes["place"][parent]])
        for parent, child in zip(edges["parent"], edges["child"], strict=True)
    ]


def column(record: dict, name: str) -> list[float]:
    return [NAN if value is None else value for value in record["edges"][name]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "branch_grpo", splits=[0, 1, 3])


def holed(*failed: int):
    """The reward `light` with these images of a batch not scored."""

    def score(images, prompts, metadata):
        scores = light(images, prompts, metadata)
        scores["light"][list(failed)] = torch.nan
        return scores

    return score


def close(found: list[float], expected: list[float]) -> None:
    assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=2e-5, equal_nan=True)


# ---- its numbers


METHODS = {
    "branch_grpo": (
        {"splits": [0, 1, 3], "prune": "extremes", "keep": 2},
        lambda total, tree: depthwise(fuse(total, tree), total, tree, Scale()).clamp(-5, 5),
    ),
    "tempflow_grpo": (
        {"children": 3, "steps": [0, 2]},
        lambda total, tree: depthwise(fuse(total, tree), total, tree, Scale(pool="prompt", eps=1e-4, ddof=0)),
    ),
    "g2rpo": (
        {"children": 3, "strides": [1, 2], "steps": [0, 1]},
        lambda total, tree: by_grain(total, tree, 2, registry.load("algorithms", "g2rpo").Config().scale),
    ),
    "tree_grpo": (
        {"children": 2, "window": 2},
        lambda total, tree: propagated(rules.alone("group", total, std="group").values.squeeze(2), tree),
    ),
    "flow_grpo_fast": (
        {"branch": 4, "window_size": 2},
        lambda total, tree: propagated(rules.alone("group", total, std="global").values.squeeze(2), tree),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_file_agrees_with_the_rollout_and_the_credit_on_trees(tmp_path, name):
    options, credit = METHODS[name]
    place = Place(tmp_path, name, **options)
    record = place.record()
    plan, _, samples, _ = place.drawn()
    tree, images = plan.tree, unit_floats(eight_bit(place.adapter.decode(samples.x0)))
    total = 2 * light(images, [], [])["light"][None].double()
    leaves = record["leaves"]
    close(leaves["reward"], total[0].tolist())
    close(leaves["raw"]["corner"], light(images, [], [])["corner"].tolist())
    assert record["sigmas"] == pytest.approx(plan.schedule.sigmas.tolist(), abs=1e-6)
    nodes, edges = record["nodes"], record["edges"]
    expected = [(k, int(leaf)) for k in range(len(plan) + 1) for leaf in tree.at(k)]
    assert list(zip(nodes["place"], nodes["leaf"], strict=True)) == expected
    assert (len(edges["parent"]), len(nodes["place"]) - plan.leaves) == (tree.edges, tree.forwards)
    close(column(record, "reward"), on_edges(tree, record, fuse(total, tree)[0]))
    assert nodes["reward"][0] == pytest.approx(float(total.mean()), abs=1e-5)
    assert [nodes["reward"][child] for child in edges["child"]] == edges["reward"]
    assert edges["noisy"] == [bool(v) for v in on_edges(tree, record, tree.noisy.T)]
    close(column(record, "advantage"), on_edges(tree, record, credit(total, tree)[0]))
    assert [a is not None for a in edges["advantage"]] == edges["noisy"]
    several = [k for k in range(len(plan)) if len(tree.children(k)) > len(tree.at(k))]
    assert (record["splits"], record["method"], record["prompt"]) == (several, name, "held out")
    assert record["note"] is None


def test_pruned_are_the_noisy_edges_that_the_method_leaves_out(tmp_path):
    place = Place(tmp_path, "branch_grpo", splits=[0, 1, 3], prune="extremes", keep=1)
    record = place.record()
    plan = place.plan()
    total = torch.tensor(record["leaves"]["reward"], dtype=torch.float64)[None]
    left_out = on_edges(plan.tree, record, extremes(total, plan.tree, 1)[0] & plan.tree.noisy.T)
    assert record["edges"]["pruned"] == [bool(v) for v in left_out]
    assert 0 < sum(record["edges"]["pruned"]) < sum(record["edges"]["noisy"])
    assert not any(Place(tmp_path, "branch_grpo", splits=[0, 1, 3]).record()["edges"]["pruned"])


def test_the_likelier_ways_weigh_more_as_in_training(tmp_path):
    place = Place(tmp_path, "branch_grpo", splits=[0, 1, 3], path_weight=2.0)
    record = place.record()
    plan, ids, _, edges = place.drawn()
    tree, total = plan.tree, torch.tensor(record["leaves"]["reward"], dtype=torch.float64)[None]
    ways = by_path(log_probs_on_paths(edges, ids, plan, torch.ones(len(plan))).T[None], tree, 2.0)
    close(column(record, "reward"), on_edges(tree, record, fuse(total, tree, ways)[0]))
    plain = fuse(total, tree)[0]
    assert max(abs(a - b) for a, b in zip(column(record, "reward"), on_edges(tree, record, plain), strict=True)) > 1e-4


def test_the_images_are_row_by_row_on_one_sheet(tmp_path, place):
    record = place.record()
    assert record["sheet"] == {"columns": 3, "width": 4, "height": 4}
    sheet, images = media.read(tmp_path / "eval" / "tree-base.png"), place.adapter.decode(place.drawn()[2].x0)
    assert sheet.shape == (3, 12, 12)
    for leaf, image in enumerate(images):
        top, left = 4 * (leaf // 3), 4 * (leaf % 3)
        assert_close(sheet[:, top : top + 4, left : left + 4], image, rtol=0, atol=0.003)  # 8 bits
    assert not sheet[:, 8:, 8:].any()


# ---- the same tree at every evaluation


def test_the_noise_stays_and_the_weights_move_the_tree(place):
    base, later = place.record("base", 0), place.record("iteration-000003", 3)
    assert (base.pop("tag"), base.pop("iteration")) == ("base", 0)
    assert (later.pop("tag"), later.pop("iteration")) == ("iteration-000003", 3)
    assert later == base
    nudge(place.adapter.network)
    moved = place.record("tuned", 4)["leaves"]["reward"]
    assert min(abs(a - b) for a, b in zip(moved, base["leaves"]["reward"], strict=True)) > 0


def test_the_plan_is_that_of_the_iteration(tmp_path):
    place = Place(tmp_path, "tree_grpo", children=2, window=2, num_steps=12)
    starts = {}
    for iteration in range(7):
        starts[iteration] = place.record("tuned", iteration)["splits"]
        several = [k for k, splits in enumerate(place.plan(max(iteration, 1)).tree.splits) if splits]
        assert starts[iteration] == several
    assert starts[0] == starts[1]
    assert len({tuple(steps) for steps in starts.values()}) > 1


def test_neither_batch_size_nor_processes_change_it(place):
    whole = place.record()
    place.grow.resolved.run.rollout.batch_size = 64
    other = place.record()
    close(other["leaves"]["reward"], whole["leaves"]["reward"])
    sampling = replace(place.grow.evaluator.sampling, world=OneOf(0, 2, CPU))
    place.grow = replace(place.grow, evaluator=replace(place.grow.evaluator, sampling=sampling))
    assert place.record() == other


# ---- what it leaves alone


def test_what_a_method_remembers_is_not_touched(tmp_path):
    rule = AdvantageConfig(name="batch", history=HistoryConfig(buffer_size=8, min_count=2))
    place = Place(tmp_path, "flow_grpo_fast", branch=4, window_size=2, advantages=rule)
    one = torch.tensor([[[0.1, 0.2, 0.3, 0.9]]])
    place.algorithm.advantages(one, torch.ones(1), (("held out", ()),))
    before = json.dumps(place.algorithm.state_dict())
    record = place.record()
    assert json.dumps(place.algorithm.state_dict()) == before
    # It is compared with what the prompt has earned, as in training.
    total = torch.tensor(record["leaves"]["reward"], dtype=torch.float64)
    known = torch.cat([one.flatten().double(), total])
    expected = ((total - known.mean()) / (known.std(correction=0) + 1e-4)).tolist()
    last = [i for i, a in enumerate(record["edges"]["advantage"]) if a is not None][-4:]
    close([record["edges"]["advantage"][i] for i in last], expected)


def test_a_running_mean_of_rewards_is_not_touched(tmp_path):
    tuning = registry.load("algorithms", "dynamic_tree_rpo").TuningConfig()
    place = Place(tmp_path, "dynamic_tree_rpo", tuning=tuning, num_steps=8)
    place.algorithm.mean = 0.25
    place.record()
    assert (place.algorithm.mean, place.algorithm.worth) == (0.25, None)


def test_a_tree_costs_one_evaluation_for_each_node_but_the_leaves_and_no_score_of_the_iterations_row(place):
    place.record()
    assert place.evaluations.rows == place.plan().tree.forwards
    assert set(place.scorer.take_counts().values()) == {0}


@pytest.mark.parametrize(
    ("name", "options", "rank"),
    [
        ("flow_grpo", {}, 0),
        ("flow_grpo_fast", {}, 0),
        ("diffusion_nft", {}, 0),
        ("branch_grpo", {"splits": [0, 1, 3]}, 1),
    ],
)
def test_a_method_without_a_tree_and_the_second_process_draw_and_write_nothing(tmp_path, name, options, rank):
    place = Place(tmp_path, name, world=OneOf(rank, 2, CPU), **options)
    place.grow("base", 0)
    assert place.evaluations.rows == 0
    assert not list(tmp_path.iterdir())


# ---- processes and signals


def test_of_a_sharded_network_every_process_makes_each_forward_and_asks_as_often_whether_to_stop(tmp_path):
    asked: list[list[int]] = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        place = Place(folder, "branch_grpo", splits=[0, 1, 3], world=OneOf(rank, 2, CPU), sharded=True)
        calls: list[int] = []
        stop = Stop(in_step=lambda calls=calls, place=place: bool(calls.append(place.evaluations.rows)))
        place.grow("base", 0, stop)
        assert place.evaluations.rows == place.plan().tree.forwards
        assert (folder / "eval").exists() == (rank == 0)
        asked.append(calls)
    assert asked[0] == asked[1]


def test_a_signal_leaves_no_file(tmp_path, place):
    for start in (0, 1):
        with pytest.raises(Abandoned):
            place.grow("base", 0, Stop(in_step=lambda start=start: place.evaluations.rows >= start))
        assert (place.evaluations.rows > 0) == bool(start)
    with pytest.raises(Abandoned):
        place.grow("base", 0, Stop(here=lambda: True))
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_forgets_the_trees_past_its_checkpoint(tmp_path, place):
    for iteration in range(4):
        place.record(f"iteration-{iteration:06d}", iteration)
    RunFolder(tmp_path).forget_after(2)
    kept = sorted(file.stem for file in (tmp_path / "eval").glob("tree-*.json"))
    assert kept == ["tree-iteration-000000", "tree-iteration-000001", "tree-iteration-000002"]


# ---- without advantages


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tp_grpo", {"window": 3}, "this is one of them"),  # one chain of several
        (
            "flow_grpo_fast",
            {"branch": 4, "window_size": 2, "advantages": AdvantageConfig(std="group", trimmed_ratio=0.8)},
            "trimmed_ratio",  # needs more samples than the tree has
        ),
    ],
)
def test_where_one_tree_has_no_advantages_it_has_rewards_and_a_note(tmp_path, name, options, words):
    record = Place(tmp_path, name, **options).record()
    assert set(record["edges"]["advantage"]) == {None}
    assert None not in record["edges"]["reward"]
    assert not any(record["edges"]["pruned"])
    assert words in record["note"]


def test_equal_rewards_train_nothing_and_the_file_notes_it(tmp_path):
    def flat(images, prompts, metadata):
        return {name: torch.ones(len(images)) for name in ("light", "corner")}

    record = Place(tmp_path, "branch_grpo", splits=[0, 1, 3], score=flat).record()
    assert record["edges"]["pruned"] == record["edges"]["noisy"]
    assert {a for a in record["edges"]["advantage"] if a is not None} == {0.0}
    assert "same reward" in record["note"]


def test_an_edge_without_credit_has_no_advantage(tmp_path):
    """G2RPO: one stride of a child fails, so the sum over strides is not known, though the edge has a reward."""
    record = Place(tmp_path, "g2rpo", children=3, strides=[1, 2], steps=[0], score=holed(1)).record()
    nodes, edges = record["nodes"], record["edges"]
    rows = zip(edges["child"], edges["noisy"], edges["advantage"], edges["pruned"], edges["reward"], strict=True)
    noisy = {nodes["leaf"][child]: row for child, stochastic, *row in rows if stochastic}
    assert noisy[0][:2] == [None, True]
    assert noisy[0][2] is not None, "of the stride that was scored"
    assert all(noisy[leaf][0] is not None and not noisy[leaf][1] for leaf in (2, 4))


def test_what_could_not_be_scored_is_null_and_trains_nothing(tmp_path):
    record = Place(tmp_path, "branch_grpo", splits=[0, 1, 3], score=holed(0, 1)).record()
    nodes, edges = record["nodes"], record["edges"]
    assert [value is None for value in record["leaves"]["reward"]] == [True, True] + [False] * 6
    below = [nodes["leaf"][child] < 2 and nodes["place"][child] > 1 for child in edges["child"]]
    assert [value is None for value in edges["reward"]] == below
    assert all(cut for cut, empty, noisy in zip(edges["pruned"], below, edges["noisy"], strict=True) if empty & noisy)
    assert nodes["reward"][0] is not None
