"""flow_grpo and DiffusionNFT: what becomes of their options (yifan123/flow_grpo @879042c, NVlabs/DiffusionNFT)."""

from typing import Any

from flowrl.apps.migration.engine import DTYPES, UNKNOWN_STEPS, Draft
from flowrl.apps.migration.flow_grpo_file import BY_HAND
from flowrl.apps.migration.flow_grpo_file import KEYS as KEYS
from flowrl.apps.migration.flow_grpo_file import read as read
from flowrl.apps.migration.table import read_rewards, read_table

_FAMILIES = read_table("tables", "flow_grpo")["families"]
_REWARDS, _REWARDS_OF_NFT = read_rewards("flow_grpo"), read_rewards("diffusion_nft")
REWARDS = _REWARDS | {"hpsv2": _REWARDS_OF_NFT["hpsv2"]}
"""Those of the page."""
_SOLVERS = {"dpm2": "dpm2_midpoint", "dpm1": "dpm1", **dict.fromkeys(("flow", "dance", "ddim"), "ode")}
_OLD = {0: "none", 1: "ramp", 2: "late"}
_MODES = {name: name for name in ("all", "positive_only", "negative_only", "one_only", "binary")}
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
    kind, folder = draft.get("prompt_fn"), draft.text("dataset")
    if kind not in ("general_ocr", "geneval"):
        raise draft.fault("prompt_fn", "only general_ocr and geneval read files of prompts")
    edits = any(part in draft.text("pretrained.model").lower() for part in ("kontext", "edit"))
    name = "{}_metadata.jsonl" if kind == "geneval" or edits else "{}.txt"
    draft.put_prompts(folder, [name], ("dataset", "prompt_fn"), draft.source.file.resolve().parent.parent)
    _rollout(draft, family, method)
    _algorithm(draft, family, method)
    _rewards(draft, _REWARDS | _REWARDS_OF_NFT if method == "diffusion_nft" else _REWARDS)
    _optim(draft, family, method)
    draft.copy("eval_freq", "sample.eval_num_steps")
    own = method == "flow_grpo_fast" and draft.given("sample.eval_guidance_scale")
    key = "sample.eval_guidance_scale" if own else "sample.guidance_scale"
    draft.put("eval.guidance_scale", draft.real(key), key)
    if not own:
        draft.unread("only their scripts with a window read it", "sample.eval_guidance_scale")
    draft.copy("sample.test_batch_size", note="per process")
    if not draft.get("resume_from"):
        draft.unread("it names none", "resume_from")


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
    draft.put_head("run_name", "seed", draft.source.label, "run_name is empty: the name of the configuration")
    epochs = draft.whole("num_epochs")
    if epochs == BY_HAND:
        draft.put("iterations", UNKNOWN_STEPS, "num_epochs", note=f"{epochs} stands for: stopped by hand; 1000 here")
    else:
        draft.copy("num_epochs")
    folder = "save_dir" if draft.get("save_dir") else "logdir"
    draft.put("output", draft.text(folder), folder, note="relative to the working directory")
    if folder == "save_dir":
        draft.unread("save_dir takes its place", "logdir")
    draft.copy("save_freq", "num_checkpoint_limit")


def _model(draft: Draft, family: str) -> None:
    draft.put("model.name", family, "pretrained.model", note="adapter by the model's path")
    draft.put_place("model.path", "pretrained.model")
    dtype = draft.choice("mixed_precision", DTYPES)
    draft.put("model.dtype", dtype, "mixed_precision", note="trained weights: float32")
    if draft.switch("use_lora"):
        rank = 64 if family in ("flux", "qwen_image", "generic") else 32
        draft.put("model.lora.rank", rank, "use_lora", note="in their script's code; targets are the family's")
        draft.put("model.lora.alpha", 2 * rank, "use_lora", note="in their script's code")
    else:
        draft.put("model.lora", None, "use_lora", note="all weights")
    if draft.get("train.lora_path"):
        draft.put_place("model.init_lora", "train.lora_path")
    if family == "wan":
        draft.copy("height", "width", "frames")
        draft.unread("their Wan script takes height and width", "resolution")
    else:
        for side in ("height", "width"):
            draft.put(f"model.{side}", draft.whole("resolution"), "resolution")
    tokens = {"wan": 512, "sd3": 128, "flux": 128, "qwen_image": 128}
    if family in tokens:
        draft.put("model.max_sequence_length", tokens[family], note="text tokens, in their script's code")
    draft.copy("activation_checkpointing")


