"""vqa_score on a tiny random LLaVA."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.vqa_score import Config, build

from flowrl.reward import Reward
from tests.tiny_rewards import judges


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config(local=judges.local(folder)))}
