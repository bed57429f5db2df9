"""DiffusionDPO: what becomes of the flags of its train.py (SalesforceAIResearch/DiffusionDPO @5233e75)."""

from pathlib import Path

from flowrl.apps.migration.command_line import read_command
from flowrl.apps.migration.engine import DTYPES, Draft, plain_name
from flowrl.apps.migration.table import Source, read_keys

KEYS = read_keys("diffusion_dpo")
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
    draft.copy("proportion_empty_prompts", note="of pairs; theirs of images")
    draft.put("data.pairs.crop", "random" if draft.get("random_crop") else "center", "random_crop")
    note = "pairs alike; theirs each image by itself"
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
