"""UnifiedReward on a server: the answers of random weights hold no grades."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.rewards.unified_reward import Config, build

from flowrl.reward import Reward
from tests.tiny_rewards import judges

GRADES = "Alignment Score (1-5): {0}\nCoherence Score (1-5): 3\nStyle Score (1-5): {0}"


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    return {"": build(Config(backend="http", http=judges.server(stack, GRADES)))}
