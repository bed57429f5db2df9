"""Texts of different lengths never share a forward, where the adapter says so: neither padding nor a mask."""

import itertools
import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms import awm, dgpo
from flowrl.algorithms.base import Method, Networks
from flowrl.algorithms.flow_grpo import Config, FlowGrpo
from flowrl.core.types import Condition, SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import solver_plan
from flowrl.diffusion.training_times import TimesConfig
from flowrl.rollout.loop import RunOptions, batches, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import flow_sde
from flowrl.samplers.base import Sampler
from flowrl.training.kinds import training_of
from flowrl.training.microbatches import forwards
from flowrl.training.replay_gate import pass_gate
from flowrl.training.world import World
from tests import native
from tests.toys import Session, ToyAdapter, noising_of, replay_of, roll_out, sampling_of

TIMES = TimesConfig(name="discrete", count=3)
REWARDS = torch.arange(12.0).reshape(1, 4, 3)


class Ragged(ToyAdapter):
    """Every third prompt has a text of another length."""

    def text_lengths(self, cond: Condition) -> Tensor:
        own = {float(row): k for k, row in enumerate(self.encode([f"prompt {k}" for k in range(9)])["prompt"][:, 0])}
        return torch.tensor([9 if own[float(row)] % 3 else 5 for row in cond["prompt"][:, 0]])


def lengths(adapter: Ragged, cond: Condition) -> set[int]:
    return set(adapter.text_lengths(cond).tolist())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 6))
def test_rollout_batches_are_neighbours_of_one_length(rows, size):
    adapter, plan = Ragged(), solver_plan(ToyAdapter().schedule(3))
    cond, place = adapter.encode([f"prompt {k}" for k in range(4)]), torch.tensor(rows)
    found = batches(adapter, plan, cond, place, size)
    assert [k for part in found for k in range(part.start, part.stop)] == list(range(len(rows)))
    assert all(0 < part.stop - part.start <= size for part in found)
    assert all(len(lengths(adapter, cond.index(place[part]))) == 1 for part in found)
    # No batch is cut that need not be.
    for left, right in itertools.pairwise(found):
        both = slice(left.start, right.stop)
        assert both.stop - both.start > size or len(lengths(adapter, cond.index(place[both]))) > 1
    plain = batches(ToyAdapter(), plan, cond, place, size)
    assert plain == [slice(k, min(k + size, len(rows))) for k in range(0, len(rows), size)]


def test_a_sharded_rollout_makes_as_many_batches_as_the_process_that_has_the_most():
    @dataclass(frozen=True)
    class Others(World):
        def gather(self, value: Any) -> list[Any]:
            assert not made, "the others are in their forwards"
            return [value, 5]

    made: list[int] = []

    class Counting(Ragged):
        def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
            made.append(len(x))
            return super().predict(x, timestep, cond, guidance_scale)

    adapter, prompts = Counting(), [Prompt(f"prompt {k}") for k in range(4)]
    sampling = sampling_of(adapter, prompts, world=Others(0, 2, torch.device("cpu")), sharded=True)
    ids = [SampleId(slot, 0) for slot in range(4)]
    noise = Noise(0, "rollout", 1, adapter.latent_shape())
    sampling.draw(
        solver_plan(sampling.schedule), noise, sampling.asked(prompts, ids), batch_size=4, options=RunOptions()
    )
    assert made[::3] == [1, 2, 1, 1, 1]  # three steps each; the last two are spare
    assert sampling.counter.rows == 3 * 4


@pytest.mark.parametrize("size", [2, 4, 100])
def test_edges_of_different_lengths_share_no_forward_and_each_comes_once(size):
    adapter = Ragged()
    session = roll_out(adapter, prompts=4)
    work = replay_of(session, REWARDS, updates=2, batch_size=size)
    seen = []
    for share, order in enumerate(work.shares):
        made = list(work.batches(share))
        assert all(len(lengths(adapter, batch.cond)) == 1 and len(batch.latents) <= size for batch, _ in made)
        assert len(made) == len(list(forwards(work.rollout, adapter, order, size)))
        seen += [int(order[k]) for batch, _ in made for k in batch.place]
    assert sorted(seen) == list(range(len(session.edges)))


@pytest.mark.parametrize(
    ("method", "whole"),
    [
        (awm.build(awm.Config(times=TIMES)), 1),
        (awm.build(awm.Config(times=TIMES, ratio="sample")), 3),
        (dgpo.build(dgpo.Config(times=TIMES)), 3),
    ],
    ids=["term", "sample", "group"],
)
def test_terms_of_different_lengths_share_no_forward_and_units_stay_whole(method, whole):
    adapter = Ragged()
    work = noising_of(roll_out(adapter, algorithm=method, prompts=4), REWARDS, batch_size=7)
    made = [batch for batch, _ in work.batches(0)]
    assert all(len(lengths(adapter, batch.cond)) == 1 and len(batch) <= 7 for batch in made)
    terms = [(int(s), int(g)) for batch in made for s, g in zip(batch.sample, batch.group, strict=True)]
    assert len(set(terms)) == len(terms) == work.sizes[0] == 12 * 3
    for batch in made:
        unit = batch.group if method.unit == "group" else batch.sample
        assert whole == 1 or set(unit.unique(return_counts=True)[1].tolist()) == {whole}


# ---- Qwen-Image


def qwen(method: Method, sampler: Sampler) -> Session:
    """Four prompts of two lengths, three samples each, four steps, drawn five at a time."""
    adapter, _ = native.kind("qwen_image")
    weights = native.lora(adapter, noise=0.1)
    policy = Policy(adapter, sampler, 4.0)
    plan = method.plan(adapter.schedule(4), sampler, 1, 0)
    ids = tuple(SampleId(slot, sample) for slot in range(4) for sample in range(3))
    rows, noise = torch.tensor([i.slot for i in ids]), Noise(0, "rollout", 1, adapter.latent_shape())
    cond = adapter.encode([*native.PROMPTS, *native.PROMPTS])
    options = RunOptions(recording=training_of(method).recording(sampler))
    samples, edges = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=5, options=options)
    networks = Networks(policy, weights)
    return Session(adapter, weights, method, policy, networks, plan, noise, ids, samples, edges, cond, rows, 5)


def test_no_forward_of_qwen_is_padded_and_the_gate_is_passed(caplog, monkeypatch):
    adapter_of, masks = native.kind, []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["encoder_hidden_states_mask"])

    def watched(name: str) -> Any:
        adapter, pipe = adapter_of(name)
        adapter.network.register_forward_pre_hook(note, with_kwargs=True)
        return adapter, pipe

    monkeypatch.setattr(native, "kind", watched)
    session = qwen(FlowGrpo(Config(sde_steps=[0, 1])), flow_sde.build(flow_sde.Config(noise_level=0.7)))
    work = replay_of(session, REWARDS, updates=1, batch_size=5)
    with caplog.at_level(logging.INFO, "flowrl"):
        pass_gate(work, torch.float32)
    assert caplog.messages[-1].endswith("0.00e+00 at the rollout's own batches")
    for batch, _ in work.batches(0):
        session.algorithm.loss(batch, session.networks)
    matching = awm.build(awm.Config(times=TIMES))
    terms = noising_of(replace(session, algorithm=matching), REWARDS, batch_size=5)
    for batch, _ in terms.batches(0):
        matching.outputs(batch, session.networks, roles=())
    assert len(masks) > 40
    assert set(masks) == {None}
