"""The lab's recipes on videos resolve, and belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.diffusion.plan import window
from flowrl.diffusion.process import FlowProcess
from flowrl.models._schedulers import path_of, schedule_of
from tests.tiny_sd3 import ROOT, script

RECIPES = {file.stem: file for file in (ROOT / "configs" / "lab").glob("video-*.yaml")}
FROZEN = {f"frozen-{file.stem}": file for file in (ROOT / "configs" / "frozen").glob("*.yaml")}


def read(recipe: Path) -> Resolved:
    return resolve(load_config(recipe, ["model.path=owner/tiny-wan"]))


@pytest.mark.parametrize("name", [*RECIPES, *FROZEN])
def test_a_recipe_resolves_under_its_own_name_and_shares_the_model_and_the_captions(name: str):
    run, first = read((RECIPES | FROZEN)[name]).run, read(RECIPES["video-flow_grpo"]).run
    assert run.name == name
    assert (run.model, run.data.eval_prompts) == (first.model, first.data.eval_prompts)
    assert (run.data.prompts is None) == (name == "video-diffusion_dpo")
    assert (run.rollout.num_inference_steps, run.rollout.guidance_scale) == (10, 1.0)


def first_std(recipe: Path) -> float:
    """Std of the noise of the first step on tiny-wan's own grid."""
    run = read(recipe)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)  # scripts/_tiny_wan.py
    scheduler.set_timesteps(run.run.rollout.num_inference_steps)
    schedule = schedule_of(path_of(scheduler), scheduler, scheduler.timesteps, scheduler.sigmas)
    sampler, process, x = run.sampler.build(), FlowProcess(), torch.zeros(1, 1)
    step = window(schedule, sampler.default_noise_level(), [0]).steps(torch.tensor([0]), process)
    return float(sampler.transition(process, process.predict(x, x, step.sigma, "velocity"), x, step).std)


def test_the_samplers_that_are_compared_make_equal_noise_on_the_first_step():
    """On the grid of the lab's images, which has no shift, the same strengths would be others."""
    stds = {name: first_std(file) for name, file in RECIPES.items() if name.startswith("video-sage_grpo")}
    assert stds.pop("video-sage_grpo-wan_sde") == pytest.approx(0.192, abs=1e-3)  # it has no strength to set
    assert stds.pop("video-sage_grpo-dance_sde") == pytest.approx(0.5, abs=0.03)  # more would be too much later on
    assert len(stds) == 3
    assert stds == pytest.approx(dict.fromkeys(stds, 0.7), abs=0.03)
    assert first_std(RECIPES["video-flow_grpo"]) == pytest.approx(0.7, abs=1e-3)
    assert first_std(RECIPES["video-dance_grpo"]) == pytest.approx(0.5, abs=1e-2)
    assert first_std(RECIPES["video-branch_grpo"]) == pytest.approx(0.6, abs=1e-2)


def test_a_cell_in_which_every_video_is_tied_leaves_the_page_whole():
    page = script("_lab_page")
    tied = {"rate": None, "low": None, "high": None, "n": 0, "tie_rate": 1.0}
    cell = {"summary": {"win_rate": {"shapes_motion_partial": tied}}}
    entry = page.Entry("video-diffusion_dpo", "tested", False, {0: cell}, {0: "fresh"}, preferring=True, moving=True)
    assert page.wins([entry])[-1] == "| video-diffusion_dpo | 0 | - | 0 | 100.0 |"
