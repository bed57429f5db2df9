"""The options and prompts of a set of pairs, checked before anything is loaded; apps/pairs/drawing.py makes the set."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.resolved import Resolved
from flowrl.config.schema import to_tree
from flowrl.core.errors import ConfigError
from flowrl.core.files import file_sha256
from flowrl.data.prompt_sources import Columns, load_prompts
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import StepPlan, solver_plan, window
from flowrl.diffusion.schedules import Schedule
from flowrl.models.weights.roles import lora_file
from flowrl.scoring.entries import RewardPlan

OWN = ("prompt", "chosen", "rejected", "margin", "chosen_scores", "rejected_scores", "drawn")
"""Keys of a line; a prompt's metadata may have none of these names."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command line."""

    per_prompt: int
    """Samples of a prompt in a round, G."""
    margin: float
    """Difference of the scores of the best and the worst above which they are a pair and not a tie."""
    count: int | None
    """Number of pairs; None: those of one round."""


def rollout_plan(resolved: Resolved, schedule: Schedule) -> StepPlan:
    """Steps of the samples: those of `rollout.sampler` but for the last, or the plain ODE where none is set.

    The method's own window of steps is for training, and is ignored.
    """
    if resolved.run.rollout.sampler is None:
        return solver_plan(schedule)
    level = resolved.sampler.build().default_noise_level()
    return window(schedule, level) if level > 0 and len(schedule) > 1 else solver_plan(schedule)


def training_prompts(resolved: Resolved) -> list[Prompt]:
    """Prompts of `data.prompts`. Raises ConfigError: they cannot be read, or their metadata has a key of the lines."""
    data = resolved.run.data
    columns = Columns(data.prompt_column, data.image_column, data.subset)
    assert data.prompts is not None  # only a method that learns from pairs has none
    prompts = load_prompts(data.prompts, "data.prompts", columns, data.max_prompts)
    for number, prompt in enumerate(prompts, 1):
        taken = [name for name in prompt.metadata if name in (*OWN, *(("source",) if prompt.images else ()))]
        if taken:
            raise ConfigError(
                f"data.prompts: prompt {number}, {prompt.text[:60]!r}, has {taken[0]!r}, a key of the pairs that are "
                "written; rename it"
            )
        try:
            json.dumps(prompt.metadata)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"data.prompts: prompt {number}, {prompt.text[:60]!r}: its metadata cannot be written as JSON ({error})"
            ) from None
    return prompts


def check(resolved: Resolved, wanted: Wanted) -> None:
    """Refuse what cannot give pairs, before anything is loaded. Raises ConfigError: with key, value and remedy."""
    rollout = resolved.run.rollout
    if resolved.members:
        raise ConfigError(
            f"algorithm.name={resolved.algorithm.name}: it learns from pairs, and `flowrl pairs` draws them for "
            "data.prompts by rewards; give the configuration of a method that draws samples, such as flow_grpo"
        )
    if wanted.per_prompt < 2:
        raise ConfigError(f"--per-prompt {wanted.per_prompt}: a pair needs at least 2 samples of a prompt")
    if not (math.isfinite(wanted.margin) and wanted.margin >= 0):
        raise ConfigError(f"--margin {wanted.margin}: give a number from 0")
    if rollout.exploration is not None:
        raise ConfigError("rollout.exploration: pairs are drawn in full", {"rollout.exploration": None})
    if rollout.shared_noise and (rollout.sampler is None or resolved.sampler.build().default_noise_level() == 0):
        raise ConfigError(
            "rollout.shared_noise=true without a stochastic rollout.sampler: all samples of a prompt would be the same",
            {"rollout.shared_noise": False},
        )
    if resolved.model.config.shard:
        raise ConfigError("model.shard=true: `flowrl pairs` keeps the network whole", {"model.shard": False})


def made_with(resolved: Resolved, prompts: Sequence[Prompt], wanted: Wanted) -> dict[str, Any]:
    """All that decides the pairs; a folder holds pairs of one such record."""
    config, model = resolved.run, resolved.model
    texts = hashlib.sha256(repr([(p.text, p.images, p.metadata) for p in prompts]).encode()).hexdigest()
    result = {
        "seed": config.seed,
        "model": {"name": model.name} | to_tree(model.config),
        "prompts": {"source": config.data.prompts, "count": len(prompts), "sha256": texts},
        "sampler": None if config.rollout.sampler is None else resolved.sampler.reference,
        "num_inference_steps": config.rollout.num_inference_steps,
        "guidance_scale": config.rollout.guidance_scale,
        "shared_noise": config.rollout.shared_noise,
        "rewards": {str(place): _reward(plan, config.rewards[place]) for place, plan in enumerate(resolved.rewards)},
        "per_prompt": wanted.per_prompt,
        "margin": wanted.margin,
    }
    if result["sampler"] is not None:
        result["sampler"] |= to_tree(resolved.sampler.config)
    if model.config.init_lora is not None and lora_file(Path(model.config.init_lora)).is_file():
        result["init_lora_sha256"] = file_sha256(lora_file(Path(model.config.init_lora)))
    return result


def _reward(plan: RewardPlan, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a reward, with the hash of a file of the user's, which may change under the same name."""
    source = plan.entry.path
    return dict(options) | ({} if source is None else {"sha256": file_sha256(Path(source))})
