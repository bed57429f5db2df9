"""Flow-Factory: the reading of its YAML, of commit a0b2bc5 or a newer form with one data set, and what becomes of its
options; those of a trainer in flow_factory_trainers.py.
"""

from pathlib import Path
from typing import Any

from flowrl.apps.migration import flow_factory_trainers as trainers
from flowrl.apps.migration.engine import DTYPES, UNKNOWN_STEPS, Draft, is_number
from flowrl.apps.migration.table import Source, read_keys, read_rewards, read_table
from flowrl.core.errors import ConfigError
from flowrl.core.strict import parse_yaml, read_text

KEYS = read_keys("flow_factory")
_SECTIONS = ("data", "model", "log", "train", "scheduler", "eval")
_FAMILIES, _OF_ONE, _OPTIMIZER = (
    read_table("tables", "flow_factory")[name] for name in ("families", "of_one", "optimizer")
)
_NONE = ("ltx2", "wan2_v2v")
REWARDS = read_rewards("flow_factory")
_OF_MEMORY = ("name", "reward_model", "weight", "batch_size", "device", "dtype", "async_reward", "num_workers")
_WARMUP_EPOCHS = 10
"""w of their average's warm-up, where a trainer has no key for it."""


def read(place: str) -> Source:
    """A YAML configuration. Raises ConfigError: it is no mapping of sections, or doubles a key."""
    file = Path(place)
    tree = parse_yaml(read_text(file, str(file)), str(file))
    if not isinstance(tree, dict) or "train" not in tree:
        raise ConfigError(f"{file}: it must be a mapping with the section train, as Flow-Factory's examples are")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in _SECTIONS:
            values[str(key)] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{name}": below for name, below in value.items()}
        elif value is not None:
            raise ConfigError(f"{file}: {key}={value!r}: it must be a section of options")
    count = values.get("num_processes")
    if count is not None and type(count) is not int:
        raise ConfigError(f"{file}: num_processes={count!r}: it must be a whole number; correct it in the file")
    notes = _one_optimizer(values) + _one_set(values)
    return Source(file, file.stem, values, _OF_ONE.get(str(values.get("train.trainer_type")), {}), count, notes)


def _one_optimizer(values: dict[str, Any]) -> tuple[str, ...]:
    """Newer files have a list of optimizers: one of them is read as the options of `train` were."""
    found = values.get("optimizers")
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict)):
        return ()
    if any(f"train.{name}" in values for name in _OPTIMIZER.values()):
        return ()  # of both forms: what is listed says so
    del values["optimizers"]
    for name, value in found[0].items():
        if name != "name":
            values[f"train.{_OPTIMIZER[name]}" if name in _OPTIMIZER else f"optimizers.0.{name}"] = value
    return ("optimizers.0 is read as train.learning_rate, adam_* and max_grad_norm, the older names.",)


