"""A KL without a divisor has that of the sampler's official code, in every method that takes one."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from flowrl.algorithms.flow_grpo import KLConfig
from flowrl.config.load import load_config, resolve
from flowrl.config.older import as_it_was
from flowrl.core import registry
from flowrl.core.strict import Options
from flowrl.run.folder import differences
from flowrl.samplers.base import Sampler
from tests.toys import ToyAdapter, draw_advantages, nudge, roll_out

OFFICIAL = {"flow_sde": "flow_grpo", "cps": "variance", "wan_sde": "variance", "sage": "variance"}
"""Flow-GRPO divides by 2 g^2 with the Flow-SDE and by 2 g^2 |dt| in its Wan script, FlowCPS and SAGE by 2 std^2."""
WITHOUT = {"dance_sde": "flow_grpo", "memoryless": "flow_grpo", "ddim": "flow_grpo"}
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


# ---- what a run folder keeps


def tree_of(place: Path, *words: str) -> Options:
    """The resolved configuration of a small run with a KL."""
    file = place / "run.yaml"
    file.write_text(
        "name: a\niterations: 1\nmodel: {path: tiny-sd3}\ndata: {prompts: 'shapes:train'}\nrewards: [{name: shapes}]\n"
    )
    small = ("rollout.num_inference_steps=4", "algorithm.kl.coef=0.04", "algorithm.clip_range=1e-4", *words)
    return resolve(load_config(file, list(small))).tree()


def older(tree: Options) -> Options:
    """The same as a version wrote it in which null was flow_grpo on every flow."""
    tree = copy.deepcopy(tree)
    del tree["eval"]["tie"]
    return as_it_was(tree)


@pytest.mark.parametrize("sampler", EVERY)
def test_an_older_run_keeps_its_divisor_or_is_refused_by_its_key(tmp_path, sampler):
    word, unscored = f"rollout.sampler={{name: {sampler}}}", "eval.tie=0.0"
    new = tree_of(tmp_path, word, unscored)
    words = {"algorithm.kl.divisor": "algorithm.kl.divisor was 'flow_grpo', now None"}
    changed = EVERY[sampler] != "flow_grpo"
    assert differences(older(new), new) == (words if changed else {})
    # Resumed by its folder, or with that value, it goes on as it began.
    assert older(new)["algorithm"]["kl"]["divisor"] == ("flow_grpo" if changed else None)
    if changed:
        assert differences(older(new), tree_of(tmp_path, word, unscored, "algorithm.kl.divisor=flow_grpo")) == {}
    assert differences(as_it_was(new), new) == {}


@pytest.mark.parametrize("words", ["algorithm.kl.coef=0", "model.path=tiny-sd"])
def test_without_a_kl_and_on_noise_prediction_nothing_has_changed(tmp_path, words):
    new = tree_of(tmp_path, "rollout.sampler={name: cps}", "eval.tie=0.0", words)
    assert differences(older(new), new) == {}
