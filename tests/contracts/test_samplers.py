"""What every file in flowrl/samplers/ must satisfy; a new file is tested before its author writes a test."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flowrl.contracts.grids import flow_schedule
from flowrl.contracts.laws import ContractError, Law
from flowrl.contracts.samplers import LAWS, PATHS, OnPath, inputs, taken_paths
from flowrl.core import registry
from flowrl.diffusion.plan import window
from flowrl.diffusion.process import ddim_mean
from flowrl.samplers.base import Sampler, StepDistribution

NAMES = registry.names("samplers")


def build(name: str) -> Sampler:
    module = registry.load("samplers", name)
    return module.build(module.Config())


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_keeps_the_law(name: str, law: Law[Sampler]):
    law.hold(build(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_file_has_a_frozen_config_with_defaults_and_a_build(name):
    module = registry.load("samplers", name)
    config = module.Config()
    assert type(config).__dataclass_params__.frozen
    assert dataclasses.is_dataclass(config)
    assert isinstance(module.build(config), Sampler)
    assert module.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_refuses_a_path_that_it_does_not_take_and_says_what_to_use(name):
    taken = {each.path for each in taken_paths(build(name))}
    for path in set(PATHS) - taken:
        each = OnPath(build(name), path)
        words = rf"'{name}' needs a flow model.*rollout\.sampler=\{{.name.: .ddim., .eta.: 1\.0\}}"
        with pytest.raises(ValueError, match=words):
            each.call(each.steps(0.0, 4), *inputs(4))


@pytest.mark.parametrize("name", [name for name in NAMES if build(name).default_noise_level() == 0])
def test_a_deterministic_sampler_can_be_trained_on_no_step(name):
    with pytest.raises(ValueError, match="noise level 0"):
        window(flow_schedule(4), build(name).default_noise_level())


def test_the_gain_that_the_base_finds_by_itself_is_the_closed_form():
    for name in NAMES:
        for each in taken_paths(build(name)):
            step = each.steps()
            found = Sampler.velocity_gain(each.sampler, step)
            assert torch.allclose(found, each.sampler.velocity_gain(step), rtol=1e-4, atol=1e-6), (name, each.path)


# ---- each law can fail


class Sound(Sampler):
    """DDIM with another share of noise; what breaks a law is one of its parts."""

    def transition(self, process, prediction, x, step):
        std = 0.5 * step.noise_level * step.sigma_next
        return StepDistribution(ddim_mean(prediction, step, (step.sigma_next**2 - std**2).sqrt()), std)


class Misdeclared(Sound):
    log_prob_form: Any = "logarithm"


class Nowhere(Sound):
    def transition(self, process, prediction, x, step):
        raise ValueError("no path is mine")


def changed(change: Callable[[StepDistribution, Any, torch.Tensor, Any], StepDistribution]) -> type[Sampler]:
    """A sound sampler but for `change(distribution, prediction, x, step)`."""

    class Changed(Sound):
        def transition(self, process, prediction, x, step):
            return change(super().transition(process, prediction, x, step), prediction, x, step)

    return Changed


class Deaf(Sound):
    def transition(self, process, prediction, x, step):
        return super().transition(process, prediction, x, replace(step, noise_level=0 * step.noise_level))


def careless(found, prediction, x, step):
    prediction.eps_hat.mul_(2)
    return found


class WrongGain(Sound):
    def velocity_gain(self, step):
        return super().velocity_gain(step) * 1.1


class Backwards(Sound):
    def velocity_gain(self, step):
        return -super().velocity_gain(step)


def afraid(found, prediction, x, step, above=0.99, of=-1.0):
    if bool((step.sigma_next > above).any() and (step.noise_level > of).any()):
        raise ValueError(f"sigma_next={float(step.sigma_next.max())} is too noisy for me")
    return found


class Ambitious(Sound):
    """A fourth of the variance is drawn anew however short the step is, so no marginal is kept."""

    order = 1


BREAKS: dict[str, type[Sampler]] = {
    "declarations": Misdeclared,
    "paths": Nowhere,
    "without noise": changed(lambda found, *_: replace(found, std=found.std + 0.1)),
    "with noise": Deaf,
    "half precision": changed(lambda found, _, x, step: replace(found, mean=found.mean.to(x.dtype))),
    "rows": changed(
        lambda found, _, x, step: replace(found, mean=found.mean + step.noise_level.max() * found.mean.mean())
    ),
    "inputs": changed(careless),
    "velocity gain": WrongGain,
    "direction": Backwards,
    "density": changed(
        lambda found, _, x, step: replace(found, std=found.std * torch.where(step.sigma > 0.95, torch.inf, 1.0))
    ),
    "gradient": changed(lambda found, *_: replace(found, mean=found.mean.detach())),
    "every grid": changed(partial(afraid, above=0.5, of=0.0)),
    "every grid without noise": changed(afraid),
    "order": Ambitious,
}


def test_a_sound_sampler_of_one_method_keeps_every_law():
    for law in LAWS:
        law.hold(Sound(Sound.Config()))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_each_law_finds_the_sampler_that_breaks_it(law):
    with pytest.raises(ContractError, match=law.name):
        law.hold(BREAKS[law.name](Sound.Config()))


@pytest.mark.parametrize(("name", "order"), [("cps", 1), ("ode", 2), ("ddim", 2), ("flow_sde", 2), ("memoryless", 2)])
def test_an_order_that_is_too_high_is_refused_with_the_one_that_was_measured(name, order, monkeypatch):
    sampler = build(name)
    monkeypatch.setattr(type(sampler), "order", order)
    (law,) = (law for law in LAWS if law.name == "order")
    with pytest.raises(ContractError, match=rf"declares order {order}, and half.*\n.*order = {order - 1}, or"):
        law.hold(sampler)