def _rollout(draft: Draft, family: str, method: str) -> None:
    _sampler(draft, family, method)
    draft.copy("sample.num_steps")
    scale = draft.real("sample.guidance_scale")
    draft.put("rollout.guidance_scale", scale, "sample.guidance_scale")
    if method in _ON_SAMPLES:
        draft.unread(f"the training forwards of {method} are without guidance", "train.cfg", changes=scale > 1)
    elif family == "flux" or draft.get("train.cfg") or scale <= 1:
        draft.unread("training has the rollout's guidance here, and so has theirs", "train.cfg")
    else:
        reason = "training here has the rollout's guidance always; theirs would train without it"
        draft.unread(reason, "train.cfg", changes=True)
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
    draft.put_size("rollout.batch_size", size, size_key)
    if method != "diffusion_nft":
        draft.put_size("optim.batch_size", size, size_key)
        draft.unread("their scripts train the batches as they were sampled", "train.batch_size")
    draft.copy("sample.same_latent")
    many, how, keys = draft.whole("train.gradient_accumulation_steps"), "M/A", ["sample.num_batches_per_epoch"]
    samples, rows, note = batches, many, "batches / accumulation"
    if method == "diffusion_nft":
        part = draft.whole("train.batch_size")
        draft.put_size("optim.batch_size", part, "train.batch_size")
        samples, rows = size * batches, part * many
        how = "samples of a GPU / (b in training x accumulation)"
        note = f"{samples} samples of a GPU / ({part} x {many})"
        keys.append("train.batch_size")
    steps = draft.quotient(samples, rows, "optim.updates_per_iteration", how)
    draft.put("optim.updates_per_iteration", steps, *keys, "train.gradient_accumulation_steps", note=note)
    if draft.number("train.num_inner_epochs", least=1) > 1:
        draft.leave("train.num_inner_epochs", "an iteration goes through its samples once", changes=True)
    else:
        draft.unread("1, as here", "train.num_inner_epochs")


def _sampler(draft: Draft, family: str, method: str) -> None:
    of_noise = ("sample.noise_level", "sample.sde_type")
    if method == "diffusion_nft":
        solver = draft.choice("sample.solver", _SOLVERS)
        draft.put("algorithm.solver", solver, "sample.solver", "sample.deterministic")
        if not draft.switch("sample.deterministic"):
            reason = "theirs adds noise to the rollout; the method takes a solver without noise here"
            draft.leave("sample.deterministic", reason, changes=True)
        draft.unread("the rollout is without noise", "sample.noise_level")
    elif method in _RANKING:
        draft.put("algorithm.solver", "ode", note="their script samples without noise")
        draft.unread(f"their script of {method} samples without noise", *of_noise)
    elif family == "wan":
        draft.put("rollout.sampler.name", "wan_sde", note="their Wan script's sampler, which has no strength")
        draft.unread("their Wan script does not read it", *of_noise)
    else:
        name = draft.choice("sample.sde_type", {None: "flow_sde", "sde": "flow_sde", "cps": "cps"})
        keys = ["sample.sde_type"] if draft.given("sample.sde_type") else []
        draft.put("rollout.sampler.name", name, *keys, note="" if keys else "their script's sampler")
        draft.copy("sample.noise_level")


