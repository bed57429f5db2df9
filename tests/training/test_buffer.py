"""From edges to training forwards."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.contracts.grids import flow_schedule
from flowrl.core.types import Condition, Edges, Samples
from flowrl.diffusion.plan import window
from flowrl.rollout.trajectories import Trajectories
from flowrl.training.microbatches import microbatches, update_chunks
from flowrl.training.world import shard
from tests.toys import ToyAdapter

PLAN = window(flow_schedule(4), 0.7)
COND = Condition({"prompt": torch.arange(2.0)[:, None]})
ROWS = torch.tensor([0, 0, 1, 1])


def table() -> Edges:
    """Four samples, three trained steps; node n is full of n, edge e has old log-prob e."""
    parent = torch.tensor([4 * step + sample for sample in range(4) for step in range(3)])
    return Edges(
        nodes=torch.arange(16.0)[:, None].expand(16, 5).clone(),
        parent=parent,
        child=parent + 4,
        step=torch.arange(3).repeat(4),
        sample=torch.arange(4).repeat_interleave(3),
        old_log_prob=torch.arange(12.0),
        columns={"mean_old": torch.arange(12.0)[:, None] * 100},
    )


def batches(edges: Edges, adapter: ToyAdapter, batch_size: int, order: torch.Tensor | None = None):
    advantage = 10 * torch.arange(float(len(edges)))[:, None]
    return list(microbatches(drawn(edges), advantage, adapter, batch_size=batch_size, order=order))


def drawn(edges: Edges) -> Trajectories:
    """The edges on their plan; microbatches take no finished sample."""
    return Trajectories(PLAN, Samples(torch.zeros(0), ()), edges, COND, ROWS)


def counts(chunks: list[torch.Tensor], numbers: list[int]) -> list[int]:
    """Of some numbers, those in each chunk."""
    return [int(torch.isin(chunk, torch.tensor(numbers)).sum()) for chunk in chunks]


def uneven(chunks: list[torch.Tensor], numbers: list[int]) -> int:
    found = counts(chunks, numbers)
    return max(found) - min(found)


def own(prompts: int, group: int, processes: int) -> list[list[int]]:
    """Sample numbers of each process."""
    parts = [shard(prompts, group, rank, processes) for rank in range(processes)]
    return [[slot * group + sample for slot, sample in part] for part in parts]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 8), st.integers(0, 1000), st.floats(0, 1))
def test_every_prompt_and_every_process_is_dealt_evenly_to_the_updates(prompts, group, updates, seed, live):
    """Some samples are dead; processes of whole groups."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.rand(prompts * group, generator=generator) <= live).nonzero().squeeze(1)
    chunks = update_chunks(numbers, updates, seed, 1, stratum=group)
    assert len(chunks) == updates
    assert torch.cat(chunks).sort().values.tolist() == numbers.tolist()
    assert uneven(chunks, numbers.tolist()) <= 1
    for slot in range(prompts):
        assert uneven(chunks, list(range(slot * group, (slot + 1) * group))) <= 1
    for processes in range(1, min(prompts, 8) + 1):
        assert all(uneven(chunks, part) <= 1 for part in own(prompts, group, processes))


@pytest.mark.parametrize(
    ("prompts", "group", "updates", "processes"),
    [(48, 24, 2, 8), (64, 18, 2, 8), (32, 12, 4, 8), (24, 12, 4, 8), (32, 16, 2, 8), (32, 4, 2, 8), (2, 24, 3, 8)],
)
def test_the_processes_of_a_recipe_have_the_same_work_in_every_update(prompts, group, updates, processes):
    """In the last case a prompt's samples are on four processes."""
    for iteration in range(3):
        chunks = update_chunks(torch.arange(prompts * group), updates, 0, iteration, stratum=group)
        assert all(uneven(chunks, part) == 0 for part in own(prompts, group, processes))


@pytest.mark.parametrize(("prompts", "updates", "processes", "apart"), [(48, 2, 8, 0), (32, 4, 8, 0), (30, 4, 6, 2)])
def test_whole_groups_are_dealt_evenly_to_the_updates_of_a_process(prompts, updates, processes, apart):
    for iteration in range(3):
        chunks = update_chunks(torch.arange(prompts), updates, 0, iteration, stratum=prompts)
        assert all(uneven(chunks, part) <= apart for part in own(prompts, 1, processes))


