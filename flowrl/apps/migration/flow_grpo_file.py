"""flow_grpo and DiffusionNFT: what their files say. Their keys with the published defaults (config/base.py; the
configurations add some), and the reading of a configuration: FILE.py:NAME, with the base.py beside it.
"""

from __future__ import annotations

from pathlib import Path

from flowrl.apps.migration.python_config import Reader
from flowrl.apps.migration.python_values import Node, flat, untouched
from flowrl.apps.migration.table import Key, Source
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.core.strict import read_text

BY_HAND = 100_000
"""Published `num_epochs`: training is stopped by hand."""
_P = "rollout.prompts_per_iteration"
_U = "optim.updates_per_iteration"
_SIZES = "rollout.batch_size, optim.batch_size"

KEYS = {
    "run_name": Key("", "name", "empty: the name of the configuration"),
    "debug": Key(True, "", "a switch of their scripts that training does not read"),
    "num_epochs": Key(BY_HAND, "iterations", "100000 stands for: stopped by hand; 1000 is written"),
    "resume_from": Key(None, "", "give flowrl train --resume; their checkpoints cannot be resumed here", changes=True),
    "seed": Key(42, "seed", "random streams differ"),
    "logdir": Key("logs", "output", "if save_dir is empty"),
    "save_dir": Key("", "output"),
    "save_freq": Key(20, "checkpoint.every"),
    "eval_freq": Key(20, "eval.every"),
    "num_checkpoint_limit": Key(5, "checkpoint.keep"),
    "mixed_precision": Key("fp16", "model.dtype", "fp16 float16, bf16 bfloat16, no float32"),
    "allow_tf32": Key(True, "", "arithmetic is chosen by model.dtype and model.vae_precision"),
    "use_lora": Key(True, "model.lora", "rank 32, alpha 64; FLUX, Qwen-Image 64, 128; False: null, all weights"),
    "dataset": Key("", "data.prompts, data.eval_prompts", "its train and test file, by prompt_fn"),
    "resolution": Key(768, "model.height, model.width"),
    "height": Key(240, "model.height", "Wan"),
    "width": Key(416, "model.width", "Wan"),
    "frames": Key(33, "model.num_frames", "Wan"),
    "activation_checkpointing": Key(False, "model.gradient_checkpointing"),
    "fsdp_optimizer_offload": Key(False, "", "the optimizer's state stays on the device; memory alone"),
    "pretrained.model": Key("runwayml/stable-diffusion-v1-5", "model.path, model.name", "the adapter by the path"),
    "pretrained.revision": Key("main", "", "their scripts do not read it"),
    "sample.num_steps": Key(40, "rollout.num_inference_steps"),
    "sample.eval_num_steps": Key(40, "eval.num_inference_steps"),
    "sample.guidance_scale": Key(4.5, "rollout.guidance_scale, eval.guidance_scale"),
    "sample.eval_guidance_scale": Key(4.5, "eval.guidance_scale", "with a window alone, as their scripts"),
    "sample.batch_size": Key(1, "", "their scripts do not read it"),
    "sample.train_batch_size": Key(1, f"{_P}, {_SIZES}", "prompts = GPUs x b x batches / group; sizes per process"),
    "sample.num_image_per_prompt": Key(1, f"rollout.group_size, {_P}"),
    "sample.test_batch_size": Key(1, "eval.batch_size", "per process, memory alone"),
    "sample.num_batches_per_epoch": Key(2, f"{_P}, {_U}", "updates = batches / accumulation"),
    "sample.sample_time_per_prompt": Key(1, f"{_P}, {_U}", "multiplies the batches"),
    "sample.global_std": Key(True, "algorithm.advantages.std", "True global, False group"),
    "sample.noise_level": Key(0.7, "rollout.sampler.noise_level", "Wan reads none"),
    "sample.sde_type": Key(None, "rollout.sampler.name", "sde flow_sde, cps cps"),
    "sample.same_latent": Key(False, "rollout.shared_noise"),
    "sample.sde_window_size": Key(2, "algorithm.window_size", "where the configuration sets it: flow_grpo_fast"),
    "sample.sde_window_range": Key((0, 10), "algorithm.low, algorithm.high", "high is at most the steps less one"),
    "sample.train_num_steps": Key(None, "algorithm.window_size", "the older script with a window"),
    "sample.mini_num_image_per_prompt": Key(None, f"algorithm.branch, {_SIZES}, {_P}", "it must divide the group"),
    "sample.kl_reward": Key(0, "", "the reward takes no KL; algorithm.kl.coef is the loss's", changes=True),
    "train.batch_size": Key(1, f"{_U}, optim.batch_size", "DiffusionNFT; flow_grpo trains the batches as sampled"),
    "train.use_8bit_adam": Key(False, "optim.name", "true: adamw_8bit, of the same library"),
    "train.learning_rate": Key(3e-4, "optim.learning_rate"),
    "train.adam_beta1": Key(0.9, "optim.betas"),
    "train.adam_beta2": Key(0.999, "optim.betas"),
    "train.adam_weight_decay": Key(1e-4, "optim.weight_decay"),
    "train.adam_epsilon": Key(1e-8, "optim.eps"),
    "train.gradient_accumulation_steps": Key(1, f"{_U}, optim.ema.repeats", "see the batches and train.ema"),
    "train.max_grad_norm": Key(1.0, "optim.max_grad_norm"),
    "train.num_inner_epochs": Key(1, "", "an iteration goes through its samples once", changes=True),
    "train.cfg": Key(True, "", "training has the rollout's guidance; False with a scale above 1 is not possible"),
    "train.adv_clip_max": Key(5, "algorithm.advantages.clip"),
    "train.clip_range": Key(1e-4, "algorithm.clip_range"),
    "train.clip_range_lt": Key(1e-4, "", "of BAGEL, which has no adapter; the range is symmetric", changes=True),
    "train.clip_range_gt": Key(1e-4, "", "of BAGEL, which has no adapter; the range is symmetric", changes=True),
    "train.highclip_range": Key(None, "", "their scripts do not read it"),
    "train.timestep_shift": Key(3.0, "", "of BAGEL, which has no adapter", changes=True),
    "train.timestep_fraction": Key(1.0, "algorithm.sde_steps", "int(steps x it) noisiest steps; with a window unread"),
    "train.beta": Key(0.0, "algorithm.kl.coef, algorithm.kl.divisor", "dpo.py: algorithm.beta"),
    "train.lora_path": Key(None, "model.init_lora"),
    "train.ema": Key(
        False, "optim.ema", "min(0.9, (1 + n) / (10 + n))^accumulation at n = 7, 15, ...; Qwen-Image has none"
    ),
    "train.sft": Key(0.0, "", "their scripts do not read it"),
    "train.sft_batch_size": Key(0, "", "their scripts do not read it"),
    "train.algorithm": Key(None, "algorithm.name", "dpo online_dpo, sft raft"),
    "train.ref_update_step": Key(10_000_000, "algorithm.behaviour, algorithm.ref_update, algorithm.refresh"),
    "diffusion_loss": Key(False, "", "their scripts do not read it"),
    "rationorm": Key(False, "algorithm.name", "True: grpo_guard with reweight flow_grpo"),
    "prompt_fn": Key("imagenet_animals", "data.prompts", "general_ocr NAME.txt, geneval NAME_metadata.jsonl"),
    "prompt_fn_kwargs": Key({}, "", "their scripts do not read it"),
    "reward_fn": Key({}, "rewards", "the rewards below"),
    "per_prompt_stat_tracking": Key(True, "algorithm.advantages.name", "False: batch without history"),
    "base_model": Key("sd3", "", "DiffusionNFT: a switch of its functions; the adapter is found by the path"),
    "beta": Key(1.0, "algorithm.mix", "DiffusionNFT"),
    "decay_type": Key(1, "algorithm.old", "DiffusionNFT, whose files have it: 0 none, 1 ramp, 2 late"),
    "sample.deterministic": Key(True, "algorithm.solver", "DiffusionNFT: False adds noise, which is listed"),
    "sample.solver": Key("dpm2", "algorithm.solver", "DiffusionNFT: dpm2 dpm2_midpoint, dpm1; flow, dance, ddim ode"),
    "train.adv_mode": Key("all", "algorithm.mode", "DiffusionNFT"),
    "run_project": Key("", "", "the project of a tracker: give it to trackers"),
    "train_attribute": Key("", "", "their scripts do not read it"),
}
_NFT_DEFAULTS = {
    "save_freq": 30,
    "eval_freq": 10,
    "resume_from": "",
    "sample.noise_level": 1.0,
    "train.beta": 1e-4,
    "train.ema": True,
    "train.timestep_fraction": 0.99,
}
"""Defaults of DiffusionNFT's base.py that are not those of `KEYS`."""
_BASE = "get_config"
_GPUS = ("gpu_number", "n_gpus")


