"""Configurations of flow_grpo as recipes: published values against the shipped recipes of the same experiments."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flowrl.apps.migration.engine import Draft, convert, recipe_text
from flowrl.apps.migration.flow_grpo_file import read
from flowrl.apps.migration.python_config import Reader
from flowrl.apps.migration.tools import TOOLS, tool_of
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.training.optim import EmaConfig
from tests.recipes import at, recipe

TEXTS = Path(__file__).parent / "published"
TEXT = (TEXTS / "grpo.py.txt").read_text(encoding="ascii")


@cache
def file() -> Path:
    """The configurations as a .py file, which in the repository would be collected as tests."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for name in ("grpo.py", "base.py"):
        (folder / name).write_bytes((TEXTS / f"{name}.txt").read_bytes())
    return folder / "grpo.py"


def converted(name: str, gpus: int | None = None) -> Draft:
    return convert(TOOLS["flow_grpo"], f"{file()}:{name}", gpus, Path())


def resolved(draft: Draft, folder: Path) -> dict[str, Any]:
    """All options of the recipe, as a run of it has them."""
    made = folder / "recipe.yaml"
    made.write_text(recipe_text(draft), encoding="ascii")
    return resolve(load_config(made), offline=True).tree()


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
    ours, theirs = resolved(converted(name, gpus), tmp_path), recipe(shipped).tree()
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
    text = f"{TEXT}\n\ndef own():\n    gpu_number = 32\n    config = general_ocr_sd3()\n"
    text += f"    config.train.gradient_accumulation_steps = {accumulation}\n    return config\n"
    (tmp_path / "grpo.py").write_text(text, encoding="ascii")
    tree = resolved(convert(TOOLS["flow_grpo"], f"{tmp_path}/grpo.py:own", None, tmp_path), tmp_path)
    ema = EmaConfig(**tree["optim"]["ema"])
    step, theirs = 0, 1.0
    for batch in range(1, 40 * accumulation + 1):
        step += batch % accumulation == 0
        if (step + 1) % 8 == 0:
            theirs *= min(0.9, (1 + step) / (10 + step))
    ours = math.prod(ema.weight(n) for n in range(1, 41))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert ours == pytest.approx((8 * 16 * 24 * 32 * 40 / (17 * 25 * 33 * 41 * 49)) ** accumulation, rel=1e-12)
    assert ours == pytest.approx(share, rel=0.06), "two digits, one for the least"


def test_every_line_of_a_recipe_names_its_key_and_nothing_given_is_lost():
    for name, gpus in (*((each, 4) for each in ("general_ocr_wan2_1", "pickscore_dpo")), ("geneval_edit", None)):
        draft = converted(name, gpus)
        used = {key for line in (*draft.lines.values(), *draft.rewards) for key in line.keys}
        assert set(draft.source.values) <= used | set(draft.listed)
        text = recipe_text(draft)
        assert max(map(len, text.splitlines())) <= 120
        for key in draft.listed:
            assert f": {key}" in " ".join(text.replace("#", " ").split())


def test_the_method_follows_the_script_that_a_configuration_is_for(tmp_path):
    methods = {"pickscore_dpo": "online_dpo", "geneval_edit": "flow_grpo_fast", "sd3_ratio_norm": "grpo_guard"}
    for name, method in methods.items():
        draft = converted(name, 4 if name == "pickscore_dpo" else None)
        assert resolved(draft, tmp_path)["algorithm"]["name"] == method
    assert draft.lines["algorithm.reweight"].value == "flow_grpo"


def test_what_has_no_counterpart_is_listed_with_its_reason():
    listed = converted("geneval_edit").listed
    assert listed["reward_fn.image_similarity"].changes
    assert converted("geneval_edit").lines["optim.name"].value == "adamw_8bit"
    assert not listed["sample.batch_size"].changes, "their scripts do not read it"
    old = converted("pickscore_sd3_old_window")
    assert "must divide the 24" in old.listed["sample.mini_num_image_per_prompt"].reason
    assert "did you mean 'sample.guidance_scale'?" in converted("misspelt").listed["sample.guidence_scale"].reason


def test_sizes_per_gpu_need_the_number_of_gpus():
    with pytest.raises(ConfigError, match="give the number that the run used: --gpus N"):
        converted("general_ocr_wan2_1")
    with pytest.raises(ConfigError, match=r"--gpus 8: .* states 32"):
        converted("general_ocr_sd3", 8)
    assert converted("general_ocr_wan2_1", 8).lines["rollout.prompts_per_iteration"].value == 32
    with pytest.raises(ConfigError, match="no configuration 'general_ocr'; did you mean 'general_ocr_"):
        converted("general_ocr")


