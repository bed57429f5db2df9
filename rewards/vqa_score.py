"""VQAScore: the probability that a vision-language model says Yes when asked whether the image shows the prompt.

raw = P("Yes") over the whole vocabulary at temperature 1, the geometric mean over its tokens where it has several.
Unlike `vlm_judge`, an answer that is neither Yes nor No lowers it.

Every family of judges is asked in the words that t2v_metrics has for it (`wording`), within its own chat template;
`question` asks all in yours.

Through a server the first token alone is seen, so the answer must be one token there; where the server does not list
it, its upper bound counts. Published numbers are of CLIP-FlanT5, which transformers cannot load: report yours with
the judge's name.

Source: arXiv:2404.01291; linzhiqiu/t2v_metrics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.rewards._judges.backends import QWEN, Backend, judge_card, reward_of_judge
from flowrl.rewards._judges.base import ask_about, where_asked
from torch import Tensor

from flowrl.reward import Images, Reward

LEVEL = "experimental"
CARD = judge_card(
    "vqa_score",
    level=LEVEL,
    licence="Apache-2.0 (Qwen3-VL and t2v_metrics; unverified); another judge's own",
    source="arXiv:2404.01291",
)
_LATER = 'Does this figure show "{}"? Please answer Yes or No.'
_PAPER = 'Does this figure show "{}"? Please answer yes or no.'
_IMAGE = 'Does this image show "{}"? Answer the question with Yes or No'
# The first that the family's name holds; the more special ones come first.
_WORDINGS = {
    **dict.fromkeys(("llava_onevision", "mllama", "llama_3_2"), _IMAGE),
    **dict.fromkeys(("llava", "gemini"), _PAPER),
}


@dataclass(frozen=True, kw_only=True)
class Config(Backend):
    question: str | None = None
    """{} stands for the prompt; null: the words of t2v_metrics for the judge's family."""
    answer: str = "Yes"
    """The answer whose probability is the score."""

    def __post_init__(self) -> None:
        if self.question is not None and "{}" not in self.question:
            raise ValueError(f"question={self.question!r} must hold {{}}, where the prompt goes")
        if not self.answer.strip():
            raise ValueError("answer must not be blank")


def wording(family: str) -> str:
    """The question of t2v_metrics for a family of judges, by `model_type` or by the name of a served model.

    LLaVA 1.5 and 1.6 and Gemini, as CLIP-FlanT5 in the paper: "yes or no"; LLaVA-OneVision and Llama 3.2: "this image";
    Qwen-VL, InternVL, Gemma 3, GPT and all that it does not know: "Yes or No".

    >>> wording("llava_next")
    'Does this figure show "{}"? Please answer yes or no.'
    """
    name = re.sub(r"[^a-z0-9]+", "_", family.lower())
    return next((question for part, question in _WORDINGS.items() if part in name), _LATER)


def build(config: Config) -> Reward:
    judge = config.load("vqa_score", QWEN)
    question = config.question or wording(judge.family)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        questions = ask_about(images, [question.replace("{}", prompt) for prompt in prompts])
        return where_asked(questions, lambda asked: judge.answer_logprobs(asked, config.answer).exp()).float()

    return reward_of_judge(judge, "vqa_score", CARD, config, QWEN, score, question, config.answer)
