"""Flow-Factory: what becomes of its options (its commit a0b2bc5), of a method on samples in a module beside it."""

from __future__ import annotations

import re

from flowrl.apps.migration import flow_factory_samples as samples
from flowrl.apps.migration.engine import Draft, is_number
from flowrl.apps.migration.flow_factory_credit import REWARDS, advantages, bound, rewards
from flowrl.apps.migration.flow_factory_file import read
from flowrl.apps.migration.flow_factory_keys import KEYS, OF_TRAINERS
from flowrl.apps.migration.table import Tool

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
_UNKNOWN_STEPS = 1000
_WARMUP_EPOCHS = 10
"""w of their average's warm-up, where a trainer has no key for it."""


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of Flow-Factory."""
    kind = draft.get("train.trainer_type")
    draft.choice("train.trainer_type", {**_METHODS, **samples.METHODS})
    for key in draft.source.values.keys() & OF_TRAINERS.keys():
        if kind not in OF_TRAINERS[key]:
            draft.leave(key, f"their trainer {kind} does not read it", changes=False)
    family = _family(draft)
    _run(draft)
    _model(draft, family)
    _data(draft)
    _rollout(draft, kind)
    if kind in _METHODS:
        _sampler(draft)
        trained = _method(draft, _METHODS[kind])
        _credit(draft)
        updates = _updates(draft, trained)
    else:
        updates = _updates(draft, samples.terms(draft)) * draft.whole("train.num_inner_epochs")
        samples.method(draft, family, updates)
    rewards(draft)
    _optim(draft, updates)
    _evaluation(draft)


def _family(draft: Draft) -> str:
    kind = draft.text("model.model_type")
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
    draft.put("output", draft.text("log.save_dir"), "log.save_dir", note="relative to the working directory")
    if draft.whole("log.save_freq", least=0):
        draft.put("checkpoint.every", draft.whole("log.save_freq"), "log.save_freq")
    else:
        draft.leave("log.save_freq", "the last iteration is saved always", changes=False)


def _model(draft: Draft, family: str) -> None:
    draft.put("model.name", family, "model.model_type")
    draft.put_place("model.path", "model.model_name_or_path")
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
    draft.put("model.gradient_checkpointing", draft.switch(key), key)
    if draft.get("model.attn_backend") is not None:
        draft.put("model.attention", draft.text("model.attn_backend"), "model.attn_backend")
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
        draft.put_place("model.init_lora", "model.resume_path", "model.resume_type")
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
    names = {
        option: [f"{part}.jsonl", f"{part}.txt"]
        for option, part in (("data.prompts", "train"), ("data.eval_prompts", "test"))
    }
    draft.put_prompts(draft.text("data.dataset_dir"), names, ["data.dataset_dir"])
    if draft.get("data.max_dataset_size") is not None:
        draft.put("data.max_prompts", draft.whole("data.max_dataset_size"), "data.max_dataset_size")


def _sampler(draft: Draft) -> None:
    names = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
    name = draft.choice("scheduler.dynamics_type", names)
    draft.put("rollout.sampler.name", name, "scheduler.dynamics_type")
    option = "eta" if name == "dance_sde" else "noise_level"
    draft.put(f"rollout.sampler.{option}", float(draft.number("scheduler.noise_level")), "scheduler.noise_level")


def _rollout(draft: Draft, kind: str) -> None:
    for key, option in (
        ("train.num_inference_steps", "num_inference_steps"),
        ("train.unique_sample_num_per_epoch", "prompts_per_iteration"),
        ("train.group_size", "group_size"),
    ):
        draft.put(f"rollout.{option}", draft.whole(key), key)
    draft.put("rollout.guidance_scale", float(draft.number("train.guidance_scale")), "train.guidance_scale")
    size, group = draft.whole("train.per_device_batch_size"), draft.whole("train.group_size")
    note = "per process, memory alone"
    draft.put("rollout.batch_size", size, "train.per_device_batch_size", note=note)
    # DGPO and CRD compare the samples of a prompt in one batch, DPO the two of a pair.
    rows = max(size, group) if kind in ("dgpo", "crd") else 2 * size if kind == "dpo" else size
    draft.put("optim.batch_size", rows, "train.per_device_batch_size", note=note)


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


def _credit(draft: Draft) -> None:
    draft.put("algorithm.clip_range", bound(draft, "train.clip_range"), "train.clip_range")
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
    advantages(draft, clip=True)


def _updates(draft: Draft, trained: int) -> int:
    """Write the optimizer steps of a pass, and return their number; `trained`: steps, or times, of a sample."""
    many = draft.get("train.gradient_accumulation_steps")
    if many == "auto":
        updates, keys = draft.whole("train.gradient_step_per_epoch"), ["train.gradient_step_per_epoch"]
        keys += [key for key in ("train.gradient_accumulation_steps", "num_processes") if draft.given(key)]
    else:
        total, part, how = samples.work(draft)
        part *= draft.whole("train.gradient_accumulation_steps")
        how = f"{how} x trained steps / accumulation"
        updates = draft.quotient(total * trained, part, "optim.updates_per_iteration", how)
        keys = ["train.gradient_accumulation_steps", "num_processes"]
        if draft.given("train.gradient_step_per_epoch"):
            draft.leave("train.gradient_step_per_epoch", "an integer accumulation takes its place", changes=False)
    draft.put("optim.updates_per_iteration", updates, *keys)
    return updates


def _optim(draft: Draft, updates: int) -> None:
    draft.put("optim.learning_rate", float(draft.number("train.learning_rate")), "train.learning_rate")
    betas = draft.get("train.adam_betas")
    if not (isinstance(betas, list | tuple) and len(betas) == 2 and all(map(is_number, betas))):
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
        _warmed_up(draft, updates)
    else:
        draft.put("optim.ema", None, "train.ema_decay")
        if draft.given("train.ema_update_interval"):
            draft.leave("train.ema_update_interval", "there is no average", changes=False)


def _warmed_up(draft: Draft, updates: int) -> None:
    """The warm-up of their average, (1 + e) / (w + e) with epochs e from 0: n / ((w - 1) U + n) at n = (e + 1) U."""
    kind, steps = draft.get("train.ema_decay_schedule"), _WARMUP_EPOCHS
    keys = ["train.ema_decay_schedule"]
    if draft.get("train.trainer_type") in OF_TRAINERS["train.warmup_steps"]:
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
    title="Flow-Factory (X-GenGroup/Flow-Factory @a0b2bc5, 2026-05-02), trainers grpo, grpo-guard, nft, awm, dgpo, crd "
    "and dpo",
    keys=KEYS,
    read=read,
    rules=rules,
    refuses_unknown=False,
    form="a YAML file, such as one of examples/",
    rewards=REWARDS,
)
