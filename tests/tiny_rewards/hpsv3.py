"""HPSv3 on a tiny random Qwen2-VL in the published layout."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from flowrl.rewards.hpsv3 import MARK, PROMPT, Config, build

from flowrl.reward import Reward
from flowrl.rewards import hpsv3
from tests import toy_qwen_vl as toy

PROMPTS = ["a photo of a cat", "two {dogs} on a bench", "sea"]


def random_head() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = hpsv3.head(toy.HIDDEN).eval()
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return head


def save(folder: Path) -> tuple[Any, Any]:
    """Write the folder; (network, tokenizer)."""
    from safetensors.torch import save_file

    base = toy.save_base(folder, [PROMPT.read_text(encoding="utf-8"), *PROMPTS])
    model, tokenizer = toy.network(base, [MARK])
    weights = toy.published(model) | {f"rm_head.{name}": value for name, value in random_head().state_dict().items()}
    save_file(weights, folder / "HPSv3.safetensors")
    return model, tokenizer


def configured(folder: Path, **options: Any) -> Config:
    return Config(model=str(folder), base=str(folder), dtype="float32", device="cpu", **options)


def small_images(patch: pytest.MonkeyPatch) -> None:
    """Images of 16 tokens, for what does not depend on their size."""
    patch.setattr(hpsv3, "PIXELS", 16 * 28 * 28)


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    save(folder)
    small_images(stack.enter_context(pytest.MonkeyPatch.context()))
    return {name: build(configured(folder, preprocess=name)) for name in ("exact", "fast")}
