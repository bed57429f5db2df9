"""Flow-Factory: what becomes of its options with the trainers grpo and grpo-guard (its commit a0b2bc5)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from flowrl.config.migration.engine import Draft
from flowrl.config.migration.flow_factory_keys import KEYS
from flowrl.config.migration.table import Source, Tool
from flowrl.core.errors import ConfigError
from flowrl.core.strict import parse_yaml, read_text

_SECTIONS = ("data", "model", "log", "train", "scheduler", "eval")
_METHODS = {"grpo": "flow_grpo", "grpo-guard": "grpo_guard"}
_FAMILIES = {
    "sd3-5": "sd3",
    "sd3": "sd3",
    "flux1": "flux",
    "qwen-image": "qwen_image",
    "qwenimage": "qwen_image",
    "wan2_t2v": "wan",
}
_NONE = ("ltx2", "wan2_v2v")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "no": "float32", None: "float32"}
_REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "PickScore": ({"name": "pickscore", "scale": 0.0384615}, "theirs divides by 26"),
    "CLIP": ({"name": "clip_score"}, ""),
    "OCR": ({"name": "ocr"}, "the reader differs: docs/rewards/ocr.md"),
}
_OF_MEMORY = ("name", "reward_model", "weight", "batch_size", "device", "dtype", "async_reward", "num_workers")
_UNKNOWN_STEPS = 1000


def read(place: str) -> Source:
    """A YAML configuration.

    Raises:
        ConfigError: it is no mapping of sections, or doubles a key.
    """
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
    return Source(file, file.stem, values, {}, count)


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of Flow-Factory's grpo or grpo-guard."""
    kind = draft.get("train.trainer_type")
    if kind not in _METHODS:
        known = ", ".join(_METHODS)
        raise draft.fault("train.trainer_type", f"only {known} are converted yet (docs/migration.md)")
    family = _family(draft)
    _run(draft)
    _model(draft, family)
    _data(draft)
    _rollout(draft)
    trained = _method(draft, _METHODS[kind])
    _credit(draft)
    _rewards(draft)
    _optim(draft, trained)
    _evaluation(draft)


def _family(draft: Draft) -> str:
    kind = str(draft.get("model.model_type"))
    if kind.startswith(_NONE):
        raise draft.fault("model.model_type", "flowrl has no adapter of it, so there is nothing to convert to")
    return _FAMILIES.get(kind, "generic")


def _run(draft: Draft) -> None:
    name = str(draft.get("log.run_name") or draft.source.label)
    note = "" if draft.get("log.run_name") else "none there: the name of the file"
    draft.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name), "log.run_name", note=note)
    draft.put("seed", draft.whole("train.seed", least=0), "train.seed", note="random streams differ")
    epochs = draft.get("train.max_epochs")
    if epochs is None or epochs == -1:
        draft.put("iterations", _UNKNOWN_STEPS, "train.max_epochs", note="no end there; 1000 here")
    else:
        draft.put("iterations", draft.whole("train.max_epochs"), "train.max_epochs")
    draft.put("output", str(draft.get("log.save_dir")), "log.save_dir", note="relative to the working directory")
    if draft.whole("log.save_freq", least=0):
        draft.put("checkpoint.every", draft.whole("log.save_freq"), "log.save_freq")
    else:
        draft.leave("log.save_freq", "the last iteration is saved always", changes=False)


def _model(draft: Draft, family: str) -> None:
    draft.put("model.name", family, "model.model_type")
    draft.put("model.path", str(draft.get("model.model_name_or_path")), "model.model_name_or_path")
    draft.put("model.dtype", draft.choice("mixed_precision", _DTYPES), "mixed_precision")
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
        draft.put("model.max_sequence_length", draft.whole("train.max_sequence_length"), "train.max_sequence_length")
    if family == "wan" and draft.get("train.num_frames") is not None:
        draft.put("model.num_frames", draft.whole("train.num_frames"), "train.num_frames")
    shift = draft.get("scheduler.flow_shift")
    if shift is not None and family in ("flux", "qwen_image", "wan"):
        draft.put("model.shift", float(draft.number("scheduler.flow_shift")), "scheduler.flow_shift")
    key = "train.enable_gradient_checkpointing"
    draft.put("model.gradient_checkpointing", bool(draft.get(key)), key)
    if draft.get("model.attn_backend") is not None:
        draft.put("model.attention", str(draft.get("model.attn_backend")), "model.attn_backend")
    if "fsdp" in str(draft.get("config_file")).lower() and family != "generic":
        draft.put("model.shard", True, "config_file", note="a file of FSDP")
    elif draft.given("config_file"):
        draft.leave("config_file", "it is accelerate's; memory and speed alone", changes=False)