def read(place: str) -> Source:
    """The configuration that FILE.py:NAME names.

    Raises:
        ConfigError: no such file or function, or a statement that cannot be read without executing it.
    """
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = Path(path)
    base, notes = _base(file)
    reader = Reader(file, {"base.get_config": lambda: untouched(base)})
    names = [each for each in reader.functions if not each.startswith("_")]
    names = [each for each in names if each != _BASE or len(names) == 1]
    if not name and len(names) == 1:
        name = names[0]
    if name not in reader.functions:
        asked = f"it has no configuration {name!r}; {suggest(name, names)}" if name else "name one of its functions: "
        raise ConfigError(f"{file}: {asked}{file}:NAME with NAME one of {', '.join(names) or '(none)'}")
    config = reader.call(name)
    if not isinstance(config, Node):
        raise ConfigError(f"{file}: {name} returns no ConfigDict; name a function that returns the configuration")
    values, left = {}, {}
    try:
        found = flat(config)
    except RecursionError:
        raise ConfigError(f"{file}: the configuration of {name} holds itself; correct it in the file") from None
    for key, (assigned, value) in found.items():
        default = KEYS[key].default if key in KEYS else None
        same = tuple(value) == default if isinstance(value, list) and isinstance(default, tuple) else value == default
        (left if same and key in KEYS and not assigned else values)[key] = value
    return Source(file, name, values, left, _gpus(file, reader), notes)


