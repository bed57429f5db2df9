"""A KL without a divisor has that of the sampler's official code, in every method that takes one."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.flow_grpo import KLConfig
from flowrl.core import registry
from flowrl.samplers.base import Sampler
from tests.toys import ToyAdapter, draw_advantages, nudge, roll_out

OFFICIAL = {"flow_sde": "flow_grpo", "cps": "variance", "wan_sde": "variance", "sage": "variance"}
"""Flow-GRPO divides by 2 g^2 with the Flow-SDE and by 2 g^2 |dt| in its Wan script, FlowCPS and SAGE by 2 std^2."""
WITHOUT = {"dance_sde": "flow_grpo", "memoryless": "flow_grpo", "ddim": "flow_grpo", "precise": "flow_grpo"}
"""Samplers whose official code has no KL."""
EVERY = OFFICIAL | WITHOUT
METHODS = [
    name
    for name in registry.names("algorithms")
    if isinstance(getattr(registry.load("algorithms", name).Config(), "kl", None), KLConfig)
    and registry.load("algorithms", name).Config().kl.divisor is None
]


def built(name: str) -> Sampler:
    module = registry.load("samplers", name)
    return module.build(module.Config())


def test_every_sampler_that_can_be_trained_is_in_the_table():
    assert set(EVERY) == set(registry.names("samplers")) - {"ode"}


@pytest.mark.parametrize(
    ("method", "sampler"),
    # Its noise differs between siblings, and Wan's has no strength.
    [pair for pair in itertools.product(METHODS, EVERY) if pair != ("dynamic_tree_rpo", "wan_sde")],
)
def test_null_is_the_samplers_own(method, sampler):
    module = registry.load("algorithms", method)
    options = {"clip_range": 1.0} if hasattr(module.Config(), "clip_range") else {}
    algorithm = module.build(module.Config(kl=KLConfig(coef=0.5), **options))
    run = roll_out(ToyAdapter(), algorithm=algorithm, sampler=built(sampler), num_steps=8, group=12)
    nudge(run.adapter.network)
    batch = run.batches(draw_advantages(len(run.edges)))[0]
    found = algorithm.loss(batch, run.networks).metrics["policy/kl_reference"]
    policy, anchor = run.networks.transition(batch), run.networks.frozen("reference", batch)
    square = (policy.mean - anchor.mean).square().flatten(1).mean(1)
    dt = (batch.step.sigma - batch.step.sigma_next) if EVERY[sampler] == "flow_grpo" else torch.ones(())
    assert_close(found, (square * dt / (2 * policy.std.square())).sum().detach())