def _lora(draft: Draft, family: str) -> None:
    full = draft.choice("model.finetune_type", {"full": True, "lora": False})
    start = draft.get("model.resume_path")
    if full:
        draft.put("model.lora", None, "model.finetune_type", note="all weights")
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            if draft.given(f"model.{name}"):
                default = name != "target_modules" or draft.get("model.target_modules") in ("all", "default")
                draft.leave(f"model.{name}", "all weights are trained", changes=not default)
    else:
        rank = draft.whole("model.lora_rank")
        draft.put("model.lora.rank", rank, "model.lora_rank", "model.finetune_type")
        alpha = 2 * rank if draft.get("model.lora_alpha") is None else draft.number("model.lora_alpha")
        draft.put("model.lora.alpha", alpha, "model.lora_alpha")
        _targets(draft, family)
    if start is not None and not full and draft.get("model.resume_type") in (None, "lora"):
        draft.put("model.init_lora", str(start), "model.resume_path", "model.resume_type")
    else:
        for name in ("resume_path", "resume_type"):
            if draft.given(f"model.{name}"):
                reason = "their checkpoints cannot be resumed here; model.init_lora takes a LoRA"
                draft.leave(f"model.{name}", reason, changes=start is not None)


def _targets(draft: Draft, family: str) -> None:
    targets = draft.get("model.target_modules")
    if isinstance(targets, list | tuple):
        draft.put("model.lora.targets", [str(each) for each in targets], "model.target_modules")
        return
    if targets not in ("all", "default"):
        draft.put("model.lora.targets", [str(targets)], "model.target_modules")
        return
    draft.put("model.lora.targets", None, "model.target_modules", note="the family's own list")
    if targets == "all":
        reason = "every linear layer there, the family's own list here; name others in model.lora.targets"
        draft.leave("model.target_modules", reason, changes=True)
    elif family not in ("sd3", "flux"):
        reason = "their list and ours are compared for SD3 and FLUX alone; name others in model.lora.targets"
        draft.leave("model.target_modules", reason, changes=True)


def _data(draft: Draft) -> None:
    folder, root = str(draft.get("data.dataset_dir")), Path.cwd()
    for option, part in (("data.prompts", "train"), ("data.eval_prompts", "test")):
        found = [name for name in (f"{part}.jsonl", f"{part}.txt") if (root / folder / name).exists()]
        place = os.path.join(folder, found[0] if found else f"{part}.txt")
        if found:
            place = os.path.relpath(root / place, draft.folder.resolve())
        draft.put(option, place, "data.dataset_dir", note="relative to this file")
    if draft.get("data.max_dataset_size") is not None:
        draft.put("data.max_prompts", draft.whole("data.max_dataset_size"), "data.max_dataset_size")


def _rollout(draft: Draft) -> None:
    names = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
    name = draft.choice("scheduler.dynamics_type", names)
    draft.put("rollout.sampler.name", name, "scheduler.dynamics_type")
    option = "eta" if name == "dance_sde" else "noise_level"
    draft.put(f"rollout.sampler.{option}", float(draft.number("scheduler.noise_level")), "scheduler.noise_level")
    for key, option in (
        ("train.num_inference_steps", "num_inference_steps"),
        ("train.unique_sample_num_per_epoch", "prompts_per_iteration"),
        ("train.group_size", "group_size"),
    ):
        draft.put(f"rollout.{option}", draft.whole(key), key)
    draft.put("rollout.guidance_scale", float(draft.number("train.guidance_scale")), "train.guidance_scale")
    for place in ("rollout", "optim"):
        size = draft.whole("train.per_device_batch_size")
        draft.put(f"{place}.batch_size", size, "train.per_device_batch_size", note="per process, memory alone")


