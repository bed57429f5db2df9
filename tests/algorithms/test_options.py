"""The options of all methods: what is refused, as an error of the configuration, and what the switches add."""

import contextlib

import pytest

from flowrl.algorithms.base import EdgeMethod
from flowrl.commands._option_texts import option_texts
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.rollout.options import RolloutConfig
from tests.tables import table
from tests.toys import algorithms

POSITIONAL = ("dance_grpo", "euphonium", "flow_grpo", "flow_grpo_fast", "mix_grpo", "mix_grpo_flash")
"""The methods with a ratio by position."""
REFUSED = [
    *table(__file__, "refused"),
    *((name, {"spatial": {}}, "unknown key") for name in algorithms(EdgeMethod) if name not in POSITIONAL),
]
TOO_SHORT = [
    ("dance_grpo", {"timestep_fraction": 0.1}, 6, r"must be at least 0\.2"),
    ("ddpo", {"timestep_fraction": 0.1}, 6, r"must be at least 0\.167"),
    ("flow_grpo_fast", {"high": 10}, 10, "last of 10 steps"),  # hi = T trains the sharp last step
    ("mix_grpo", {}, 2, "at least 3"),
    ("mix_grpo_flash", {}, 2, "at least 3"),
]
GEOMETRIES = [
    ("ddpo", {"estimator": "score"}, (24, 10, 1), None),
    ("ddpo", {}, (24, 10, 4), None),
    ("ddpo", {"estimator": "score"}, (24, 10, 2), r"estimator=score .*=2; try optim\.updates_per_iteration=1"),
    ("dpok", {}, (6, 50, 1), None),  # the official 6 prompts of 50 steps
    ("dpok", {}, (6, 50, 2), r"updates_per_iteration=2 .*; try optim.updates_per_iteration=1$"),
    ("dpok", {}, (21, 50, 1), "buffer=1000 holds less than the 1029 transitions"),
    ("dpok", {"sde_steps": [0, 1]}, (500, 50, 1), None),
    ("dpok", {}, (20, 51, 1), None),  # 1000 transitions, were the last step clean
]
"""Samples, steps, updates."""
OFF = {"coef": 0.0}
ROLES = [
    ("awm", {}, ("reference", "anchor"), "policy"),
    ("awm", {"kl": OFF, "ema_kl": OFF}, (), "policy"),
    ("awm", {"kl": OFF, "ema_kl": OFF, "off_policy": True}, ("anchor",), "anchor"),
    ("crd", {}, ("reference", "old", "sampling"), "sampling"),
    ("dgpo", {"kl": OFF}, ("reference", "average"), "policy"),
    ("dgpo", {"kl": OFF, "against_average": True}, ("average",), "policy"),
    ("diffusion_nft", {}, ("reference", "old"), "old"),
    ("diffusion_nft", {"kl": OFF}, ("old",), "old"),
    ("flow_grpo", {}, (), "policy"),
    ("flow_grpo", {"kl": {"coef": 0.01}}, ("reference",), "policy"),
    ("sage_grpo", {}, ("anchor",), "policy"),
    ("sage_grpo", {"trust": {"anchor": "fixed", "old": "none"}}, ("reference",), "policy"),
    ("sage_grpo", {"trust": OFF}, (), "policy"),
]

OWN_SAMPLER = {
    "adjoint_matching": "ddim",
    "branch_grpo": "dance_sde",
    "dance_grpo": "dance_sde",
    "ddpo": "ddim",
    "dpok": "ddim",
    "euphonium": "dance_sde",
    "flash_grpo": "wan_sde",
    "opd": "ode",
    "rocm": "cps",
    "sage_grpo": "sage",
}
"""The methods whose published noise is not the Flow-SDE's."""


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_an_option_without_a_meaning_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        validate(registry.load("algorithms", name).Config, options, "algorithm")


@pytest.mark.parametrize(("name", "options", "num_steps", "message"), TOO_SHORT)
def test_a_grid_without_a_step_to_train_is_refused_before_a_model_is_loaded(name, options, num_steps, message):
    config = registry.load("algorithms", name).Config(**options)
    sampler = registry.load("samplers", config.default_sampler)
    with pytest.raises(ValueError, match=message):
        config.check(sampler.build(sampler.Config()), num_steps)


@pytest.mark.parametrize(("name", "options", "geometry", "message"), GEOMETRIES)
def test_a_geometry_is_checked_before_a_model_is_loaded(name, options, geometry, message):
    config = registry.load("algorithms", name).Config(**options)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        config.check_geometry(*geometry)


@pytest.mark.parametrize(("name", "options", "roles", "behaviour"), ROLES)
def test_only_the_networks_that_the_options_ask_for_are_kept(name, options, roles, behaviour):
    module = registry.load("algorithms", name)
    method = module.build(validate(module.Config, options, "algorithm"))
    assert (method.roles, method.behaviour) == (roles, behaviour)


def test_a_run_that_names_no_sampler_has_the_one_of_the_method():
    """And the text of the option names it."""
    found = {name: registry.load("algorithms", name).Config.default_sampler for name in registry.names("algorithms")}
    assert {name: sampler for name, sampler in found.items() if sampler != "flow_sde"} == OWN_SAMPLER
    (text,) = (option.about for option in option_texts(RolloutConfig) if option.name == "sampler")
    for sampler in OWN_SAMPLER.values():
        *others, last = [name for name, own in OWN_SAMPLER.items() if own == sampler]
        names = f"{', '.join(others)} and {last}" if others else last
        assert f"{sampler} for {names}" in text
