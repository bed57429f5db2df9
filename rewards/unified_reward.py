"""UnifiedReward: a vision-language model tuned to grade images from 1 to 5, asked with the text it was tuned on.

v2.0 grades alignment, coherence and style; raw is their mean, each is reported beside it. v1.5 gives one final score.
An answer that lacks a grade, or has one outside 1 to 5, is NaN; it is not asked for again, as the models know one
form of question only. The prompt texts are the published ones to the byte, checked by their sha256.

v1.5 is a LLaVA checkpoint that transformers cannot load: serve it (SGLang, chat template chatml-llava). It is shown
the image at 512 x 512, whatever its aspect, as in Flow-GRPO.

Source: arXiv:2503.05236; the texts are CodeGoat24/UnifiedReward's (MIT), that of v1.5 as in yifan123/flow_grpo:
flow_grpo/rewards.py (MIT).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from flowrl.rewards._judges.backends import Backend, judge_card, judge_reward
from flowrl.rewards._judges.base import Judge, Question, Writing, ask_written, where_asked
from flowrl.rewards._judges.vlm import Local
from flowrl.rewards._vision.arrays import to_uint8
from PIL import Image
from torch import Tensor

from flowrl.core.strict import require_positive
from flowrl.reward import Card, Images, Reward, RewardError, ScoreFunction

LEVEL = "experimental"
DEFAULT = Local(model="CodeGoat24/UnifiedReward-2.0-qwen3vl-4b")
AXES = ("alignment", "coherence", "style")
CARD = judge_card(
    *("unified_reward", *(f"unified_reward_{axis}" for axis in AXES)),
    low=1.0,
    high=5.0,
    transform=(0.25, -0.25),
    resolution="as the judge's processor takes it (v1.5: 512 x 512, the aspect is lost)",
    level=LEVEL,
    licence="MIT (code and texts); weights unverified",
    source="arXiv:2503.05236",
)
PROMPTS = {
    "v1.5": (
        "<image>\n"
        "You are given a text caption and a generated image based on that caption. Your task is to evaluate "
        "this image based on two key criteria:\n"
        "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider"
        " the accuracy of depicted objects, their relationships, and attributes as described in the "
        "caption.\n"
        "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
        "preservation, color accuracy, and overall aesthetic appeal.\n"
        "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
        "Your task is provided as follows:\n"
        "Text Caption: [{caption}]"
    ),
    "v2.0": (
        "You are presented with a generated image and its associated text caption. Your task is to analyze "
        "the image across multiple dimensions in relation to the caption. Specifically:\n"
        "Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
        "- Alignment Score: How well the image matches the caption in terms of content.\n"
        "- Coherence Score: How logically consistent the image is (absence of visual glitches, object "
        "distortions, etc.).\n"
        "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n"
        "\n"
        "Output your evaluation using the format below:\n"
        "\n"
        "Alignment Score (1-5): X\n"
        "Coherence Score (1-5): Y\n"
        "Style Score (1-5): Z\n"
        "\n"
        "Your task is provided as follows:\n"
        "Text Caption: [{caption}]"
    ),
}
# Of the text for the caption "a photo of a cat".
SHA256 = {
    "v1.5": "9358a8ac59c4012fe81e8ef35c5fdc60e4def72734abe7676488888eaecaaed8",
    "v2.0": "43d97dbf203e8df853adb7a93bbd60d7fa3ac32428adc186196c9742d93ac3f9",
}
# A whole number with its decimals, on the line of its name; "4/10" is none.
_NUMBER = r"[^\w\n]*?([-+]?\d+(?:\.\d+)?)(?!\d|\.\d|/)"
_AXIS_LINES = {axis: re.compile(rf"\b{axis} score\W*(?:\(1-5\)\W*)?:{_NUMBER}", re.I) for axis in AXES}
_FINAL_LINE = re.compile(rf"\bfinal score\W*?:{_NUMBER}", re.I)


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    version: Literal["v2.0", "v1.5"] = "v2.0"
    """Version of the model, which decides the text of the question."""
    max_tokens: int = 512
    """Longest answer."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "max_tokens")


def question(version: str, caption: str) -> str:
    """The text that goes with the image.

    >>> question("v2.0", "a cat").splitlines()[-1]
    'Text Caption: [a cat]'
    """
    return PROMPTS[version].replace("{caption}", caption)


def grades(version: str, answer: str) -> list[float] | None:
    """The numbers of an answer: [mean, alignment, coherence, style], or [final] of v1.5; None where one is missing.

    >>> grades("v2.0", "Alignment Score (1-5): 2.69\\nCoherence Score (1-5): 2.37\\nStyle Score (1-5): 2.80")[1:]
    [2.69, 2.37, 2.8]
    """
    patterns = list(_AXIS_LINES.values()) if version == "v2.0" else [_FINAL_LINE]
    result = [pattern.findall(answer) for pattern in patterns]
    # The last one: an answer may begin by repeating the form.
    values = [float(matches[-1]) if matches else math.nan for matches in result]
    if not all(CARD.low <= value <= CARD.high for value in values):
        return None
    return [sum(values) / len(values), *values] if version == "v2.0" else values


def _score(judge: Judge, config: Config, names: Sequence[str]) -> ScoreFunction:
    writing = Writing(max_tokens=config.max_tokens)

    def ask(questions: list[Question]) -> Tensor:
        read = ask_written(judge, questions, lambda answer: grades(config.version, answer), writing, "unified_reward")
        rows = [[math.nan] * len(names) if row is None else row for row in read]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(names))

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        pixels = [to_uint8(image) for image in images]
        if config.version == "v1.5":
            pixels = [None if p is None else np.asarray(Image.fromarray(p).resize((512, 512))) for p in pixels]
        questions = [
            None if p is None else Question(question(config.version, prompt), (p,))
            for p, prompt in zip(pixels, prompts, strict=True)
        ]
        return dict(zip(names, where_asked(questions, ask).float().unbind(dim=1), strict=True))

    return score


def card_of(config: Config) -> Card:
    return (
        CARD if config.version == "v2.0" else dataclasses.replace(CARD, outputs=CARD.outputs[:1], transform=(0.2, 0.0))
    )


def build(config: Config) -> Reward:
    text = question(config.version, "a photo of a cat")
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256[config.version], "the prompt text was changed"
    if config.version == "v1.5" and config.backend == "local":
        raise RewardError(
            "reward 'unified_reward': version v1.5 is a LLaVA checkpoint that transformers cannot load; serve it "
            "(SGLang, chat template chatml-llava) and set backend: http, or take version: v2.0"
        )
    card = card_of(config)
    return judge_reward(
        "unified_reward", card, config, DEFAULT, lambda judge: _score(judge, config, card.outputs), text
    )