HELPERS = """
steps, flavour = 12, {"fast": 4, "slow": 40}

def _made(kind, count=1, *, prompts=6, extra={}, steps=steps, name=missing.name):
    config = base.get_config()
    assert kind in ("fast", "slow") and kind not in extra
    def half(value, by=2):
        return value // by if by is not None else value
    size = 8
    while True:
        if size < 1:
            assert False, "no size fits"
        if prompts * 4 % (count * size) == 0 and count * size % 4 == 0:
            config.sample.train_batch_size = size
            config.sample.num_batches_per_epoch = prompts * 4 // (count * size)
            break
        size -= 1
    config.sample.num_steps = half(flavour[kind], by=1 if kind == "fast" else 2) + steps
    config.reward_fn = {**extra, "ocr": 1.0}
    return config

def one(count=3):
    shared = {"prompts": 6, "name": "x"}
    config = _made("slow", count, **shared)
    other = _made(kind="fast", name=f"fast_{count}", extra={"ocr": 2.0, "aesthetic": 0.5})
    other.reward_fn["aesthetic"] = 0.25
    config.other = (other.sample.num_steps, other.reward_fn, other.sample.train_batch_size)
    return config

def two():
    return _made("fast")

def three():
    return _made("fast", 2, name="y", kind="slow")

def four():
    return _made("medium", name="y")

def five():
    while steps < 1:
        pass

def six():
    config = helpers.made(1)
    return config

@cached
def seven():
    return 1

steps = 0
"""


def test_functions_of_the_file_are_followed_with_their_arguments(tmp_path):
    """Defaults are those of the definition, so `steps` is 12 there; every call of the base gives another one."""
    (tmp_path / "base.py").write_text((TEXTS / "base.py.txt").read_text(encoding="ascii"), encoding="ascii")
    own = tmp_path / "own.py"
    own.write_text(HELPERS, encoding="ascii")
    values = read(f"{own}:one").values
    # 6 prompts x 4 on 3 GPUs: 3 x 8 divides 24 once, and 24 is whole groups of 4.
    assert (values["sample.train_batch_size"], values["sample.num_batches_per_epoch"]) == (8, 1)
    assert values["sample.num_steps"] == 40 // 2 + 12
    assert values["reward_fn"] == {"ocr": 1.0}
    assert values["other"] == (4 + 12, {"ocr": 1.0, "aesthetic": 0.25}, 8)
    with pytest.raises(ConfigError, match=r"name one of its functions.*NAME one of one, two, three, four, five, six$"):
        read(str(own))


def test_a_configuration_that_holds_itself_is_refused(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def one():\n    config = ConfigDict()\n    config.x = config\n    return config\n", encoding="ascii"
    )
    with pytest.raises(ConfigError, match="the configuration of one holds itself"):
        read(f"{own}:one")


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
    own = tmp_path / "own.py"
    own.write_text(HELPERS, encoding="ascii")
    with pytest.raises(ConfigError, match=rf"own\.py, {reason}"):
        read(f"{own}:{name}")


NFT = """
def _shared(base_model="sd3", n_gpus=1, steps_per_epoch=1, dataset="ocr", reward_fn={}, name=""):
    config = base.get_config()
    config.base_model, config.dataset = base_model, os.path.join(os.getcwd(), f"dataset/{dataset}")
    config.pretrained.model, config.resolution = "stabilityai/stable-diffusion-3.5-medium", 512
    config.sample.num_steps = 10
    config.sample.num_image_per_prompt = 24
    size = 9
    while 48 * 24 % (n_gpus * size) != 0:
        size -= 1
    config.sample.train_batch_size = config.train.batch_size = size
    config.sample.num_batches_per_epoch = 48 * 24 // (n_gpus * size)
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch // steps_per_epoch
    config.prompt_fn = "geneval" if dataset == "geneval" else "general_ocr"
    config.run_name = f"nft_{name}"
    config.reward_fn = reward_fn
    config.decay_type = 1
    config.beta = 1.0
    config.train.adv_mode = "all"
    config.sample.guidance_scale = 1.0
    config.sample.deterministic, config.sample.solver = True, "dpm2"
    return config

def text():
    config = _shared(n_gpus=8, steps_per_epoch=2, reward_fn={"ocr": 1.0, "hpsv2": 0.5, "clipscore": 1.0}, name="text")
    config.beta = 0.1
    config.decay_type = 2
    return config
"""


