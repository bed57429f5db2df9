"""The rewards of a run: built, and tried before anything is trained."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from flowrl.data.text_cache import Texts
from flowrl.evaluation.held_out import RunPrompts
from flowrl.models.base import ModelAdapter
from flowrl.scoring.build import build_scorers, require_fit
from flowrl.scoring.gradient import require_paths
from flowrl.scoring.probing import probe
from flowrl.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True)
class Scorers:
    """The rewards at work."""

    trained: Scorer | None
    """Rewards that are trained on; None for a method that learns from given images."""
    watched: Scorer | None
    """Rewards that are trained on or only evaluated (`eval.rewards`); None without any."""

    @classmethod
    def of(cls, resolved: Resolved, climbs: bool, prompts: RunPrompts) -> "Scorers":
        """The rewards of a configuration; `climbs`: of a method that takes their gradient.

        Raises ConfigError, RewardError: one that cannot be built, or has no gradient where it is wanted.
        """
        scorers = cls(*build_scorers(resolved.rewards, resolved.eval_rewards, prompts.listed, prompts.looked_up))
        if climbs and scorers.trained is not None:
            cards = [entry.reward.card for entry in scorers.trained.entries]
            require_paths(resolved.algorithm.name, resolved.rewards, cards)
        return scorers

    def highest(self) -> list[Tensor]:
        """The highest value of each trained reward, for `virtual_best`. Raises ConfigError: one of them has none."""
        key, entries = "algorithm.advantages.virtual_best", () if self.trained is None else self.trained.entries
        for entry in entries:
            if entry.weight and not math.isfinite(entry.highest()):
                words = f"{key}: the card of reward {entry.name!r} says no highest value; give it a clip [low, high]"
                raise ConfigError(words, {key: 0})
        return [torch.tensor(entry.highest()) for entry in entries]

    def tried(self, adapter: ModelAdapter, prompts: RunPrompts, texts: Texts | None = None) -> None:
        """Score noise of the model's size; with `texts` by the rewards on latents, without by those on images.

        Raises RewardError: one does not fit the model, or breaks its contract.
        """
        require_fit(self.watched, adapter)
        probe(self.trained, prompts.train[:2], adapter, texts=texts)
        probe(self.watched, prompts.evaluated[:2], adapter, self.trained, texts)
