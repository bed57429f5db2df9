"""VideoAlign on a tiny random Qwen2-VL in the published layout."""

import dataclasses
import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from flowrl.rewards.video_align import MARKS, Config, build

from flowrl.reward import Reward
from flowrl.rewards import video_align
from tests import toy_qwen_vl as toy

PROMPTS = ["a photo of a cat", "two {dogs} on a bench", "sea"]
# Stands in for the authors' text, which is not part of the repository: three marks, the caption before the last.
TEXT = "\nRate sharpness: <|VQ_reward|>\nEND\n\nRate motion: <|MQ_reward|>\nEND\n\nPrompt - {text_prompt}  \n"
TEXT += "Rate likeness: <|TA_reward|>\nEND\n"
NORMS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
RANK, ALPHA = 2, 6


def settings_file(base: str, **changes: Any) -> dict:
    """A model_config.json; `changes` are {"section.key": value}."""
    content = {
        "data_config": {
            "max_frame_pixels": 200704,
            "num_frames": None,
            "fps": 2.0,
            "eval_dim": ["VQ", "MQ", "TA"],
            "prompt_template_type": "detailed_special",
            "sample_type": "uniform",
        },
        "model_config": {"model_name_or_path": base, "output_dim": 1, "use_special_tokens": True},
        "peft_lora_config": {"lora_enable": True, "lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": {f"{n}_mean": m for n, (m, _) in NORMS.items()}
        | {f"{n}_std": s for n, (_, s) in NORMS.items()},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        content[section][name] = value
    return content


def split_lora(weights: dict) -> tuple[dict, dict]:
    """(the weights less what LoRA adds, the factors by layer) for the language model's queries and values."""
    generator = torch.Generator().manual_seed(5)
    plain, factors = dict(weights), {}
    for name in weights:
        if name.startswith("model.layers.") and name.endswith(("q_proj.weight", "v_proj.weight")):
            outputs, inputs = weights[name].shape
            a, b = (torch.randn(s, generator=generator) * 0.2 for s in ((RANK, inputs), (outputs, RANK)))
            plain[name] = weights[name] - ALPHA / RANK * b @ a
            factors[name.removesuffix(".weight")] = (a, b)
    return plain, factors


@dataclasses.dataclass
class Toy:
    """A saved one; network and tokenizer are transformers' own."""

    folder: Path
    base: str
    model: Any
    tokenizer: Any
    head: torch.Tensor


def save(folder: Path) -> Toy:
    """Write a tiny VideoReward whose last checkpoint is one model.pth, as PEFT names weights."""
    base = toy.save_base(folder / "base", [TEXT, *PROMPTS])
    model, tokenizer = toy.network(base, MARKS)
    plain, factors = split_lora(toy.published(model))
    head = torch.randn(1, toy.HIDDEN, generator=torch.Generator().manual_seed(3))
    saved = {"base_model.model.rm_head.weight": head}
    for name, value in plain.items():
        layer = name.removesuffix(".weight")
        saved[f"base_model.model.{layer}.base_layer.weight" if layer in factors else f"base_model.model.{name}"] = value
    for layer, pair in factors.items():
        for part, value in zip("AB", pair, strict=True):
            saved[f"base_model.model.{layer}.lora_{part}.default.weight"] = value
    for step, content in (("9", {}), ("11", saved)):
        (folder / f"checkpoint-{step}").mkdir()
        torch.save(content, folder / f"checkpoint-{step}" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(settings_file(base)))
    (folder / "prompt_template.py").write_text(f"OTHER = 'x'\nDETAILED = {TEXT!r}\n")
    return Toy(folder, base, model, tokenizer, head)


def own_text(patch: pytest.MonkeyPatch) -> None:
    """The text that the reward expects is TEXT."""
    digest = hashlib.sha256(TEXT.replace("{text_prompt}", "a photo of a cat").encode()).hexdigest()
    patch.setattr(video_align, "PROMPT_SHA256", digest)


def small_frames(patch: pytest.MonkeyPatch) -> None:
    """Frames of a few tokens, for what does not depend on their size."""
    patch.setattr(video_align, "MIN_PIXELS", 4 * 28 * 28)


def configured(toys: Toy, **options: Any) -> Config:
    given = {"model": str(toys.folder), "prompt_file": str(toys.folder / "prompt_template.py"), "fps": 4.0}
    return Config(**{**given, "dtype": "float32", "device": "cpu", **options})


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    own_text(patch)
    small_frames(patch)
    return {"": build(configured(save(folder)))}
