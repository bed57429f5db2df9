"""DiffusionDPO: what becomes of the flags of its train.py (SalesforceAIResearch/DiffusionDPO @5233e75)."""

from __future__ import annotations

from pathlib import Path

from flowrl.apps.migration.command_line import read_command
from flowrl.apps.migration.engine import DTYPES, Draft, plain_name
from flowrl.apps.migration.table import Key, Source, Tool

_PAIRS = "data.pairs.per_iteration"
_COLUMN = "columns are those of docs/preferences.md: data.pairs.records"
_TRACKER = "give trackers (docs/watching.md)"

KEYS = {
    "pretrained_model_name_or_path": Key(None, "model.path"),
    "revision": Key(None, "model.revision"),
    "unet_init": Key("", "", "take a pipeline folder with that UNet as model.path", changes=True),
    "pretrained_vae_model_name_or_path": Key(None, "model.vae"),
    "sdxl": Key(False, "model.name", "sdxl, else sd"),
    "dataset_name": Key(None, "data.pairs.path", "hf:NAME:SPLIT"),
    "split": Key("train", "data.pairs.path"),
    "dataset_config_name": Key(None, "data.pairs.records.subset"),
    "train_data_dir": Key(None, "data.pairs.path", "if dataset_name is not given"),
    "image_column": Key("image", "", _COLUMN),
    "caption_column": Key("caption", "", _COLUMN),
    "max_train_samples": Key(None, "", "all pairs of the set are used; cut the set", changes=True),
    "dreamlike_pairs_only": Key(False, "", "all pairs of the set are used; cut the set", changes=True),
    "choice_model": Key("", "", "pairs are as the set prefers; write them anew with flowrl pairs", changes=True),
    "noise_offset": Key(0, "", "noise is standard normal", changes=True),
    "input_perturbation": Key(0, "", "noise is standard normal", changes=True),
    "output_dir": Key("sd-model-finetuned", "name, output", "its last part the name, the rest the output"),
    "cache_dir": Key(None, "", "set HF_HOME"),
    "seed": Key(None, "seed", "none: 0, as every run has a seed; streams differ"),
    "resolution": Key(None, "model.height, model.width", "none: 512, with sdxl 1024"),
    "random_crop": Key(False, "data.pairs.crop", "random, else center"),
    "no_hflip": Key(False, "data.pairs.flip", "theirs flips each picture by itself, ours a pair"),
    "proportion_empty_prompts": Key(0.2, "data.pairs.caption_dropout"),
    "train_batch_size": Key(1, f"{_PAIRS}, optim.batch_size", "pairs = GPUs x b x A; two rows a pair"),
    "gradient_accumulation_steps": Key(1, _PAIRS),
    "num_train_epochs": Key(100, "", "max_train_steps overrides it in their code"),
    "max_train_steps": Key(2000, "iterations", "one update an iteration"),
    "gradient_checkpointing": Key(False, "model.gradient_checkpointing", "sdxl: true always"),
    "learning_rate": Key(1e-8, "optim.learning_rate", "with scale_lr x GPUs x b x A"),
    "scale_lr": Key(False, "optim.learning_rate"),
    "lr_scheduler": Key("constant_with_warmup", "optim.schedule", "constant, linear, cosine; others are listed"),
    "lr_warmup_steps": Key(
        500, "optim.warmup_updates", "none of it with constant; one update ahead of theirs, whose first has the rate 0"
    ),
    "use_adafactor": Key(False, "optim.name", "true, and with sdxl: adafactor, which has no betas and no epsilon"),
    "adam_beta1": Key(0.9, "optim.betas"),
    "adam_beta2": Key(0.999, "optim.betas"),
    "adam_weight_decay": Key(1e-2, "optim.weight_decay"),
    "adam_epsilon": Key(1e-8, "optim.eps"),
    "max_grad_norm": Key(
        1.0, "optim.max_grad_norm", "null with use_adafactor, which does not clip there; sdxl alone does"
    ),
    "mixed_precision": Key("fp16", "model.dtype", "fp16 float16, bf16 bfloat16, no float32"),
    "allow_tf32": Key(False, "", "arithmetic is chosen by model.dtype and model.vae_precision"),
    "dataloader_num_workers": Key(0, "", "pictures are read by the process itself"),
    "checkpointing_steps": Key(500, "checkpoint.every"),
    "resume_from_checkpoint": Key(
        "latest", "", "give flowrl train --resume; theirs cannot be resumed here", changes=True
    ),
    "hard_skip_resume": Key(False, "", "of their own resuming"),
    "hub_model_id": Key(None, "", "flowrl export writes the result; upload it by hand"),
    "logging_dir": Key("logs", "", _TRACKER),
    "report_to": Key("tensorboard", "", _TRACKER),
    "tracker_project_name": Key("tuning", "", _TRACKER),
    "local_rank": Key(-1, "", "torchrun sets it"),
    "beta_dpo": Key(5000, "algorithm.beta", "sft does not read it"),
    "sft": Key(False, "algorithm.name", "sft, else diffusion_dpo"),
}
_SCHEDULES = {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}


