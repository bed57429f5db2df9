"""Configurations of flow_grpo as recipes: published values against the shipped recipes of the same experiments."""

import math
from pathlib import Path

import pytest

from flowrl.apps.migration.engine import Draft, recipe_text
from flowrl.apps.migration.flow_grpo_file import read
from flowrl.apps.migration.python_config import Reader
from flowrl.apps.migration.tools import tool_of
from flowrl.core.errors import ConfigError
from flowrl.training.options import EmaConfig
from tests.apps.migration import drafts
from tests.recipes import at, recipe

TEXT = drafts.text_of("grpo.py.txt")


def converted(folder: Path, name: str, gpus: int | None = None) -> Draft:
    return drafts.converted("flow_grpo", folder, TEXT, f"grpo.py:{name}", gpus)


def own(folder: Path, *lines: str) -> Draft:
    """The configuration of SD3's OCR experiment with some lines more."""
    body = "".join(f"    {line}\n" for line in ("gpu_number = 32", "config = general_ocr_sd3()", *lines))
    text = f"{TEXT}\n\ndef own():\n{body}    return config\n"
    return drafts.converted("flow_grpo", folder, text, "grpo.py:own")


# Shipped recipe, GPUs where the file does not state them, gradient accumulation.
# Not compared: places (name, output, data, path), sizes that are memory alone, and what is ours in the evaluation.
CASES = {
    "general_ocr_sd3": ("sd3/flow_grpo-ocr", None, 2),
    "pickscore_flux_fast": ("flux/flow_grpo_fast-pickscore", None, 6),
    "general_ocr_wan2_1": ("wan/flow_grpo-ocr", 1, 1),
    "sd3_ratio_norm": ("sd3/grpo_guard-ocr", None, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_configuration_has_the_values_of_the_shipped_recipe(name, tmp_path):
    shipped, gpus, accumulation = CASES[name]
    ours, theirs = drafts.resolved(converted(tmp_path, name, gpus), tmp_path).tree(), recipe(shipped).tree()
    assert ours["optim"]["ema"]["repeats"] == accumulation, "the shipped one averages once"
    keys = ("iterations", "seed", "model.name", "model.dtype", "model.lora", "model.height", "model.width")
    keys += ("model.max_sequence_length", "rollout.sampler", "rollout.num_inference_steps", "rollout.guidance_scale")
    keys += ("rollout.prompts_per_iteration", "rollout.group_size", "rollout.shared_noise", "algorithm")
    keys += ("optim.learning_rate", "optim.betas", "optim.eps", "optim.weight_decay", "optim.max_grad_norm")
    keys += ("optim.updates_per_iteration", "optim.ema.every", "optim.ema.decay", "checkpoint")
    keys += ("eval.every", "eval.num_inference_steps", "eval.guidance_scale")
    assert {key: at(ours, key) for key in keys} == {key: at(theirs, key) for key in keys}
    assert ours["rewards"] == theirs["rewards"]


@pytest.mark.parametrize(("accumulation", "share"), [(1, 0.14), (2, 0.019), (4, 0.0004)])
def test_the_average_is_taken_once_a_batch_as_theirs_is(accumulation, share, tmp_path):
    """Theirs, after each batch with `step` optimizer steps done, where step + 1 is a multiple of 8 (flow_grpo/ema.py):

    ema <- d ema + (1 - d) weights, d = min(0.9, (1 + step) / (10 + step))

    So the initial weights have after 40 steps the share (8/17 16/25 24/33 32/41 40/49)^accumulation = 0.1396^a.
    """
    draft = own(tmp_path, f"config.train.gradient_accumulation_steps = {accumulation}")
    ema = EmaConfig(**drafts.resolved(draft, tmp_path).tree()["optim"]["ema"])
    step, theirs = 0, 1.0
    for batch in range(1, 40 * accumulation + 1):
        step += batch % accumulation == 0
        if (step + 1) % 8 == 0:
            theirs *= min(0.9, (1 + step) / (10 + step))
    ours = math.prod(ema.weight(n) for n in range(1, 41))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert ours == pytest.approx((8 * 16 * 24 * 32 * 40 / (17 * 25 * 33 * 41 * 49)) ** accumulation, rel=1e-12)
    assert ours == pytest.approx(share, rel=0.06), "two digits, one for the least"


def test_a_key_that_is_misspelt_is_listed_with_the_nearest(tmp_path):
    listed = converted(tmp_path, "misspelt").listed
    assert "did you mean 'sample.guidance_scale'?" in listed["sample.guidence_scale"].reason


def test_sizes_per_gpu_need_the_number_of_gpus(tmp_path):
    with pytest.raises(ConfigError, match="give the number that the run used: --gpus N"):
        converted(tmp_path, "general_ocr_wan2_1")
    with pytest.raises(ConfigError, match=r"--gpus 8: .* states 32"):
        converted(tmp_path, "general_ocr_sd3", 8)
    assert converted(tmp_path, "general_ocr_wan2_1", 8).lines["rollout.prompts_per_iteration"].value == 32
    with pytest.raises(ConfigError, match="no configuration 'general_ocr'; did you mean 'general_ocr_"):
        converted(tmp_path, "general_ocr")


HELPERS = (Path(__file__).parent / "helpers.py.txt").read_text(encoding="ascii")


def test_functions_of_the_file_are_followed_with_their_arguments(tmp_path):
    """Defaults are those of the definition, so `steps` is 12 there; every call of the base gives another one."""
    (tmp_path / "base.py").write_text(drafts.text_of("base.py.txt"), encoding="ascii")
    file = tmp_path / "own.py"
    file.write_text(HELPERS, encoding="ascii")
    values = read(f"{file}:one").values
    # 6 prompts x 4 on 3 GPUs: 3 x 8 divides 24 once, and 24 is whole groups of 4.
    assert (values["sample.train_batch_size"], values["sample.num_batches_per_epoch"]) == (8, 1)
    assert values["sample.num_steps"] == 40 // 2 + 12
    assert values["reward_fn"] == {"ocr": 1.0}
    assert values["other"] == (4 + 12, {"ocr": 1.0, "aesthetic": 0.25}, 8)
    with pytest.raises(ConfigError, match=r"name one of its functions.*NAME one of one, two, three, four, five, six$"):
        read(str(file))


def test_a_configuration_that_holds_itself_is_refused(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def one():\n    config = ConfigDict()\n    config.x = config\n    return config\n", encoding="ascii"
    )
    with pytest.raises(ConfigError, match="the configuration of one holds itself"):
        read(f"{file}:one")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("two", "line 4: 'missing' cannot be read"),
        ("three", "line 34: _made: multiple values for argument 'kind'"),
        ("four", "line 6: its own check fails"),
        ("five", r"line 40: it takes more than \d+ calls and rounds of loops"),
        ("six", r"line 44: the call helpers.made\(...\) cannot be read"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(name, reason, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(HELPERS, encoding="ascii")
    with pytest.raises(ConfigError, match=rf"own\.py, {reason}"):
        read(f"{file}:{name}")


HEAD = "import os\ndef one():\n    config = ml_collections.ConfigDict()\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("    os.system('touch made')\n", "line 4: .*cannot be read"),
        ("    config.x = open('made', 'w')\n", r"line 4: the call open\(...\)"),
        ("    config.x = [i for i in (1, 2)]\n", "line 4: .*cannot be read"),
        ("    for i in (1, 2):\n        config.x = i\n", "line 4: .*cannot be read"),
        ("    config.x = 'a' * 10\n", "line 4: .*cannot be read"),
        ("    s = 'abcdefgh'\n" + 12 * "    s = f'{s}{s}'\n", "line 15: .* is too long"),
        ("    config.x = 10 ** 10\n", "line 4: .*cannot be read"),
        ("    config.x = 1 / 0\n", "line 4: .*division by zero"),
        ("    config.x = one()\n", "line 2: one calls itself"),
        ("    config.x = missing.y\n", "line 4: 'missing' cannot be read"),
        ("    config.x = config.y\n", "line 4: config.y is not set"),
        ("    config.x = {[1]: 2}\n", "line 4: .*a key must be a text or a number"),
        ("    a = 1\n    while True:\n        a = [a, a]\n", "line 6: .*is nested too deeply"),
        ("    a = 1\n    while True:\n        a = dict(b=a)\n", "line 6: .*is nested too deeply"),
        ("    assert 1 > 2\n", "line 4: its own check fails: 1 > 2"),
        ("    config.x = \n", "not valid Python"),
    ],
)
def test_a_file_is_read_and_never_executed(text, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(f"{HEAD}{text}    return config\n", encoding="ascii")
    with pytest.raises(ConfigError, match=reason):
        Reader(file).call("one")
    assert not (tmp_path / "made").exists()


def test_values_are_those_of_python(tmp_path):
    file = tmp_path / "own.py"
    text = "a = 2\na += 1\nb: int = 4\nc = 5\nif a:\n    c = 6\nd = 7\nd = int(a)\n"
    body = '    config.x = ("" or "logs", 0 and 1, None or 0, 2 and 3, a, b)\n    return config\n'
    file.write_text(f"{text}{HEAD}{body}", encoding="ascii")
    assert Reader(file).call("one")["x"] == ("logs", 0, 0, 3, 3, 4)
    for name in "cd":  # what is not read may have changed it
        file.write_text(f"{text}{HEAD}    config.x = {name}\n    return config\n", encoding="ascii")
        with pytest.raises(ConfigError, match=f"'{name}' cannot be read"):
            Reader(file).call("one")


def test_without_base_py_the_published_defaults_stand_for_it_and_the_recipe_says_so(tmp_path):
    draft = drafts.converted("flow_grpo", tmp_path, TEXT, "alone.py:general_ocr_sd3")
    assert "no base.py beside alone.py" in recipe_text(draft)
    same = converted(tmp_path, "general_ocr_sd3")
    assert {key: line.value for key, line in draft.lines.items()} == {k: line.value for k, line in same.lines.items()}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("train.beta", "'much'", "it must be a number"),
        ("dataset", "None", "dataset=None: it must be text"),
        ("use_lora", "'no'", "it must be one of True, False"),
        ("mixed_precision", "'fp8'", "it must be one of 'fp16', 'bf16', 'no'"),
        ("prompt_fn", "'imagenet'", "only general_ocr and geneval"),
        ("reward_fn", "{'image_similarity': 1.0}", "nothing to train on"),
        ("pretrained.model", "'ByteDance-Seed/BAGEL-7B-MoT'", "no adapter of BAGEL"),
        ("train.gradient_accumulation_steps", "3", "4/3, which is no whole number"),
    ],
)
def test_a_value_that_no_recipe_can_have_is_refused_with_its_key(key, value, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        own(tmp_path, f"config.{key} = {value}")


def test_the_tool_follows_the_ending_or_from():
    assert tool_of("config/grpo.py:x", None).name == "flow_grpo"
    with pytest.raises(ConfigError, match="give --from"):
        tool_of("x.toml", None)
    with pytest.raises(ConfigError, match="did you mean 'flow_grpo'"):
        tool_of("x.py", "flowgrpo")
