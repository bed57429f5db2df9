"""What `python -m scripts.lab guard-ratio` records of GRPO-Guard's claim."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo, grpo_guard
from flowrl.credit.advantages import Advantages
from flowrl.training.metrics import Sums
from scripts.lab import guard_ratio as guard
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


def one_iteration(name: str, *, probed: bool) -> tuple[Any, Session, list[torch.Tensor]]:
    """Three updates on a toy rollout of 2 x 6 samples x 5 trained steps: the probe or None, session, weights."""
    algorithm = type(ALGORITHMS[name])(ALGORITHMS[name].config)  # the probe marks the instance
    session = roll_out(ToyAdapter(), algorithm=algorithm, group=6, columns=("mean_old",))
    learner = learner_of(session, updates=3)
    probe = guard.Probe(learner) if probed else None
    if probe:
        probe.begin(1)
    rewards = torch.randn(1, 2, 6, generator=torch.Generator().manual_seed(3))
    credit: Advantages = algorithm.advantages(rewards, torch.ones(1))
    learner.update(1, rollout_of(session, rewards), credit, Sums())
    return probe, session, [p.detach().clone() for p in session.adapter.network.parameters()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_edges_that_no_update_has_used_are_recorded_and_the_run_goes_on_as_without(name):
    """Of three shares the second and the third, each edge once, as the old policy's first share has changed it."""
    probe, session, weights = one_iteration(name, probed=True)
    found = guard.LogRatios.join(probe.parts)
    assert len(found.edge) == len(found.edge.unique()) == len(session.edges) * 2 // 3
    first = set(probe.trained[: len(session.edges) // 3].tolist())
    assert not first & set(found.edge.tolist())
    assert torch.equal(found.step, session.edges.step[found.edge])
    assert float(found.own.abs().min()) > 0
    assert torch.equal(found.own, found.plain if name == "flow_grpo" else found.ratio_norm)
    with pytest.raises(AssertionError, match="used before"):
        probe.before_update(replay_of(session, torch.rand(1, 2, 6)), 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, one_iteration(name, probed=False)[2], strict=True))


def test_the_normalised_ratio_is_the_plain_one_freed_of_its_kl_and_its_scale():
    """arXiv 2510.22319; that its mean is 0 where the plain one's is -KL: tests/algorithms."""
    session = roll_out(ToyAdapter(), algorithm=ALGORITHMS["grpo_guard"])
    nudge(session.adapter.network, 0.2)
    probe = guard.Probe(learner_of(session))
    found = probe.log_ratios(replay_of(session, torch.rand(1, 2, 3), updates=1), 0)
    assert_close(found.ratio_norm, found.std * (found.plain + found.kl), rtol=0, atol=1e-5)


def test_the_error_is_clustered_by_iteration_and_agrees_with_the_plain_one_for_independent_values():
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    iteration = torch.arange(40_000) % 200
    alone = guard.moments(values, iteration)
    assert alone["error"] == pytest.approx(40_000**-0.5, rel=0.15)
    shared = guard.moments(values + torch.randn(200, generator=torch.Generator().manual_seed(1))[iteration], iteration)
    assert shared["error"] == pytest.approx(200**-0.5, rel=0.15)


@pytest.mark.slow
def test_a_tiny_measurement_is_finite_at_every_trained_step(tmp_path):
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
