"""VQAScore: the probability that a vision-language model says Yes when asked whether the picture shows the prompt.

raw = P("Yes") over the whole vocabulary at temperature 1, the geometric mean over its tokens where it has several.
Unlike `vlm_judge`, an answer that is neither Yes nor No lowers it.

Through a server the first token alone is seen, so the answer must be one token there; where the server does not list
it, its upper bound counts. Published numbers are of CLIP-FlanT5, which transformers cannot load: report yours with
the judge's name.

Source: arXiv:2404.01291; linzhiqiu/t2v_metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.rewards._backends import QWEN, Backend, Score, judge_card, judged
from flowrl.rewards._judge import Judge, ask_about, where_asked
from torch import Tensor

from flowrl.reward import Reward

LEVEL = "experimental"
CARD = judge_card(
    "vqa_score",
    level=LEVEL,
    licence="Apache-2.0 (Qwen3-VL and t2v_metrics; unverified); another judge's own",
    source="arXiv:2404.01291",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(Backend):
    question: str = 'Does this figure show "{}"? Please answer Yes or No.'
    """{} stands for the prompt."""
    answer: str = "Yes"
    """The answer whose probability is the score."""

    def __post_init__(self) -> None:
        if "{}" not in self.question:
            raise ValueError(f"question={self.question!r} must hold {{}}, where the prompt goes")
        if not self.answer.strip():
            raise ValueError("answer must not be blank")


def _score(judge: Judge, config: Config) -> Score:
    def score(images: Tensor | Sequence[Tensor], prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        questions = ask_about(images, [config.question.replace("{}", prompt) for prompt in prompts])
        return where_asked(questions, lambda asked: judge.answer_logprobs(asked, config.answer).exp()).float()

    return score


def build(config: Config) -> Reward:
    return judged("vqa_score", CARD, config, QWEN, lambda judge: _score(judge, config), config.question, config.answer)
