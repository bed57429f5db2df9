"""Launchers of DiffusionDPO as recipes: published values against the shipped recipes of the same experiments."""

from pathlib import Path

import pytest

from flowrl.apps.migration.engine import Draft, recipe_text
from flowrl.core.errors import ConfigError
from tests.apps.migration import drafts
from tests.recipes import at, recipe
from tests.tables import table

TEXT = drafts.text_of("sd15.sh")


def converted(folder: Path, text: str = TEXT, gpus: int | None = 16) -> Draft:
    return drafts.converted("diffusion_dpo", folder, text, "run.sh", gpus)


def with_flags(flags: str) -> str:
    return TEXT.replace("--beta_dpo 5000", flags)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_published_launcher_has_the_values_of_the_shipped_recipe(name, tmp_path):
    text = TEXT
    if name == "sdxl":
        text = with_flags("--beta_dpo 5000 --sdxl --pretrained_vae_model_name_or_path=madebyollin/sdxl-vae-fp16-fix")
        text = text.replace("runwayml/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0")
        text = text.replace("lr_warmup_steps=500", "lr_warmup_steps=200")
    draft = converted(tmp_path, text)
    ours, theirs = drafts.resolved(draft, tmp_path).tree(), recipe(f"{name}/diffusion_dpo-pickapic").tree()
    keys = ("seed", "model.name", "model.dtype", "data.pairs.path", "algorithm")
    keys += ("data.pairs.crop", "data.pairs.flip", "data.pairs.caption_dropout", "optim.betas", "optim.eps")
    keys += ("optim.weight_decay", "optim.max_grad_norm", "optim.schedule", "optim.warmup_updates")
    assert {key: at(ours, key) for key in keys} == {key: at(theirs, key) for key in keys}
    sizes = [tree["model"]["height"] or 512 for tree in (ours, theirs)]
    assert sizes == [1024 if name == "sdxl" else 512] * 2, "null is the pipeline's own, 512 for SD 1.5"
    updates = [tree["iterations"] * tree["optim"]["updates_per_iteration"] for tree in (ours, theirs)]
    assert updates == [2000, 2000]
    # The shipped recipes depart in these, as their comments say: the paper's values are those here.
    assert ours["data"]["pairs"]["per_iteration"] == 2048
    assert ours["optim"]["learning_rate"] == pytest.approx(2.048e-5, rel=1e-12)
    assert ours["model"]["lora"] is None
    assert not drafts.changing(draft)
    assert at(ours, "optim.name") == ("adafactor" if name == "sdxl" else "adamw")


def test_sft_is_a_method_of_its_own(tmp_path):
    draft = converted(tmp_path, with_flags("--sft --noise_offset 0.1 --beta_dpo 5000"))
    assert draft.listed["noise_offset"].changes
    assert not draft.listed["beta_dpo"].changes, "sft does not read it"
    assert draft.lines["algorithm.name"].value == "sft"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    table(__file__, "diffusion_dpo_refused"),
)
def test_bad_input_is_named(old, new, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        converted(tmp_path, TEXT.replace(old, new))


def test_the_number_of_gpus_comes_from_the_launcher_or_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="--gpus N"):
        converted(tmp_path, gpus=None)
    text = TEXT.replace("accelerate launch", "torchrun --nproc_per_node 8 --nnodes=2 --standalone")
    draft = converted(tmp_path, text, None)
    assert draft.lines["data.pairs.per_iteration"].value == 2048
    assert "Options of the launcher are not read: standalone;" in recipe_text(draft)


def test_a_schedule_of_another_shape_is_listed(tmp_path):
    draft = converted(tmp_path, TEXT.replace("constant_with_warmup", "polynomial"))
    assert draft.listed["lr_scheduler"].changes
    assert (
        converted(tmp_path, TEXT.replace("constant_with_warmup", "constant")).lines["optim.warmup_updates"].value == 0
    )


@pytest.mark.parametrize(("flags", "norm"), [("", 0.5), ("--sdxl", 0.5), ("--use_adafactor", None)])
def test_gradients_are_clipped_where_theirs_are(flags, norm, tmp_path):
    """train.py clips unless --use_adafactor is given; --sdxl takes the same optimizer, and clips."""
    draft = converted(tmp_path, with_flags(f"--beta_dpo 5000 --max_grad_norm 0.5 {flags}"))
    assert draft.lines["optim.max_grad_norm"].value == norm
    assert ("max_grad_norm" in draft.listed) is (norm is None)
