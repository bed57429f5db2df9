"""The FLUX.1-dev recipes: the sheet's values, and the steps of the real model's grid."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flowrl.commands.plan import step_plan
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.types import SampleId
from flowrl.diffusion.schedules import shift_sigmas
from flowrl.diffusion.windows import step_subsets
from flowrl.planning.tree_work import tree_work
from tests import recipes
from tests.recipes import ADAMW, EMA, FOLDER, NO_EMA, adapter, advantages, check_values, saved


def rollout(steps: int, prompts: int, group: int, batch: int, updates: int, rate: float, shared: bool = False) -> dict:
    return {
        "rollout.num_inference_steps": steps,
        "rollout.guidance_scale": 3.5,
        "rollout.prompts_per_iteration": prompts,
        "rollout.group_size": group,
        "rollout.batch_size": batch,
        "rollout.shared_noise": shared,
        "optim.updates_per_iteration": updates,
        "optim.learning_rate": rate,
        "eval.guidance_scale": 3.5,
        "algorithm.kl.coef": 0.0,
    }


# grpo_family sheet 1.2, rows *_flux and *_flux_fast.
FLOW = EMA | rollout(6, 48, 24, 3, 2, 3e-4) | saved(30, 30) | {"eval.num_inference_steps": 28}
CPS = {"rollout.sampler": {"name": "cps", "noise_level": 0.8}, "algorithm.clip_range": 1e-5}
FAST = FLOW | CPS | {"algorithm.window_size": 3, "algorithm.low": 0, "algorithm.high": 3}
# grpo_family sheet 4.2, column FLUX LoRA 8 GPU.
DANCE = rollout(12, 16, 12, 1, 2, 3e-4, shared=True) | {"rollout.sampler": {"name": "dance_sde", "eta": 0.3}}
# grpo_family sheet 5.4; the rate is that of DANCE, since these are LoRA recipes.
MIX = (
    NO_EMA
    | rollout(25, 32, 12, 1, 4, 3e-4, shared=True)
    | advantages("per_reward", "group", eps=1e-8, ddof=1)
    | {"iterations": 300, "rollout.sampler": {"name": "flow_sde", "noise_level": 0.7}, "algorithm.clip_range": 1e-4}
    | {"algorithm.window.strategy": "progressive", "algorithm.window.size": 4, "algorithm.window.shift": 1}
    | {"eval.num_inference_steps": 50}
)
SMALL, LARGE = (64, 128, 512), (128, 256, 720)  # LoRA rank and alpha, side in pixels: sheet 1.2; 4.2 and 5.4
# recipe -> (its source, trained steps, model, its values)
RECIPES: dict[str, tuple[str, int, tuple[int, int, int], dict[str, Any]]] = {
    "flow_grpo-pickscore": (
        "pickscore_flux",
        5,
        SMALL,
        FLOW
        | advantages("group", "global")
        | {"rollout.sampler": {"name": "flow_sde", "noise_level": 0.9}, "algorithm.clip_range": 1e-4},
    ),
    "flow_grpo_fast-geneval": ("geneval_flux_fast", 3, SMALL, FAST | advantages("group", "global")),
    "flow_grpo_fast-pickscore": ("pickscore_flux_fast", 3, SMALL, FAST | advantages("group", "group")),
    "dance_grpo-pickscore": (
        "XueZeyue/DanceGRPO",
        11,
        LARGE,
        DANCE
        | NO_EMA
        | advantages("separate", "group", eps=1e-8, ddof=1)
        | {"iterations": 301, "algorithm.clip_range": 1e-4, "algorithm.timestep_fraction": 0.6},
    ),
    # trees_and_exploration sheet 1.3; LoRA and its rate are those of DANCE.
    "branch_grpo-hpsv2": (
        "Fredreic1849/BranchGRPO",
        19,
        LARGE,
        NO_EMA
        | rollout(20, 16, 16, 4, 4, 3e-4)
        | {"rollout.sampler": {"name": "dance_sde", "eta": 0.3}, "algorithm.clip_range": 1e-3, "iterations": 300}
        | {"algorithm.splits": [0, 3, 6, 9], "algorithm.children": 2, "algorithm.spread": 4.0}
        | {"algorithm.depth.size": 4, "algorithm.depth.start": 9, "algorithm.depth.interval": 30}
        | {"algorithm.scale.eps": 1e-8, "algorithm.scale.ddof": 1, "algorithm.advantages.clip": 5.0},
    ),
    "mix_grpo-pickscore": ("Tencent-Hunyuan/MixGRPO", 4, LARGE, MIX | {"algorithm.window.interval": 25}),
    "mix_grpo_flash-pickscore": (
        "Tencent-Hunyuan/MixGRPO",
        4,
        LARGE,
        MIX
        | {"algorithm.window.interval": 20, "algorithm.ratio_kept": 0.4, "algorithm.shift": 3.0}
        | {"algorithm.solver": "dpm2_midpoint"},
    ),
    # grpo_family sheet 6.1 (weight on the Dance-SDE), 6.3 (clip range of PickScore, rate, EMA), 6.4; the rest 4.2.
    "grpo_guard-pickscore": (
        "config/grpo_guard.py",
        11,
        LARGE,
        DANCE
        | EMA
        | advantages("group", "group", eps=1e-8, ddof=1)
        | {"algorithm.clip_range": 4e-6, "algorithm.ratio_norm": True, "algorithm.reweight": "dance_grpo"}
        | {"optim.learning_rate": 1e-4},
    ),
}


def recipe(name: str) -> Resolved:
    return recipes.recipe(f"flux/{name}")


def test_these_are_all_the_recipes():
    assert {file.stem for file in (FOLDER / "flux").iterdir()} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values_and_says_whose(name):
    source, _, _, expected = RECIPES[name]
    run = recipe(name)
    check_values(run.tree(), ADAMW | expected)
    assert source in (FOLDER / "flux" / f"{name}.yaml").read_text(encoding="ascii")
    assert run.run.name == f"flux-{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_section_is_the_published_one(name):
    model = recipe(name).model
    rank, alpha, side = RECIPES[name][2]
    assert (model.name, model.config.path, model.config.dtype) == ("flux", "black-forest-labs/FLUX.1-dev", "bfloat16")
    lora = model.config.lora
    assert (lora.rank, lora.alpha, lora.targets) == (rank, alpha, None)
    assert model.config.height == model.config.width == side
    # yifan123/flow_grpo:scripts/train_flux.py; DanceGRPO and MixGRPO: sheet 0.3.
    expected = (128, None) if side == 512 else (512, 3.0)
    assert (model.config.max_sequence_length, model.config.shift, model.config.true_cfg_scale) == (*expected, 1.0)


@pytest.mark.parametrize(("variant", "edges"), [("prune", 130), ("mix", 34)])
def test_the_other_variants_that_branch_grpos_recipe_names_are_those_that_it_says(variant, edges):
    """Its overrides as they stand in the comment: with the depth window still set, others would be left out too."""
    file = FOLDER / "flux" / "branch_grpo-hpsv2.yaml"
    lines = file.read_text(encoding="ascii").splitlines()
    (words,) = (shlex.split(line.lstrip("# ")) for line in lines if line.startswith("#") and f"{variant}=" in line)
    run = resolve(load_config(file, words))
    assert sum(tree_work(run, step_plan(run, None)).edges) == edges


@pytest.mark.parametrize("name", RECIPES)
def test_the_steps_are_the_published_ones(name):
    run, trained = recipe(name), RECIPES[name][1]
    count, model = run.run.rollout.num_inference_steps, adapter(run)
    plan = step_plan(run, model)
    if model.config.shift is None:  # sheet 0.3
        published = torch.tensor([1, 0.90374, 0.7897, 0.65249, 0.48422, 0.273, 0])
    else:
        published = shift_sigmas(torch.linspace(1, 0, count + 1), 3.0)
    assert_close(model.schedule(count).sigmas, published, atol=1e-5, rtol=0)
    assert plan.train == tuple(range(trained))
    assert len(plan) == (11 if run.algorithm.name == "mix_grpo_flash" else count)  # sheet 5.3
    assert step_plan(run, None).train == plan.train
    if run.algorithm.name == "dance_grpo":  # sheet 4.1: int((S - 1) * fraction) of them for each sample
        kept = step_subsets([SampleId(0, 0)], plan.train, run.algorithm.config.timestep_fraction, 0, 1)
        assert kept.sum() == int(11 * 0.6)
