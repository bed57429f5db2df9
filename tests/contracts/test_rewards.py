"""What every file in rewards/ must satisfy; a new file is tested before its author writes a test."""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import flowrl
from flowrl.contracts.latents import LatentTrial
from flowrl.contracts.rewards import RewardTrial
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.core.types import Condition
from flowrl.reward import Card
from flowrl.scoring.options import RewardEntry
from tests import tiny_rewards, toy_latent

NAMES = registry.names("rewards")


@pytest.fixture(params=NAMES)
def module(request):
    return registry.load("rewards", request.param)


def test_the_card_is_filled(module):
    card = module.CARD
    assert isinstance(card, Card)
    assert card.outputs
    assert len(set(card.outputs)) == len(card.outputs)
    assert card.low < card.high
    assert card.modality in ("image", "video", "any", "edit", "latents")
    for name in ("resolution", "licence", "source", "version"):
        assert getattr(card, name) not in ("", "unknown"), name
    assert card.licence != "unknown"
    assert card.level == module.LEVEL
    assert all(math.isfinite(value) for value in card.transform)
    assert card.transform[0] > 0, "the direction is higher_is_better's to say"
    assert 0 <= card.memory_gib < 200


def test_the_options_do_not_hide_behind_those_of_every_entry(module):
    own = {item.name for item in dataclasses.fields(module.Config)}
    assert own & {item.name for item in dataclasses.fields(RewardEntry)} == set()
    assert module.__doc__.strip().splitlines()[0].endswith(".") or "?" in module.__doc__.strip().splitlines()[0]


def test_what_is_declared_for_the_default_options_is_the_card(module):
    if not hasattr(module, "card_of"):
        return
    required = {"remote": {"servers": ["http://127.0.0.1:1"], "reward": "a"}}
    name = module.__name__.rpartition(".")[2]
    declared = module.card_of(module.Config(**required.get(name, {})))
    assert declared == (None if name == "remote" else module.CARD), "only the servers know what they serve"


def test_no_two_rewards_share_an_output():
    outputs = [name for each in NAMES for name in registry.load("rewards", each).CARD.outputs]
    assert len(outputs) == len(set(outputs))


ON_LATENTS = [name for name in NAMES if registry.load("rewards", name).CARD.modality == "latents"]


@pytest.mark.parametrize("name", [*ON_LATENTS, "tests/toy_latent.py"])
def test_every_judge_of_latents_keeps_its_laws(name):
    findings = {finding.law: finding for finding in flowrl.check(name)}
    assert len(findings) == 7
    assert "no noise level" not in findings["noise level and prompt"].measured


