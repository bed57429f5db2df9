"""Every recipe of a real model, on the meta device: targets exist, the geometry is valid, the plan prints offline."""

from __future__ import annotations

import math
import re
import socket
from typing import Any

import pytest
import yaml

from flowrl.commands.plan import PROCESSES, command, geometry, step_plan, transition_std
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from flowrl.models.classes import choose
from flowrl.planning import memory
from tests.recipes import FOLDER, PAIRED, RECIPES, adapter, at, recipe

# The list: model -> methods.
ASKED = {
    "flux": {"flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard"},
    "qwen_image": {"flow_grpo_fast"},
    "sd": {"dance_grpo", "ddpo"},
    "sd35_large": {"flow_grpo"},
    "wan": {"flow_grpo", "sage_grpo"},
}
# What the paper calls the two ways of a reward.
REWARDS = {"compressibility": "jpeg", "incompressibility": "jpeg"}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a plan must not open a connection")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_there_is_a_recipe_for_every_model_and_method_asked_for():
    for model, methods in ASKED.items():
        assert methods <= {name.partition("/")[2].partition("-")[0] for name in RECIPES if name.startswith(f"{model}/")}


@pytest.mark.parametrize("name", RECIPES + PAIRED)
def test_a_recipe_says_how_it_is_run_and_what_departs(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 120
    assert "departs" in text.lower()
    assert "not run here" in " ".join(text.lower().replace("#", " ").split())
    keys = re.findall(r"([A-Za-z_]+):", yaml.safe_dump(yaml.safe_load(text)))
    assert not {key for key in keys if re.search("gpu|process|world|device|nproc", key)}
    assert f"torchrun --nproc-per-node gpu -m flowrl train configs/{name}.yaml" in text
    assert f"flowrl plan configs/{name}.yaml" in text


@pytest.mark.parametrize("name", RECIPES)
def test_its_geometry_is_valid_and_its_names_are_those_of_the_file(name):
    run = recipe(name)
    tree, (method, reward) = run.tree(), name.partition("/")[2].split("-")
    assert run.algorithm.name == method
    assert [plan.name for plan in run.rewards] == [REWARDS.get(reward, reward)]
    # The same forwards in rollout and training: half precision depends on the batch.
    assert at(tree, "rollout.batch_size") == at(tree, "optim.batch_size")
    assert choose(run.model.config.path).name == run.model.name  # its name could be left out
    plan = step_plan(run, None)
    for processes in PROCESSES:
        counts = geometry(run, plan, processes)
        assert counts.samples * processes >= run.run.samples_per_iteration
        assert counts.update_forwards > 0


@pytest.mark.parametrize("name", RECIPES)
def test_its_lora_targets_exist_and_its_trained_steps_are_the_noisy_ones(name):
    run = recipe(name)
    model = adapter(run)
    modules = [module for module, _ in model.network.named_modules()]
    lora = run.model.config.lora
    for target in (lora and lora.targets) or model.lora_targets:
        assert any(module.endswith(f".{target}") for module in modules), target
    assert set(model.dead_lora_modules()) <= set(modules)
    plan = step_plan(run, model)
    stds = transition_std(run, model, plan)
    assert plan.train
    assert all((std > 0) == (k in plan.train) for k, std in enumerate(stds))
    assert step_plan(run, None).train == plan.train


# Recipes of Flow-GRPO's whole rollouts, and of what takes their values over.
NOISY_TO_THE_END = [
    *(f"sd3/{name}" for name in ("flow_grpo-pickscore", "flow_grpo-ocr", "flow_grpo-geneval", "flow_grpo-jpeg")),
    *(f"sd3/grpo_guard-{name}" for name in ("pickscore", "ocr", "geneval")),
    *("sd3/flow_dppo-pickscore", "sd35_large/flow_grpo-pickscore", "flux/flow_grpo-pickscore"),
    *("wan/flow_grpo-ocr", "wan/sage_grpo-ocr", "sd/dance_grpo-hpsv2"),
]


def ddim_std(before: float, after: float) -> float:
    """By the squared alphas of a step's ends, ddpo sheet 1.2; at eta 1."""
    return ((1 - after) / (1 - before) * (1 - before / after)) ** 0.5


@pytest.mark.parametrize("name", NOISY_TO_THE_END)
def test_the_noise_that_the_official_rollout_keeps_in_its_last_step_is_named_as_a_departure(name):
    """migration sheet 5; the std by the law on the model's own grid, grpo_family sheet 0.1, trees sheet 3.1.

    DanceGRPO's SD script samples by ddpo-pytorch's pipeline, noise to the end, and trains num_steps - 1 of the steps.
    """
    run = recipe(name)
    model = adapter(run)
    grid = model.schedule(run.run.rollout.num_inference_steps)
    first, last = float(grid.sigmas[1]), float(grid.sigmas[-2])
    law = run.tree()["rollout"]["sampler"]
    std = {
        "ddim": lambda: law["eta"] * ddim_std(*grid.alphas[-2:].double().square().tolist()),
        "flow_sde": lambda: law["noise_level"] * last / (1 - last) ** 0.5,
        "wan_sde": lambda: first * last * last**0.5,
        "sage": lambda: law["eta"] * (-last - math.log(1 - last)) ** 0.5,
    }[law["name"]]()
    text = " ".join((FOLDER / f"{name}.yaml").read_text(encoding="ascii").replace("#", " ").split())
    (said,) = re.findall(r"Departs: [^.]*? is an ODE step[^()]*\(std ([0-9.]+)\)", text)
    assert said == f"{std:.{len(said) - 2}f}"
    assert transition_std(run, model, step_plan(run, model))[-1] == 0


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("-ocr")])
def test_text_is_read_by_the_published_rules(name):
    """flow_grpo/ocr.py: PaddleOCR drops lines below 0.5 before the scorer sees them; clips have no substring rule."""
    (reward,) = recipe(name).rewards
    assert reward.config.min_confidence == 0.5
    assert reward.config.allow_extra_text == (not name.startswith("wan/"))


@pytest.mark.parametrize("name", RECIPES)
def test_its_plan_prints_without_a_network(offline, capsys, monkeypatch, name):
    def stop(resolved: Resolved, adapter: Any, plan: Any, **options: Any) -> None:
        # The measurement itself has its tests, and takes seconds.
        raise ConfigError("measured elsewhere")

    model = adapter(recipe(name))
    monkeypatch.setattr(memory, "skeleton", lambda resolved: model)
    monkeypatch.setattr(memory, "estimate", stop)
    with pytest.raises(ConfigError, match="measured elsewhere"):
        command(str(FOLDER / f"{name}.yaml"), [])
    text = capsys.readouterr().out
    branching = "edges trained" in text  # the steps of a tree say how many
    assert branching == (recipe(name).algorithm.name == "branch_grpo")
    assert branching or "sde, trained" in text
    doubled = model.branches(recipe(name).run.rollout.guidance_scale) > 1
    assert ("CFG: each sample twice" in text) == doubled
