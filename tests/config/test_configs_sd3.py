"""The SD3.5 recipes: the sheet's values, prompt lists that their rewards can read, a plan without a network."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from functools import cache
from typing import Any

import pytest
from flowrl.rewards.geneval import read_clauses
from flowrl.rewards.ocr import target_text

from flowrl.commands.plan import command, geometry, step_plan, transition_std
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.credit.advantages import AdvantageConfig
from flowrl.data.prompt_sources import load_prompts
from flowrl.planning import memory
from tests import recipes
from tests import tiny_sd3 as tiny
from tests.recipes import ADAMW, EMA, NO_EMA, adapter, advantages, at, check_values, saved

FOLDER = tiny.ROOT / "configs" / "sd3"
RECIPES = ("pickscore", "ocr", "geneval", "jpeg")
# yifan123/flow_grpo:config/grpo.py; the JPEG recipe has no official counterpart and takes GenEval's.
KL = {"pickscore": 0.01, "ocr": 0.04, "geneval": 0.04, "jpeg": 0.04}

LORA = {"model.dtype": "float16", "model.lora": {"rank": 32, "alpha": 64, "targets": None}, "optim.learning_rate": 3e-4}
FULL = {"model.dtype": "float16", "model.lora": None, "optim.learning_rate": 1e-5}
FLOW_SDE = {"rollout.sampler": {"name": "flow_sde", "noise_level": 0.7}, "algorithm.kl.coef": 0.0}


def rollout(steps: int, guidance: float, prompts: int, group: int, updates: int, shared: bool = False) -> dict:
    return {
        "rollout.num_inference_steps": steps,
        "rollout.guidance_scale": guidance,
        "rollout.prompts_per_iteration": prompts,
        "rollout.group_size": group,
        "rollout.shared_noise": shared,
        "optim.updates_per_iteration": updates,
        "eval.guidance_scale": guidance,
        "eval.num_inference_steps": 40,
    }


# grpo_family sheet 2.1, and the rows *_sd3_fast_nocfg of 1.2.
FAST = (
    LORA
    | EMA
    | advantages("group", "global")
    | {"rollout.sampler": {"name": "cps", "noise_level": 0.8}, "algorithm.kl.coef": 0.0, "algorithm.clip_range": 1e-5}
    | {"algorithm.window_size": 3, "algorithm.low": 0, "algorithm.high": 5, "eval.best_guidance": [4.5]}
    | saved(60, 60)
)
# grpo_family sheet 6.3 and config/grpo_guard.py; the weight of a step 6.1.
GUARD = (
    LORA
    | EMA
    | FLOW_SDE
    | rollout(10, 4.5, 48, 24, 2)
    | advantages("group", "group")
    | saved(30, 30)
    | {"optim.learning_rate": 1e-4, "algorithm.ratio_norm": True, "algorithm.reweight": "flow_grpo"}
)
# grpo_family sheet 5.4, with the guidance and resolution of 1.2.
MIX = (
    FULL
    | NO_EMA
    | FLOW_SDE
    | rollout(25, 4.5, 32, 12, 4, shared=True)
    | advantages("per_reward", "group", eps=1e-8, ddof=1)
    | {"iterations": 300, "algorithm.clip_range": 1e-4, "algorithm.window.strategy": "progressive"}
    | {"algorithm.window.size": 4, "algorithm.window.shift": 1}
)
# trees_and_exploration sheet 3.1, 3.3, 3.4, with the model's own values of grpo_family 1.2.
SAGE = (
    LORA
    | NO_EMA
    | rollout(20, 4.5, 48, 24, 1)
    | advantages("group", "group")
    | {"rollout.sampler": {"name": "sage", "eta": 0.5, "sigma_max": 0.997}, "algorithm.clip_range": 1e-4}
    | {"algorithm.equalise": True, "algorithm.trust.anchor": "moving", "algorithm.trust.every": 10}
    | {"algorithm.trust.old_weight": 0.1, "algorithm.trust.coef": 1e-7, "algorithm.trust.target": 1e-5}
    | {"algorithm.trust.min_coef": 1e-7, "algorithm.trust.max_coef": 1e-5}
)
# grpo_family sheet 7.7; all else that of pickscore_sd3 in 1.2.
DPPO = (
    LORA
    | EMA
    | rollout(10, 4.5, 48, 24, 2)
    | advantages("group", "global")
    | {"rollout.sampler": {"name": "flow_sde", "noise_level": 0.7}, "algorithm.threshold": 1e-5}
    | {"algorithm.divisor": "variance", "algorithm.old_log_prob": "recompute", "algorithm.kl.coef": 0.01}
    | saved(60, 60)
)
METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {  # recipe -> (its source, trained steps, its values)
    "flow_grpo_fast-geneval": ("yifan123/flow_grpo", 3, FAST | rollout(10, 1.0, 48, 24, 2)),
    "flow_grpo_fast-pickscore": ("yifan123/flow_grpo", 3, FAST | rollout(10, 1.0, 64, 18, 2)),
    "grpo_guard-geneval": ("config/grpo_guard.py", 9, GUARD | {"algorithm.clip_range": 2e-6}),
    "grpo_guard-ocr": ("config/grpo_guard.py", 9, GUARD | {"algorithm.clip_range": 2e-6}),
    "grpo_guard-pickscore": ("config/grpo_guard.py", 9, GUARD | {"algorithm.clip_range": 4e-6}),
    "flow_dppo-pickscore": ("arXiv 2606.11025", 9, DPPO),
    "sage_grpo-pickscore": ("arXiv 2603.21872", 19, SAGE),
    "mix_grpo-pickscore": ("Tencent-Hunyuan/MixGRPO", 4, MIX | {"algorithm.window.interval": 25}),
    "mix_grpo_flash-pickscore": (
        "Tencent-Hunyuan/MixGRPO",
        4,
        MIX
        | {"algorithm.window.interval": 20, "algorithm.ratio_kept": 0.4, "algorithm.shift": 3.0}
        | {"algorithm.solver": "dpm2_midpoint"},
    ),
}


def recipe(name: str, *overrides: str) -> Resolved:
    name = name if "-" in name else f"flow_grpo-{name}"
    return resolve(load_config(FOLDER / f"{name}.yaml", list(overrides)))


@cache
def sd35() -> Any:
    return adapter(recipe("geneval"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a plan must not open a connection")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_these_are_all_the_recipes():
    names = {f"flow_grpo-{name}" for name in RECIPES} | set(METHODS) | {"diffusion_dpo-pickapic"}
    assert {file.name for file in FOLDER.iterdir()} == {f"{name}.yaml" for name in names}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values(name):
    run = recipe(name)
    tree = run.tree()
    expected = {
        "model": {"path": "stabilityai/stable-diffusion-3.5-medium", "dtype": "float16", "height": 512, "width": 512}
        | {"max_sequence_length": 128, "lora": {"rank": 32, "alpha": 64, "targets": None}},
        "rollout": {"num_inference_steps": 10, "guidance_scale": 4.5, "prompts_per_iteration": 48, "group_size": 24}
        | {"shared_noise": False, "sampler": {"name": "flow_sde", "noise_level": 0.7}},
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-4, "sde_steps": None}
        | {"advantages": dataclasses.asdict(AdvantageConfig(name="group", std="global", eps=1e-4, clip=5.0))}
        | {"kl": {"coef": KL[name], "divisor": "flow_grpo"}},
        "optim": {"learning_rate": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-4}
        | {"max_grad_norm": 1.0, "updates_per_iteration": 2, "schedule": "constant"}
        | {"ema": {"decay": 0.9, "every": 8, "warmup": True}},
        "eval": {"num_inference_steps": 40, "guidance_scale": 4.5, "every": 60},
        "checkpoint": {"every": 60, "keep": 5},
    }
    for section, values in expected.items():
        assert {key: tree[section][key] for key in values} == values
    assert "yifan123/flow_grpo" in (FOLDER / f"flow_grpo-{name}.yaml").read_text(encoding="ascii")


@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_of_another_method_has_the_published_values_and_says_whose(name):
    source, _, expected = METHODS[name]
    run = recipe(name)
    method, reward = name.split("-")
    model = {"model.path": "stabilityai/stable-diffusion-3.5-medium", "model.height": 512, "model.width": 512}
    check_values(run.tree(), ADAMW | model | {"model.max_sequence_length": 128} | expected)
    assert source in (FOLDER / f"{name}.yaml").read_text(encoding="ascii")
    assert run.run.name == f"sd35-{name}"
    # A group of prompts and rewards that fit: the same lists as Flow-GRPO's recipe for this reward.
    assert run.run.data == recipe(reward).run.data
    carried = method in ("flow_dppo", "sage_grpo", "mix_grpo", "mix_grpo_flash")
    words = " ".join((FOLDER / f"{name}.yaml").read_text(encoding="ascii").replace("#", " ").split())
    assert ("No values were published for this model" in words) == carried
    assert ("arried over from" in words) == carried


@pytest.mark.parametrize("name", METHODS)
def test_as_many_steps_as_published_are_trained(name):
    assert len(step_plan(recipe(name), sd35()).train) == METHODS[name][1]


def test_the_recipe_of_the_large_model_is_the_mediums_but_for_what_it_says():
    medium, large = recipe("pickscore").tree(), recipes.recipe("sd35_large/flow_grpo-pickscore").tree()
    changed = {
        "name": "sd35_large-flow_grpo-pickscore",
        "model.path": "stabilityai/stable-diffusion-3.5-large",
        "model.dtype": "bfloat16",
        "model.gradient_checkpointing": True,
        "rollout.batch_size": 4,
        "optim.batch_size": 4,
        "eval.batch_size": 8,
    }
    for key, value in changed.items():
        *sections, last = key.split(".")
        assert at(large, key) == value != at(medium, key)
        at(medium, ".".join(sections))[last] = value
    assert large == medium
    text = " ".join(
        (FOLDER.parent / "sd35_large/flow_grpo-pickscore.yaml").read_text("ascii").replace("#", " ").split()
    )
    assert "No values were published for this model" in text


def test_the_plans_of_flash_and_sage_are_the_published_ones():
    flash = step_plan(recipe("mix_grpo_flash-pickscore"), sd35())
    # grpo_family sheet 5.3: 11 forwards while the window is at the first place.
    assert (len(flash), flash.train) == (11, (0, 1, 2, 3))
    run = recipe("sage_grpo-pickscore")
    # trees_and_exploration sheet 3.1: w / eta^2 at most 2 (0.5 / 0.5^2) keeps the first step's variance in bounds.
    stds = transition_std(run, sd35(), step_plan(run, sd35()))
    assert max(stds) ** 2 < 0.5
    ten = recipe("sage_grpo-pickscore", "rollout.num_inference_steps=10")
    assert transition_std(ten, sd35(), step_plan(ten, sd35()))[0] == pytest.approx(0.8, abs=0.01)


def test_rewards_are_scaled_as_in_the_official_code():
    assert recipe("pickscore").rewards[0].entry.scale == pytest.approx(1 / 26, rel=1e-6)
    assert recipe("jpeg").rewards[0].entry.scale == 1 / 500
    assert recipe("geneval").rewards[0].config.mode == "partial"


# ---- prompts


@pytest.mark.parametrize("name", RECIPES)
def test_training_and_held_out_prompts_are_apart(name):
    data = recipe(name).run.data
    train = [p.text for p in load_prompts(data.prompts, "data.prompts")]
    held_out = [p.text for p in load_prompts(str(data.eval_prompts), "data.eval_prompts")]
    assert (len(set(train)), len(set(held_out))) == (384, 96)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_every_prompt_has_what_its_reward_reads(part):
    for prompt in load_prompts(f"sd3-ocr-{part}.jsonl", "data.prompts"):
        assert target_text(prompt.text, prompt.metadata) in prompt.text
    for prompt in load_prompts(f"sd3-geneval-{part}.jsonl", "data.prompts"):
        clauses = read_clauses(prompt.metadata, "include")
        assert all(clause.label in prompt.text for clause in clauses)
        assert all(clause.color is None or clause.color in prompt.text for clause in clauses)
        position = [clause for clause in clauses if clause.relation]
        assert bool(position) == (prompt.metadata["tag"] == "position")
        for clause in position:  # "a photo of a cat left of a dog" places the cat
            other = clauses[clause.target].label
            assert re.search(rf"{clause.label} {clause.relation} an? {other}$", prompt.text)


def test_no_text_and_no_combination_of_objects_is_in_both_lists():
    def keys(kind: str, part: str) -> set:
        records = load_prompts(f"sd3-{kind}-{part}.jsonl", "data.prompts")
        if kind == "ocr":
            return {record.metadata["text"] for record in records}
        return {tuple(sorted(record.text.split())) for record in records}

    for kind in ("ocr", "geneval"):
        assert not keys(kind, "train") & keys(kind, "heldout")


def test_geneval_prompts_have_the_published_shares():
    tags = [p.metadata["tag"] for p in load_prompts("sd3-geneval-train.jsonl", "data.prompts")]
    shares = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
    for tag, share in shares.items():
        assert tags.count(tag) == pytest.approx(len(tags) * share / 17, abs=1.5)
    assert len(tags) == sum(tags.count(tag) for tag in shares)


@pytest.mark.parametrize("kind", ["general", "ocr", "geneval"])
def test_the_lists_are_those_the_script_writes(kind):
    script = tiny.script("make_sd3_prompts")
    for part, records in script.draw(kind, 384, 96).items():
        suffix = script.KINDS[kind][1]
        file = tiny.ROOT / "assets" / "prompts" / f"sd3-{kind}-{part}.{suffix}"
        lines = [r["prompt"] if suffix == "txt" else json.dumps(r) for r in records]
        assert file.read_text(encoding="ascii").splitlines() == lines
    longer = script.draw(kind, 500, 96)
    assert longer["heldout"] == script.draw(kind, 384, 96)["heldout"]


def test_more_prompts_than_the_words_make_are_refused():
    script = tiny.script("make_sd3_prompts")
    possible = len(script.WORDS["first_words"]) * len(script.WORDS["last_words"]) * len(script.WORDS["surfaces"])
    with pytest.raises(SystemExit, match=r"ocr: these words make only \d+ train prompts"):
        script.draw("ocr", possible + 1, 0)


# ---- the plan


def test_the_plan_of_a_recipe_tells_it_all(offline, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    # The measurement itself has its tests, and takes seconds.
    bytes_ = {"encode": 1, "rollout": 2, "decode": 3, "evaluation": 4, "update": 34 * 2**30}
    operations = {"forward_flop": 4.5e12, "edge_flop": 1.4e13}
    monkeypatch.setattr(memory, "_measure", lambda *args, **options: (bytes_ | operations, {}))
    command(str(FOLDER / "flow_grpo-pickscore.yaml"), ["optim.learning_rate=1.0e-4"])
    text = capsys.readouterr().out
    for piece in (
        "learning_rate: 0.0001",
        "384 train and 96 held-out prompts",
        "1152 samples per iteration = 48 prompts x 24; 2 updates of 576 samples x 9 steps; 1000 iterations = 2000",
        "2,243,171,520",
        "LoRA rank 32, alpha 64, 191 modules",
        "18,776,064",
        "embeddings of 480 texts, 1.6 MiB each",
        "largest: update",
        "51.8 PFLOP in the rollout, 145 PFLOP in the updates",
    ):
        assert piece in text
    assert re.search(r"samples per process +1,152 +576 +144", text)
    assert re.search(r"1 +0\.96013 +0\.91335 +960\.13 +sde, trained +0\.74", text)
    assert re.search(r"9 +0\.00893 +0\.00000 +8\.93 +ode +0\.00000", text)


def test_a_model_that_is_not_known_still_has_a_geometry(offline, capsys):
    command(str(FOLDER / "flow_grpo-jpeg.yaml"), ["model.path=owner/unheard-of"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("not known before the model is here") == 2
    assert "samples per process" in text
    # Nor does a method that shortens the grid need the model's own.
    command(str(FOLDER / "mix_grpo_flash-pickscore.yaml"), ["model.path=owner/unheard-of"])
    assert "Steps: 11 in all, 4 trained" in capsys.readouterr().out


def test_the_noise_of_the_trained_steps_is_the_published_one():
    run = recipe("geneval")
    adapter = memory.skeleton(run)
    plan = step_plan(run, adapter)
    assert plan.train == tuple(range(9))
    expected = [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0]
    assert transition_std(run, adapter, plan) == pytest.approx(expected, abs=6e-4)


def test_forwards_are_counted_for_the_busiest_process():
    run = recipe("jpeg", "rollout.prompts_per_iteration=3", "rollout.group_size=10", "algorithm.sde_steps=[0, 1]")
    plan = step_plan(run, None)
    one, two = geometry(run, plan, 1, extra=1), geometry(run, plan, 2, extra=1)
    assert (one.samples, one.rollout_forwards) == (30, 10 * 4)  # 30 in batches of 8
    assert (one.update_forwards, one.frozen_forwards) == (2 * 4, 2 * 4)  # 30 edges in each of 2 updates
    assert (two.samples, two.rollout_forwards) == (20, 10 * 3)  # two whole groups against one
    assert two.update_forwards == 2 * 3
