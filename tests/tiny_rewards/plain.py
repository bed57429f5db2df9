"""The tiny rewards that take a line or two, by name: their cases, and samples where the contract's own do not do."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flowrl.rewards.remote import Config as Remote
from flowrl.rewards.remote import build as build_remote
from torch import Tensor

from flowrl import moving_shapes, shapes
from flowrl.contracts.rewards import FRAMES, trial_batch
from flowrl.reward import Reward
from flowrl.rewards import motion, pickscore, unified_reward, vlm_judge, vqa_score
from flowrl.rewards import shapes as of_shapes
from flowrl.rewards import shapes_motion as of_motion
from flowrl.scoring.surroundings import Batch
from tests import toy_clip
from tests.serving import Inline, serving
from tests.tiny_rewards import drawn_samples, edit_score, judges
from tests.tiny_rewards.diversity import save_clip

GRADES = "Alignment Score (1-5): {0}\nCoherence Score (1-5): 3\nStyle Score (1-5): {0}"
AXES = '{"reasons": "so", "alignment": {0}, "coherence": 3, "style": {0}}'


def letters(images: Sequence[Tensor], prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
    """Brightness of the image and length of its prompt: what the server in a thread of `remote` serves."""
    return torch.stack([image.mean() + 0.01 * len(prompt) for image, prompt in zip(images, prompts, strict=True)])


def of_server(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    server = stack.enter_context(serving(Inline(letters)))
    return {"": build_remote(Remote(servers=[server], reward="mine", deadline_s=20.0, timeout_s=5.0, start_s=0.1))}


def of_clip(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    own: dict[str, Any] = {"model": toy_clip.save(folder), "tokenizer": str(folder), "device": "cpu"}
    return {way: pickscore.build(pickscore.Config(**own, preprocess=way)) for way in ("exact", "fast")}


def of_judge(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    """Probabilities of a tiny random LLaVA's answers, and grades of a server."""
    llava, http = judges.local(folder), judges.server(stack, AXES)
    return {
        "alignment": vlm_judge.build(vlm_judge.Config(local=llava)),
        "digits": vlm_judge.build(vlm_judge.Config(local=llava, rubric="alignment_digits")),
        "quality": vlm_judge.build(vlm_judge.Config(backend="http", http=http, rubric="quality")),
        "edit": vlm_judge.build(vlm_judge.Config(local=llava, rubric="edit_digits")),
    }


CASES: dict[str, Callable[[Path, ExitStack], dict[str, Reward]]] = {
    "motion": lambda folder, _: {
        "pixels": motion.build(motion.Config()),
        "clip": motion.build(motion.Config(backbone=save_clip(folder), device="cpu")),
    },
    "pickscore": of_clip,
    "remote": of_server,
    "shapes": lambda *_: {"": of_shapes.build(of_shapes.Config())},
    "shapes_motion": lambda *_: {"": of_motion.build(of_motion.Config())},
    # The answers of random weights hold no grades.
    "unified_reward": lambda _, stack: {
        "": unified_reward.build(unified_reward.Config(backend="http", http=judges.server(stack, GRADES)))
    },
    "vlm_judge": of_judge,
    "vqa_score": lambda folder, _: {"": vqa_score.build(vqa_score.Config(local=judges.local(folder)))},
}
SAMPLES: dict[str, Callable[..., Batch]] = {
    "vlm_judge": lambda reward, folder: (
        edit_score.samples(reward, folder) if reward.card.modality == "edit" else trial_batch(reward.card)
    ),
    "shapes": lambda *_: drawn_samples(shapes, ("a red circle", "a blue square", "two green triangles")),
    "shapes_motion": lambda *_: drawn_samples(
        moving_shapes, ("a red circle moves left", "a blue square stays", "a cross turns from green to red"), FRAMES
    ),
}
