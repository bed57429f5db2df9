"""Configurations of trl's DDPO as recipes: the published command line against the shipped recipe of DDPO."""

from pathlib import Path

import pytest

from flowrl.apps.migration.engine import Draft
from flowrl.core.errors import ConfigError
from tests.apps.migration import drafts
from tests.recipes import at, recipe

COMMAND = drafts.text_of("ddpo.sh")


def converted(folder: Path, text: str = COMMAND, name: str = "ddpo.sh", gpus: int | None = 1) -> Draft:
    return drafts.converted("trl", folder, text, name, gpus)


def test_the_published_command_line_has_the_values_of_the_shipped_recipe(tmp_path):
    ours, theirs = drafts.resolved(converted(tmp_path), tmp_path).tree(), recipe("sd/ddpo-aesthetic").tree()
    keys = ("iterations", "model.name", "model.dtype", "model.lora", "model.final_alpha", "rollout.sampler", "rewards")
    keys += ("rollout.num_inference_steps", "rollout.guidance_scale", "rollout.group_size", "algorithm")
    keys += ("optim.learning_rate", "optim.betas", "optim.eps", "optim.weight_decay", "optim.max_grad_norm")
    keys += ("optim.ema", "data.prompts")
    assert {key: at(ours, key) for key in keys} == {key: at(theirs, key) for key in keys}
    # The shipped recipe has the sizes of the paper, 256 samples and 2 updates; the command line its own.
    assert (ours["rollout"]["prompts_per_iteration"], ours["optim"]["updates_per_iteration"]) == (24, 8)


def test_a_call_in_python_and_a_yaml_file_are_read(tmp_path):
    call = """DDPOConfig(num_epochs=2, train_gradient_accumulation_steps=1, sample_num_batches_per_epoch=2,
        sample_batch_size=2, mixed_precision=None, per_prompt_stat_tracking_buffer_size=32, save_freq=1000000)"""
    draft = converted(tmp_path, f"import trl\nconfig = trl.{call}\n", "test_ddpo.py")
    values = {option: line.value for option, line in draft.lines.items()}
    assert values["rollout.prompts_per_iteration"] == values["optim.updates_per_iteration"] == 4
    assert values["model.dtype"] == "float32"
    assert values["algorithm.advantages.history"] is None
    assert not draft.listed["per_prompt_stat_tracking_buffer_size"].changes
    assert draft.listed["reward_function"].changes
    same = converted(tmp_path, "num_epochs: 200\ntrain_batch_size: 2\nsample_batch_size: 2\n", "ddpo.yaml")
    assert same.lines["iterations"].value == 200


@pytest.mark.parametrize(
    ("lines", "epochs"),
    [
        ("A=1\nA=2 B=7\n", 2),
        ("export A=3 B=7\n", 3),
        ("A=4\nif true; then\n  B=7\nfi\n", 4),
        ("A=1\nif true; then\n  A=2\nfi\n", None),
        ("A=1\nif true; then A=2; fi\n", None),
        ("A=1\ndeclare -x A=2\n", None),
        ("A=1\nA=2;\n", None),
    ],
)
def test_a_variable_of_the_launcher_has_its_last_value_or_none(lines, epochs, tmp_path):
    text = f"{lines}{COMMAND.replace('=200', '=$A')}"
    if epochs is not None:
        assert converted(tmp_path, text).lines["iterations"].value == epochs
        return
    with pytest.raises(ConfigError, match=r"\$A is not set in the file by a line that is always done"):
        converted(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (COMMAND.replace("num_epochs", "num_epoch"), "a.sh", "no such option; did you mean 'num_epochs'"),
        (COMMAND.replace("train_batch_size=3", "train_batch_size=5"), "a.sh", "24/5, which is no whole number"),
        ("num_epoch: 2\n", "a.yaml", "num_epoch=2: trl has no such key; did you mean 'num_epochs'"),
        ("- num_epochs\n", "a.yaml", "it must be a mapping"),
        ("DDPOConfig(num_epochs=open('x').read())\n", "a.py", "line 1: .* is no plain value"),
        ("DDPOConfig()\nDDPOConfig()\n", "a.py", "it has 2 calls"),
        ("DDPOConfig(\n", "a.py", "not valid Python"),
        ("pretrained_model: null\n", "a.yaml", "pretrained_model=None: it must be text"),
        ("negative_prompts: [a, b]\n", "a.yaml", "it must be text"),
        ("use_lora: 'false'\n", "a.yaml", "use_lora='false': it must be one of True, False"),
        ("truncated_backprop_timestep: 50\ntruncated_backprop_rand: false\n", "a.yaml", "no step would be trained"),
        ("truncated_rand_backprop_minmax: [0, 30]\ntruncated_backprop_rand: true\n", "a.yaml", "the second reach it"),
        ("AlignPropConfig(truncated_rand_backprop_minmax=3)\n", "a.py", "two whole numbers"),
    ],
)
def test_bad_input_is_named(text, name, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        converted(tmp_path, text, name)


def test_sizes_per_gpu_need_the_number_of_gpus(tmp_path):
    with pytest.raises(ConfigError, match="--gpus N"):
        converted(tmp_path, gpus=None)


def test_alignprop_becomes_draft_with_its_truncation(tmp_path):
    call = """AlignPropConfig(train_batch_size=4, train_gradient_accumulation_steps=2, sample_num_steps=40,
        train_learning_rate=1e-3, truncated_backprop_rand={}, truncated_backprop_timestep=38, num_epochs=7)"""
    draft = converted(tmp_path, call.format(False), "alignprop.py", gpus=3)
    values = {option: line.value for option, line in draft.lines.items()}
    assert (values["algorithm.name"], values["algorithm.truncation"], values["algorithm.steps"]) == (
        "draft",
        "fixed",
        2,
    )
    assert (values["rollout.prompts_per_iteration"], values["optim.updates_per_iteration"]) == (24, 1)
    assert (values["optim.learning_rate"], values["rollout.num_inference_steps"], values["iterations"]) == (1e-3, 40, 7)
    assert drafts.unmentioned(draft) == set()
    assert drafts.changing(draft) == {"prompt_function", "reward_function"}
    assert drafts.resolved(draft, tmp_path).algorithm.name == "draft"
    drawn = converted(tmp_path, call.format(True), "alignprop.py")
    plain = converted(tmp_path, "AlignPropConfig()\n", "plain.py").lines
    assert (plain["optim.learning_rate"].value, plain["algorithm.steps"].value) == (1e-3, 50)
    assert (drawn.lines["algorithm.truncation"].value, drawn.lines["algorithm.steps"].value) == ("uniform", 40)
    assert drafts.resolved(drawn, tmp_path).algorithm.name == "draft"
