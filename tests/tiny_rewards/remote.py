"""remote, with a server in a thread that serves a reward of this file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from flowrl.rewards.remote import Config, build
from torch import Tensor

from flowrl.reward import Reward
from tests.serving import Inline, serving


def letters(images: Sequence[Tensor], prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
    """Brightness of the image and length of its prompt."""
    return torch.stack([image.mean() + 0.01 * len(prompt) for image, prompt in zip(images, prompts, strict=True)])


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    server = stack.enter_context(serving(Inline(letters)))
    return {"": build(Config(servers=[server], reward="mine", deadline_s=20.0, timeout_s=5.0, start_s=0.1))}
