"""Each published configuration gives the recipe in recipes/, byte for byte, and no key of a tool is ever lost.

The values there are those of the sheets of the methods and of the published files; the shipped recipes of the same
experiments have them too (tests of a tool).
"""

from pathlib import Path

import pytest
import yaml

from flowrl.apps.migration.engine import recipe_text
from flowrl.apps.migration.tools import TOOLS
from tests.apps.migration.drafts import PUBLISHED, changing, converted, resolved, text_of, unmentioned

# Recipe -> GPUs where the file does not state them, keys without a counterpart that change results.
CASES: dict[str, tuple[int | None, set[str]]] = {
    "flow_grpo-general_ocr_sd3": (None, set()),
    "flow_grpo-pickscore_flux_fast": (None, set()),
    "flow_grpo-general_ocr_wan2_1": (1, set()),
    "flow_grpo-sd3_ratio_norm": (None, set()),
    "flow_grpo-geneval_edit": (None, {"reward_fn.image_similarity"}),
    "flow_grpo-pickscore_dpo": (4, set()),
    "flow_grpo-pickscore_sd3_old_window": (None, {"sample.mini_num_image_per_prompt"}),
    "flow_grpo-text": (None, set()),
    "diffusion_dpo-sd15": (16, set()),
    "trl-ddpo": (1, {"prompt_function"}),
    "flow_factory-sd3_5": (None, set()),
    # An average of a linear pace is taken as the method's own network, not for the evaluation.
    **{f"flow_factory-{kind}": (None, {"train.ema_decay_schedule"}) for kind in ("nft", "awm")},
    "flow_factory-dgpo": (None, {"train.switch_ema_ref"}),
    # It draws 20 times of 8 nodes, which no rule here does.
    "flow_factory-crd": (None, {"train.num_train_timesteps"}),
    "flow_factory-dpo": (None, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_published_configuration_gives_its_recipe(case, tmp_path):
    (tool, _, name), (gpus, changes) = case.partition("-"), CASES[case]
    file = next((each.name for each in PUBLISHED.glob(f"{name}.*")), "grpo.py.txt")
    file = "nft.py.txt" if name == "text" else file
    called = f"{file.removesuffix('.txt')}:{name}" if tool == "flow_grpo" else file
    draft = converted(tool, tmp_path, text_of(file), called, gpus)
    text = recipe_text(draft)
    assert text == (Path(__file__).parent / "recipes" / f"{case}.yaml").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 120
    assert all(f": {key}" in " ".join(text.replace("#", " ").split()) for key in draft.listed)
    assert (unmentioned(draft), changing(draft)) == (set(), changes)
    assert resolved(draft, tmp_path).run.name


def of_python(family: str) -> str:
    keys = {key: entry.default for key, entry in TOOLS["flow_grpo"].keys.items()}
    for key in ("prompt_fn", "reward_fn", "pretrained.model", "train.algorithm", "sample.train_num_steps"):
        del keys[key]
    del keys["sample.mini_num_image_per_prompt"], keys["decay_type"]
    keys |= {"sample.num_image_per_prompt": 2, "pretrained.model": f"org/{family}"}
    lines = "".join(f"    config.{key} = {value!r}\n" for key, value in keys.items())
    head = f"{text_of('grpo.py.txt')}\n\ndef own():\n    gpu_number = 1\n    config = general_ocr_sd3()\n"
    return f"{head}{lines}    return config\n"


def of_flags() -> str:
    values = {type(None): "3", str: "linear", bool: "", int: "3", float: "0.5"}
    text = text_of("sd15.sh")
    flags = " ".join(
        f"--{key} {values[type(entry.default)]}"
        for key, entry in TOOLS["diffusion_dpo"].keys.items()
        if key not in ("mixed_precision", "use_adafactor") and f"--{key}" not in text
    )
    return text.replace("--beta_dpo 5000", f"--use_adafactor --beta_dpo 5000 --mixed_precision fp16 {flags}")


def of_options(*without: str) -> str:
    rows = TOOLS["trl"].keys.items()
    keys = {k: e.default for k, e in rows if e.default is not None and not k.startswith(without or "none")}
    keys = {k: list(value) if isinstance(value, tuple) else value for k, value in keys.items()}
    return yaml.safe_dump(keys | {"log_with": "wandb"})


def of_sections(kind: str) -> str:
    tree = yaml.safe_load(text_of(f"{kind}.yaml"))
    for key, entry in TOOLS["flow_factory"].keys.items():
        section, _, name = key.partition(".")
        if name and section in ("train", "model", "scheduler") and name not in tree[section]:
            tree[section][name] = list(entry.default) if isinstance(entry.default, tuple) else entry.default
    tree["train"] |= {"timestep_range": 0.6, "kl_type": "x-based" if kind == "sd3_5" else "v-based"}
    return yaml.safe_dump(tree)


EVERY = [
    *(("flow_grpo", of_python(family), "grpo.py:own") for family in ("stable-diffusion-3.5", "FLUX.1", "Qwen-Image")),
    ("diffusion_dpo", of_flags(), "run.sh"),
    ("trl", of_options(), "alignprop.yaml"),
    ("trl", of_options("truncated_", "log_image_freq"), "ddpo.yaml"),
    *(("flow_factory", of_sections(kind), f"{kind}.yaml") for kind in ("sd3_5", "nft", "awm", "dgpo", "crd", "dpo")),
]


@pytest.mark.parametrize(("tool", "text", "name"), EVERY, ids=[f"{tool}-{n}" for n, (tool, _, _) in enumerate(EVERY)])
def test_every_key_is_a_line_or_listed(tool, text, name, tmp_path):
    draft = converted(tool, tmp_path, text, name, None if tool == "flow_factory" else 1)
    unset = TOOLS[tool].keys.keys() - draft.source.values.keys()
    left_out = {"train.algorithm", "sample.train_num_steps", "sample.mini_num_image_per_prompt", "decay_type"}
    left_out |= {
        key for key in TOOLS["trl"].keys if name == "ddpo.yaml" and key.startswith(("truncated_", "log_image"))
    }
    sections = ("data", "log", "eval", "launcher", "optimizers", "main_process_port", "num_processes", "eval_rewards")
    assert unset <= left_out or (tool == "flow_factory" and all(key.startswith(sections) for key in unset))
    assert unmentioned(draft) == set()
    assert draft.lines["algorithm.name"].value != "flow_grpo", "the window is set"


@pytest.mark.parametrize(
    ("kind", "other"),
    {"nft": "crd_beta", "awm": "nft_beta", "dgpo": "beta", "crd": "clip_range", "dpo": "kl_beta"}.items(),
)
def test_a_key_of_another_trainer_is_listed_as_such(kind, other, tmp_path):
    draft = converted("flow_factory", tmp_path, of_sections(kind), f"{kind}.yaml")
    assert draft.listed[f"train.{other}"].reason == f"their trainer {kind} does not read it"
