"""Configurations of Flow-Factory as recipes: the published values of GRPO on SD 3.5 Medium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.apps.migration.engine import Draft, convert, recipe_text
from flowrl.apps.migration.tools import TOOLS
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from tests.recipes import at

TEXT = (Path(__file__).parent / "published" / "sd3_5.yaml").read_text(encoding="ascii")
# The sheet of migration derives these from the published file; no recipe is shipped of this experiment.
VALUES = {
    "iterations": 1000,
    "seed": 42,
    "model.name": "sd3",
    "model.dtype": "bfloat16",
    "model.lora": None,
    "model.height": 512,
    "model.width": 512,
    "model.max_sequence_length": 512,
    "model.shard": True,
    "data.max_prompts": 1000,
    "rollout.sampler": {"name": "flow_sde", "noise_level": 0.7},
    "rollout.num_inference_steps": 10,
    "rollout.guidance_scale": 4.5,
    "rollout.prompts_per_iteration": 48,
    "rollout.group_size": 16,
    "algorithm.name": "flow_grpo_fast",
    "algorithm.window_size": 1,
    "algorithm.low": 1,
    "algorithm.high": 4,
    "algorithm.clip_range": 1e-4,
    "algorithm.kl.coef": 0.0,
    "algorithm.advantages.name": "gdpo",
    "algorithm.advantages.std": "group",
    "algorithm.advantages.eps": 1e-6,
    "algorithm.advantages.clip": 5.0,
    "optim.learning_rate": 1e-5,
    "optim.betas": [0.9, 0.999],
    "optim.weight_decay": 1e-4,
    "optim.eps": 1e-8,
    "optim.max_grad_norm": 1.0,
    "optim.updates_per_iteration": 2,
    "optim.ema.decay": 0.9,
    "optim.ema.every": 8,
    "optim.ema.warmup_terms": [0.0, 18.0],
    "eval.every": 20,
    "eval.num_inference_steps": 40,
    "eval.guidance_scale": 4.5,
    "checkpoint.every": 20,
}


def converted(folder: Path, *changes: tuple[str, str], gpus: int | None = None) -> Draft:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "sd3_5.yaml"
    file.write_text(text, encoding="ascii")
    return convert(TOOLS["flow_factory"], str(file), gpus, folder)


def test_the_published_configuration_has_its_values(tmp_path):
    draft = converted(tmp_path)
    made = tmp_path / "recipe.yaml"
    made.write_text(recipe_text(draft), encoding="ascii")
    run = resolve(load_config(made), offline=True)
    tree = run.tree()
    assert {key: at(tree, key) for key in VALUES} == VALUES
    assert [(plan.name, plan.entry.weight) for plan in run.rewards] == [("clip_score", 1.0), ("pickscore", 0.5)]
    assert [key for key, entry in draft.listed.items() if entry.changes] == []


def test_the_average_warms_up_by_epochs_as_theirs_does(tmp_path):
    """At the end of epoch e from 0, where e + 1 is a multiple of the interval 4: min(0.9, (1 + e) / (10 + e))."""
    made = tmp_path / "recipe.yaml"
    made.write_text(recipe_text(converted(tmp_path)), encoding="ascii")
    ema = resolve(load_config(made), offline=True).run.optim.ema
    assert ema is not None
    theirs = [min(0.9, (1 + e) / (10 + e)) if (e + 1) % 4 == 0 else 1.0 for e in range(100)]
    # Two optimizer steps an epoch; after the odd ones there is no update.
    assert [ema.weight(n) for n in range(1, 200, 2)] == [1.0] * 100
    assert [ema.weight(n) for n in range(2, 201, 2)] == pytest.approx(theirs, rel=1e-12)


def test_every_key_is_a_line_or_listed(tmp_path):
    tool = TOOLS["flow_factory"]
    names = [key.split(".") for key in tool.keys if "." in key and f" {key.split('.')[1]}:" not in TEXT]
    extra: dict[str, str] = {}
    for section, name in names:
        default = tool.keys[f"{section}.{name}"].default
        value = "null" if default is None else str(default).lower() if isinstance(default, bool) else f"{default}"
        extra[section] = f"{extra.get(section, '')}  {name}: {value}\n"
    text = TEXT.replace("train:\n", f"train:\n{extra['train']}").replace("model:\n", f"model:\n{extra['model']}")
    file = tmp_path / "sd3_5.yaml"
    file.write_text(text, encoding="ascii")
    draft = convert(tool, str(file), None, tmp_path)
    used = {key for line in (*draft.lines.values(), *draft.rewards) for key in line.keys}
    assert {key for key in tool.keys if key.startswith(("train.", "model."))} <= set(draft.source.values)
    assert set(draft.source.values) <= used | set(draft.listed)


@pytest.mark.parametrize(
    ("old", "new", "key", "reason"),
    [
        ("group_size: 16", "group_size: 16\n  clip_rnage: 2", "train.clip_rnage", "did you mean 'train.clip_range'"),
        ("kl_beta: 0", "kl_beta: 0.1", "train.kl_beta", "a KL of velocities"),
        ("clip_range: 1.0e-4", "clip_range: [-1.0e-4, 2.0e-4]", "train.clip_range", "symmetric"),
        ("num_sde_steps: 1", "num_sde_steps: 2", "scheduler.num_sde_steps", "2 of .1, 2, 3. anywhere"),
        ("sde_steps: [1, 2, 3]", "sde_steps: [1, 2, 9]", "scheduler.sde_steps", "last step is never trained"),
        ("eval: {resolution: 512", "eval: {resolution: 1024", "eval.resolution", "at the model's size"),
        ("reward_model: CLIP", "reward_model: PickScore_Rank", "rewards.0", "no reward of flowrl scores"),
    ],
)
def test_what_has_no_counterpart_is_listed(old, new, key, reason, tmp_path):
    draft = converted(tmp_path, (old, new))
    assert draft.listed[key].changes
    assert re.search(reason, draft.listed[key].reason)


def test_a_lora_all_steps_and_the_guard(tmp_path):
    draft = converted(tmp_path, ("finetune_type: full", "finetune_type: lora\n  lora_rank: 64"))
    assert draft.lines["model.lora.alpha"].value == 128, "twice the rank"
    draft = converted(tmp_path, ("num_sde_steps: 1", "num_sde_steps: 3"))
    assert (draft.lines["algorithm.name"].value, draft.lines["algorithm.sde_steps"].value) == ("flow_grpo", [1, 2, 3])
    draft = converted(tmp_path, ("trainer_type: grpo", "trainer_type: grpo-guard"))
    assert draft.lines["algorithm.reweight"].value == "none"
    assert draft.listed["scheduler.num_sde_steps"].changes
    steps = ("gradient_step_per_epoch: 2", "gradient_accumulation_steps: 12")
    assert converted(tmp_path, steps).lines["optim.updates_per_iteration"].value == 4, "768 / (8 x 2 x 12)"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("trainer_type: grpo", "trainer_type: dppo", "it must be one of 'grpo', 'grpo-guard', 'nft'"),
        ("model_type: sd3-5", "model_type: ltx2_t2v", "no adapter"),
        ("group_size: 16", "group_size: 16\n  group_size: 8", "group_size"),
        ("dynamics_type: Flow-SDE", "dynamics_type: ODE", "must be one of 'Flow-SDE'"),
        ("gradient_step_per_epoch: 2", "gradient_accumulation_steps: 7", "no whole number"),
        ("num_processes: 8", "num_processes: auto", "num_processes='auto'"),
        ("train:\n", "training:\n", "with the section train"),
        ("adam_betas: [0.9, 0.999]", "adam_betas: [a, 0.9]", "two numbers"),
        ("group_size: 16", "group_size: .nan", "must be a number"),
        ("reward_model: CLIP", "reward_model: [CLIP]", "reward_model must be the name of one"),
        ("rewards:\n", "rewards: 5\neval_rewards:\n", "rewards=5: it must be a reward, or a list of them"),
        ("dataset_dir: ", "dataset_dir: ~, sampler_type: ", "data.dataset_dir=None: it must be text"),
        ("group_size: 16", "group_size: 16\n  enable_gradient_checkpointing: 'false'", "one of True, False"),
    ],
)
def test_bad_input_is_named(old, new, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        converted(tmp_path, (old, new))


def test_another_number_of_gpus_than_the_file_states_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--gpus 4: .* states 8"):
        converted(tmp_path, gpus=4)