BROKEN = {
    "values": "network(x, sigma, cond)[:, None]",
    "alone as in a batch": "network(x, sigma, cond) - x.detach().mean()",
    "gradient": "network(x.detach(), sigma, cond) + (0 * x).flatten(1).sum(1)",
    "weights": "network.requires_grad_(True)(x, sigma, cond)",
    "leaves inputs alone": "network(x.mul_(2), sigma, cond)",
    "same twice": "network(x, sigma, cond) + torch.rand(len(x))",
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_judge_that_breaks_a_law_of_latents_is_told_which(law):
    own = toy_latent.build(toy_latent.Config())
    network = own.network
    made: Any = eval(f"lambda x, sigma, cond: {BROKEN[law]}", {"network": network, "torch": torch})
    with pytest.raises(flowrl.contracts.laws.ContractError) as told:
        flowrl.check(dataclasses.replace(own, value=made))
    assert law in {finding.law for finding in told.value.broken}


def test_a_judge_of_another_model_needs_its_conditions():
    own = toy_latent.build(toy_latent.Config(size=4, width=5))
    with pytest.raises(
        ConfigError, match=r"judges latents \[4, 4, 4\], and tiny-sd3 makes \[4, 8, 8\]; give conditions"
    ):
        flowrl.check(own)
    cond = Condition({"prompt_embeds": torch.randn(2, 3, 5)})
    assert all(finding.good for finding in LatentTrial("mine", own, cond).run())
    blind = dataclasses.replace(own, value=lambda x, sigma, cond: x.flatten(1).mean(dim=1))
    measured = {finding.law: finding.measured for finding in LatentTrial("mine", blind, cond).run()}
    assert measured["noise level and prompt"].startswith("no noise level moves it")


@pytest.fixture(scope="module", params=[name for name in NAMES if name not in ON_LATENTS])
def tiny(request, tmp_path_factory):
    """The tiny rewards of a file in rewards/, each with its samples."""
    state = torch.get_rng_state()
    with ExitStack() as stack:
        made = tiny_rewards.cases(request.param, tmp_path_factory.mktemp(request.param), stack)
        assert torch.equal(state, torch.get_rng_state()), "loading draws from torch's random numbers"
        yield made


def test_every_reward_keeps_its_laws(tiny):
    for case in tiny:
        findings = list(RewardTrial(case.name, case.reward, case.samples).run())
        assert len(findings) > 10
        assert [f for f in findings if not f.good] == [], case.name
        measured = {f.law: f.measured for f in findings}
        assert "all alike" not in measured["scores"], f"{case.name}: its samples must tell apart for laws to mean much"
        assert measured["NaN image"] == "is NaN, and spoils no other", case.name


def test_a_judge_on_a_server_is_not_repeatable_and_everything_else_is(tiny):
    for case in tiny:
        asks = "http" in {
            item.name for item in dataclasses.fields(registry.load("rewards", case.name.split()[0]).Config)
        }
        on_server = asks and case.reward.card.overlap
        assert case.reward.card.repeatable != on_server, case.name


def scored(case: tiny_rewards.Case, images) -> dict[str, torch.Tensor]:
    """Scores of images under the case's prompts and records, by output; nothing of flowrl around the reward."""
    given = case.samples.pick(range(len(images)))
    result = case.reward.score(images, given.prompts, given.metadata)
    return dict(result) if isinstance(result, Mapping) else {case.reward.card.outputs[0]: result}


def test_networks_run_in_float32_under_autocast_too_which_stays_as_it_is(tiny):
    for case in tiny:
        if not case.reward.card.memory_gib:
            continue
        images = case.samples.images[:2] if not case.reward.card.needs_groups else case.samples.images
        expected = scored(case, images)
        with torch.autocast("cpu", torch.bfloat16):
            result = scored(case, images)
            assert torch.is_autocast_enabled("cpu"), case.name
        assert torch.is_grad_enabled(), case.name
        for name, values in expected.items():
            assert torch.equal(values, result[name]), (case.name, name)


def test_gradients_are_those_of_finite_differences_and_climb_each_on_its_own_image(tiny):
    for case in tiny:
        if not case.reward.card.differentiable:
            continue
        images = (0.25 + case.samples.images[:2] / 2).requires_grad_()
        (output,) = case.reward.card.outputs
        before = scored(case, images)[output]
        assert torch.autograd.grad(before[0], images, retain_graph=True)[0][1].abs().max() == 0, case.name
        (gradient,) = torch.autograd.grad(before.sum(), images)
        step = 3e-5 if output == "hpsv3" else 1e-3  # its random network is steep and bent
        slopes = 2 * step * gradient.abs().double().sum(dim=(1, 2, 3))
        with torch.no_grad():
            ends = [scored(case, images + sign * step * gradient.sign())[output].double() for sign in (1, -1)]
        assert_close(ends[0] - ends[1], slopes, rtol=0.1, atol=0)
        assert (ends[0] > before).all(), case.name


OF_FRAMES = {"safety": torch.amin, "hpsv3": lambda frames, dim: frames[0], "ocr": lambda frames, dim: frames[0]}
"""How a reward scores a video of three frames, where that is not by their mean."""


def test_a_video_has_the_mean_score_of_its_frames(tiny):
    for case in tiny:
        card, name = case.reward.card, case.name.split()[0]
        if card.modality != "any" or card.needs_groups:
            continue
        frames = case.samples.images[:3]
        given = case.samples.pick([0])
        apart = case.reward.score(frames, given.prompts * 3, given.metadata * 3)
        whole = case.reward.score(frames[None], given.prompts, given.metadata)
        apart, whole = (x if isinstance(x, Mapping) else {card.outputs[0]: x} for x in (apart, whole))
        for output, values in apart.items():
            expected = OF_FRAMES.get(name, torch.mean)(values, dim=0)
            assert_close(whole[output][0], expected, rtol=1e-5, atol=1e-5)
