"""Can the asked-for text be read in the image? Optical character recognition against the prompt's quoted text.

raw = 1 - min(edit distance, len(target)) / len(target), spaces and case ignored; 1 as well where the target is
part of what was read. Extra text goes unpunished then, which training exploits: watch a preference reward beside it.
A video [F, 3, H, W] has the mean over those of its frames 0, 4, 8, ... that are above 0, as Flow-GRPO scores them.

The rule is Flow-GRPO's, the reader is not. Nearest to its scores come `min_confidence: 0.5`, and for videos
`allow_extra_text: false`; its PaddleOCR has other weights, limits and order of colours (docs/rewards/ocr.md).

On words drawn at 256 x 256 the reader is measured by `python -m tests.rendered_words` (docs/rewards/ocr.md).

The reader is RapidOCR with the weights of its package: PP-OCRv4 of `rapidocr-onnxruntime` (Python below 3.13), which
lacks most accented letters, or PP-OCRv6 of `rapidocr`, which has those of Latin alphabets. Compare scores of one alone.

Source: yifan123/flow_grpo:flow_grpo/ocr.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch
from flowrl.rewards._detection.ocr_reader import Pool, engine, package
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor

from flowrl.core.errors import Remedy
from flowrl.reward import Card, Images, Reward, RewardError

Reader = Callable[[Sequence[np.ndarray]], list[str]]
"""Images [H, W, 3] uint8 RGB -> all the text read in each, in reading order; "" where there is none."""

_QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')

LEVEL = "tested"
CARD = Card(
    outputs=("ocr",),
    low=0.0,
    high=1.0,
    modality="any",
    resolution="the whole image, resized by RapidOCR; PP-OCRv4 lacks most accented letters",
    memory_gib=0.1,
    level=LEVEL,
    licence="Apache-2.0 (RapidOCR and PP-OCRv4)",
    source="yifan123/flow_grpo:flow_grpo/ocr.py",
)
_FRAME_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    allow_extra_text: bool = True
    """Full score where the target is part of what was read; false punishes every extra letter. Flow-GRPO: true for
    images, false for videos."""
    min_confidence: float = 0.0
    """Lines that the reader is less sure of are ignored; 0 takes every line. PaddleOCR, of which Flow-GRPO takes what
    it gives, and RapidOCR by themselves have 0.5."""
    detection_side: int = 736
    """Text is looked for with the shorter side at this many pixels or more; less is faster on small images."""
    workers: int = 0
    """Processes that read, an engine and a thread in each; 0 reads in this process, on one thread."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence={self.min_confidence} must be from 0 to 1")
        if self.detection_side < 32:
            raise ValueError(f"detection_side={self.detection_side} must be at least 32, one cell of the detector")
        if self.workers < 0:
            raise ValueError(f"workers={self.workers} must be 0, to read in this process, or a number of processes")


def check_prompt(prompt: str, metadata: dict) -> None:
    """Raise RewardError for a prompt that asks for no text, before anything is loaded."""
    target_text(prompt, metadata)


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


def similarity(recognised: str, target: str, *, allow_extra_text: bool) -> float:
    """1 for the target, 0 for nothing like it.

    >>> similarity("Hello Wrld", "Hello World", allow_extra_text=True)
    0.9
    """
    from rapidfuzz.distance import Levenshtein

    read, wanted = ("".join(text.split()).lower() for text in (recognised, target))
    if allow_extra_text and wanted in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


def load_reader(config: Config) -> Reader:
    """RapidOCR on the CPU.

    Raises:
        RewardError: a package is not installed.
    """
    # Looked for here, so that a missing one is named before anything is drawn.
    for name in ("rapidfuzz", package() or "rapidocr", "onnxruntime"):
        if find_spec(name) is None:
            raise RewardError(
                f"reward 'ocr' needs a package that is not installed ({name})",
                Remedy(command='pip install "flowrl[ocr]"'),
            )
    if config.workers:
        return Pool(config.min_confidence, config.detection_side, config.workers)
    read = engine(config.min_confidence, config.detection_side)
    return lambda images: [read(pixels) for pixels in images]


def build(config: Config) -> Reward:
    reader = load_reader(config)

    def value(frames: Sequence[np.ndarray | None], texts: Sequence[str], target: str) -> float:
        values = [
            math.nan if pixels is None else similarity(text, target, allow_extra_text=config.allow_extra_text)
            for pixels, text in zip(frames, texts, strict=True)
        ]
        read = [value for value in values if value != 0]  # NaN stays
        return sum(read) / len(read) if read else 0.0

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        # All targets first: a prompt without one is the user's mistake, and is refused before the slow part.
        targets = [target_text(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        samples = [[to_uint8(f) for f in (x[::_FRAME_INTERVAL] if x.ndim == 4 else [x])] for x in images]
        # One call for all, so that a pool has work for every worker.
        texts = iter(reader([pixels for frames in samples for pixels in frames if pixels is not None]))
        read = [["" if pixels is None else next(texts) for pixels in frames] for frames in samples]
        rows = zip(samples, read, targets, strict=True)
        return torch.tensor([value(*row) for row in rows])

    card = CARD
    if package() == "rapidocr":  # scores of the version 1 are PP-OCRv4's
        which = {"version": f"1, rapidocr {version('rapidocr')}", "licence": "Apache-2.0 (RapidOCR and PP-OCRv6)"}
        card = dataclasses.replace(CARD, resolution="the whole image, resized by RapidOCR", **which)
    return Reward(score, card)
