"""What `python -m scripts.lab guard-ratio` records of GRPO-Guard's claim."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo, grpo_guard
from flowrl.credit.advantages import Advantages
from flowrl.training.metrics import Sums
from scripts.lab import guard_ratio
from tests.toys import Session, ToyAdapter, learner_of, nudge, replay_of, roll_out, rollout_of

ALGORITHMS = {
    "flow_grpo": flow_grpo.build(flow_grpo.Config(clip_range=0.02)),
    "grpo_guard": grpo_guard.build(grpo_guard.Config(clip_range=0.02)),
}
SMALL = [
    "iterations=2",
    "data.max_eval_prompts=2",
    "data.cache_text=false",  # embeds only the captions that are drawn
    "rollout.prompts_per_iteration=2",
    "rollout.group_size=4",
    "rollout.num_inference_steps=4",
    "optim.warmup_updates=0",
]


@pytest.fixture
def guard() -> ModuleType:
    return guard_ratio


def one_iteration(name: str, guard: ModuleType | None) -> tuple[Any, Session, list[torch.Tensor]]:
    """Three updates on a toy rollout of 2 x 6 samples x 5 trained steps: the probe or None, session, weights."""
    algorithm = type(ALGORITHMS[name])(ALGORITHMS[name].config)  # the probe marks the instance
    session = roll_out(ToyAdapter(), algorithm=algorithm, group=6, columns=("mean_old",))
    learner = learner_of(session, updates=3)
    probe = guard.Probe(learner) if guard else None
    if probe:
        probe.begin(1)
    rewards = torch.randn(1, 2, 6, generator=torch.Generator().manual_seed(3))
    credit: Advantages = algorithm.advantages(rewards, torch.ones(1))
    learner.update(1, rollout_of(session, rewards), credit, Sums())
    return probe, session, [p.detach().clone() for p in session.adapter.network.parameters()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_edges_that_no_update_has_used_are_recorded_and_the_run_goes_on_as_without(guard, name):
    """Of three shares the second and the third, each edge once, as the old policy's first share has changed it."""
    probe, session, weights = one_iteration(name, guard)
    found = guard.LogRatios.join(probe.parts)
    assert len(found.edge) == len(found.edge.unique()) == len(session.edges) * 2 // 3
    first = set(probe.trained[: len(session.edges) // 3].tolist())
    assert not first & set(found.edge.tolist())
    assert torch.equal(found.step, session.edges.step[found.edge])
    assert float(found.own.abs().min()) > 0
    assert torch.equal(found.own, found.plain if name == "flow_grpo" else found.ratio_norm)
    with pytest.raises(AssertionError, match="used before"):
        probe.before_update(replay_of(session, torch.rand(1, 2, 6)), 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, one_iteration(name, None)[2], strict=True))


def test_a_change_of_the_policy_leaves_the_normalised_mean_at_zero_and_moves_the_plain_one_by_minus_kl(guard):
    """arXiv 2510.22319: E[plain] = -KL per dim, E[normalised] = 0, for a change that has not seen the noise.

    2 x 1500 samples, a fixed seed; 4 standard errors are allowed at each of the five steps.
    """
    session = roll_out(ToyAdapter(), algorithm=ALGORITHMS["grpo_guard"], group=1500, batch_size=3000)
    nudge(session.adapter.network, 0.2)
    probe = guard.Probe(learner_of(session, batch_size=3000))
    replay = replay_of(session, torch.rand(1, 2, 1500), updates=1, batch_size=3000)
    found = probe.log_ratios(replay, 0)
    for k in found.step.unique():
        here = found.step == k
        kl, count = found.kl[here].double(), int(here.sum())
        for values, expected in ((found.plain, -kl.mean()), (found.ratio_norm, 0.0)):
            error = values[here].double().std() / count**0.5
            assert abs(values[here].double().mean() - expected) < 4 * error
        assert found.plain[here].double().mean() < -4 * found.plain[here].double().std() / count**0.5
    assert_close(found.ratio_norm, found.std * (found.plain + found.kl), rtol=0, atol=1e-5)


def test_the_error_is_clustered_by_iteration_and_agrees_with_the_plain_one_for_independent_values(guard):
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    iteration = torch.arange(40_000) % 200
    alone = guard.moments(values, iteration)
    assert alone["error"] == pytest.approx(40_000**-0.5, rel=0.15)
    shared = guard.moments(values + torch.randn(200, generator=torch.Generator().manual_seed(1))[iteration], iteration)
    assert shared["error"] == pytest.approx(200**-0.5, rel=0.15)


@pytest.mark.slow
def test_a_tiny_measurement_is_finite_at_every_trained_step(guard, tmp_path):
    """Through the real trainer, both methods, and its page and picture."""
    numbers = guard.measure(SMALL)
    for method, run in numbers["runs"].items():
        assert run["own"] == ("plain" if method == "flow_grpo" else "ratio_norm")
        for form in guard.FORMS:
            assert [step["step"] for step in run[form]["steps"]] == [0, 1, 2]
            # 2 iterations x 3 later shares x 2 samples, fewer where a group's rewards are all equal.
            assert all(0 < step["n"] <= 12 and step["std"] > 0 for step in run[form]["steps"])
            assert all(math.isfinite(step[key]) for step in run[form]["steps"] for key in ("mean", "error", "std"))
            assert run[form]["spread"]["value"] >= 1
    guard.draw(numbers, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("flow_grpo run") == 3
    assert len(guard.table(numbers).splitlines()) == 2 + 6 + 1 + 2 + 3
