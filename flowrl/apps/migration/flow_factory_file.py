"""Flow-Factory: what its file says. Its keys with their published defaults, of all trainers and of some alone, and
the reading of a YAML configuration, of the commit that is converted or a newer form of one data set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.apps.migration.table import Key, Source
from flowrl.core.errors import ConfigError
from flowrl.core.strict import parse_yaml, read_text

_MEMORY = "memory and speed alone"
_READS = "prompts are read and embedded without options of it"
_SPREAD = "samples are spread over processes by identity"
_OVERLAP = "rewards overlap with sampling by themselves"
_TRACKER = "give trackers (docs/watching.md)"
_LORA = "model.lora"
_CALL = "give it in model.call, where the pipeline takes it (model.name: generic)"
_AVERAGES = "algorithm.old, algorithm.ema"
_WARMS = "optim.ema takes constant and power, by epochs as theirs"
_WINDOW = "algorithm.sde_steps, algorithm.window_size, algorithm.low, algorithm.high"

_RUN = {
    "launcher": Key("accelerate", "", "flowrl runs under torchrun"),
    "optimizers": Key(
        None, "", "one is read as train.learning_rate and adam_*; several have no counterpart", changes=True
    ),
    "config_file": Key(None, "model.shard", "a file of FSDP: true; else read by accelerate alone"),
    "num_processes": Key(1, "optim.updates_per_iteration", "the number of GPUs; only an integer accumulation needs it"),
    "main_process_port": Key(29500, "", "flowrl runs under torchrun"),
    "mixed_precision": Key("bf16", "model.dtype", "fp16 float16, bf16 bfloat16, no float32"),
    "log.run_name": Key(None, "name", "null: the name of the file"),
    "log.project": Key("Flow-Factory", "", _TRACKER),
    "log.logging_backend": Key(None, "", _TRACKER),
    "log.save_dir": Key("saves/", "output"),
    "log.save_freq": Key(10, "checkpoint.every", "0 is listed: the last iteration is saved always"),
    "log.save_model_only": Key(True, "", "checkpoints can be resumed always"),
    "log.verbose": Key(False, "", "of the screen alone"),
    "data.dataset_dir": Key("data", "data.prompts, data.eval_prompts", "its train and test file"),
    "data.datasets": Key(
        None, "", "of newer versions: one is read as data.dataset_dir; of several name one file", changes=True
    ),
    "data.image_dir": Key(
        None, "", "paths of images in a .jsonl start from its folder: data.image_column", changes=True
    ),
    "data.video_dir": Key(None, "", "no model of flowrl takes videos", changes=True),
    "data.audio_dir": Key(None, "", "no model of flowrl takes audio", changes=True),
    "data.preprocessing_batch_size": Key(8, "", _READS),
    "data.dataloader_num_workers": Key(16, "", _READS),
    "data.enable_preprocess": Key(True, "", _READS),
    "data.force_reprocess": Key(True, "", _READS),
    "data.cache_dir": Key("~/.cache/flow_factory/datasets", "", "data.text_cache is in a form of its own"),
    "data.max_dataset_size": Key(None, "data.max_prompts"),
    "data.sampler_type": Key("auto", "", _SPREAD),
    "data.sampler_subgroup_size": Key(None, "", _SPREAD),
}
_MODEL = {
    "model.model_name_or_path": Key("black-forest-labs/FLUX.1-dev", "model.path"),
    "model.model_type": Key("flux1", "model.name", "sd3-5, flux1, qwen-image, wan2_t2v; others generic"),
    "model.finetune_type": Key("full", _LORA, "full: null, all weights"),
    "model.lora_rank": Key(8, f"{_LORA}.rank"),
    "model.lora_alpha": Key(None, f"{_LORA}.alpha", "null: twice the rank"),
    "model.target_modules": Key("all", f"{_LORA}.targets", "default: the family's; a list; all is listed"),
    "model.target_components": Key("transformer", "", "one network is trained, the transformer", changes=True),
    "model.resume_path": Key(None, "model.init_lora", "of a LoRA; else listed"),
    "model.resume_type": Key(None, "model.init_lora", "lora alone"),
    "model.attn_backend": Key(None, "model.attention"),
    "model.master_weight_dtype": Key("bf16", "", "trained weights are float32", changes=True),
}
_TRAIN = {
    "train.trainer_type": Key(
        "grpo", "algorithm.name", "nft diffusion_nft, awm, dgpo, crd, dpo online_dpo, grpo-guard"
    ),
    "train.resolution": Key(512, "model.height, model.width"),
    "train.height": Key(None, "model.height"),
    "train.width": Key(None, "model.width"),
    "train.num_frames": Key(None, "model.num_frames", "Wan; else listed"),
    "train.max_epochs": Key(None, "iterations", "null: 1000"),
    "train.per_device_batch_size": Key(1, "rollout.batch_size, optim.batch_size", "per process"),
    "train.gradient_step_per_epoch": Key(2, "optim.updates_per_iteration", "if accumulation is auto"),
    "train.gradient_accumulation_steps": Key(
        "auto", "optim.updates_per_iteration", "integer: prompts x group x trained steps / (GPUs x b x it)"
    ),
    "train.num_inner_epochs": Key(1, "algorithm.passes", "grpo goes through its samples once"),
    "train.reward_optimization_overlap": Key(False, "", _OVERLAP),
    "train.reward_optimization_overlap_mode": Key("ready", "", _OVERLAP),
    "train.reward_optimization_overlap_poll_interval": Key(0.05, "", _OVERLAP),
    "train.group_size": Key(1, "rollout.group_size"),
    "train.unique_sample_num_per_epoch": Key(8, "rollout.prompts_per_iteration"),
    "train.num_inference_steps": Key(10, "rollout.num_inference_steps"),
    "train.guidance_scale": Key(
        3.5, "rollout.guidance_scale, algorithm.guidance_scale", "training too but for grpo and dgpo"
    ),
    "train.guidance_scale_2": Key(None, "", "both networks of a model take one scale", changes=True),
    "train.seed": Key(42, "seed", "random streams differ"),
    "train.learning_rate": Key(1e-5, "optim.learning_rate"),
    "train.adam_weight_decay": Key(1e-4, "optim.weight_decay"),
    "train.adam_betas": Key((0.9, 0.999), "optim.betas"),
    "train.adam_epsilon": Key(1e-8, "optim.eps"),
    "train.max_grad_norm": Key(1.0, "optim.max_grad_norm"),
    "train.optimizers": Key(None, "", "of newer versions, with several; give optim", changes=True),
    "train.enable_gradient_checkpointing": Key(False, "model.gradient_checkpointing"),
    "train.offload_samples_to_cpu": Key(False, "", _MEMORY),
    "train.ema_decay": Key(0.995, f"optim.ema.decay, {_AVERAGES}", "0: no average; limit of the pace"),
    "train.ema_update_interval": Key(10, "optim.ema.every", "epochs x updates"),
    "train.ema_device": Key("cuda", "", _MEMORY),
    "train.ema_decay_schedule": Key(
        "power", f"optim.ema, {_AVERAGES}", f"of old and ema constant, linear, piecewise_linear; {_WARMS}", changes=True
    ),
    "train.latent_storage_dtype": Key("fp16", "", "kept latents are float32", changes=True),
    "train.ref_param_device": Key("cuda", "", _MEMORY),
    "train.global_std": Key(True, "algorithm.advantages.std", "with sum; gdpo does not read it"),
    "train.advantage_aggregation": Key("gdpo", "algorithm.advantages.name", "sum: group"),
    "train.clip_range": Key(1e-4, "algorithm.clip_range", "symmetric"),
    "train.adv_clip_range": Key(5.0, "algorithm.advantages.clip", "symmetric"),
    "train.kl_type": Key(
        "x-based",
        "algorithm.kl.divisor, algorithm.kl.weight",
        "grpo: x-based none, v-based is listed; others v-based: uniform",
    ),
    "train.kl_beta": Key(0, "algorithm.kl.coef", "crd 0.1"),
    "train.guidance_rescale": Key(None, "", _CALL, changes=True),
    "train.condition_image_size": Key(None, "", _CALL, changes=True),
    "train.max_sequence_length": Key(512, "model.max_sequence_length", "512 left out, which is inferred"),
}
_REST = {
    "scheduler.dynamics_type": Key(
        "Flow-SDE", "rollout.sampler.name, algorithm.solver", "grpo: flow_sde, dance_sde, cps; others: the solver ode"
    ),
    "scheduler.noise_level": Key(0.7, "rollout.sampler.noise_level, rollout.sampler.eta"),
    "scheduler.num_sde_steps": Key(1, _WINDOW, "all of sde_steps: flow_grpo; one of a row: flow_grpo_fast"),
    "scheduler.sde_steps": Key(None, _WINDOW, "null: all but the last"),
    "scheduler.flow_shift": Key(None, "model.shift", "flux, qwen_image, wan"),
    "scheduler.seed": Key(42, "", "one seed gives every stream"),
    "eval.resolution": Key(1024, "", "evaluations are at the model's size; another one changes results"),
    "eval.height": Key(None, "", "evaluations are at the model's size", changes=True),
    "eval.width": Key(None, "", "evaluations are at the model's size", changes=True),
    "eval.num_frames": Key(None, "", "evaluations are at the model's size", changes=True),
    "eval.per_device_batch_size": Key(1, "eval.batch_size", "per process"),
    "eval.seed": Key(None, "", "evaluations have fixed seeds of their own"),
    "eval.guidance_scale": Key(3.5, "eval.guidance_scale"),
    "eval.num_inference_steps": Key(30, "eval.num_inference_steps"),
    "eval.eval_freq": Key(10, "eval.every"),
    "rewards": Key((), "rewards", "the rewards below"),
    "eval_rewards": Key((), "eval.rewards", "but those of training, which are evaluated anyway"),
}
_PACE = "algorithm.average"
_TIMES = {
    "train.num_train_timesteps": Key(0, "algorithm.times.count", "0: steps x range; dpo 1"),
    "train.time_sampling_strategy": Key("discrete", "algorithm.times.name"),
    "train.time_shift": Key(
        3.0,
        "algorithm.times.shift",
        "1 / it for logit_normal and uniform, which theirs shifts from the noisy end; dpo 1",
    ),
    "train.timestep_range": Key(
        0.9,
        "algorithm.times.fraction, algorithm.times.low",
        "a time bounds theirs, a number of nodes ours: exact on SD3's grid, listed on others; dgpo 0.6, crd, dpo 0.99",
    ),
}
_NFT = {
    "train.nft_beta": Key(1.0, "algorithm.mix"),
    "train.off_policy": Key(
        False,
        "algorithm.old, algorithm.off_policy, algorithm.sample_average_from",
        "nft, awm, dgpo: the average samples",
    ),
    "train.flat_steps": Key(0, "algorithm.old.flat, algorithm.ema.flat", "epochs x updates, with piecewise_linear"),
    "train.ramp_rate": Key(0.001, "algorithm.old.slope, algorithm.ema.slope", "by updates, with piecewise_linear"),
    "train.warmup_steps": Key(10, "algorithm.old.slope, algorithm.ema.slope", "decay by it and updates, with linear"),
}
_AWM = {
    "train.awm_weighting": Key("Uniform", "algorithm.weighting", "Uniform, t sigma, t**2 sigma2, huber, ghuber"),
    "train.ghuber_power": Key(0.25, "algorithm.power", "of ghuber"),
    "train.ema_kl_beta": Key(0, "algorithm.ema_kl.coef"),
    "train.kl_weight": Key("Uniform", "", "their code does not read it; algorithm.kl.weight is uniform"),
}
_DGPO = {
    "train.dpo_beta": Key(100.0, "algorithm.beta"),
    "train.use_shared_noise": Key(True, "", "always: one eps for a prompt and time; false is listed", changes=True),
    "train.clip_dsm": Key(True, "", "always; false is listed", changes=True),
    "train.clip_kl": Key(False, "", "never; true is listed", changes=True),
    "train.switch_ema_ref": Key(200, "algorithm.sample_average_from", "by the average of the ratio, theirs a slow one"),
    "train.use_ema_ref": Key(False, "algorithm.against_average"),
    "train.ema_ref_max_decay": Key(0.3, f"{_PACE}.limit"),
    "train.ema_ref_ramp_rate": Key(0.001, f"{_PACE}.slope"),
    "train.ema_ref_device": Key("cuda", "", _MEMORY),
}
_CRD = {
    "train.crd_beta": Key(1.0, "algorithm.beta"),
    "train.crd_loss_type": Key("mse", "algorithm.fit"),
    "train.use_old_for_loss": Key(True, "", "always; false is listed", changes=True),
    "train.adaptive_logp": Key(True, "algorithm.adaptive"),
    "train.weight_temp": Key(-1.0, "algorithm.pools", "below 0: null"),
    "train.old_model_decay": Key("0-0.25-0.005-0.999", "algorithm.old", "steps-start-slope-limit, or a released pace"),
    "train.sampling_model_decay": Key("75-0.0-0.0075-0.999", "algorithm.sampling", "the same"),
    "train.reward_adaptive_kl": Key(True, "algorithm.least_pull", "true: 1e-4 / kl_beta, as in their code; false: 1"),
}
_KL_CFG = {"train.kl_cfg": Key(1.0, "algorithm.reference_guidance", "crd 4.5")}
_DPO = {
    "train.beta": Key(2000.0, "algorithm.beta"),
    "train.weighting_scheme": Key("logit_normal", "algorithm.times.name"),
    "train.logit_mean": Key(0.0, "", "logit_normal has 0 here; another one is listed", changes=True),
    "train.logit_std": Key(1.0, "", "logit_normal has 1 here; another one is listed", changes=True),
}
KEYS = {**_RUN, **_MODEL, **_TRAIN, **_TIMES, **_NFT, **_AWM, **_DGPO, **_CRD, **_KL_CFG, **_DPO, **_REST}

_GRPO = ("grpo", "grpo-guard")
OF_TRAINERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TIMES, ("nft", "awm", "dgpo", "crd", "dpo")),
    "train.time_sampling_strategy": ("nft", "awm", "dgpo", "crd"),
    **dict.fromkeys(_NFT, ("nft", "awm")),
    "train.nft_beta": ("nft",),
    "train.off_policy": ("nft", "awm", "dgpo"),
    **dict.fromkeys(_AWM, ("awm",)),
    **dict.fromkeys(_DGPO, ("dgpo",)),
    **dict.fromkeys(_CRD, ("crd",)),
    **dict.fromkeys(_KL_CFG, ("dgpo", "crd")),
    **dict.fromkeys(_DPO, ("dpo",)),
    "train.clip_range": (*_GRPO, "awm", "dgpo"),
    **dict.fromkeys(("train.adv_clip_range", "train.kl_type", "train.kl_beta"), (*_GRPO, "nft", "awm", "dgpo", "crd")),
}
"""Key -> the trainers that read it; a key that is not here: all."""
_OF_ONE: dict[str, dict[str, Any]] = {
    **{kind: {"train.kl_type": "v-based"} for kind in ("nft", "awm")},
    "crd": {"train.kl_beta": 0.1, "train.kl_cfg": 4.5, "train.timestep_range": 0.99, "train.kl_type": "v-based"},
    "dpo": {"train.num_train_timesteps": 1, "train.time_shift": 1.0, "train.timestep_range": 0.99},
    "dgpo": {"train.timestep_range": 0.6},
}
"""Trainer -> key -> its default where that differs from the one of `KEYS`."""
_SECTIONS = ("data", "model", "log", "train", "scheduler", "eval")
_OPTIMIZER = {
    "learning_rate": "learning_rate",
    "weight_decay": "adam_weight_decay",
    "betas": "adam_betas",
    "eps": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
}


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