def read(place: str) -> Source:
    """A launcher script, one of launchers/."""
    return read_command(Path(place), KEYS, bare_flags=True)


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of Diffusion-DPO."""
    _run(draft)
    _model(draft)
    _data(draft)
    sft = bool(draft.get("sft"))
    draft.put("algorithm.name", "sft" if sft else "diffusion_dpo", *["sft"] * sft)
    draft.put("algorithm.times.name", "timesteps", note="uniform, in their code")
    draft.put("algorithm.times.count", 1, note="one a pair, in their code")
    if sft:
        draft.unread("sft does not read it", "beta_dpo")
    else:
        draft.put("algorithm.beta", draft.real("beta_dpo"), "beta_dpo")
    _optim(draft)


def _run(draft: Draft) -> None:
    folder = Path(str(draft.get("output_dir")))
    draft.put("name", plain_name(folder.name) or "converted", "output_dir", note="its last part")
    draft.put("output", str(folder.parent), "output_dir", note="relative to the working directory")
    if draft.get("seed") is None:
        draft.put("seed", 0, "seed", note="none there, which is a new one each time; a run has one here")
    else:
        draft.put("seed", draft.whole("seed", least=0), "seed", note="random streams differ")
    draft.copy("max_train_steps", note="one update an iteration")
    draft.copy("checkpointing_steps", note="there all are kept")


def _model(draft: Draft) -> None:
    big, path = bool(draft.get("sdxl")), draft.get("pretrained_model_name_or_path")
    if not path:
        raise draft.fault("pretrained_model_name_or_path", "it is required")
    draft.put("model.name", "sdxl" if big else "sd", "sdxl")
    draft.put_place("model.path", "pretrained_model_name_or_path")
    if draft.get("revision") is not None:
        draft.put("model.revision", draft.text("revision"), "revision")
    if draft.get("pretrained_vae_model_name_or_path") is not None:
        draft.put_place("model.vae", "pretrained_vae_model_name_or_path")
    draft.put("model.dtype", draft.choice("mixed_precision", DTYPES), "mixed_precision")
    draft.put("model.lora", None, note="all weights of the UNet; a LoRA needs far less memory, and another rate")
    size, note = (1024 if big else 512), "none there: by the model"
    if draft.get("resolution") is not None:
        size, note = draft.whole("resolution"), ""
    for side in ("height", "width"):
        draft.put(f"model.{side}", size, "resolution", note=note)
    saves = big or bool(draft.get("gradient_checkpointing"))
    draft.put("model.gradient_checkpointing", saves, "gradient_checkpointing", note="sdxl: always" if big else "")
    if "turbo" in str(path).lower():
        draft.leave("turbo", "of a turbo model theirs trains four timesteps, ours all of them", changes=True)


def _data(draft: Draft) -> None:
    name, folder = draft.get("dataset_name"), draft.get("train_data_dir")
    if name is not None:
        name = draft.place(str(name)) or name
        draft.put("data.pairs.path", f"hf:{name}:{draft.get('split')}", "dataset_name", "split")
        if folder is not None:
            draft.leave("train_data_dir", "dataset_name takes its place", changes=False)
    elif folder is not None:
        draft.put_place("data.pairs.path", "train_data_dir")
    else:
        raise draft.fault("dataset_name", "it is required, or train_data_dir")
    if draft.get("dataset_config_name") is not None:
        draft.put("data.pairs.records.subset", str(draft.get("dataset_config_name")), "dataset_config_name")
    gpus, size, many = draft.gpus(), draft.whole("train_batch_size"), draft.whole("gradient_accumulation_steps")
    keys = ("train_batch_size", "gradient_accumulation_steps")
    draft.put("data.pairs.per_iteration", gpus * size * many, *keys, note=f"{gpus} GPUs x {size} x {many}")
    draft.copy("proportion_empty_prompts", note="of pairs; theirs of pictures")
    draft.put("data.pairs.crop", "random" if draft.get("random_crop") else "center", "random_crop")
    note = "pairs alike; theirs each picture by itself"
    draft.put("data.pairs.flip", not draft.get("no_hflip"), "no_hflip", note=note)
    draft.put("optim.batch_size", 2 * size, "train_batch_size", note="two rows a pair; per process, memory alone")


def _optim(draft: Draft) -> None:
    rate, pairs = draft.real("learning_rate"), draft.lines["data.pairs.per_iteration"].value
    if draft.get("scale_lr"):
        note = f"{rate:g} x {pairs} pairs"
        draft.put("optim.learning_rate", rate * pairs, "learning_rate", "scale_lr", note=note)
    else:
        draft.put("optim.learning_rate", rate, "learning_rate")
    kind = str(draft.get("lr_scheduler"))
    warmup = 0 if kind == "constant" else draft.whole("lr_warmup_steps", least=0)
    if kind in _SCHEDULES:
        draft.put("optim.schedule", _SCHEDULES[kind], "lr_scheduler")
    else:
        draft.put("optim.schedule", "constant", note="there is no other of its shape")
        draft.leave("lr_scheduler", "schedules are constant, linear and cosine; constant is written", changes=True)
    late = "one update ahead of theirs, whose first has the rate 0" if warmup else ""
    draft.put("optim.warmup_updates", warmup, "lr_warmup_steps", note=late)
    if draft.get("sdxl") or draft.get("use_adafactor"):
        draft.put("optim.name", "adafactor", "use_adafactor", note="their launchers use it with sdxl always")
        draft.unread("Adafactor has none, there and here", "adam_beta1", "adam_beta2", "adam_epsilon")
    else:
        draft.put_betas("adam_beta1", "adam_beta2")
        draft.copy("adam_epsilon")
    draft.copy("adam_weight_decay")
    if draft.get("use_adafactor"):
        note = "theirs clips no gradient then; with sdxl alone it does"
        draft.put("optim.max_grad_norm", None, "use_adafactor", note=note)
        draft.unread("with --use_adafactor theirs clips no gradient", "max_grad_norm")
    else:
        draft.copy("max_grad_norm")
    draft.put("optim.updates_per_iteration", 1, note="an iteration is one of their steps")


TOOL = Tool(
    name="diffusion_dpo",
    title="DiffusionDPO (SalesforceAIResearch/DiffusionDPO @5233e75, 2025-11-10)",
    keys=KEYS,
    read=read,
    rules=rules,
    refuses_unknown=True,
    form="a launcher script such as `launchers/sd15.sh`",
    rewards={},
)
