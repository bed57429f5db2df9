"""The recipes of Qwen-Image and Wan: the sheet's values, and the steps of the real models' grids."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.commands.plan import step_plan, transition_std
from tests.recipes import ADAMW, EMA, FOLDER, NO_EMA, adapter, advantages, check_values, recipe, saved

# grpo_family sheet 1.2, row pickscore_qwenimage.
QWEN = (
    ADAMW
    | NO_EMA
    | saved(30, 30)
    | advantages("group", "global")
    | {"model.path": "Qwen/Qwen-Image", "model.dtype": "bfloat16", "model.height": 512, "model.width": 512}
    | {"model.lora": {"rank": 64, "alpha": 128, "targets": None}, "model.negative_prompt": " "}
    | {"rollout.sampler": {"name": "flow_sde", "noise_level": 1.2}, "rollout.num_inference_steps": 10}
    | {"rollout.guidance_scale": 4.0, "rollout.prompts_per_iteration": 32, "rollout.group_size": 16}
    | {"algorithm.window_size": 2, "algorithm.low": 0, "algorithm.high": 5, "algorithm.clip_range": 1e-4}
    | {"algorithm.kl.coef": 0.0, "optim.learning_rate": 3e-4, "optim.updates_per_iteration": 2}
    | {"eval.num_inference_steps": 50, "eval.guidance_scale": 4.0}
)
WAN = (
    {"model.path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "model.dtype": "bfloat16"}
    | {"model.height": 240, "model.width": 416, "model.num_frames": 33, "model.negative_prompt": ""}
    | {"model.lora": {"rank": 32, "alpha": 64, "targets": None}, "optim.learning_rate": 1e-4}
    | {"rollout.num_inference_steps": 20, "rollout.guidance_scale": 4.5, "rollout.group_size": 4}
    | {"eval.num_inference_steps": 50, "eval.guidance_scale": 4.5}
)
# recipe -> (its source, trained steps, its values)
RECIPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen_image/flow_grpo_fast-pickscore": ("pickscore_qwenimage", 2, QWEN),
    # grpo_family sheet 1.1 (6), the Wan script's KL, and 1.2, row general_ocr_wan2_1; its README has one process.
    "wan/flow_grpo-ocr": (
        "general_ocr_wan2_1",
        19,
        ADAMW
        | EMA
        | WAN
        | advantages("group", "group")
        | {"rollout.sampler": {"name": "wan_sde"}, "algorithm.clip_range": 1e-3, "model.shift": None}
        | saved(30, 60)
        | {"algorithm.kl.coef": 0.004, "algorithm.kl.divisor": "variance", "optim.updates_per_iteration": 2}
        | {"rollout.prompts_per_iteration": 1 * 8 * 2 // 4, "rollout.batch_size": 8},
    ),
    # trees_and_exploration sheet 3.1, 3.3, 3.4.
    "wan/sage_grpo-ocr": (
        "arXiv 2603.21872",
        19,
        ADAMW
        | NO_EMA
        | WAN
        | advantages("group", "group")
        | {"rollout.sampler": {"name": "sage", "eta": 0.5, "sigma_max": 0.997}, "model.shift": 5.0}
        | {"algorithm.clip_range": 1e-4, "algorithm.equalise": True, "algorithm.trust.anchor": "moving"}
        | {"algorithm.trust.every": 10, "algorithm.trust.target": 1e-5, "rollout.prompts_per_iteration": 16}
        | {"optim.updates_per_iteration": 1, "rollout.batch_size": 2},
    ),
}


def test_these_are_all_the_recipes():
    found = {f"{folder}/{file.stem}" for folder in ("qwen_image", "wan") for file in (FOLDER / folder).iterdir()}
    assert found == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values_and_says_whose(name):
    source, _, expected = RECIPES[name]
    run = recipe(name)
    check_values(run.tree(), expected)
    assert source in (FOLDER / f"{name}.yaml").read_text(encoding="ascii")


@pytest.mark.parametrize("name", RECIPES)
def test_the_steps_are_the_published_ones(name):
    run = recipe(name)
    model = adapter(run)
    plan = step_plan(run, model)
    assert len(plan) == run.run.rollout.num_inference_steps
    assert len(plan.train) == RECIPES[name][1]
    stds = transition_std(run, model, plan)
    if name == "wan/sage_grpo-ocr":
        # Sheet 3.1, [derived]: w / eta^2 at shift 5 and 20 steps.
        assert [std**2 / 0.25 for std in stds[:3]] == pytest.approx([1.234, 0.724, 0.438], rel=0.1)
    if name.startswith("qwen"):
        assert float(plan.schedule.sigmas[-2]) == pytest.approx(0.02, abs=1e-6)  # the scheduler's shift_terminal