def _algorithm(draft: Draft, family: str, method: str) -> None:
    if method in _RANKING:
        _refreshed(draft, method)
        keys = ("sample.global_std", "train.adv_clip_max", "per_prompt_stat_tracking")
        draft.unread(f"{method} only ranks the samples of a prompt", *keys)
        return
    if method == "diffusion_nft":
        _nft(draft)
    else:
        _clipped(draft, family, method)
    tracking = draft.switch("per_prompt_stat_tracking")
    draft.put("algorithm.advantages.name", "group" if tracking else "batch", "per_prompt_stat_tracking")
    if not tracking:
        draft.put("algorithm.advantages.history", None, "per_prompt_stat_tracking")
        draft.unread("without tracking the std is that of the batch", "sample.global_std")
    else:
        std = "global" if draft.switch("sample.global_std") else "group"
        draft.put("algorithm.advantages.std", std, "sample.global_std")
    draft.put("algorithm.advantages.eps", 1e-4, note="in their code")
    draft.put("algorithm.advantages.clip", draft.real("train.adv_clip_max"), "train.adv_clip_max")


def _nft(draft: Draft) -> None:
    """DiffusionNFT, but for its advantages."""
    draft.copy("beta")
    draft.put("algorithm.old", draft.choice("decay_type", _OLD), "decay_type")
    draft.put("algorithm.mode", draft.choice("train.adv_mode", _MODES), "train.adv_mode")
    draft.put("algorithm.kl.coef", draft.real("train.beta", least=0), "train.beta")
    draft.put("algorithm.times.name", "permutation", note="in their code")
    draft.put("algorithm.times.count", None, note="all of the share")
    share = draft.real("train.timestep_fraction", least=0)
    draft.put("algorithm.times.fraction", share, "train.timestep_fraction")
    if draft.number("sample.guidance_scale") > 1:
        reason = "their script takes none in training, as here, and fails there with a scale above 1"
        draft.leave("sample.guidance_scale", reason, changes=True)


def _refreshed(draft: Draft, method: str) -> None:
    """online_dpo and raft, whose samples are drawn by a policy that is refreshed now and then."""
    every = draft.whole("train.ref_update_step")
    never = every >= BY_HAND
    if method == "online_dpo":
        draft.put("algorithm.beta", draft.real("train.beta"), "train.beta")
        draft.put("algorithm.behaviour", "reference" if never else "lagged", "train.ref_update_step")
        if not never:
            draft.put("algorithm.ref_update", every, "train.ref_update_step")
    elif never:
        reason = "raft has no fixed reference to draw by: it draws by the policy of the last refresh"
        draft.leave("train.ref_update_step", reason, changes=True)
    else:
        draft.put("algorithm.refresh", every, "train.ref_update_step")
    reason = f"{method} has no ratio and no trained steps: its times are drawn"
    draft.unread(reason, "train.clip_range", "train.timestep_fraction", changes=True)


def _clipped(draft: Draft, family: str, method: str) -> None:
    """The methods of a clipped ratio."""
    draft.copy("train.clip_range")
    coef = draft.real("train.beta", least=0)
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
    places = None if trained >= steps - 1 else list(range(trained))
    draft.put("algorithm.sde_steps", places, "train.timestep_fraction", note=note)
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
    else:
        draft.unread("no window is drawn", "sample.sde_window_range")
    draft.unread("their scripts with a window do not read it", "train.timestep_fraction")
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
    draft.put_adam("train.")
    if not draft.switch("train.ema"):
        draft.put("optim.ema", None, "train.ema")
    elif family == "qwen_image":
        draft.put("optim.ema", None, "train.ema", note="their Qwen-Image script has none")
        draft.leave("train.ema", "their Qwen-Image script does not read it", changes=False)
    elif method == "diffusion_nft":  # one update for each optimizer step
        draft.put("optim.ema.decay", 0.9, "train.ema", note="in their code")
        draft.put("optim.ema.every", 1, note="in their code")
    else:
        many = draft.whole("train.gradient_accumulation_steps")
        draft.put("optim.ema.decay", 0.9, "train.ema", note="in their code")
        draft.put("optim.ema.every", 8, note="in their code")
        draft.put("optim.ema.first", 7, note="theirs averages where their step + 1 is a multiple of 8")
        note = "theirs averages once a batch"
        draft.put("optim.ema.repeats", many, "train.gradient_accumulation_steps", note=note)
