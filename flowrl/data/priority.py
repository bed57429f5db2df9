"""Draws of prompts by what training has learned of them so far.

    spread  weight of a prompt: the mean std of its groups' rewards, the largest of all where it is unknown
    ucb     score of a kind: its mean |A| + sqrt(2 ln(N + 1) / (n + 1)), N samples so far, n of them of this kind;
            kinds by softmax(score / temperature), then any prompt of the kind

Source: SPO, arXiv 2509.13232. DUMP, arXiv 2504.09710; in ZhentingWang/DUMP rewards of a validation loop stand for |A|.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.rng import stream
from flowrl.core.tensors import floats, ints
from flowrl.credit.advantages import Advantages
from flowrl.credit.groups import group_moments
from flowrl.data.options import PriorityConfig
from flowrl.data.prompts import Prompt, PromptSource, distinct_numbers, identity


class PrioritySource(PromptSource):
    """Draws by priority, in an iteration no prompt twice before all have come."""

    def __init__(self, prompts: Sequence[Prompt], per_iteration: int, seed: int, config: PriorityConfig) -> None:
        super().__init__(prompts, per_iteration, seed)
        self.config = config
        kinds = [self.kind(prompt) for prompt in self.prompts]
        self.kinds = np.array(distinct_numbers(kinds))
        self.numbers = dict(zip(kinds, self.kinds.tolist(), strict=True))
        self.seen, self.newest = [0] * len(self.numbers), [list[float]() for _ in self.numbers]
        """Samples of each kind so far, and spread or mean |A| of its newest groups."""

    def draw(self, iteration: int) -> list[int]:
        live = np.setdiff1d(np.arange(len(self.prompts)), list(self.retired))
        # Those of the largest log chance + Gumbel noise are a weighted draw without replacement.
        noise = stream(self.seed, "priority", iteration).gumbel(size=len(self.prompts))[live]
        order = live[np.argsort(-np.log(self.chances(live)) - noise)].tolist()
        return [order[slot % len(order)] for slot in range(self.per_iteration)]

    def chances(self, live: np.ndarray) -> np.ndarray:
        """Chance of each of the prompts `live` [L] at the first slot, [L] float64."""
        config, kinds, seen = self.config, self.kinds[live], np.array(self.seen)
        mean = np.array([np.mean(own or [0.0]) for own in self.newest])
        weight = np.where(seen > 0, mean, mean.max() or 1.0)[kinds]
        if config.by == "ucb":
            score = (mean + np.sqrt(2 * np.log(seen.sum() + 1) / (seen + 1)))[kinds] / config.temperature
            weight = np.exp(score - score.max()) / np.bincount(kinds)[kinds]
        weight = weight if weight.any() else np.ones(len(live))
        return config.floor / len(live) + (1 - config.floor) * weight / weight.sum()

    def learn(self, prompts: Sequence[Prompt], total: Tensor, credit: Advantages) -> None:
        spread, counts = self.config.by == "spread", credit.valid.sum(dim=1)
        size = credit.values.sum(dim=2).abs().sum(dim=1).double() / counts.clamp(min=1)
        values, most = group_moments(total)[0] if spread else size, max(1, self.config.window // total.shape[1])
        for prompt, value, count in zip(prompts, floats(values), ints(counts), strict=True):
            if count > spread:  # one sample alone has no spread
                kind = self.numbers[self.kind(prompt)]
                self.seen[kind] += count
                self.newest[kind] = [*self.newest[kind], value][-most:]

    def state_dict(self) -> dict:
        return super().state_dict() | {"seen": self.seen, "newest": self.newest}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.seen, self.newest = list(state["seen"]), list(state["newest"])

    def kind(self, prompt: Prompt) -> object:
        """What a prompt shares its statistics by. Raises ConfigError: it lacks the key."""
        key, known = self.config.group, prompt.metadata
        if key != "prompt" and key not in known:
            raise ConfigError(
                f"data.priority.group={key}: the metadata of the prompt {prompt.text[:60]!r} are {list(known)}",
                remedies=[Remedy({"data.priority.group": name}) for name in ("prompt", *list(known)[:3])],
            )
        return identity(prompt) if key == "prompt" else str(known[key])