def test_a_configuration_of_diffusion_nft_is_a_recipe_of_its_method(tmp_path):
    """The values of its OCR experiment, as the sheet of forward-process methods has them; without its base.py."""
    own = tmp_path / "nft.py"
    own.write_text(NFT, encoding="ascii")
    draft = convert(TOOLS["flow_grpo"], f"{own}:text", None, tmp_path)
    tree = resolved(draft, tmp_path)
    wanted = {
        "name": "nft_text",
        "rollout.prompts_per_iteration": 48,
        "rollout.group_size": 24,
        "rollout.guidance_scale": 1.0,
        "algorithm.name": "diffusion_nft",
        "algorithm.solver": "dpm2_midpoint",
        "algorithm.mix": 0.1,
        "algorithm.old": "late",
        "algorithm.mode": "all",
        "algorithm.kl.coef": 1e-4,
        "algorithm.times.fraction": 0.99,
        "algorithm.advantages.std": "global",
        "algorithm.advantages.clip": 5.0,
        "optim.updates_per_iteration": 2,
        "optim.batch_size": 9,
        "optim.ema.decay": 0.9,
        "optim.ema.every": 1,
        "checkpoint.every": 30,
    }
    assert {key: at(tree, key) for key in wanted} == wanted
    assert [(each["name"], each.get("scale", 1.0)) for each in tree["rewards"]] == [
        ("ocr", 1.0),
        ("hpsv2", 1.0),
        ("clip_score", 1.0),
    ]
    assert {key for key, entry in draft.listed.items() if entry.changes} == set()
    assert "the published defaults stand for it, DiffusionNFT's" in " ".join(
        recipe_text(draft).replace("#", "").split()
    )


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
    own = tmp_path / "own.py"
    own.write_text(f"{HEAD}{text}    return config\n", encoding="ascii")
    with pytest.raises(ConfigError, match=reason):
        Reader(own).call("one")
    assert not (tmp_path / "made").exists()


def test_values_are_those_of_python(tmp_path):
    own = tmp_path / "own.py"
    text = "a = 2\na += 1\nb: int = 4\nc = 5\nif a:\n    c = 6\nd = 7\nd = int(a)\n"
    body = '    config.x = ("" or "logs", 0 and 1, None or 0, 2 and 3, a, b)\n    return config\n'
    own.write_text(f"{text}{HEAD}{body}", encoding="ascii")
    assert Reader(own).call("one")["x"] == ("logs", 0, 0, 3, 3, 4)
    for name in "cd":  # what is not read may have changed it
        own.write_text(f"{text}{HEAD}    config.x = {name}\n    return config\n", encoding="ascii")
        with pytest.raises(ConfigError, match=f"'{name}' cannot be read"):
            Reader(own).call("one")


def test_without_base_py_the_published_defaults_stand_for_it_and_the_recipe_says_so(tmp_path):
    alone = tmp_path / "grpo.py"
    alone.write_text(TEXT, encoding="ascii")
    draft = convert(TOOLS["flow_grpo"], f"{alone}:general_ocr_sd3", None, tmp_path)
    assert "no base.py beside grpo.py" in recipe_text(draft)
    same = converted("general_ocr_sd3")
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
    text = f"{TEXT}\n\ndef own():\n    gpu_number = 32\n    config = general_ocr_sd3()\n    config.{key} = {value}\n"
    own = tmp_path / "grpo.py"
    own.write_text(f"{text}    return config\n", encoding="ascii")
    with pytest.raises(ConfigError, match=reason):
        convert(TOOLS["flow_grpo"], f"{own}:own", None, tmp_path)


def test_the_tool_follows_the_ending_or_from():
    assert tool_of("config/grpo.py:x", None).name == "flow_grpo"
    with pytest.raises(ConfigError, match="give --from"):
        tool_of("x.toml", None)
    with pytest.raises(ConfigError, match="did you mean 'flow_grpo'"):
        tool_of("x.py", "flowgrpo")


@pytest.mark.parametrize("family", ["stable-diffusion-3.5-medium", "FLUX.1-dev", "Qwen-Image"])
def test_every_key_is_a_line_or_listed(family, tmp_path):
    skipped = ("prompt_fn", "reward_fn", "pretrained.model", "train.algorithm", "sample.train_num_steps")
    skipped += ("sample.mini_num_image_per_prompt", "decay_type")
    keys = {key: entry.default for key, entry in TOOLS["flow_grpo"].keys.items() if key not in skipped}
    lines = "".join(f"    config.{key} = {value!r}\n" for key, value in keys.items())
    own = tmp_path / "grpo.py"
    lines += "    config.sample.num_image_per_prompt = 2\n"
    head = f"{TEXT}\n\ndef own():\n    gpu_number = 1\n    config = general_ocr_sd3()\n{lines}"
    own.write_text(f"{head}    config.pretrained.model = 'org/{family}'\n    return config\n", encoding="ascii")
    draft = convert(TOOLS["flow_grpo"], f"{own}:own", 1, tmp_path)
    used = {key for line in (*draft.lines.values(), *draft.rewards) for key in line.keys}
    assert set(keys) <= set(draft.source.values)
    assert set(draft.source.values) <= used | set(draft.listed)
    assert resolved(draft, tmp_path)["algorithm"]["name"] == "flow_grpo_fast", "the window is set"