def _base(file: Path) -> tuple[Node, tuple[str, ...]]:
    """What base.get_config() gives: of the base.py beside the file, else the published one."""
    beside = file.parent / "base.py"
    if beside.is_file() and beside.resolve() != file.resolve():
        found = Reader(beside)
        if _BASE not in found.functions:
            raise ConfigError(f"{beside}: it has no {_BASE}, which {file.name} calls; give flow_grpo's config/base.py")
        config = found.call(_BASE)
        if not isinstance(config, Node):
            raise ConfigError(f"{beside}: {_BASE} returns no ConfigDict; give flow_grpo's config/base.py")
        return config, ()
    nft = file.stem == "nft" or "decay_type" in read_text(file, str(file))
    config = Node()
    for key, entry in KEYS.items():
        parts, node = key.split("."), config
        for part in parts[:-1]:
            node = node.setdefault(part, Node())
        default = _NFT_DEFAULTS.get(key, entry.default) if nft else entry.default
        if default is not None or key in ("resume_from", "train.lora_path"):
            node[parts[-1]] = default
    whose = "DiffusionNFT's" if nft else "flow_grpo's"
    return config, (f"There is no base.py beside {file.name}: the published defaults stand for it, {whose}.",)


def _gpus(file: Path, reader: Reader) -> int | None:
    """The number of GPUs that the function states, else the one that those which it calls state."""
    *inner, outer = [[frame[name] for name in _GPUS if name in frame] for frame in reader.frames]
    counts = outer or [count for each in inner for count in each]
    if not counts:
        return None
    if type(counts[0]) is not int or any(count != counts[0] for count in counts):
        told = ", ".join(map(repr, counts))
        raise ConfigError(f"{file}: {' and '.join(_GPUS)} are {told}: they must be one whole number; correct the file")
    return counts[0]