def _one_set(values: dict[str, Any]) -> tuple[str, ...]:
    """Newer files have a list of data sets: one of them is read as the options of `data` were."""
    found = values.get("data.datasets")
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict)):
        return ()
    if "data.dataset_dir" in values or "data.max_dataset_size" in values:
        return ()
    del values["data.datasets"]
    for name, value in found[0].items():
        if name == "dataset_dir":
            values["data.dataset_dir"] = value
        elif name == "train" and isinstance(value, dict):
            names = {"max_dataset_size": "data.max_dataset_size"}
            values |= {names.get(key, f"data.datasets.0.train.{key}"): v for key, v in value.items() if key != "weight"}
        elif name != "name" and value:
            values[f"data.datasets.0.{name}"] = value
    return ("data.datasets.0 is read as data.dataset_dir, the older name; name and weight say nothing of one set.",)


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of Flow-Factory."""
    kind = draft.get("train.trainer_type")
    draft.choice("train.trainer_type", trainers.METHODS)
    others = [key for key, entry in KEYS.items() if entry.readers and kind not in entry.readers]
    draft.unread(f"their trainer {kind} does not read it", *others)
    model = draft.text("model.model_type")
    if model.startswith(_NONE):
        raise draft.fault("model.model_type", "flowrl has no adapter of it, so there is nothing to convert to")
    family = _FAMILIES.get(model, "generic")
    _run(draft)
    _model(draft, family)
    draft.put_prompts(draft.text("data.dataset_dir"), ["{}.jsonl", "{}.txt"], ["data.dataset_dir"])
    if draft.get("data.max_dataset_size") is not None:
        draft.put("data.max_prompts", draft.whole("data.max_dataset_size"), "data.max_dataset_size")
    draft.copy("train.num_inference_steps", "train.unique_sample_num_per_epoch", "train.group_size")
    draft.put("rollout.guidance_scale", draft.real("train.guidance_scale"), "train.guidance_scale")
    size, group = draft.whole("train.per_device_batch_size"), draft.whole("train.group_size")
    draft.put_size("rollout.batch_size", size, "train.per_device_batch_size")
    # DGPO and CRD compare the samples of a prompt in one batch, DPO the two of a pair.
    rows = max(size, group) if kind in ("dgpo", "crd") else 2 * size if kind == "dpo" else size
    draft.put_size("optim.batch_size", rows, "train.per_device_batch_size")
    updates = trainers.method(draft, kind, family)
    _rewards(draft)
    _optim(draft, updates)
    draft.put("eval.every", draft.whole("eval.eval_freq", least=0), "eval.eval_freq")
    draft.copy("eval.num_inference_steps", "eval.guidance_scale")
    draft.copy("eval.per_device_batch_size", note="per process")
    other = draft.get("eval.resolution") != draft.get("train.resolution")
    draft.unread("evaluations are at the model's size", "eval.resolution", changes=other)


def _run(draft: Draft) -> None:
    draft.put_head("log.run_name", "train.seed", draft.source.label, "none there: the name of the file")
    epochs = draft.get("train.max_epochs")
    if epochs is None or epochs == -1:
        draft.put("iterations", UNKNOWN_STEPS, "train.max_epochs", note="no end there; 1000 here")
    else:
        draft.put("iterations", draft.whole("train.max_epochs"), "train.max_epochs")
    draft.copy("log.save_dir", note="relative to the working directory")
    if draft.whole("log.save_freq", least=0):
        draft.copy("log.save_freq")
    else:
        draft.leave("log.save_freq", "the last iteration is saved always", changes=False)


def _model(draft: Draft, family: str) -> None:
    draft.put("model.name", family, "model.model_type")
    draft.put_place("model.path", "model.model_name_or_path")
    draft.put("model.dtype", draft.choice("mixed_precision", {**DTYPES, None: "float32"}), "mixed_precision")
    _lora(draft, family)
    size = draft.get("train.resolution")
    sides = list(size) if isinstance(size, list | tuple) else [size]
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        raise draft.fault("train.resolution", "it must be a number of pixels, or height and width")
    for side, value in (("height", sides[0]), ("width", sides[min(1, len(sides) - 1)])):
        if draft.get(f"train.{side}") is not None:
            draft.put(f"model.{side}", draft.whole(f"train.{side}"), f"train.{side}", "train.resolution")
        else:
            draft.put(f"model.{side}", value, "train.resolution")
    if family != "generic":
        draft.copy("train.max_sequence_length")
    if family == "wan" and draft.get("train.num_frames") is not None:
        draft.put("model.num_frames", draft.whole("train.num_frames"), "train.num_frames")
    shift = draft.get("scheduler.flow_shift")
    if shift is not None and family in ("flux", "qwen_image", "wan"):
        draft.put("model.shift", draft.real("scheduler.flow_shift"), "scheduler.flow_shift")
    draft.copy("train.enable_gradient_checkpointing")
    if draft.get("model.attn_backend") is not None:
        draft.put("model.attention", draft.text("model.attn_backend"), "model.attn_backend")
    if "fsdp" in str(draft.get("config_file")).lower() and family != "generic":
        draft.put("model.shard", True, "config_file", note="a file of FSDP")
    else:
        draft.unread("it is accelerate's; memory and speed alone", "config_file")


def _lora(draft: Draft, family: str) -> None:
    full = draft.choice("model.finetune_type", {"full": True, "lora": False})
    start = draft.get("model.resume_path")
    if full:
        draft.put("model.lora", None, "model.finetune_type", note="all weights")
        draft.unread("all weights are trained", "model.lora_rank", "model.lora_alpha")
        own = draft.get("model.target_modules") not in ("all", "default")
        draft.unread("all weights are trained", "model.target_modules", changes=own)
    else:
        rank = draft.whole("model.lora_rank")
        draft.put("model.lora.rank", rank, "model.lora_rank", "model.finetune_type")
        alpha = 2 * rank if draft.get("model.lora_alpha") is None else draft.number("model.lora_alpha")
        draft.put("model.lora.alpha", alpha, "model.lora_alpha")
        _targets(draft, family)
    if start is not None and not full and draft.get("model.resume_type") in (None, "lora"):
        draft.put_place("model.init_lora", "model.resume_path", "model.resume_type")
    else:
        reason = "their checkpoints cannot be resumed here; model.init_lora takes a LoRA"
        draft.unread(reason, "model.resume_path", "model.resume_type", changes=start is not None)


def _targets(draft: Draft, family: str) -> None:
    targets = draft.get("model.target_modules")
    if targets not in ("all", "default"):
        several = targets if isinstance(targets, list | tuple) else [targets]
        draft.put("model.lora.targets", [str(each) for each in several], "model.target_modules")
        return
    draft.put("model.lora.targets", None, "model.target_modules", note="the family's own list")
    if targets == "all":
        reason = "every linear layer there, the family's own list here; name others in model.lora.targets"
        draft.leave("model.target_modules", reason, changes=True)
    elif family not in ("sd3", "flux"):
        reason = "their list and ours are compared for SD3 and FLUX alone; name others in model.lora.targets"
        draft.leave("model.target_modules", reason, changes=True)


def _entries(draft: Draft, key: str) -> list[dict[str, Any]]:
    """The rewards under a key that have a counterpart, as entries of ours; the others are listed."""
    found = draft.get(key)
    several = [found] if isinstance(found, dict) else found or ()
    if not isinstance(several, list | tuple):
        raise draft.fault(key, "it must be a reward, or a list of them")
    result: list[dict[str, Any]] = []
    for number, entry in enumerate(several):
        if not isinstance(entry, dict):
            raise draft.fault(key, "each reward must be a mapping with reward_model")
        name = entry.get("reward_model", "PickScore")
        if not isinstance(name, str):
            raise draft.fault(key, "reward_model must be the name of one")
        if name not in REWARDS:
            draft.leave(f"{key}.{number}", f"no reward of flowrl scores as {name} does; left out", changes=True)
            continue
        for other in [other for other in entry if other not in _OF_MEMORY]:
            draft.leave(f"{key}.{number}.{other}", f"an argument of their {name}; left out", changes=True)
        weight = entry.get("weight", 1.0)
        if not is_number(weight):
            raise draft.fault(key, f"the weight of {name} must be a number")
        result.append({**REWARDS[name][0], "weight": float(weight)})
    return result


def _rewards(draft: Draft) -> None:
    """Write the rewards of training and those of evaluations."""
    entries = _entries(draft, "rewards")
    for entry in entries:
        note = next(note for ours, note in REWARDS.values() if ours["name"] == entry["name"])
        draft.reward(entry, "rewards", note=note)
    if not any(entry["weight"] for entry in entries):
        raise draft.fault("rewards", "none has a counterpart here with a weight, so there is nothing to train on")
    trained = {entry["name"] for entry in entries}
    others = [entry for entry in _entries(draft, "eval_rewards") if entry["name"] not in trained]
    if others:
        ours = [{key: value for key, value in entry.items() if key != "weight"} for entry in others]
        draft.put("eval.rewards", ours, "eval_rewards", note="those of training are evaluated anyway")
    else:
        draft.unread("rewards of training are evaluated anyway", "eval_rewards")


def _optim(draft: Draft, updates: int) -> None:
    draft.copy("train.learning_rate")
    betas = draft.get("train.adam_betas")
    if not (isinstance(betas, list | tuple) and len(betas) == 2 and all(map(is_number, betas))):
        raise draft.fault("train.adam_betas", "it must be two numbers")
    draft.put("optim.betas", [float(beta) for beta in betas], "train.adam_betas")
    draft.copy("train.adam_epsilon", "train.adam_weight_decay", "train.max_grad_norm")
    decay, every = draft.real("train.ema_decay", least=0), draft.whole("train.ema_update_interval")
    if decay:
        draft.put("optim.ema.decay", decay, "train.ema_decay")
        note = f"{every} epochs x {updates} updates"
        draft.put("optim.ema.every", every * updates, "train.ema_update_interval", note=note)
        _warmed_up(draft, updates)
    else:
        draft.put("optim.ema", None, "train.ema_decay")
        draft.unread("there is no average", "train.ema_update_interval")


def _warmed_up(draft: Draft, updates: int) -> None:
    """The warm-up of their average, (1 + e) / (w + e) with epochs e from 0: n / ((w - 1) U + n) at n = (e + 1) U."""
    kind, steps = draft.get("train.ema_decay_schedule"), _WARMUP_EPOCHS
    keys = ["train.ema_decay_schedule"]
    if draft.get("train.trainer_type") in KEYS["train.warmup_steps"].readers:
        steps = draft.whole("train.warmup_steps", least=0)
        keys.append("train.warmup_steps")
    if kind == "constant" or (kind == "power" and steps == 0):
        draft.put("optim.ema.warmup", False, *keys)
    elif kind == "power":
        note = f"theirs counts epochs of {updates} updates"
        draft.put("optim.ema.warmup_terms", [0.0, float((steps - 1) * updates)], *keys, note=note)
    else:
        reason = f"the average that is evaluated and saved warms up by (1 + n) / (10 + n) updates here, {kind} there"
        draft.leave("train.ema_decay_schedule", reason, changes=True)
