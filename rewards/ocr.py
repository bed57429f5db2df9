"""Can the asked-for text be read in the picture? Optical character recognition against the prompt's quoted text.

raw = 1 - min(edit distance, len(target)) / len(target), spaces and case ignored; 1 as well where the target is
part of what was read. Extra text goes unpunished then, which training exploits: watch a preference reward beside it.
A clip [F, 3, H, W] has the mean over those of its frames 0, 4, 8, ... that are above 0, as Flow-GRPO scores them.

Source: yifan123/flow_grpo:flow_grpo/ocr.py; the reader is RapidOCR (PP-OCRv4), whose weights come with its package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.reward import Card, Reward, RewardError
from rewards._images import to_uint8

Reader = Callable[[np.ndarray], str]
"""[H, W, 3] uint8 RGB -> all the text read, in reading order; "" if there is none."""

_QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')

LEVEL = "experimental"
CARD = Card(
    outputs=("ocr",),
    low=0.0,
    high=1.0,
    modality="any",
    resolution="the whole picture, resized by RapidOCR",
    memory_gib=0.1,
    level=LEVEL,
    licence="Apache-2.0 (RapidOCR and PP-OCRv4)",
    source="yifan123/flow_grpo:flow_grpo/ocr.py",
)
_FRAME_INTERVAL = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    allow_extra_text: bool = True
    """Full score where the target is part of what was read (as Flow-GRPO does); false punishes every extra letter."""
    min_confidence: float = 0.5
    """Lines that the reader is less sure of are ignored; Flow-GRPO takes every line (0)."""


def target_text(prompt: str, metadata: dict) -> str:
    """The text to be drawn: metadata["text"], else what the prompt has in double quotes first.

    Raises:
        RewardError: there is none, or it is blank.

    >>> target_text('a shop sign that says "Open Now"', {})
    'Open Now'
    """
    text = metadata.get("text")
    if text is None:
        match = _QUOTED.search(prompt)
        text = (match[1] or match[2]) if match else None
    if not isinstance(text, str) or not text.strip():
        raise RewardError(
            f"reward 'ocr': the prompt {prompt!r} asks for no text; put it in double quotes (\"...\") in the prompt, "
            f'or under "text" in a .jsonl prompt file'
        )
    return text


def edit_distance(first: str, second: str) -> int:
    """Levenshtein: the fewest insertions, deletions and replacements of a letter.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def similarity(recognised: str, target: str, *, allow_extra_text: bool) -> float:
    """1 for the target, 0 for nothing like it.

    >>> similarity("Hello Wrld", "Hello World", allow_extra_text=True)
    0.9
    """
    read, wanted = ("".join(text.split()).lower() for text in (recognised, target))
    if allow_extra_text and wanted in read:
        return 1.0
    return 1 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


def load_reader(min_confidence: float) -> Reader:
    """RapidOCR on the CPU; about 0.1 s a picture.

    Raises:
        RewardError: the package is not installed.
    """
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ModuleNotFoundError as error:
        raise RewardError(
            f"reward 'ocr' needs a package that is not installed ({error.name}): run pip install \"flowrl[ocr]\""
        ) from error
    engine = RapidOCR(text_score=min_confidence)

    def read(pixels: np.ndarray) -> str:
        # OpenCV's order of channels.
        lines, _ = engine(np.ascontiguousarray(pixels[:, :, ::-1]))
        return "".join(text for _, text, _ in lines or ())

    return read


def build(config: Config) -> Reward:
    reader = load_reader(config.min_confidence)

    def one(picture: Tensor, target: str) -> float:
        if picture.ndim == 4:
            values = [one(frame, target) for frame in picture[::_FRAME_INTERVAL]]
            read = [value for value in values if value != 0]  # NaN stays
            return sum(read) / len(read) if read else 0.0
        pixels = to_uint8(picture)
        if pixels is None:
            return math.nan
        return similarity(reader(pixels), target, allow_extra_text=config.allow_extra_text)

    def score(images: Tensor | Sequence[Tensor], prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        # All targets first: a prompt without one is the user's mistake, and found before the slow part.
        targets = [target_text(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        return torch.tensor([one(picture, target) for picture, target in zip(images, targets, strict=True)])

    return Reward(score, CARD)
