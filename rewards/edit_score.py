"""EditScore: was the image edited as instructed, was the rest left alone, and does the result look right?

A judge sees the source (metadata["images"], one path) and the edited image, and grades the success of the edit and
how little else was changed; it sees the edited image alone, and grades naturalness and artefacts. Grades are 0 to 25:

    SC = min(success, kept) / 2.5,  PQ = min(naturalness, artefacts) / 2.5,  raw = sqrt(SC PQ), 0 to 10

The mean over `num_pass` answers, seeds `seed`, `seed` + 1, ... Every part is reported: returning the source unchanged
raises `kept`, painting everything anew raises `success`; watch both.

Released EditScore models were tuned on the texts of their repository (editscore/vie_prompts.py), which are not copied
here: the built-in texts ask for the same grades in other words. For the published scale, give the originals under
`sc_prompt` and `pq_prompt`.

Source: arXiv:2509.23909; VectorSpaceLab/EditScore, its single-sample path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from flowrl.rewards._judges.backends import Backend, judge_card, judge_reward
from flowrl.rewards._judges.base import (
    Judge,
    Question,
    Writing,
    ask_json,
    mean_or_nan,
    read_text,
    source_pixels,
    strict_fields,
)
from flowrl.rewards._judges.vlm import Local
from flowrl.rewards._vision.arrays import to_uint8
from pydantic import Field
from torch import Tensor

from flowrl.core.paths import PATH
from flowrl.core.strict import require_not_negative, require_positive
from flowrl.reward import Images, Reward, RewardError

LEVEL = "experimental"
DEFAULT = Local(model="Qwen/Qwen2.5-VL-7B-Instruct", adapter="EditScore/EditScore-7B")
PARTS = ("success", "kept", "sc", "pq")
CARD = judge_card(
    *("edit_score", *(f"edit_score_{part}" for part in PARTS)),
    high=10.0,
    transform=(0.1, 0.0),
    modality="edit",
    requires=("images",),
    memory_gib=15.5,
    level=LEVEL,
    licence="Apache-2.0 (EditScore and Qwen2.5-VL; unverified); another judge's own",
    source="arXiv:2509.23909",
)
_RANGE = 25
_FORM = 'Answer with a JSON object of this form, reasons first and short: {"reasoning": "...", "score": [a, b]}'
SC_PROMPT = f"""You see two pictures: first the source, then the source edited by a model that was told:
<instruction>

Give two numbers from 0 to {_RANGE}.
a, success: 0 if nothing of the instruction was carried out, {_RANGE} if all of it was, on the right objects.
b, kept: 0 if the edited picture has little in common with the source, {_RANGE} if nothing was changed that the
instruction did not call for.
The pictures may be the same: then nothing was carried out.
{_FORM}"""
PQ_PROMPT = f"""You see a picture made by a model. Judge how it looks, not what it shows.

Give two numbers from 0 to {_RANGE}.
a, naturalness: 0 if distances, shadows and light are impossible, {_RANGE} if everything looks natural.
b, artefacts: 0 if it is full of distortions, scratches, watermarks, blurred faces or misshapen bodies, {_RANGE} if it
has none.
{_FORM}"""


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    num_pass: int = 1
    """Answers that are averaged."""
    temperature: float = 0.7
    seed: int = 42
    """Seed of the first answer; a sample's draws depend on nothing else."""
    max_tokens: int = 512
    sc_prompt: Annotated[str | None, PATH] = None
    """A text file to ask with instead, <instruction> where the prompt goes: was the edit made, and nothing else?"""
    pq_prompt: Annotated[str | None, PATH] = None
    """The same for the look of the edited image."""

    def __post_init__(self) -> None:
        if self.num_pass < 1:
            raise ValueError(f"num_pass={self.num_pass} must be at least 1")
        require_not_negative(vars(self), "temperature")
        require_positive(vars(self), "max_tokens")


def combine(success: float, kept: float, naturalness: float, artefacts: float) -> dict[str, float]:
    """Parts and score of one answer from its four grades, 0 to 25.

    >>> combine(25, 10, 25, 22.5)
    {'edit_score': 6.0, 'edit_score_success': 10.0, 'edit_score_kept': 4.0, 'edit_score_sc': 4.0, 'edit_score_pq': 9.0}
    """
    unit = _RANGE / 10
    sc, pq = min(success, kept) / unit, min(naturalness, artefacts) / unit
    values = (math.sqrt(sc * pq), success / unit, kept / unit, sc, pq)
    return dict(zip(CARD.outputs, values, strict=True))


class Asker:
    """Puts both questions about every edited image, once a pass."""

    def __init__(self, judge: Judge, config: Config, sc_prompt: str, pq_prompt: str) -> None:
        self.judge, self.config, self.sc_prompt, self.pq_prompt = judge, config, sc_prompt, pq_prompt
        grade = Annotated[float, Field(ge=0, le=_RANGE, allow_inf_nan=False)]
        pair = Annotated[list[grade], Field(min_length=2, max_length=2)]
        self.form = strict_fields("Grades", {"reasoning": (str, ...), "score": (pair, ...)})

    def one_pass(
        self, sources: Sequence[np.ndarray], edited: Sequence[np.ndarray], prompts: Sequence[str], seed: int
    ) -> list[dict[str, float]]:
        """Parts and score of each image; NaN where a question was not answered."""
        both = [
            Question(self.sc_prompt.replace("<instruction>", prompt), (source, result))
            for source, result, prompt in zip(sources, edited, prompts, strict=True)
        ]
        alone = [
            Question(self.pq_prompt.replace("<instruction>", prompt), (result,))
            for result, prompt in zip(edited, prompts, strict=True)
        ]
        config = self.config
        how = Writing(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed, schema=self.form)
        answers = ask_json(self.judge, [*both, *alone], self.form, how)
        grades = [(math.nan, math.nan) if answer is None else answer.model_dump()["score"] for answer in answers]
        return [combine(*sc, *pq) for sc, pq in zip(grades[: len(both)], grades[len(both) :], strict=True)]

    def __call__(self, images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        # All sources first: a missing one is the user's mistake, and is refused before the slow part.
        sources = [source_pixels(record, "edit_score") for record in metadata]
        edited = [to_uint8(image) for image in images]
        rows = [row for row, pixels in enumerate(edited) if pixels is not None]
        shown = [pixels for pixels in edited if pixels is not None]
        chosen = [sources[row] for row in rows], shown, [prompts[row] for row in rows]
        passes = [self.one_pass(*chosen, self.config.seed + number) for number in range(self.config.num_pass)]
        result = {name: torch.full((len(prompts),), torch.nan) for name in CARD.outputs}
        for place, row in enumerate(rows):
            for name, values in result.items():
                values[row] = mean_or_nan([answers[place][name] for answers in passes])
        return result


def build(config: Config) -> Reward:
    texts = []
    for path, default, key in ((config.sc_prompt, SC_PROMPT, "sc_prompt"), (config.pq_prompt, PQ_PROMPT, "pq_prompt")):
        texts.append(default if path is None else read_text(path, "edit_score", key))
    if "<instruction>" not in texts[0]:
        raise RewardError(f"reward 'edit_score': sc_prompt {config.sc_prompt!r} must hold <instruction>")
    draws = f"{config.num_pass} {config.temperature} {config.seed}"
    return judge_reward("edit_score", CARD, config, DEFAULT, lambda judge: Asker(judge, config, *texts), *texts, draws)
