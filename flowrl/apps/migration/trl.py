"""trl: what becomes of DDPOConfig, of AlignPropConfig and of its example script's flags (huggingface/trl 0.23.1)."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.apps.migration.command_line import read_command
from flowrl.apps.migration.engine import DTYPES, Draft
from flowrl.apps.migration.table import REMEDY, Source, read_keys
from flowrl.core.errors import ConfigError
from flowrl.core.strict import parse_yaml, read_text

_SCRIPT = "ddpo.py"
KEYS = read_keys("trl")
_ALIGNPROP, _CALLED = "alignprop", ("DDPOConfig", "AlignPropConfig")
_OF_ALIGNPROP = ("log_image_freq", "truncated_backprop_rand", "truncated_backprop_timestep")


def read(place: str) -> Source:
    """A command line (.sh), a YAML file of options, or a .py file with one DDPOConfig(...) or AlignPropConfig(...).

    Raises ConfigError: it is none of them.
    """
    file = Path(place)
    text = read_text(file, str(file))
    source = _read(file, text)
    aligned = "alignprop" in text.lower() or any(key in source.values for key in _OF_ALIGNPROP)
    return replace(source, label=_ALIGNPROP, base={"train_learning_rate": 1e-3}) if aligned else source


def _read(file: Path, text: str) -> Source:
    if file.suffix in (".yaml", ".yml"):
        values = parse_yaml(text, str(file))
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: it must be a mapping of options")
        return Source(file, file.stem, {str(key): value for key, value in values.items()}, {}, None)
    if file.suffix == ".py":
        return Source(file, file.stem, _call(file, text), {}, None)
    return read_command(file, KEYS, bare_flags=False)


def _call(file: Path, text: str) -> dict[str, Any]:
    """The arguments of the only DDPOConfig(...) or AlignPropConfig(...) in a Python file."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file}: it is not valid Python: {error}") from None
    calls = [each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func).endswith(_CALLED)]
    if len(calls) != 1 or calls[0].args:
        raise ConfigError(f"{file}: it has {len(calls)} calls of DDPOConfig with named values, and one is read")
    values: dict[str, Any] = {}
    for word in calls[0].keywords:
        try:
            if word.arg is None:
                raise ValueError("** cannot be read")
            values[word.arg] = ast.literal_eval(word.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise ConfigError(
                f"{file}, line {word.value.lineno}: {word.arg or '**'}={ast.unparse(word.value)[:60]} is no plain "
                f"value; {REMEDY}"
            ) from None
    return values


def rules(draft: Draft) -> None:
    """Write the lines of a recipe of DDPO, or of AlignProp."""
    _run(draft)
    if draft.source.label == _ALIGNPROP:
        return _alignprop(draft)
    _rollout(draft)
    draft.put("algorithm.name", "ddpo", note="DDPOTrainer")
    draft.copy("train_clip_range", "train_timestep_fraction", "train_num_inner_epochs")
    _advantages(draft)
    draft.reward({"name": "aesthetic", "version": "v2"}, note="the function of their example script")
    if draft.source.label != _SCRIPT:
        reason = "a reward is a function in their code; aesthetic, that of their example script, stands in its place"
        draft.leave("reward_function", reason, changes=True)
    draft.put_adam("train_")


def _alignprop(draft: Draft) -> None:
    steps, gpus = draft.whole("sample_num_steps"), draft.gpus()
    draft.copy("sample_num_steps", "sample_guidance_scale")
    draft.unread(
        "the rollout is deterministic; noise moves no gradient", "sample_eta", changes=draft.real("sample_eta") > 0
    )
    keys = ("train_batch_size", "train_gradient_accumulation_steps")
    part, many = map(draft.whole, keys)
    draft.put("rollout.prompts_per_iteration", gpus * part * many, *keys, note=f"{gpus} GPUs x {part} x {many}")
    draft.put("rollout.group_size", 1, note="each sample has its own prompt")
    for option in ("rollout.batch_size", "optim.batch_size"):
        draft.put_size(option, part, "train_batch_size")
    draft.put("optim.updates_per_iteration", 1, note="AlignPropTrainer: one update an epoch")
    draft.put("algorithm.name", "draft", note="AlignPropTrainer")
    if draft.switch("truncated_backprop_rand"):
        key = "truncated_rand_backprop_minmax"
        bounds = draft.get(key)
        if not (isinstance(bounds, list | tuple) and len(bounds) == 2 and all(type(n) is int for n in bounds)):
            raise draft.fault(key, "it must be two whole numbers")
        if not 0 <= bounds[0] < steps <= bounds[1]:
            raise draft.fault(key, f"draft trains the last steps: the first must be below {steps}, the second reach it")
        draft.put("algorithm.truncation", "uniform", "truncated_backprop_rand")
        draft.put("algorithm.steps", steps - bounds[0], key, note="the longest; they draw anew at each step")
    else:
        key = "truncated_backprop_timestep"
        last = draft.whole(key, least=0)
        if last >= steps:
            raise draft.fault(key, f"with {steps} steps no step would be trained")
        draft.put("algorithm.truncation", "fixed", "truncated_backprop_rand")
        draft.put("algorithm.steps", steps - last, key, note=f"the last of {steps}")
    reason = "a reward is a function in their code; aesthetic stands in its place"
    draft.reward({"name": "aesthetic", "version": "v2", "preprocess": "fast"}, note="of their example script")
    draft.leave("reward_function", reason, changes=True)
    draft.put("deterministic", False, note="the bicubic resize has no deterministic gradient on a GPU")
    draft.put_adam("train_")


def _run(draft: Draft) -> None:
    draft.put_head("run_name", "seed", draft.source.file.stem, "empty: the name of the file")
    draft.copy("num_epochs")
    draft.copy("logdir", note="relative to the working directory")
    draft.copy("save_freq", "num_checkpoint_limit")
    draft.put("model.name", "sd", note="DefaultDDPOStableDiffusionPipeline")
    draft.put_place("model.path", "pretrained_model")
    if draft.given("pretrained_revision"):
        draft.copy("pretrained_revision")
    draft.put("model.dtype", draft.choice("mixed_precision", {**DTYPES, None: "float32"}), "mixed_precision")
    if draft.source.label != _ALIGNPROP:
        draft.put("model.final_alpha", "first", note="their last step keeps noise and is trained")
    if draft.switch("use_lora"):
        draft.put("model.lora.rank", 4, "use_lora", note="in their code")
        draft.put("model.lora.alpha", 4, "use_lora", note="in their code")
    else:
        draft.put("model.lora", None, "use_lora", note="all weights")
    if draft.get("negative_prompts"):
        draft.copy("negative_prompts")
    draft.put("data.prompts", "simple-animals.txt", note="45 animals; theirs are drawn by a function, with replacement")
    reason = "prompts are a function in their code; data.prompts is flowrl's list of animals: put yours in a file"
    draft.leave("prompt_function", reason, changes=True)


def _rollout(draft: Draft) -> None:
    draft.put("rollout.sampler.name", "ddim", note="their pipeline's sampler")
    draft.copy("sample_eta", "sample_num_steps", "sample_guidance_scale")
    lost = not draft.switch("train_cfg") and draft.real("sample_guidance_scale") > 1
    draft.unread("training has the rollout's guidance here always", "train_cfg", changes=lost)
    gpus, size = draft.gpus(), draft.whole("sample_batch_size")
    batches = draft.whole("sample_num_batches_per_epoch")
    keys = ("sample_batch_size", "sample_num_batches_per_epoch")
    note = f"{gpus} GPUs x {size} x {batches} batches"
    draft.put("rollout.prompts_per_iteration", gpus * size * batches, *keys, note=note)
    draft.put("rollout.group_size", 1, note="each sample has its own prompt")
    draft.put_size("rollout.batch_size", size, "sample_batch_size")
    part, many = draft.whole("train_batch_size"), draft.whole("train_gradient_accumulation_steps")
    how = "sample_batch_size x batches / (train_batch_size x accumulation)"
    updates = draft.quotient(size * batches, part * many, "optim.updates_per_iteration", how)
    keys = (*keys, "train_batch_size", "train_gradient_accumulation_steps")
    draft.put("optim.updates_per_iteration", updates, *keys, note=f"{size} x {batches} / ({part} x {many})")
    draft.put_size("optim.batch_size", part, "train_batch_size")


def _advantages(draft: Draft) -> None:
    tracking = draft.switch("per_prompt_stat_tracking")
    draft.put("algorithm.advantages.name", "batch", "per_prompt_stat_tracking")
    draft.put("algorithm.advantages.eps", 1e-6 if tracking else 1e-8, "per_prompt_stat_tracking", note="in their code")
    draft.copy("train_adv_clip_max")
    keys = ("per_prompt_stat_tracking_buffer_size", "per_prompt_stat_tracking_min_count")
    if tracking:
        draft.copy(*keys)
    else:
        draft.put("algorithm.advantages.history", None, "per_prompt_stat_tracking")
        draft.unread("without per_prompt_stat_tracking there is no history", *keys)