def _method(draft: Draft, method: str) -> int:
    """The method and its trained steps, whose number is returned."""
    steps, count = draft.whole("train.num_inference_steps"), draft.whole("scheduler.num_sde_steps")
    asked = draft.get("scheduler.sde_steps")
    places = list(range(steps - 1)) if asked is None else asked
    if not isinstance(places, list) or not places or not all(type(each) is int and each >= 0 for each in places):
        raise draft.fault("scheduler.sde_steps", "it must be a list of steps")
    keys = ("scheduler.num_sde_steps", "scheduler.sde_steps")
    kept = sorted(each for each in set(places) if each < steps - 1)
    if not kept:
        raise draft.fault("scheduler.sde_steps", "the last step is never trained here, and it names no other")
    if len(kept) < len(set(places)):
        draft.leave("scheduler.sde_steps", f"the last step is never trained here: {kept} remain", changes=True)
    row = kept == list(range(kept[0], kept[-1] + 1))
    if count >= len(kept) or method == "grpo_guard":
        draft.put("algorithm.name", method, "train.trainer_type")
        whole = kept == list(range(steps - 1))
        draft.put("algorithm.sde_steps", None if whole else kept, *keys, note="all of these are trained")
        if count < len(kept):
            reason = f"{count} of {len(kept)} steps are drawn there; {method} trains all of them here"
            draft.leave("scheduler.num_sde_steps", reason, changes=True)
    else:
        draft.put("algorithm.name", "flow_grpo_fast", "train.trainer_type", *keys, note="some steps of a row")
        draft.put("algorithm.window_size", count, "scheduler.num_sde_steps")
        draft.put("algorithm.low", kept[0], "scheduler.sde_steps")
        draft.put("algorithm.high", kept[-1] + 1, "scheduler.sde_steps", note="exclusive")
        if count > 1 or not row:
            reason = f"theirs draws {count} of {kept} anywhere, the window here is of neighbours"
            draft.leave("scheduler.num_sde_steps", reason, changes=True)
    if method == "grpo_guard":
        draft.put("algorithm.reweight", "none", "train.trainer_type", note="as their grpo-guard")
    return min(count, len(kept))