def test_every_sample_is_equally_likely_in_every_update():
    """Neither its prompt nor its place there counts, nor how many samples are alive."""
    numbers, updates, draws = torch.tensor([0, 1, 2, 4, 5, 6, 8]), 3, 1500
    found = torch.zeros(updates, 9)
    for seed in range(draws):
        for k, chunk in enumerate(update_chunks(numbers, updates, seed, 1, stratum=3)):
            found[k, chunk] += 1
    deviation = (draws * (1 / updates) * (1 - 1 / updates)) ** 0.5
    assert float((found[:, numbers] - draws / updates).abs().max()) < 4.5 * deviation


def test_chunks_are_random_by_seed_and_iteration_and_else_fixed():
    numbers = torch.arange(100)

    def dealt(seed: int, iteration: int) -> list[list[int]]:
        return [chunk.sort().values.tolist() for chunk in update_chunks(numbers, 2, seed, iteration, stratum=10)]

    assert dealt(0, 1) == dealt(0, 1)
    assert dealt(0, 1) != dealt(0, 2) != dealt(1, 1)
    assert dealt(0, 1)[0] != list(range(0, 100, 2))


@pytest.mark.parametrize("key_per_step", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
def test_every_edge_comes_exactly_once_with_all_that_belongs_to_it(batch_size, key_per_step):
    edges, adapter = table(), ToyAdapter(key_per_step=key_per_step)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    found = batches(edges, adapter, batch_size, order)
    seen = torch.cat([batch.old_log_prob for batch in found]).long()
    assert seen.sort().values.tolist() == list(range(12))
    starts = torch.cat([batch.latents[batch.parent] for batch in found])[:, 0].long()
    assert starts.tolist() == edges.parent[seen].tolist()
    assert torch.cat([batch.next_latents for batch in found])[:, 0].long().tolist() == edges.child[seen].tolist()
    assert torch.cat([batch.step.index for batch in found]).tolist() == edges.step[seen].tolist()
    assert torch.equal(torch.cat([batch.step.sigma for batch in found]), PLAN.schedule.sigmas[edges.step[seen]])
    assert torch.cat([batch.advantage for batch in found]).tolist() == [[10.0 * e] for e in seen]
    assert torch.cat([batch.columns["mean_old"] for batch in found]).tolist() == [[100.0 * e] for e in seen]
    prompts = torch.cat([batch.cond["prompt"] for batch in found])[:, 0].long()
    assert prompts.tolist() == ROWS[edges.sample[seen]].tolist()
    assert all(len(batch) == len(batch.cond) == len(batch.latents) <= batch_size for batch in found)


NONE = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("edges", "order", "batch_size", "key_per_step", "expected"),
    [
        (table(), torch.tensor([7, 3, 11, 0, 5]), 2, False, [[7, 3], [11, 0], [5]]),
        (table(), None, 5, False, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]),
        (table(), None, 3, True, [[0, 3, 6], [9], [1, 4, 7], [10], [2, 5, 8], [11]]),  # no forward of two steps
        (table(), NONE, 4, False, []),
        (table().select(NONE), NONE, 4, False, []),
    ],
)
def test_edges_keep_their_order_within_a_key_and_batches_may_be_partial(
    edges, order, batch_size, key_per_step, expected
):
    found = batches(edges, ToyAdapter(key_per_step=key_per_step), batch_size, order)
    assert [batch.old_log_prob.tolist() for batch in found] == expected


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_edges_from_the_same_latents_share_a_forward(batch_size):
    """Samples 0 and 2 start from node 5, sample 1 from node 9: two forwards, in order of appearance."""
    edges = dataclasses.replace(table().select(torch.tensor([0, 3, 6])), parent=torch.tensor([5, 9, 5]))
    found = batches(edges, ToyAdapter(), batch_size)
    assert [batch.latents[:, 0].tolist() for batch in found] == ([[5.0], [9.0]] if batch_size == 1 else [[5.0, 9.0]])
    assert all(len(b.latents) == len(b.cond) == len(b.start.sigma) <= batch_size for b in found)
    starts = torch.cat([batch.latents[batch.parent] for batch in found])[:, 0].tolist()
    places = torch.cat([batch.place for batch in found]).tolist()
    assert [start for _, start in sorted(zip(places, starts, strict=True))] == [5.0, 9.0, 5.0]
