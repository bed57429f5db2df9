"""vlm_judge: probabilities of a tiny random LLaVA's answers, and grades of a server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.vlm_judge import Config, build

from flowrl.reward import Reward
from tests.tiny_rewards import judges

AXES = '{"reasons": "so", "alignment": {0}, "coherence": 3, "style": {0}}'


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    llava, http = judges.local(folder), judges.server(stack, AXES)
    return {
        "alignment": build(Config(local=llava)),
        "digits": build(Config(local=llava, rubric="alignment_digits")),
        "quality": build(Config(backend="http", http=http, rubric="quality")),
    }
