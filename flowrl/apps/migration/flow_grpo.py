"""flow_grpo: what becomes of its options (config/base.py and the scripts, yifan123/flow_grpo @879042c)."""

from __future__ import annotations

import re
from typing import Any

from flowrl.apps.migration import flow_grpo_nft as nft
from flowrl.apps.migration.engine import Draft
from flowrl.apps.migration.flow_grpo_file import read
from flowrl.apps.migration.flow_grpo_keys import BY_HAND, KEYS
from flowrl.apps.migration.table import Tool

_FAMILIES = {
    "stable-diffusion-3": "sd3",
    "sd3": "sd3",
    "kontext": "generic",
    "qwen-image-edit": "generic",
    "flux": "flux",
    "qwen-image": "qwen_image",
    "wan2": "wan",
    "stable-diffusion-v1": "sd",
}
"""Part of a model's path -> adapter; the first that fits."""
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "no": "float32"}
_REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "pickscore": ({"name": "pickscore", "scale": 0.0384615}, "theirs divides by 26"),
    "geneval": ({"name": "geneval", "mode": "partial"}, "the trained score is inferred"),
    "jpeg_compressibility": ({"name": "jpeg", "scale": 0.002}, "theirs divides by 500"),
    "clipscore": (
        {"name": "clip_score", "scale": 3.3333},
        "theirs divides by 30, ours and DiffusionNFT by 100: scale 1",
    ),
    "ocr": (
        {"name": "ocr", "allow_extra_text": True, "min_confidence": 0.5},
        "the reader differs: docs/rewards/ocr.md",
    ),
    "video_ocr": (
        {"name": "ocr", "allow_extra_text": False, "min_confidence": 0.5},
        "the reader differs: docs/rewards/ocr.md",
    ),
    "aesthetic": ({"name": "aesthetic"}, ""),
    "imagereward": ({"name": "image_reward"}, ""),
    "unifiedreward": ({"name": "unified_reward"}, "name its model: rewards.N.local.model or http.model"),
    "qwenvl": ({"name": "vlm_judge"}, "its rubric differs; name the model: rewards.N.local.model or http.model"),
}
_UNKNOWN_STEPS = 1000
_ON_SAMPLES = ("online_dpo", "raft", "diffusion_nft")
"""Methods that train on finished samples."""
_RANKING = ("online_dpo", "raft")


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of flow_grpo."""
    path = draft.get("pretrained.model")
    family = next((name for part, name in _FAMILIES.items() if part in str(path).lower()), "generic")
    if "bagel" in str(path).lower():
        raise draft.fault("pretrained.model", "flowrl has no adapter of BAGEL, so there is nothing to convert to")
    method = _method(draft, family)
    _run(draft)
    _model(draft, family)
    _data(draft)
    _rollout(draft, family, method)
    _algorithm(draft, family, method)
    _rewards(draft, _REWARDS | nft.REWARDS if method == "diffusion_nft" else _REWARDS)
    _optim(draft, family, method)
    _evaluation(draft, method)
    if draft.given("resume_from") and not draft.get("resume_from"):
        draft.leave("resume_from", "it names none", changes=False)


def _method(draft: Draft, family: str) -> str:
    """The method of the script that a configuration is written for."""
    stem = draft.source.file.stem
    kind = draft.get("train.algorithm")
    window = [key for key in ("sample.sde_window_size", "sample.train_num_steps") if draft.given(key)]
    if stem == "nft" or draft.given("decay_type"):
        method, keys = "diffusion_nft", ["decay_type"]
    elif kind is not None or stem in ("dpo", "sft"):
        kind = kind or stem
        if kind not in ("dpo", "sft"):
            raise draft.fault("train.algorithm", "it must be dpo or sft")
        method, keys = {"dpo": "online_dpo", "sft": "raft"}[kind], ["train.algorithm"]
    elif draft.switch("rationorm") or stem == "grpo_guard":
        method, keys = "grpo_guard", ["rationorm"]
    elif window:
        method, keys = "flow_grpo_fast", window
    else:
        method, keys = "flow_grpo", []
    why = "" if any(map(draft.given, keys)) else "the configuration says no method: inferred from the file and its keys"
    draft.put("algorithm.name", method, *filter(draft.given, keys), note=why)
    if family == "wan" and method not in ("flow_grpo", "diffusion_nft"):
        raise draft.fault("pretrained.model", f"their script of {method} does not take Wan")
    return method


def _run(draft: Draft) -> None:
    name = str(draft.get("run_name") or draft.source.label)
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    note = "" if draft.get("run_name") else "run_name is empty: the name of the configuration"
    draft.put("name", clean, "run_name", note=note)
    draft.put("seed", draft.whole("seed", least=0), "seed", note="random streams differ")
    epochs = draft.whole("num_epochs")
    if epochs == BY_HAND:
        draft.put("iterations", _UNKNOWN_STEPS, "num_epochs", note=f"{epochs} stands for: stopped by hand; 1000 here")
    else:
        draft.put("iterations", epochs, "num_epochs")
    folder = "save_dir" if draft.get("save_dir") else "logdir"
    draft.put("output", draft.text(folder), folder, note="relative to the working directory")
    if folder == "save_dir" and draft.given("logdir"):
        draft.leave("logdir", "save_dir takes its place", changes=False)
    draft.put("checkpoint.every", draft.whole("save_freq"), "save_freq")
    draft.put("checkpoint.keep", draft.whole("num_checkpoint_limit"), "num_checkpoint_limit")


def _model(draft: Draft, family: str) -> None:
    draft.put("model.name", family, "pretrained.model", note="adapter by the model's path")
    draft.put_place("model.path", "pretrained.model")
    draft.put(
        "model.dtype", draft.choice("mixed_precision", _DTYPES), "mixed_precision", note="trained weights: float32"
    )
    if draft.switch("use_lora"):
        rank = 64 if family in ("flux", "qwen_image") or family == "generic" else 32
        draft.put("model.lora.rank", rank, "use_lora", note="in their script's code; targets are the family's")
        draft.put("model.lora.alpha", 2 * rank, "use_lora", note="in their script's code")
    else:
        draft.put("model.lora", None, "use_lora", note="all weights")
    if draft.get("train.lora_path"):
        draft.put_place("model.init_lora", "train.lora_path")
    if family == "wan":
        for key, option in (("height", "height"), ("width", "width"), ("frames", "num_frames")):
            draft.put(f"model.{option}", draft.whole(key), key)
        if draft.given("resolution"):
            draft.leave("resolution", "their Wan script takes height and width", changes=False)
    else:
        for side in ("height", "width"):
            draft.put(f"model.{side}", draft.whole("resolution"), "resolution")
    tokens = {"wan": 512, "sd3": 128, "flux": 128, "qwen_image": 128}
    if family in tokens:
        draft.put("model.max_sequence_length", tokens[family], note="text tokens, in their script's code")
    checkpointing = draft.switch("activation_checkpointing")
    draft.put("model.gradient_checkpointing", checkpointing, "activation_checkpointing")


def _data(draft: Draft) -> None:
    kind, folder = draft.get("prompt_fn"), draft.text("dataset")
    if kind not in ("general_ocr", "geneval"):
        raise draft.fault("prompt_fn", "only general_ocr and geneval read files of prompts")
    edits = any(part in draft.text("pretrained.model").lower() for part in ("kontext", "edit"))
    form = "{}_metadata.jsonl" if kind == "geneval" or edits else "{}.txt"
    names = {option: [form.format(part)] for option, part in (("data.prompts", "train"), ("data.eval_prompts", "test"))}
    draft.put_prompts(folder, names, ("dataset", "prompt_fn"), draft.source.file.resolve().parent.parent)


def _rollout(draft: Draft, family: str, method: str) -> None:
    _sampler(draft, family, method)
    draft.put("rollout.num_inference_steps", draft.whole("sample.num_steps"), "sample.num_steps")
    scale = float(draft.number("sample.guidance_scale"))
    draft.put("rollout.guidance_scale", scale, "sample.guidance_scale")
    if draft.given("train.cfg"):
        if method in _ON_SAMPLES:
            draft.leave("train.cfg", f"the training forwards of {method} are without guidance", changes=scale > 1)
        elif family == "flux" or draft.get("train.cfg") or scale <= 1:
            draft.leave("train.cfg", "training has the rollout's guidance here, and so has theirs", changes=False)
        else:
            reason = "training here has the rollout's guidance always; theirs would train without it"
            draft.leave("train.cfg", reason, changes=True)
    size, size_key = draft.whole("sample.train_batch_size"), "sample.train_batch_size"
    if draft.given("sample.mini_num_image_per_prompt"):
        size_key = "sample.mini_num_image_per_prompt"
        size = draft.whole(size_key)
        draft.leave("sample.train_batch_size", f"the old script samples {size} images at once", changes=False)
    group = draft.whole("sample.num_image_per_prompt")
    batches = draft.whole("sample.num_batches_per_epoch") * draft.whole("sample.sample_time_per_prompt")
    keys = [size_key, "sample.num_batches_per_epoch", "sample.num_image_per_prompt"]
    keys += [key for key in ("sample.sample_time_per_prompt",) if draft.given(key)]
    gpus = draft.gpus()
    prompts = draft.quotient(gpus * size * batches, group, "rollout.prompts_per_iteration", "GPUs x b x M / k")
    note = f"{gpus} GPUs x {size} x {batches} batches / {group}; all differ, theirs may draw one twice"
    draft.put("rollout.prompts_per_iteration", prompts, *keys, note=note)
    draft.put("rollout.group_size", group, "sample.num_image_per_prompt")
    draft.put("rollout.batch_size", size, size_key, note="per process, memory alone")
    if method != "diffusion_nft":
        draft.put("optim.batch_size", size, size_key, note="per process, memory alone")
        if draft.given("train.batch_size"):
            draft.leave("train.batch_size", "their scripts train the batches as they were sampled", changes=False)
    draft.put("rollout.shared_noise", draft.switch("sample.same_latent"), "sample.same_latent")
    many = draft.whole("train.gradient_accumulation_steps")
    if method == "diffusion_nft":
        nft.updates(draft, size * batches, many)
    else:
        steps = draft.quotient(batches, many, "optim.updates_per_iteration", "M/A")
        keys = ("sample.num_batches_per_epoch", "train.gradient_accumulation_steps")
        draft.put("optim.updates_per_iteration", steps, *keys, note="batches / accumulation")
    if draft.number("train.num_inner_epochs", least=1) > 1:
        draft.leave("train.num_inner_epochs", "an iteration goes through its samples once", changes=True)
    elif draft.given("train.num_inner_epochs"):
        draft.leave("train.num_inner_epochs", "1, as here", changes=False)


def _sampler(draft: Draft, family: str, method: str) -> None:
    if method == "diffusion_nft":
        nft.solver(draft)
        return
    if method in _RANKING:
        draft.put("algorithm.solver", "ode", note="their script samples without noise")
        for key in ("sample.noise_level", "sample.sde_type"):
            if draft.given(key):
                draft.leave(key, f"their script of {method} samples without noise", changes=False)
        return
    if family == "wan":
        draft.put("rollout.sampler.name", "wan_sde", note="their Wan script's sampler, which has no strength")
        for key in ("sample.noise_level", "sample.sde_type"):
            if draft.given(key):
                draft.leave(key, "their Wan script does not read it", changes=False)
        return
    name = draft.choice("sample.sde_type", {None: "flow_sde", "sde": "flow_sde", "cps": "cps"})
    keys = ["sample.sde_type"] if draft.given("sample.sde_type") else []
    draft.put("rollout.sampler.name", name, *keys, note="" if keys else "their script's sampler")
    draft.put("rollout.sampler.noise_level", float(draft.number("sample.noise_level")), "sample.noise_level")


def _algorithm(draft: Draft, family: str, method: str) -> None:
    if method in _RANKING:
        _refreshed(draft, method)
    elif method == "diffusion_nft":
        nft.method(draft)
    else:
        _clipped(draft, family, method)
    if method in _RANKING:
        for key in ("sample.global_std", "train.adv_clip_max", "per_prompt_stat_tracking"):
            if draft.given(key):
                draft.leave(key, f"{method} only ranks the samples of a prompt", changes=False)
        return
    tracking = draft.switch("per_prompt_stat_tracking")
    draft.put("algorithm.advantages.name", "group" if tracking else "batch", "per_prompt_stat_tracking")
    if not tracking:
        draft.put("algorithm.advantages.history", None, "per_prompt_stat_tracking")
        if draft.given("sample.global_std"):
            draft.leave("sample.global_std", "without tracking the std is that of the batch", changes=False)
    else:
        std = "global" if draft.switch("sample.global_std") else "group"
        draft.put("algorithm.advantages.std", std, "sample.global_std")
    draft.put("algorithm.advantages.eps", 1e-4, note="in their code")
    draft.put("algorithm.advantages.clip", float(draft.number("train.adv_clip_max")), "train.adv_clip_max")


def _refreshed(draft: Draft, method: str) -> None:
    """online_dpo and raft, whose samples are drawn by a policy that is refreshed now and then."""
    every = draft.whole("train.ref_update_step")
    never = every >= BY_HAND
    if method == "online_dpo":
        draft.put("algorithm.beta", float(draft.number("train.beta")), "train.beta")
        draft.put("algorithm.behaviour", "reference" if never else "lagged", "train.ref_update_step")
        if not never:
            draft.put("algorithm.ref_update", every, "train.ref_update_step")
    elif never:
        reason = "raft has no fixed reference to draw by: it draws by the policy of the last refresh"
        draft.leave("train.ref_update_step", reason, changes=True)
    else:
        draft.put("algorithm.refresh", every, "train.ref_update_step")
    for key in ("train.clip_range", "train.timestep_fraction"):
        if draft.given(key):
            draft.leave(key, f"{method} has no ratio and no trained steps: its times are drawn", changes=True)


def _clipped(draft: Draft, family: str, method: str) -> None:
    """The methods of a clipped ratio."""
    draft.put("algorithm.clip_range", float(draft.number("train.clip_range")), "train.clip_range")
    coef = float(draft.number("train.beta", least=0))
    draft.put("algorithm.kl.coef", coef, "train.beta")
    if coef:
        exact = family == "wan" or draft.get("sample.sde_type") == "cps"
        why = "their script divides by 2 g^2 |dt|" if exact else "theirs, without the factor 1/|dt|"
        draft.put("algorithm.kl.divisor", "variance" if exact else "flow_grpo", note=why)
    if method == "grpo_guard":
        draft.put("algorithm.reweight", "flow_grpo", note="1/|dt|, as published")
    if method == "flow_grpo_fast":
        _window(draft)
    else:
        _trained(draft)


def _trained(draft: Draft) -> None:
    """The trained steps of a script without a window."""
    steps, share = draft.whole("sample.num_steps"), draft.number("train.timestep_fraction", least=0)
    trained = int(steps * share)
    if trained < 1:
        raise draft.fault("train.timestep_fraction", f"it trains none of the {steps} steps")
    note = f"the {trained} noisiest of {steps}, the last is an ODE step; theirs keeps its noise"
    if trained >= steps - 1:
        draft.put("algorithm.sde_steps", None, "train.timestep_fraction", note=note)
    else:
        draft.put("algorithm.sde_steps", list(range(trained)), "train.timestep_fraction", note=note)
    if trained >= steps:
        draft.leave("train.timestep_fraction", "the last step is never trained here", changes=True)
    elif trained < steps - 1:
        reason = f"theirs keeps noise on steps {trained} to {steps - 1}, which are ODE steps here"
        draft.leave("train.timestep_fraction", reason, changes=True)


def _window(draft: Draft) -> None:
    steps = draft.whole("sample.num_steps")
    old = draft.given("sample.train_num_steps")
    key = "sample.train_num_steps" if old else "sample.sde_window_size"
    size = draft.whole(key, least=0)
    draft.put("algorithm.window_size", size, key, note="" if size else "0: all steps but the last")
    if size and not old:
        place = draft.get("sample.sde_window_range")
        if not (isinstance(place, list | tuple) and len(place) == 2 and all(type(each) is int for each in place)):
            raise draft.fault("sample.sde_window_range", "it must be two whole numbers")
        low, high = place[0], min(place[1], steps - 1)
        draft.put("algorithm.low", low, "sample.sde_window_range")
        note = "exclusive" if high == place[1] else f"exclusive; {place[1]} there, here at most the steps less one"
        draft.put("algorithm.high", high, "sample.sde_window_range", note=note)
        if high != place[1]:
            reason = f"the last step is never trained here: windows end at {high}, not {place[1]}"
            draft.leave("sample.sde_window_range", reason, changes=True)
    elif draft.given("sample.sde_window_range"):
        draft.leave("sample.sde_window_range", "no window is drawn", changes=False)
    if draft.given("train.timestep_fraction"):
        draft.leave("train.timestep_fraction", "their scripts with a window do not read it", changes=False)
    if draft.given("sample.mini_num_image_per_prompt"):
        share, group = (draft.whole(f"sample.{name}_image_per_prompt") for name in ("mini_num", "num"))
        if group % share:
            reason = f"{share} samples share a path there; algorithm.branch must divide the {group} of a prompt"
            draft.leave("sample.mini_num_image_per_prompt", reason, changes=True)
        else:
            draft.put("algorithm.branch", share, "sample.mini_num_image_per_prompt")


def _rewards(draft: Draft, entries: dict[str, tuple[dict[str, Any], str]]) -> None:
    weights = draft.get("reward_fn")
    if not isinstance(weights, dict) or not weights:
        raise draft.fault("reward_fn", "it must name at least one reward with its weight")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise draft.fault("reward_fn", f"the weight of {name} must be a number")
        if name not in entries:
            known = f"no reward of flowrl scores as {name} does, so its weight {weight} is left out"
            draft.leave(f"reward_fn.{name}", known, changes=True)
            continue
        entry, note = entries[name]
        draft.reward({**entry, "weight": float(weight)}, "reward_fn", note=f"{name}{f': {note}' if note else ''}")
    if not any(line.value["weight"] for line in draft.rewards):
        raise draft.fault("reward_fn", "none of its rewards has a counterpart here, so there is nothing to train on")


def _optim(draft: Draft, family: str, method: str) -> None:
    draft.put("optim.learning_rate", float(draft.number("train.learning_rate")), "train.learning_rate")
    if draft.switch("train.use_8bit_adam"):
        draft.put("optim.name", "adamw_8bit", "train.use_8bit_adam")
    betas = [float(draft.number(f"train.adam_beta{number}")) for number in (1, 2)]
    draft.put("optim.betas", betas, "train.adam_beta1", "train.adam_beta2")
    draft.put("optim.eps", float(draft.number("train.adam_epsilon")), "train.adam_epsilon")
    draft.put("optim.weight_decay", float(draft.number("train.adam_weight_decay")), "train.adam_weight_decay")
    draft.put("optim.max_grad_norm", float(draft.number("train.max_grad_norm")), "train.max_grad_norm")
    if not draft.switch("train.ema"):
        draft.put("optim.ema", None, "train.ema")
    elif family == "qwen_image":
        draft.put("optim.ema", None, "train.ema", note="their Qwen-Image script has none")
        draft.leave("train.ema", "their Qwen-Image script does not read it", changes=False)
    elif method == "diffusion_nft":
        nft.average(draft)
    else:
        many = draft.whole("train.gradient_accumulation_steps")
        draft.put("optim.ema.decay", 0.9, "train.ema", note="in their code")
        draft.put("optim.ema.every", 8, note="in their code")
        draft.put("optim.ema.first", 7, note="theirs averages where their step + 1 is a multiple of 8")
        note = "theirs averages once a batch"
        draft.put("optim.ema.repeats", many, "train.gradient_accumulation_steps", note=note)


def _evaluation(draft: Draft, method: str) -> None:
    draft.put("eval.every", draft.whole("eval_freq"), "eval_freq")
    draft.put("eval.num_inference_steps", draft.whole("sample.eval_num_steps"), "sample.eval_num_steps")
    own = method == "flow_grpo_fast" and draft.given("sample.eval_guidance_scale")
    key = "sample.eval_guidance_scale" if own else "sample.guidance_scale"
    draft.put("eval.guidance_scale", float(draft.number(key)), key)
    if not own and draft.given("sample.eval_guidance_scale"):
        draft.leave("sample.eval_guidance_scale", "only their scripts with a window read it", changes=False)
    draft.put("eval.batch_size", draft.whole("sample.test_batch_size"), "sample.test_batch_size", note="per process")


TOOL = Tool(
    name="flow_grpo",
    title="flow_grpo (yifan123/flow_grpo @879042c, 2026-05-07) and DiffusionNFT (NVlabs/DiffusionNFT, 2025-09-22)",
    keys=KEYS,
    read=read,
    rules=rules,
    refuses_unknown=False,
    form="`config/grpo.py:NAME`, `config/nft.py:NAME`: a configuration file and the name of one of its functions. "
    "Functions of the file that these call are followed with their arguments, in arithmetic, conditions and `while`; "
    "what else would have to be executed is refused with its line",
    rewards=_REWARDS | {"hpsv2": nft.REWARDS["hpsv2"]},
)
