"""The DDPO recipes of Stable Diffusion 1.4: the sheet's values, the paper's prompts, every step trained."""

from __future__ import annotations

import pytest

from flowrl.commands.plan import step_plan, transition_std
from flowrl.config.load import load_config, resolve
from flowrl.data.prompt_sources import load_prompts
from tests.recipes import ADAMW, FOLDER, NO_EMA, adapter, check_values, recipe

# ddpo sheet 1.4: kvablack/ddpo-pytorch:config/base.py, config/dgx.py. name -> iterations, updates, buffer, prompts
RECIPES = {
    "ddpo-compressibility": (100, 4, 16, "imagenet-animals.txt"),
    "ddpo-incompressibility": (100, 4, 16, "imagenet-animals.txt"),
    "ddpo-aesthetic": (200, 2, 32, "simple-animals.txt"),
}
# ddpo sheet 1.4.
ANIMALS = """
cat dog horse monkey rabbit zebra spider bird sheep deer cow goat lion tiger bear raccoon fox wolf lizard beetle ant
butterfly fish shark whale dolphin squirrel mouse rat snake turtle frog chicken duck goose bee pig turkey fly llama
camel bat gorilla hedgehog kangaroo
"""


def test_these_are_all_the_recipes():
    assert {file.stem for file in (FOLDER / "sd").glob("ddpo-*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values(name):
    iterations, updates, buffer, prompts = RECIPES[name]
    tree = recipe(f"sd/{name}").tree()
    check_values(
        tree,
        ADAMW
        | NO_EMA
        | {"model.path": "CompVis/stable-diffusion-v1-4", "model.dtype": "float16", "optim.learning_rate": 3e-4}
        | {"model.lora": {"rank": 4, "alpha": 4, "targets": None}, "model.height": 512, "model.width": 512}
        | {"rollout.sampler": {"name": "ddim", "eta": 1.0}, "rollout.num_inference_steps": 50}
        | {"rollout.guidance_scale": 5.0, "rollout.prompts_per_iteration": 256, "rollout.group_size": 1}
        | {"iterations": iterations, "optim.updates_per_iteration": updates, "data.prompts": prompts}
        | {"algorithm.clip_range": 1e-4, "algorithm.timestep_fraction": 1.0, "algorithm.estimator": "importance"}
        | {"algorithm.kl.coef": 0.0, "algorithm.passes": 1, "algorithm.advantages.clip": 5.0}
        | {"algorithm.advantages.name": "batch", "algorithm.advantages.eps": 1e-6, "algorithm.advantages.ddof": 0}
        | {"algorithm.advantages.history": {"buffer_size": buffer, "min_count": 16}},
    )
    reward = recipe(f"sd/{name}").rewards[0]
    if reward.name == "jpeg":
        assert (reward.config.quality, reward.config.mode) == (95, name.partition("-")[2])
        assert (reward.entry.scale, reward.entry.offset, reward.entry.clip) == (None, None, None)
    else:
        assert reward.config.version == "v2"


@pytest.mark.parametrize("name", RECIPES)
def test_all_fifty_steps_are_trained_with_the_published_stds(name):
    """ddpo sheet 1.2."""
    run = recipe(f"sd/{name}")
    model = adapter(run)
    plan = step_plan(run, model)
    assert plan.train == tuple(range(50))
    stds = dict(zip(plan.schedule.timesteps.int().tolist(), transition_std(run, model, plan), strict=True))
    for timestep, std in {981: 0.4545, 481: 0.2877, 181: 0.1771, 41: 0.0999, 21: 0.0395, 1: 0.0206}.items():
        assert stds[timestep] == pytest.approx(std, abs=5e-5)


def test_finer_steps_at_the_same_cost_are_a_valid_geometry():
    """What the header of every recipe offers: as many samples in all."""
    for name, (iterations, *_) in RECIPES.items():
        words = [word for word in (FOLDER / "sd" / f"{name}.yaml").read_text().split() if "=" in word][:3]
        run = resolve(load_config(FOLDER / "sd" / f"{name}.yaml", [word.rstrip(".") for word in words])).run
        assert run.iterations * run.samples_per_iteration == iterations * 256


def test_the_prompts_are_those_of_the_paper():
    torchvision = pytest.importorskip("torchvision.models")
    classes = [prompt.text for prompt in load_prompts("imagenet-animals.txt", "data.prompts")]
    assert classes == torchvision.ResNet50_Weights.DEFAULT.meta["categories"][:398]
    assert [prompt.text for prompt in load_prompts("simple-animals.txt", "data.prompts")] == ANIMALS.split()
    assert len(ANIMALS.split()) == 45


@pytest.mark.parametrize("name", RECIPES)
def test_held_out_prompts_are_no_training_prompts(name):
    data = recipe(f"sd/{name}").run.data
    train = {prompt.text for prompt in load_prompts(data.prompts, "data.prompts")}
    held_out = [prompt.text for prompt in load_prompts(data.eval_prompts, "data.eval_prompts")][: data.max_eval_prompts]
    if name == "ddpo-aesthetic":
        assert not train & set(held_out)
    else:  # the lists overlap by names such as "zebra", which the recipe says
        assert len(train & set(held_out)) == 9
