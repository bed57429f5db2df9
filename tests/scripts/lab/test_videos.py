"""The lab's recipes on videos resolve, and belong together."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.diffusion.plan import window
from flowrl.diffusion.process import FlowProcess
from flowrl.models._schedulers import path_of, schedule_of
from flowrl.samplers.base import step_std
from scripts.lab import motion_tasks, page
from tests import toys
from tests.tiny_sd3 import ROOT

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


def stds(recipe: Path, steps: Sequence[int]) -> list[float]:
    """Std of the noise of steps on tiny-wan's own grid."""
    run = read(recipe)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)  # scripts/pretraining/wan.py
    scheduler.set_timesteps(run.run.rollout.num_inference_steps)
    schedule = schedule_of(path_of(scheduler), scheduler, scheduler.timesteps, scheduler.sigmas)
    sampler, process = run.sampler.build(), FlowProcess()
    plan = window(schedule, sampler.default_noise_level(), list(steps))
    return step_std(sampler, process, plan.steps(torch.tensor(steps), process)).tolist()


def test_the_samplers_that_are_compared_make_equal_noise_over_the_trained_steps():
    """On the grid of the lab's images, which has no shift, the same strengths would be others."""
    compared = {name: file for name, file in RECIPES.items() if name.startswith("video-sage_grpo")}
    means = {name: statistics.fmean(stds(file, [0, 2, 4])) for name, file in compared.items()}
    assert all(read(file).algorithm.config.sde_steps == [0, 2, 4] for file in compared.values())
    assert means.pop("video-sage_grpo-wan_sde") == pytest.approx(0.206, abs=1e-3)  # it has no strength to set
    assert len(means) == 4
    assert means == pytest.approx(dict.fromkeys(means, 0.66), abs=0.01)


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("video-flow_grpo", [0], [0.7]),
        ("video-dance_grpo", [0, 4], [0.5, 0.72]),
        ("video-branch_grpo", [0, 3], [0.6, 0.78]),
    ],
)
def test_the_noise_is_what_the_recipe_says(name, steps, expected):
    assert stds(RECIPES[name], steps) == pytest.approx(expected, abs=0.01)


def test_a_cell_in_which_every_video_is_tied_leaves_the_page_whole():
    tied = {"rate": None, "low": None, "high": None, "n": 0, "tie_rate": 1.0}
    cell: dict[str, Any] = {"summary": {"win_rate": {"shapes_motion_partial": tied}}}
    entry = page.Entry("video-diffusion_dpo", "tested", False, {0: cell}, preferring=True, metric=page.MOTION)
    assert page.wins([entry])[-1] == "| video-diffusion_dpo | 0 | - | 0 | 100.0 | equal | - |"
    cell["summary"] |= {"win_rate": {"shapes_motion_partial": tied | {"margin": 0.0172}}, "moved": {"levels": 1.25}}
    assert page.wins([entry])[-1] == "| video-diffusion_dpo | 0 | - | 0 | 100.0 | at most 0.0172 apart | 1.25 |"


def test_accuracy_by_task_is_of_its_captions_alone_and_runs_of_other_captions_are_refused(tmp_path: Path):
    tasks, prompts = motion_tasks, ("a red circle stays", "a red circle moves left", "a blue cross moves up")
    for name, captions in (("one", prompts), ("two", prompts), ("other", prompts[::-1])):
        for tag, right in (("base", (0, 0, 1)), ("tuned", (1, 0, 1))):
            scores = {tasks.METRIC: np.asarray(right, dtype=float)[:, None]}
            toys.evaluation(tag, 1, 1.0, 10, captions, 1, scores).save(tmp_path / name / "eval")
    lines = tasks.lines_of([tmp_path / "one", tmp_path / "two"])
    assert lines[0] == "| run | stay (1) | move (2) |"
    assert lines[2:] == ["| base | 0 | 50 |", "| one | 100 | 50 |", "| two | 100 | 50 |"]
    with pytest.raises(SystemExit, match="other has evaluated other captions than one"):
        tasks.lines_of([tmp_path / "one", tmp_path / "other"])
    with pytest.raises(SystemExit, match=r"gone is not a finished run: it has no eval/base\.json"):
        tasks.lines_of([tmp_path / "gone"])