def _bound(draft: Draft, key: str) -> float:
    """The bound of a symmetric range, given as one number or two."""
    value = draft.get(key)
    pair = list(value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(pair) <= 2 or not all(isinstance(each, int | float) and each for each in pair):
        raise draft.fault(key, "it must be a number, or a lower and an upper bound")
    if len(pair) == 2 and pair[0] != -pair[1]:
        draft.leave(key, f"ranges are symmetric here: {pair[1]:g} is written", changes=True)
    return abs(float(pair[-1]))


def _credit(draft: Draft) -> None:
    draft.put("algorithm.clip_range", _bound(draft, "train.clip_range"), "train.clip_range")
    coef, form = float(draft.number("train.kl_beta", least=0)), draft.get("train.kl_type")
    if coef and form != "x-based":
        draft.leave("train.kl_beta", "a KL of velocities has no counterpart here; none is written", changes=True)
        draft.put("algorithm.kl.coef", 0.0, "train.kl_type")
    else:
        draft.put("algorithm.kl.coef", coef, "train.kl_beta")
        if coef:
            draft.put("algorithm.kl.divisor", "none", "train.kl_type")
        elif draft.given("train.kl_type"):
            draft.leave("train.kl_type", "there is no KL", changes=False)
    rule = draft.choice("train.advantage_aggregation", {"gdpo": "gdpo", "sum": "group"})
    draft.put("algorithm.advantages.name", rule, "train.advantage_aggregation")
    if rule == "gdpo":
        draft.put("algorithm.advantages.std", "group", "train.advantage_aggregation")
        if draft.given("train.global_std"):
            draft.leave("train.global_std", "gdpo does not read it", changes=False)
    else:
        std = "global" if draft.get("train.global_std") else "group"
        draft.put("algorithm.advantages.std", std, "train.global_std")
    draft.put("algorithm.advantages.eps", 1e-6, note="in their code, as the least std; added to it here")
    draft.put("algorithm.advantages.clip", _bound(draft, "train.adv_clip_range"), "train.adv_clip_range")


def _entries(draft: Draft, key: str) -> list[dict[str, Any]]:
    """The rewards under a key that have a counterpart, as entries of ours; the others are listed."""
    found = draft.get(key)
    several = [found] if isinstance(found, dict) else list(found or ())
    result: list[dict[str, Any]] = []
    for number, entry in enumerate(several):
        if not isinstance(entry, dict):
            raise draft.fault(key, "each reward must be a mapping with reward_model")
        name = entry.get("reward_model", "PickScore")
        if name not in _REWARDS:
            draft.leave(f"{key}.{number}", f"no reward of flowrl scores as {name} does; left out", changes=True)
            continue
        for other in [other for other in entry if other not in _OF_MEMORY]:
            draft.leave(f"{key}.{number}.{other}", f"an argument of their {name}; left out", changes=True)
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise draft.fault(key, f"the weight of {name} must be a number")
        result.append({**_REWARDS[name][0], "weight": float(weight)})
    return result


def _rewards(draft: Draft) -> None:
    entries = _entries(draft, "rewards")
    for entry in entries:
        note = next(note for ours, note in _REWARDS.values() if ours["name"] == entry["name"])
        draft.reward(entry, "rewards", note=note)
    if not any(entry["weight"] for entry in entries):
        raise draft.fault("rewards", "none has a counterpart here with a weight, so there is nothing to train on")
    trained = {entry["name"] for entry in entries}
    others = [entry for entry in _entries(draft, "eval_rewards") if entry["name"] not in trained]
    if others:
        ours = [{key: value for key, value in entry.items() if key != "weight"} for entry in others]
        draft.put("eval.rewards", ours, "eval_rewards", note="those of training are evaluated anyway")
    elif draft.given("eval_rewards"):
        draft.leave("eval_rewards", "rewards of training are evaluated anyway", changes=False)


def _optim(draft: Draft, trained: int) -> None:
    many = draft.get("train.gradient_accumulation_steps")
    if many == "auto":
        updates, keys = draft.whole("train.gradient_step_per_epoch"), ["train.gradient_step_per_epoch"]
        keys += [key for key in ("train.gradient_accumulation_steps", "num_processes") if draft.given(key)]
    else:
        total = draft.whole("train.unique_sample_num_per_epoch") * draft.whole("train.group_size") * trained
        part = draft.gpus() * draft.whole("train.per_device_batch_size")
        part *= draft.whole("train.gradient_accumulation_steps")
        how = "prompts x group x trained steps / (GPUs x b x accumulation)"
        updates = draft.quotient(total, part, "optim.updates_per_iteration", how)
        keys = ["train.gradient_accumulation_steps", "num_processes"]
        if draft.given("train.gradient_step_per_epoch"):
            draft.leave("train.gradient_step_per_epoch", "an integer accumulation takes its place", changes=False)
    draft.put("optim.updates_per_iteration", updates, *keys)
    draft.put("optim.learning_rate", float(draft.number("train.learning_rate")), "train.learning_rate")
    betas = draft.get("train.adam_betas")
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise draft.fault("train.adam_betas", "it must be two numbers")
    draft.put("optim.betas", [float(beta) for beta in betas], "train.adam_betas")
    draft.put("optim.eps", float(draft.number("train.adam_epsilon")), "train.adam_epsilon")
    draft.put("optim.weight_decay", float(draft.number("train.adam_weight_decay")), "train.adam_weight_decay")
    draft.put("optim.max_grad_norm", float(draft.number("train.max_grad_norm")), "train.max_grad_norm")
    decay, every = float(draft.number("train.ema_decay", least=0)), draft.whole("train.ema_update_interval")
    if decay:
        draft.put("optim.ema.decay", decay, "train.ema_decay")
        note = f"{every} epochs x {updates} updates"
        draft.put("optim.ema.every", every * updates, "train.ema_update_interval", note=note)
    else:
        draft.put("optim.ema", None, "train.ema_decay")
        if draft.given("train.ema_update_interval"):
            draft.leave("train.ema_update_interval", "there is no average", changes=False)


def _evaluation(draft: Draft) -> None:
    draft.put("eval.every", draft.whole("eval.eval_freq", least=0), "eval.eval_freq")
    draft.put("eval.num_inference_steps", draft.whole("eval.num_inference_steps"), "eval.num_inference_steps")
    draft.put("eval.guidance_scale", float(draft.number("eval.guidance_scale")), "eval.guidance_scale")
    size = draft.whole("eval.per_device_batch_size")
    draft.put("eval.batch_size", size, "eval.per_device_batch_size", note="per process")
    if draft.given("eval.resolution"):
        other = draft.get("eval.resolution") != draft.get("train.resolution")
        draft.leave("eval.resolution", "evaluations are at the model's size", changes=other)


TOOL = Tool(
    name="flow_factory",
    title="Flow-Factory (X-GenGroup/Flow-Factory @a0b2bc5, 2026-05-02), trainers grpo and grpo-guard; "
    "nft, awm, dgpo, crd and dpo are refused: not converted yet",
    keys=KEYS,
    read=read,
    rules=rules,
    refuses_unknown=False,
    form="a YAML file, such as one of examples/",
    rewards=_REWARDS,
)
